"""From a layer's modules to the one operator of `ops` that runs norm, CE and activation."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from cenet import ops
from cenet.kernels.modes import ABSENT, BATCH, RUNNING
from cenet.nn.norms import is_hooked, uses_batch_statistics
from cenet.nn.running import is_recomputation


class Decorrelation(Protocol):
    """What the kernels ask of a `BatchDecorrelation2d`."""

    group_size: int
    newton_steps: int
    pool: int
    momentum: float | None
    running_inv_sqrt: Tensor
    num_batches_tracked: Tensor


class Reweighting(Protocol):
    """What the kernels ask of an `InstanceReweighting2d`."""

    eps: float
    momentum: float | None
    released: bool
    running_inv_std: Tensor
    num_batches_tracked: Tensor


class Branches(NamedTuple):
    """What a CE layer is made of."""

    bd: Decorrelation | None
    ir: Reweighting | None
    gate: tuple[Tensor, ...] | None  # of ir
    mix_logit: Tensor | None
    blend: Tensor | None


def fused_activation(act: nn.Module) -> tuple[str, float] | None:
    """Name and slope of an activation that the kernels have, or None."""
    if type(act) is nn.ReLU:
        return "relu", 0.0
    if type(act) is nn.LeakyReLU and act.negative_slope > 0:
        return "leaky_relu", float(act.negative_slope)
    if type(act) is nn.ELU and act.alpha > 0:
        return "elu", float(act.alpha)
    return None


def inside_and_after(act: nn.Module | None) -> tuple[str, float, nn.Module | None]:
    """Name and slope of the activation for the kernels, and what is left to call after them."""
    if act is None:
        return "none", 0.0, None
    inside = None if is_hooked(act) else fused_activation(act)
    return ("none", 0.0, act) if inside is None else (*inside, None)


def no_kernel_for(ir: Reweighting) -> str | None:
    """Why the kernels cannot run this gate, if they cannot."""
    return "they do not have the released code's variant of the gate" if ir.released else None


def can_fuse(x: Tensor, norm: Any, branches: Branches, *, synchronized: bool) -> bool:
    """Whether `run` can do this: RuntimeError if it must, by the chosen backend, and cannot."""
    bd, ir = branches.bd, branches.ir
    tensors = [*_affine(norm), branches.mix_logit, branches.blend, *(branches.gate or ())]
    group_size = 1 if bd is None else bd.group_size
    unless = None if ir is None else no_kernel_for(ir)
    if synchronized:
        unless = "they do not merge statistics of several ranks"
    return ops.use_kernels(x, tensors, group_size, unless)


def run(
    x: Tensor,
    norm: Any,
    branches: Branches,
    act: nn.Module | None,
    residual: Tensor | None,
    *,
    batch: bool,
) -> Tensor:
    """act(CE(norm(x)) + residual) by the kernels; running statistics move as in the plain layers.

    Args:
        x: input of `norm`, or its output if that is None.
        norm: a batch norm.
        branches: of the CE layer.
        act, residual: what follows.
        batch: CE takes the statistics of this batch.
    """
    if residual is not None and residual.dtype != x.dtype:
        # their sum has another dtype than x, which the kernels would keep
        y = run(x, norm, branches, None, None, batch=batch) + residual
        return y if act is None else act(y)
    bd, ir = branches.bd, branches.ir
    norm_batch = norm is not None and uses_batch_statistics(norm)
    source = BATCH if batch else RUNNING
    mode = (
        ABSENT if norm is None else BATCH if norm_batch else RUNNING,
        ABSENT if bd is None else source,
        ABSENT if ir is None else source,
    )
    name, slope, after = inside_and_after(act)
    fixed_norm = norm is not None and not norm_batch
    tracked = norm if norm_batch and _tracks(norm) else None
    averages: tuple[Any, ...] = _NO_AVERAGES
    if (tracked is not None or batch) and not is_recomputation():
        averages = _averages(tracked, bd if batch else None, ir if batch else None)
    y, _ = ops.norm_ce(
        x,
        residual,
        *_affine(norm),
        norm.running_mean if fixed_norm else None,
        norm.running_var if fixed_norm else None,
        None if bd is None or batch else bd.running_inv_sqrt,
        None if ir is None or batch else ir.running_inv_std,
        *(branches.gate or (None,) * 4),
        branches.mix_logit,
        branches.blend,
        *averages,
        mode,
        16 if bd is None else bd.group_size,
        1 if bd is None else bd.newton_steps,
        1 if bd is None else bd.pool,
        0.0 if norm is None else norm.eps,
        0.0 if ir is None else ir.eps,
        name,
        slope,
    )
    result: Tensor = y if after is None else after(y)
    return result


def _tracks(norm: Any) -> bool:
    return norm.training and norm.track_running_stats and norm.running_mean is not None


_NO_AVERAGES = (*(None,) * 7, [0.0, 0.0, 0.0])


def _averages(norm: Any, bd: Decorrelation | None, ir: Reweighting | None) -> tuple[Any, ...]:
    """Values of norm, BD and IR that move with this batch, and their momenta."""
    return (
        *((None,) * 3 if norm is None else _of_norm(norm)),
        *((None,) * 2 if bd is None else (bd.running_inv_sqrt, bd.num_batches_tracked)),
        *((None,) * 2 if ir is None else (ir.running_inv_std, ir.num_batches_tracked)),
        [-1.0 if m is None or m.momentum is None else m.momentum for m in (norm, bd, ir)],
    )


def _of_norm(norm: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def _affine(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)
