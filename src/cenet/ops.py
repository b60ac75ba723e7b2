"""`torch.library` operators around the kernels, and the choice between them and plain PyTorch.

    cenet::norm_ce             norm → CE → activation, with its statistics
    cenet::norm_ce_backward    its gradients
    cenet::average_            the running averages of a training step, in place

The operators take CUDA tensors. Everything else (CPU, float64, export, more derivatives than one) is the
business of `functional`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cenet import functional as F

Backend = Literal["auto", "triton", "torch"]
BACKENDS = ("auto", "triton", "torch")
HAS_TRITON = find_spec("triton") is not None
LARGEST_GROUP = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("none", "relu", "leaky_relu", "elu")
# where norm, decorrelation and reweighting take their statistics from
ABSENT, BATCH, RUNNING = 0, 1, 2


def _backend_named(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"CENET_BACKEND={name!r} must be one of {', '.join(BACKENDS)}")
    return name


_backend = _backend_named(os.environ.get("CENET_BACKEND", "auto"))


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose what CE layers run on inside the context.

    Args:
        name: "auto" takes the kernels where they run and plain PyTorch elsewhere, "triton" raises
            where they do not run, "torch" never takes them. The environment variable CENET_BACKEND
            sets the choice outside.

    >>> with backend("torch"):
    ...     pass
    """
    global _backend
    before = _backend
    _backend = _backend_named(name)
    try:
        yield
    finally:
        _backend = before


def use_kernels(x: Tensor, tensors: Sequence[Tensor | None], group_size: int) -> bool:
    """Whether the kernels take x and these parameters; RuntimeError if they must and cannot."""
    if _backend == "torch" or (_backend == "auto" and not x.is_cuda):
        return False
    reason = _why_not(x, tensors, group_size)
    if _backend == "triton" and reason:
        raise RuntimeError(f'backend "triton" was asked for, but {reason}; use backend "auto"')
    return reason is None


def _why_not(x: Tensor, tensors: Sequence[Tensor | None], group_size: int) -> str | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if not x.is_cuda:
        return f"the kernels run on CUDA tensors, not on {x.device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    if x.dtype not in DTYPES:
        return f"the kernels compute in float32, float16 and bfloat16, not in {x.dtype}"
    if any(tensor.dtype not in DTYPES for tensor in given if tensor.is_floating_point()):
        return "a parameter is not in float32, float16 or bfloat16"
    if any(tensor.device != x.device for tensor in given):
        return f"a parameter is not on {x.device}"
    if group_size > LARGEST_GROUP:
        return f"group_size={group_size} is more than {LARGEST_GROUP}"
    if x.numel() == 0:
        return "the batch is empty"
    if torch.compiler.is_exporting():
        return "an exported program must not depend on them"
    return None


@torch.library.custom_op("cenet::norm_ce", mutates_args=(), device_types="cuda")
def norm_ce(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    inv_sqrt: Tensor | None,
    inv_std: Tensor | None,
    w1: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    w2: Tensor | None,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    mode: Sequence[int],
    group_size: int,
    steps: int,
    pool: int,
    norm_eps: float,
    eps: float,
    act: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = act(CE(norm(x)) + residual), and what `norm_ce_backward` needs.

    Args:
        x: (N, C, H, W).
        residual: added before the activation.
        weight, bias: γ and β of the norm.
        running_mean, running_var, inv_sqrt, inv_std: statistics, where `mode` says RUNNING.
        w1, norm_weight, norm_bias, w2: the gate.
        mix_logit, blend: λ = sigmoid(mix_logit), and α.
        mode: ABSENT, BATCH or RUNNING for norm, decorrelation and reweighting.
        group_size, steps, pool, norm_eps, eps: constants of the block.
        act, slope: one of `ACTIVATIONS`, and LeakyReLU's slope or ELU's α.
    """
    from cenet.kernels import layer

    block, settings = _block_and_settings(
        weight, bias, running_mean, running_var, inv_sqrt, inv_std, w1, norm_weight, norm_bias, w2,
        mix_logit, blend, mode, group_size, steps, pool, norm_eps, eps, act, slope,
    )  # fmt: skip
    y, saved = layer.forward(x, residual, block, settings)
    empty = x.new_empty(0, dtype=torch.float32)
    gate = saved.gate or (empty, empty.clone(), empty.clone())
    return y, *saved.found, *gate


def _block_and_settings(*args: Any) -> tuple[Any, Any]:
    from cenet.kernels import layer
    from cenet.kernels.gate import GateWeights
    from cenet.kernels.groups import Mode

    tensors, gate, (mix_logit, blend), (mode, *constants) = (
        args[:6],
        args[6:10],
        args[10:12],
        args[12:],
    )
    weights = None if gate[0] is None else GateWeights(*(w.contiguous() for w in gate))
    block = layer.Block(*tensors, weights, mix_logit, blend)
    return block, layer.Settings(Mode(*mode), *constants)


@norm_ce.register_fake
def _(x, residual, weight, bias, running_mean, running_var, inv_sqrt, inv_std, w1, *args):  # type: ignore[no-untyped-def]
    (bd, ir), group_size, steps = args[5][1:], args[6], args[7]
    n, channels = x.shape[:2]
    groups = F.num_groups(channels, group_size)
    matrix = (groups, group_size, group_size)

    def small(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    return (
        _dense_like(x),
        small(8, channels),
        small(2, n if ir != ABSENT else 0, channels),
        small(3, *(matrix if bd != ABSENT else (0, 0, 0))),
        small(groups if bd == BATCH else 0, 3 * steps, *matrix[1:]),
        small(0) if w1 is None else small(n, w1.shape[0]),
        small(0) if w1 is None else small(2, n, channels),
        small(0) if w1 is None else small(),
    )


def _dense_like(x: Tensor) -> Tensor:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


@torch.library.custom_op("cenet::norm_ce_backward", mutates_args=(), device_types="cuda")
def norm_ce_backward(
    grad: Tensor,
    y: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    w1: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    w2: Tensor | None,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    values: Tensor,
    instances: Tensor,
    matrices: Tensor,
    iterates: Tensor,
    hidden: Tensor,
    gates: Tensor,
    inv_std: Tensor,
    mode: Sequence[int],
    group_size: int,
    steps: int,
    pool: int,
    norm_eps: float,
    eps: float,
    act: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight, bias, w1, norm_weight, norm_bias, w2, mix_logit and blend.

    What has none is empty. `y` is given if there was a residual and an activation.
    """
    from cenet.kernels import layer
    from cenet.kernels.gate import GateState
    from cenet.kernels.groups import Statistics

    block, settings = _block_and_settings(
        weight, bias, None, None, None, None, w1, norm_weight, norm_bias, w2,
        mix_logit, blend, mode, group_size, steps, pool, norm_eps, eps, act, slope,
    )  # fmt: skip
    gate = None if w1 is None else GateState(hidden, gates, inv_std)
    saved = layer.Saved(Statistics(values, instances, matrices, iterates), gate)
    grads = layer.backward(grad, x, y, block, settings, saved)
    flat = (
        grads.x, grads.residual if y is not None else None, grads.weight, grads.bias,
        *(grads.gate or (None,) * 4), grads.mix_logit, grads.blend,
    )  # fmt: skip
    return tuple(x.new_empty(0) if value is None else value for value in flat)  # type: ignore[return-value]


@norm_ce_backward.register_fake
def _(grad, y, x, weight, bias, *args):  # type: ignore[no-untyped-def]
    weights, scalars = args[:4], args[4:6]
    vector = x.new_empty(x.shape[1], dtype=torch.float32)
    given = [None if tensor is None else torch.empty_like(tensor) for tensor in weights + scalars]
    flat = [_dense_like(x), None if y is None else _dense_like(x), vector, vector.clone(), *given]
    return tuple(x.new_empty(0) if value is None else value for value in flat)


TENSORS = 14  # of the arguments of norm_ce


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *_ = inputs[:TENSORS]
    parameters = inputs[8:TENSORS]  # the gate, λ and α
    act = inputs[-2]
    y = output[0] if residual is not None and act != "none" else None
    ctx.save_for_backward(y, x, weight, bias, *parameters, *output[1:])
    ctx.constants = inputs[TENSORS:]
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    constants = (None,) * len(ctx.constants)
    if grad is None:
        return (None,) * TENSORS + constants
    y, x, weight, bias, *rest = ctx.saved_tensors
    grads = torch.ops.cenet.norm_ce_backward(grad, y, x, weight, bias, *rest, *ctx.constants)
    residual = (grads[1] if y is not None else grad) if ctx.has_residual else None
    affine = (_like(grads[2], weight), _like(grads[3], bias))
    given = [None if p is None else g for p, g in zip(rest[:6], grads[4:], strict=True)]
    return (grads[0], residual, *affine, None, None, None, None, *given, *constants)


def _like(grad: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else grad.to(parameter.dtype)


def _no_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise RuntimeError(
        "the kernels of cenet have no second derivative; run the forward pass inside "
        'cenet.ops.backend("torch") to differentiate twice'
    )


norm_ce.register_autograd(_backward, setup_context=_setup_context)
norm_ce_backward.register_autograd(_no_second_derivative)


@torch.library.custom_op(
    "cenet::average_",
    mutates_args=(
        "running_mean", "running_var", "norm_count", "inv_sqrt", "bd_count", "inv_std", "ir_count",
    ),
    device_types="cuda",
)  # fmt: skip
def average_(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_count: Tensor | None,
    inv_sqrt: Tensor | None,
    bd_count: Tensor | None,
    inv_std: Tensor | None,
    ir_count: Tensor | None,
    values: Tensor,
    batch_inv_sqrt: Tensor,
    batch_inv_std: Tensor,
    correction: float,
    momenta: Sequence[float],
) -> None:
    """Move running values towards those of this batch, all in one launch.

    Args:
        running_mean, running_var, norm_count: of the norm, or None.
        inv_sqrt, bd_count: of the decorrelation branch, or None.
        inv_std, ir_count: of the reweighting branch, or None.
        values, batch_inv_sqrt, batch_inv_std: of this batch, as `norm_ce` returns them.
        correction: from the biased variance to the unbiased.
        momenta: of norm, decorrelation and reweighting; negative to weigh all batches alike.
    """
    from cenet.kernels import running

    running.average_(
        None if running_mean is None else (running_mean, running_var, norm_count),
        None if inv_sqrt is None else (inv_sqrt, bd_count),
        None if inv_std is None else (inv_std, ir_count),
        values,
        batch_inv_sqrt,
        batch_inv_std,
        correction,
        tuple(momenta),
    )


@average_.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    return None


@register_flop_formula(torch.ops.cenet.norm_ce)
def _forward_flops(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products with the group matrices, one of them only with batch statistics; the gate."""
    (_, bd, ir), group_size, w1 = args[13], args[14], args[7]
    entries = _matrix_entries(x_shape, group_size)
    passes = {ABSENT: 0, BATCH: 2, RUNNING: 1}[bd]
    return 2 * passes * entries + (4 * x_shape[0] * w1[0] * w1[1] if ir != ABSENT else 0)


@register_flop_formula(torch.ops.cenet.norm_ce_backward)
def _backward_flops(
    grad_shape: Any, y_shape: Any, x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Pᵀg and Σ g x̂ᵀ, and Q·x̂ with batch statistics; the gate twice."""
    (_, bd, ir), group_size, w1 = args[15], args[16], args[2]
    passes = {ABSENT: 0, BATCH: 3, RUNNING: 2}[bd]
    gate = 8 * x_shape[0] * w1[0] * w1[1] if ir != ABSENT else 0
    return 2 * passes * _matrix_entries(x_shape, group_size) + gate


def _matrix_entries(x_shape: Any, group_size: int) -> int:
    n, channels, height, width = x_shape
    return int(n * height * width * F.num_groups(channels, group_size) * group_size**2)
