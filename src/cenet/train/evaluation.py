"""Loss and accuracy on the test images."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cenet.data.datasets import Encoded, InputSpec, Resident
from cenet.data.loaders import evaluation_batches
from cenet.distributed import Processes, total
from cenet.evaluating import evaluating, top_hits
from cenet.train.build import autocast
from cenet.train.cuda_graphs import GraphedFunction
from cenet.train.recipes import Recipe

# images per batch: those in memory are small
RESIDENT_BATCH, ENCODED_BATCH = 1000, 256


class Tester:
    """Computes loss, top-1 and top-5 accuracy of one network, after each epoch.

    Images in memory stay on the device. Loss and hits are added up on the device and read back
    once. The network runs in the precision of the recipe.

    Args:
        network: the network; it is tested in evaluation mode.
        data: the test images.
        inputs: the input spec of the network.
        recipe: gives image size and precision.
        processes: the processes that share the images.
        forward: called instead of `network`, for example the compiled network.
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
        """Move images in memory to the device."""
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
        # only full batches are captured; the last one may be smaller
        self._add_full: Callable[..., None] = GraphedFunction(self._add) if graphed else self._add

    def counts(self) -> set[int]:
        """The batch sizes that occur in a test in this process."""
        count = len(
            range(self.processes.rank, len(self._batches["data"].labels), self.processes.world)
        )
        return {min(count, self.batch), count % self.batch} - {0}

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Test the network; all processes must call this."""
        self._sums.zero_()
        with evaluating(self.network):
            for images, labels in evaluation_batches(**self._batches):
                add = self._add_full if len(labels) == self.batch else self._add
                add(images, labels)
        loss, top1, top5, count = total(self._sums, self.processes).tolist()
        return {"test_loss": loss / count, "test_top1": top1 / count, "test_top5": top5 / count}

    def _add(self, images: Tensor, labels: Tensor) -> None:
        with autocast(self.recipe, self.processes.device):
            logits = self._forward(images).float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        found = (loss, *top_hits(logits, labels))
        self._sums[:3] += torch.stack([value.double() for value in found])
        self._sums[3] += len(labels)
