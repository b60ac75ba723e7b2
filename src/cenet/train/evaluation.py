"""Accuracy on the test images."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cenet.data.datasets import Encoded, Resident
from cenet.data.input_spec import InputSpec
from cenet.data.loaders import evaluation_batches
from cenet.distributed import Processes, total
from cenet.train.graphs import Graphed
from cenet.train.recipes import Recipe
from cenet.train.setup import autocast

# images at a time: those in memory are small
RESIDENT_BATCH, ENCODED_BATCH = 1000, 256


class Tester:
    """Loss, top-1 and top-5 accuracy of one network, after each epoch.

    Images that fit stay on the device. Loss and hits are added up there, and come back once. The
    precision is that of the recipe.

    Args:
        network: is tested in evaluation mode.
        data: the test images.
        inputs: what the network takes.
        recipe: knows their size, and the precision.
        processes: among which the images are divided.
        forward: the network as it is called: itself by default, or compiled.
        graphed: replay the test of a batch as a CUDA graph.
        channels_last, workers, decode: see `Options`.
    """

    def __init__(
        self,
        network: nn.Module,
        data: Resident | Encoded,
        inputs: InputSpec,
        recipe: Recipe,
        processes: Processes,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        graphed: bool = False,
        channels_last: bool = False,
        workers: int = 0,
        decode: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """Bring the images to the device."""
        device = processes.device
        self.network, self.recipe, self.processes = network, recipe, processes
        self.batch = ENCODED_BATCH
        if isinstance(data, Resident):
            self.batch = RESIDENT_BATCH
            data = data._replace(images=data.images.to(device), labels=data.labels.to(device))
        self._batches: dict[str, Any] = {
            "data": data, "inputs": inputs, "size": recipe.image_size, "batch": self.batch,
            "device": device, "channels_last": channels_last, "workers": workers,
            "decode": decode,
            "rank": processes.rank, "world": processes.world,
        }  # fmt: skip
        self._forward = network if forward is None else forward
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        # batches of other sizes, as the last, are not captured
        self._add_full: Callable[..., None] = Graphed(self._add) if graphed else self._add

    def counts(self) -> set[int]:
        """How many images of this process are tested at a time."""
        count = len(
            range(self.processes.rank, len(self._batches["data"].labels), self.processes.world)
        )
        return {min(count, self.batch), count % self.batch} - {0}

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Test the network as it is now; all processes take part."""
        was_training = self.network.training
        self.network.eval()
        self._sums.zero_()
        for images, labels in evaluation_batches(**self._batches):
            add = self._add_full if len(labels) == self.batch else self._add
            add(images, labels)
        self.network.train(was_training)
        loss, top1, top5, count = total(self._sums, self.processes).tolist()
        return {"test_loss": loss / count, "test_top1": top1 / count, "test_top5": top5 / count}

    def _add(self, images: Tensor, labels: Tensor) -> None:
        with autocast(self.recipe, self.processes.device):
            logits = self._forward(images).float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
        found = [loss.double(), best[:, 0].sum().double(), best.any(1).sum().double()]
        self._sums[:3] += torch.stack(found)
        self._sums[3] += len(labels)
