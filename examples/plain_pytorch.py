"""Fine-tune a trained network with CE in a loop of plain PyTorch, save it, and load it again."""

from pathlib import Path
from tempfile import mkdtemp

import torch
from digits import SIZE, images_and_labels, trained_network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cenet


def main(folder: str, epochs: int = 3) -> None:
    """Fine-tune, and write the network to a folder."""
    model = trained_network()
    images, labels = images_and_labels()
    before = model.eval()(images)

    # at first CE changes nothing: the network computes what it computed before
    sites = cenet.insert_ce_(model, start="identity", example_input=images[:2])
    assert torch.allclose(model(images), before, atol=1e-4)

    # after insert_ce_, so that the optimizer sees CE; no weight decay on λ and α
    optimizer = torch.optim.AdamW(cenet.param_groups(model, weight_decay=0.01), lr=2e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    for _ in range(epochs):
        model.train()
        for some, classes in loader:
            optimizer.zero_grad()
            cross_entropy(model(some), classes).backward()
            optimizer.step()
    cenet.update_ce_stats(model, loader)  # running statistics of the last weights

    model.eval()
    cenet.save(
        model, folder, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3,
        classes=[str(digit) for digit in range(10)],
    )  # fmt: skip
    assert torch.equal(cenet.load(folder)(images), model(images))
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"CE at {len(sites)} sites; accuracy on the training images {accuracy:.3f}; in {folder}")


if __name__ == "__main__":
    main(str(Path(mkdtemp()) / "network"))
