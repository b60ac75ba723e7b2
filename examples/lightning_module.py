"""Fine-tune a trained network with CE, with Lightning's Trainer."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning
import torch
from digits import SIZE, images_and_labels, trained_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cenet


class FineTuning(lightning.LightningModule):
    """A network with CE, its loss and its optimizer."""

    def __init__(self, network: nn.Module) -> None:
        """CE is in the network already: Lightning asks for the optimizer later."""
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No weight decay on λ and α."""
        return torch.optim.AdamW(cenet.param_groups(self.network, weight_decay=0.01), lr=2e-3)


def main(folder: str, epochs: int = 2, **options: Any) -> None:
    """Fine-tune, and write the network to a folder; options are those of Lightning's Trainer."""
    network = trained_network()
    images, labels = images_and_labels()
    before = network.eval()(images)
    cenet.insert_ce_(network, start="identity", example_input=images[:2])
    assert torch.allclose(network(images), before, atol=1e-4)

    network.train()  # Lightning leaves the mode of modules as it is
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    # on several GPUs: plugins=[cenet.lightning.SyncCE()] takes statistics over all of them
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(FineTuning(network), loader)

    network.cpu().eval()
    cenet.save(network, folder, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert torch.equal(cenet.load(folder)(images), network(images))
    accuracy = (network(images).argmax(1) == labels).float().mean()
    print(f"accuracy on the training images {accuracy:.3f}; in {folder}")


if __name__ == "__main__":
    main(str(Path(mkdtemp()) / "network"))
