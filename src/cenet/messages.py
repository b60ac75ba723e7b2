"""Messages between the ranks of a synchronized layer: their content, and the two collectives.

Plain PyTorch (`nn.statistics`) and the kernels (`kernels.merging`) write and read the same
messages. So each rank can use either, whatever the other ranks use.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cenet import functional as F
from cenet.internals import (
    all_gather_into_tensor,
    all_gather_into_tensor_out,
    reduce_scatter_tensor,
    wait_tensor,
)


class Layout(NamedTuple):
    """Which statistics a layer needs, and so the layout of the messages between ranks."""

    channels: int
    group_size: int | None  # None: no covariance
    pool: int
    norm: bool
    instance: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of a message, in order."""
        per_channel = (self.channels,)
        shapes: dict[str, tuple[int, ...]] = {"counts": (3,)}
        if self.group_size is not None:
            groups = F.num_groups(self.channels, self.group_size)
            shapes["window_mean"] = per_channel
            # symmetric: one triangle is enough
            shapes["cov"] = (groups, self.group_size * (self.group_size + 1) // 2)
        if self.norm and not self.norm_is_in_cov():
            shapes |= {"mean": per_channel, "var": per_channel}
        if self.instance:
            shapes["instance_var"] = per_channel
        return shapes

    def norm_is_in_cov(self) -> bool:
        """Whether the covariance is that of the pixels themselves, whose variances it holds."""
        return self.group_size is not None and self.pool == 1

    def size(self) -> int:
        """Numbers in a message."""
        return sum(prod(shape) for shape in self.shapes().values())

    def places(self) -> dict[str, int]:
        """Where each part of a message begins."""
        begin, places = 0, {}
        for name, shape in self.shapes().items():
            places[name] = begin
            begin += prod(shape)
        return places


def all_gather(part: Tensor, ranks: int, group_name: str) -> Tensor:
    """The parts of all ranks, one after the other: (b,) -> (R·b,)."""
    if part.is_cuda and not torch.compiler.is_compiling():
        # Without `out` this is torch's coalesced all-gather. Over gloo, that one reads the memory
        # of the GPU from the host, which ends the process by SIGSEGV (pytorch issue 152645).
        parts = part.new_empty(ranks * part.numel())
        all_gather_into_tensor_out(part, ranks, group_name, out=parts)
    else:
        parts = all_gather_into_tensor(part, ranks, group_name)
    gathered: Tensor = wait_tensor(parts)
    return gathered


def sum_of_own_part(parts: Tensor, ranks: int, group_name: str) -> Tensor:
    """The adjoint of `all_gather`: the sum over ranks of what they have for this one."""
    total: Tensor = wait_tensor(reduce_scatter_tensor(parts, "sum", ranks, group_name))
    return total
