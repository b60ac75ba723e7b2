"""Fine-tune a trained network with CE: timm's optimizer, schedule and averaged weights.

timm's own train.py is made of these parts. That script is not in timm's package; how to run it
with CE is in docs/finetuning.md.
"""

from pathlib import Path
from tempfile import mkdtemp

import timm
import torch
from digits import SIZE, images_and_labels, trained_network
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy

import cenet
import cenet.models  # registers CE with timm, so that timm loads folders of cenet.save


def main(folder: str, epochs: int = 2) -> None:
    """Fine-tune, and write the network to a folder."""
    model = trained_network()
    images, labels = images_and_labels()
    before = model.eval()(images)
    cenet.insert_ce_(model, start="identity", example_input=images[:2])
    assert torch.allclose(model(images), before, atol=1e-4)

    groups = cenet.param_groups(model, weight_decay=0.02, decay_norms=False)
    optimizer = create_optimizer_v2(groups, "adamw", lr=2e-3)
    batches = list(zip(images.split(32), labels.split(32), strict=True))
    schedule, epochs = create_scheduler_v2(
        optimizer, "cosine", epochs, warmup_epochs=1, step_on_epochs=False,
        updates_per_epoch=len(batches),
    )  # fmt: skip
    averaged = ModelEmaV3(model, decay=0.8)
    updates = 0
    model.train()
    for _ in range(epochs):
        for some, classes in batches:
            schedule.step_update(updates)
            optimizer.zero_grad()
            cross_entropy(model(some), classes).backward()
            optimizer.step()
            updates += 1
            averaged.update(model, step=updates)

    # averaged weights need statistics of their own: of batch norms, then of CE
    network = averaged.module
    torch.optim.swa_utils.update_bn(images.split(32), network)
    cenet.update_ce_stats(network, images.split(32))
    network.eval()
    cenet.save(network, folder, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(again(images), network(images))
    accuracy = (network(images).argmax(1) == labels).float().mean()
    print(f"accuracy on the training images {accuracy:.3f}; in {folder}")


if __name__ == "__main__":
    main(str(Path(mkdtemp()) / "network"))
