"""Fine-tune a trained network with CE, with the Trainer of Hugging Face's transformers."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from digits import SIZE, images_and_labels, trained_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import StackDataset
from transformers import Trainer, TrainingArguments

import cenet


class Classifier(nn.Module):
    """A network in the form that the Trainer expects: it returns its loss with the logits."""

    def __init__(self, network: nn.Module) -> None:
        """Hold the network."""
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits of a batch."""
        logits = self.network(pixel_values)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def main(folder: str, epochs: int = 2, **options: Any) -> None:
    """Fine-tune, and write the network to a folder; options are those of TrainingArguments."""
    network = trained_network()
    images, labels = images_and_labels()
    before = network.eval()(images)
    cenet.insert_ce_(network, start="identity", example_input=images[:2])
    assert torch.allclose(network(images), before, atol=1e-4)

    arguments = TrainingArguments(
        output_dir=f"{folder}-training", num_train_epochs=epochs, per_device_train_batch_size=32,
        warmup_steps=2, save_strategy="no", report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    # with its own optimizer, the Trainer would decay λ and α
    optimizer = torch.optim.AdamW(cenet.param_groups(network, weight_decay=0.01), lr=2e-3)
    trainer = Trainer(
        Classifier(network), arguments, optimizers=(optimizer, None),
        train_dataset=StackDataset(pixel_values=images, labels=labels),
    )  # fmt: skip
    trainer.train()

    network.cpu().eval()
    cenet.save(network, folder, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert torch.equal(cenet.load(folder)(images), network(images))
    accuracy = (network(images).argmax(1) == labels).float().mean()
    print(f"accuracy on the training images {accuracy:.3f}; in {folder}")


if __name__ == "__main__":
    main(str(Path(mkdtemp()) / "network"))
