"""The ranks a layer measures its batch with, and the collective between them."""

import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cenet.messages import all_gather, sum_of_own_part


class Ranks(NamedTuple):
    """Two or more ranks, in a form that a compiled graph can hold."""

    size: int
    group_name: str


class SyncGroup:
    """A process group, looked up at each use: it may be created after the layer, or created again.

    Args:
        process_group: a group of torch.distributed; None stands for all ranks.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Check that this rank belongs to the group."""
        known = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
        if process_group is not None and not known:
            raise TypeError(
                f"process_group={process_group!r} is not a process group that this rank belongs "
                "to; use None for all ranks, or dist.new_group(ranks)"
            )
        self.process_group = process_group

    def ranks(self) -> Ranks | None:
        """The ranks, or None if this one is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group: Any = dist.group.WORLD if self.process_group is None else self.process_group
        return Ranks(group.size(), group.group_name) if group.size() > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncGroup":
        """Share the group: a copy of the layer merges the same ranks."""
        return self

    def __reduce__(self) -> tuple[type["SyncGroup"], tuple[()]]:
        """Pickle "all ranks"; any other group exists in this process only."""
        if self.process_group is not None:
            raise pickle.PicklingError(
                "a layer synchronized over a process group of its own cannot be pickled; use "
                "revert_sync_ce(model) first, or save model.state_dict()"
            )
        return SyncGroup, ()


def gather(part: Tensor, ranks: Ranks) -> Tensor:
    """Every rank's `part`, differentiable any number of times: (b,) -> (R, b).

    The gradient of a part is the sum of its gradients on all ranks.
    """
    gathered: Tensor = _Gather.apply(part, ranks)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(part: Tensor, ranks: Ranks) -> Tensor:
        return all_gather(part.contiguous(), *ranks).view(ranks.size, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Ranks], output: Tensor) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOfOwnPart.apply(grad, ctx.ranks), None


class _SumOfOwnPart(torch.autograd.Function):
    """The adjoint of `_Gather`, and the other way round."""

    @staticmethod
    def forward(parts: Tensor, ranks: Ranks) -> Tensor:
        return sum_of_own_part(parts.contiguous().flatten(), *ranks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Ranks], output: Tensor) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.ranks), None
