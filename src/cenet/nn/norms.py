"""Norms: their channels, their activation, their affine form, and running averages in buffers.

Averages are updated in place, never by a non-finite batch and never twice for one batch.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from cenet import functional as F
from cenet.internals import graph_task
from cenet.nn.ranks import Ranks, SyncGroup
from cenet.nn.statistics import Statistics

BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
# torchvision's and timm's frozen batch norms have no base class to test for, only buffers and this
# name
FROZEN_BATCH_NORMS = ("FrozenBatchNorm2d", "FrozenBatchNormAct2d")
# inputs of norms that CE cannot follow, by their number of dimensions
INPUTS = {
    2: "vectors (N, C)",
    3: "tokens (N, L, C)",
    5: "volumes (N, C, D, H, W)",
}


def norm_channels(module: nn.Module) -> int | None:
    """Channels of a norm over (N, C, H, W), or None if `module` is not one CE can follow."""
    if isinstance(module, (*BATCH_NORMS, nn.InstanceNorm2d)):
        return module.num_features or None  # 0 in a lazy norm that has seen no input
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    # plain LayerNorm works on the last dimension; torchvision's and timm's LayerNorm2d on channels
    if isinstance(module, nn.LayerNorm) and "2d" in type(module).__name__:
        return int(module.normalized_shape[0])
    if _is_frozen_batch_norm(module):
        return int(module.get_buffer("running_mean").numel())
    # norms of other libraries may declare that they are such norms
    declared: Any = module
    return int(declared.num_features) if getattr(module, "is_channel_norm", False) else None


def why_no_site(module: nn.Module) -> str | None:
    """The input of a norm that CE cannot follow; None for those it can, and for other modules."""
    if norm_channels(module) is not None:
        return None
    if isinstance(module, (nn.BatchNorm3d, nn.InstanceNorm3d)):
        return INPUTS[5]
    if isinstance(module, (nn.BatchNorm1d, nn.InstanceNorm1d)):
        return "vectors (N, C) or sequences (N, C, L)"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "last dimension, as of tokens (N, L, C) or maps (N, H, W, C)"
    return None


def inner_parts(norm: nn.Module) -> tuple[str, ...]:
    """Names of the dropout and activation that a norm such as timm's `BatchNormAct2d` applies."""
    parts = {name: getattr(norm, name, None) for name in ("drop", "act")}
    return tuple(
        name
        for name, part in parts.items()
        if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)
    )


def inner_activation(norm: nn.Module) -> nn.Module | None:
    """These parts as one module."""
    parts = [getattr(norm, name) for name in inner_parts(norm)]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def is_batch_norm(norm: nn.Module) -> bool:
    """Whether `norm` does exactly what `affine` says: batch norm, frozen or not, nothing more."""
    if type(norm) in BATCH_NORMS:
        return True
    known = isinstance(norm, BATCH_NORMS) and _is_norm_act(norm)
    return (known or _is_frozen_batch_norm(norm)) and inner_activation(norm) is None


def uses_batch_statistics(norm: nn.Module) -> bool:
    """Whether a batch norm normalizes by its batch (training, or no running statistics)."""
    if _is_frozen_batch_norm(norm):
        return False
    return norm.training or norm.running_mean is None


def synchronizes(norm: nn.Module) -> bool:
    """Whether `norm` merges its statistics with other ranks, if there are any."""
    return isinstance(norm, nn.SyncBatchNorm) and uses_batch_statistics(norm)


def ranks_of(norm: Any) -> Ranks | None:
    """The ranks that a SyncBatchNorm merges."""
    return SyncGroup(norm.process_group).ranks()


def is_hooked(module: nn.Module) -> bool:
    """Whether `module` has hooks, which only fire if it is called as a module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def affine(
    norm: Any, x: Tensor, statistics: Statistics | None, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale and shift of a batch norm: x̃ = scale ⊙ (x − center) + shift.

    They come from the statistics of the batch, which enter the norm's running statistics as they
    would in its own forward pass (unbiased variance, its momentum), except that a non-finite batch
    does not. If `statistics` is None, they come from the running statistics.

    Args:
        norm: a batch norm.
        x: a tensor of the input's dtype, device and channels.
        statistics: of the batch; None for the running ones.
        center: (C,); None for zero.
    """
    if statistics is not None:
        mean, var = statistics.centered_mean, statistics.var
        assert statistics.mean is not None
        assert mean is not None
        assert var is not None
        if norm.training and norm.track_running_stats and norm.running_mean is not None:
            averages = [
                (norm.running_mean, statistics.counted(statistics.mean)),
                (norm.running_var, statistics.counted(statistics.unbiased_var())),
            ]
            seen = norm.num_batches_tracked
            seen = torch.zeros((), dtype=torch.long, device=x.device) if seen is None else seen
            average_(averages, seen, norm.momentum, debias=False)
    else:
        mean, var = _values(norm.running_mean, 0.0, x), _values(norm.running_var, 1.0, x)
        mean = mean if center is None else mean - center
    scale = _values(norm.weight, 1.0, x) * (var + norm.eps).rsqrt()
    return scale, _values(norm.bias, 0.0, x) - mean * scale


def weight_sign(norm: Any, x: Tensor) -> Tensor:
    """Sign of the scale of a batch norm, known before x is measured."""
    return F.sign_of(_values(norm.weight, 1.0, x))


def _values(values: Tensor | None, default: float, x: Tensor) -> Tensor:
    dtype = F.statistics_dtype(x)
    if values is None:
        return x.new_full((x.shape[1],), default, dtype=dtype)
    # buffers are copied: autograd may keep them, and a later training step changes them in place
    return values.to(dtype, copy=not isinstance(values, nn.Parameter))


def _is_norm_act(norm: nn.Module) -> bool:
    return isinstance(getattr(norm, "act", None), nn.Module) and hasattr(norm, "drop")


def _is_frozen_batch_norm(module: nn.Module) -> bool:
    return type(module).__name__ in FROZEN_BATCH_NORMS and hasattr(module, "eps")


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass: a repeat of one already counted."""
    if torch.compiler.is_compiling():
        return False
    return bool(graph_task() != -1)


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
    # x − x is 0 if x is finite and NaN if it is not, in fewer operations than isfinite
    finite = reduce(torch.add, [(batch - batch).sum() for _, batch in averages]) == 0
    count.add_(finite)
    for running, batch in averages:
        counted = torch.where(finite, batch, running)
        if momentum is not None and not debias:
            running.lerp_(counted, momentum)
            continue
        seen = count.clamp_min(1).to(torch.promote_types(running.dtype, torch.float32))
        weight = seen.reciprocal()
        weight = weight if momentum is None else weight.clamp_min(momentum)
        running.lerp_(counted, weight.to(running.dtype))
