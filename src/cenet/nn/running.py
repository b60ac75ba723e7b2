"""Running averages in buffers: updated in place, never by a non-finite batch, never twice."""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass: a repeat of one already counted."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def average_(
    averages: Sequence[tuple[Tensor, Tensor]],
    count: Tensor,
    momentum: float | None,
    *,
    debias: bool,
) -> None:
    """Move each running value towards its batch value by `momentum` (Eq. movinginfernce), in place.

    A batch with a non-finite value anywhere changes nothing and is not counted. Nothing is read
    back to the host.

    Args:
        averages: pairs of a running value and the value of this batch.
        count: batches averaged so far, an integer tensor.
        momentum: weight of the new value; None weighs all batches alike.
        debias: weigh the first batches 1/count where that is more, so that the initial value leaves
            no trace.
    """
    if is_recomputation():
        return
    # in the dtype of the average, where a large value may overflow
    averages = [(running, batch.to(running.dtype)) for running, batch in averages]
    finite = torch.stack([batch.isfinite().all() for _, batch in averages]).all()
    count.add_(finite)
    for running, batch in averages:
        weight = 1 / count.clamp_min(1).to(torch.promote_types(running.dtype, torch.float32))
        if momentum is not None:
            weight = weight.clamp_min(momentum) if debias else torch.full_like(weight, momentum)
        running.lerp_(torch.where(finite, batch, running), weight.to(running.dtype))
