"""What a run of a classifier will ask of the kernels, and having it ready before the first step."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cenet import ops
from cenet.data.input_spec import InputSpec
from cenet.distributed import Processes
from cenet.nn import ce_layers
from cenet.train.recipes import Recipe
from cenet.train.setup import autocast

Step = Callable[[nn.Module], None]


def prepare_kernels(network: nn.Module, steps: Iterator[Step], processes: Processes) -> None:
    """Have the kernels of these steps compiled, if they will run on any."""
    if processes.device.type == "cuda" and ops.HAS_TRITON and dict(ce_layers(network)):
        from cenet.kernels.preparation import prepare  # imports triton

        prepare(network, *steps, shown=processes.is_first)


def rehearsals(
    recipe: Recipe,
    inputs: InputSpec,
    device: torch.device,
    *,
    channels_last: bool,
    tested: set[int],
) -> Iterator[Step]:
    """A training step, and a test of each number of images that occurs in one."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def logits(network: nn.Module, count: int) -> Tensor:
        shape = (count, inputs.channels, recipe.image_size, recipe.image_size)
        images = torch.empty(shape, device=device, memory_format=layout).zero_()
        with autocast(recipe, device):
            found: Tensor = network(images)
        return found

    def train(network: nn.Module) -> None:
        loss: Any = logits(network.train(), recipe.batch_size).float().square().mean()
        loss.backward()

    def test(network: nn.Module, count: int) -> None:
        with torch.no_grad():
            logits(network.eval(), count)

    yield train
    for count in tested:
        yield partial(test, count=count)
