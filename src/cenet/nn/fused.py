"""From a layer's modules to one call of the operator that runs norm, CE and activation."""

from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor, nn

from cenet import ops
from cenet.kernels.call import ABSENT, BATCH, RUNNING, NormCECall
from cenet.nn.norms import is_hooked, is_recomputation, uses_batch_statistics
from cenet.nn.ranks import Ranks


class Decorrelation(Protocol):
    """The attributes of a `BatchDecorrelation2d` that the kernels use."""

    group_size: int
    newton_steps: int
    pool: int
    momentum: float | None
    running_inv_sqrt: Tensor
    num_batches_tracked: Tensor


class Reweighting(Protocol):
    """The attributes of an `InstanceReweighting2d` that the kernels use."""

    eps: float
    momentum: float | None
    released: bool
    running_inv_std: Tensor
    num_batches_tracked: Tensor


class Branches(NamedTuple):
    """The parts of a CE layer."""

    bd: Decorrelation | None
    ir: Reweighting | None
    gate: tuple[Tensor, ...] | None  # weights of the gate of ir
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
    """Name and slope for the kernels, and the activation itself if it has to run after them."""
    if act is None:
        return "none", 0.0, None
    inside = None if is_hooked(act) else fused_activation(act)
    return ("none", 0.0, act) if inside is None else (*inside, None)


def no_kernel_for(ir: Reweighting) -> str | None:
    """Why the kernels cannot run this gate, if they cannot."""
    return "they do not have the released code's variant of the gate" if ir.released else None


def can_fuse(x: Tensor, norm: Any, branches: Branches, *, synchronized: bool) -> bool:
    """Whether `run` can take x; RuntimeError if the chosen backend demands it and it cannot."""
    bd, ir = branches.bd, branches.ir
    tensors = [*_affine(norm), branches.mix_logit, branches.blend, *(branches.gate or ())]
    group_size = 1 if bd is None else bd.group_size
    unless = None if ir is None else no_kernel_for(ir)
    return ops.use_kernels(x, tensors, group_size, unless, synchronized=synchronized)


def run(
    x: Tensor,
    norm: Any,
    branches: Branches,
    act: nn.Module | None,
    residual: Tensor | None,
    *,
    batch: bool,
    ranks: Ranks | None,
) -> Tensor:
    """act(CE(norm(x)) + residual) by the kernels; running statistics move as in the plain layers.

    Args:
        x: input of `norm`, or of the CE layer if `norm` is None.
        norm: a batch norm, or None.
        branches: the parts of the CE layer.
        act, residual: the activation, and the tensor that is added before it.
        batch: CE uses the statistics of this batch, not the running ones.
        ranks: the ranks whose batches are measured as one, None if the layer works alone.
    """
    if residual is not None and residual.dtype != x.dtype:
        # the sum has the wider of the two dtypes; the kernels would return that of x
        y = run(x, norm, branches, None, None, batch=batch, ranks=ranks) + residual
        return y if act is None else act(y)
    bd, ir = branches.bd, branches.ir
    norm_batch = norm is not None and uses_batch_statistics(norm)
    fixed_norm = None if norm_batch else norm
    source = BATCH if batch else RUNNING
    name, slope, after = inside_and_after(act)
    # the parts whose running averages this batch moves
    counted = not is_recomputation()
    moved_norm = norm if counted and norm_batch and _tracks(norm) else None
    moved_bd, moved_ir = (bd, ir) if counted and batch else (None, None)
    weight, bias = _affine(norm)
    w1, norm_weight, norm_bias, w2 = branches.gate or (None,) * 4
    call = NormCECall(
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
        running_mean=None if fixed_norm is None else fixed_norm.running_mean,
        running_var=None if fixed_norm is None else fixed_norm.running_var,
        inv_sqrt=None if bd is None or batch else bd.running_inv_sqrt,
        inv_std=None if ir is None or batch else ir.running_inv_std,
        w1=w1,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        w2=w2,
        mix_logit=branches.mix_logit,
        blend=branches.blend,
        average_mean=None if moved_norm is None else moved_norm.running_mean,
        average_var=None if moved_norm is None else moved_norm.running_var,
        norm_count=None if moved_norm is None else moved_norm.num_batches_tracked,
        average_inv_sqrt=None if moved_bd is None else moved_bd.running_inv_sqrt,
        bd_count=None if moved_bd is None else moved_bd.num_batches_tracked,
        average_inv_std=None if moved_ir is None else moved_ir.running_inv_std,
        ir_count=None if moved_ir is None else moved_ir.num_batches_tracked,
        momenta=[_momentum(moved_norm), _momentum(moved_bd), _momentum(moved_ir)],
        sources=(
            ABSENT if norm is None else BATCH if norm_batch else RUNNING,
            ABSENT if bd is None else source,
            ABSENT if ir is None else source,
        ),
        group_size=16 if bd is None else bd.group_size,
        steps=1 if bd is None else bd.newton_steps,
        pool=1 if bd is None else bd.pool,
        norm_eps=0.0 if norm is None else norm.eps,
        eps=0.0 if ir is None else ir.eps,
        act=name,
        slope=slope,
    )
    y = ops.run_norm_ce(call, ranks or ())
    return y if after is None else cast(Tensor, after(y))


def _tracks(norm: Any) -> bool:
    return norm.training and norm.track_running_stats and norm.running_mean is not None


def _momentum(moved: Any) -> float:
    """Momentum as the operator takes it: negative to give all batches the same weight."""
    return -1.0 if moved is None or moved.momentum is None else float(moved.momentum)


def _affine(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)
