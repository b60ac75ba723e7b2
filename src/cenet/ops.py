"""`torch.library` operators around the kernels, and their gradients, fakes and FLOP counts.

    cenet::norm_ce             norm → CE → activation; moves running averages in place
    cenet::norm_ce_backward    its gradients
    cenet::folded_ce           CE in deployment, without gradients

The operators take CUDA tensors. Everything else (CPU, float64, export, second derivatives) is the
business of `functional`; `backend` chooses.

Arguments of norm_ce: x (N, C, H, W); the residual added before the activation; γ and β of the norm;
statistics, where `mode` says RUNNING; the gate; λ's logit and α; for norm, decorrelation and
reweighting ABSENT, BATCH or RUNNING; constants of the block; an activation of `kernels.modes` and
LeakyReLU's slope or ELU's α. After the gate come the running averages to move (`kernels.running`).
The second result is for the backward pass alone (`kernels.state`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from cenet import functional as F
from cenet.kernels.modes import ABSENT, BATCH, RUNNING, Mode

Backend = Literal["auto", "triton", "torch"]
BACKENDS = ("auto", "triton", "torch")
HAS_TRITON = find_spec("triton") is not None
LARGEST_GROUP = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _checked(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where}={name!r} must be one of {', '.join(BACKENDS)}")
    return name


_backend = _checked(os.environ.get("CENET_BACKEND", "auto"), "CENET_BACKEND")


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose what CE layers run on inside the context, in all threads.

    Args:
        name: "auto" takes the kernels where they run and plain PyTorch elsewhere, "triton" raises
            where they do not run, "torch" never takes them. The environment variable CENET_BACKEND
            sets the choice outside.

    >>> with backend("torch"):
    ...     pass
    """
    global _backend
    before = _backend
    _backend = _checked(name, "backend")
    try:
        yield
    finally:
        _backend = before


def use_kernels(
    x: Tensor, tensors: Sequence[Tensor | None], group_size: int, unless: str | None = None
) -> bool:
    """Whether the kernels take x and these parameters; RuntimeError if they must and cannot.

    `unless` is a reason of the caller why they cannot.
    """
    if _backend == "torch" or (_backend == "auto" and not x.is_cuda):
        return False
    reason = unless or _why_not(x, tensors, group_size)
    if _backend == "triton" and reason:
        raise RuntimeError(f'backend "triton" was asked for, but {reason}; use backend "auto"')
    if reason is None and not torch.compiler.is_compiling():
        _register_flop_formulas()
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
    # torch.compiler.is_exporting() is true under torch.compile too in some releases
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return "an exported program must not depend on them"
    return None


_library: Any = torch.library.Library("cenet", "DEF")  # type: ignore[no-untyped-call]
_CONSTANTS = (
    "int[] sources, int group_size, int steps, int pool, float norm_eps, float eps, str act, "
    "float slope"
)
_GATE = (
    "Tensor? w1, Tensor? norm_weight, Tensor? norm_bias, Tensor? w2, Tensor? mix_logit, "
    "Tensor? blend"
)
_AVERAGES = (
    "Tensor(a!)? average_mean, Tensor(b!)? average_var, Tensor(c!)? norm_count, "
    "Tensor(d!)? average_inv_sqrt, Tensor(e!)? bd_count, Tensor(f!)? average_inv_std, "
    "Tensor(g!)? ir_count"
)
_library.define(
    "norm_ce(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? running_mean, "
    f"Tensor? running_var, Tensor? inv_sqrt, Tensor? inv_std, {_GATE}, {_AVERAGES}, "
    f"float[] momenta, {_CONSTANTS}) -> (Tensor y, Tensor state)"
)
_library.define(
    f"norm_ce_backward(Tensor grad, Tensor? y, Tensor x, Tensor? weight, Tensor? bias, {_GATE}, "
    f"Tensor state, {_CONSTANTS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "folded_ce(Tensor x, Tensor? residual, Tensor values, Tensor? matrix, Tensor w1, "
    "Tensor norm_weight, Tensor norm_bias, Tensor w2, Tensor inv_std, Tensor share, Tensor offset, "
    "str act, float slope) -> Tensor"
)
norm_ce = torch.ops.cenet.norm_ce.default
norm_ce_backward = torch.ops.cenet.norm_ce_backward.default
folded_ce = torch.ops.cenet.folded_ce.default

FIXED = 8  # tensors of norm_ce before the gate
GATE = 6  # gate, λ and α
AVERAGES = 7
TENSORS = FIXED + GATE + AVERAGES


def _norm_ce(x: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels import layer
    from cenet.kernels.running import Averages

    fixed, gate = args[: FIXED - 2], args[FIXED - 2 : FIXED - 2 + GATE]
    moved, momenta = args[FIXED - 2 + GATE : TENSORS - 2], args[TENSORS - 2]
    block, settings = _block_and_settings(fixed, gate, args[TENSORS - 1 :])
    averages = None
    if any(tensor is not None for tensor in moved):
        averages = Averages(*(*moved, tuple(momenta)))
        torch.autograd.graph.increment_version([t for t in moved if t is not None])
    with _device_of(x):
        return layer.forward(x, residual, block, settings, averages)


def _norm_ce_backward(
    grad: Tensor, y: Tensor | None, x: Tensor, weight: Any, bias: Any, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from cenet.kernels import layer

    fixed = (weight, bias, None, None, None, None)
    block, settings = _block_and_settings(fixed, args[:GATE], args[GATE + 1 :])
    with _device_of(x):
        dx, residual, small = layer.backward(grad, x, y, block, settings, args[GATE])
    return dx, x.new_empty(0) if residual is None or y is None else residual, small


def _block_and_settings(fixed: Any, gate: Any, constants: Any) -> tuple[Any, Any]:
    from cenet.kernels import layer
    from cenet.kernels.gate import GateWeights

    # kernels take vectors and matrices without gaps
    fixed = [None if tensor is None else tensor.contiguous() for tensor in fixed]
    *weights, mix_logit, blend = gate
    whole = None if weights[0] is None else GateWeights(*(w.contiguous() for w in weights))
    mode, *rest = constants
    return layer.Block(*(*fixed, whole, mix_logit, blend)), layer.Settings(Mode(*mode), *rest)


def _folded_ce(
    x: Tensor, residual: Tensor | None, values: Tensor, matrix: Tensor | None, *args: Any
) -> Tensor:
    from cenet.kernels import layer
    from cenet.kernels.gate import GateWeights

    gate = GateWeights(*(weight.contiguous() for weight in args[:4]))
    with _device_of(x):
        act = (args[7], args[8])
        inv_std, share, offset = args[4:7]
        return layer.folded(x, residual, values, matrix, gate, inv_std, share, offset, act)


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device."""
    if x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _fake_norm_ce(x: Tensor, residual: Any, *args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels.state import Shape, size

    w1, (mode, group_size, steps) = args[FIXED - 2], args[TENSORS - 1 : TENSORS + 2]
    n, channels = x.shape[:2]
    units = 0 if w1 is None else w1.shape[0]
    state = size(Shape(n, channels, units, group_size, steps, Mode(*mode)))
    return _dense_like(x), x.new_empty(state, dtype=torch.float32)


def _fake_norm_ce_backward(
    grad: Tensor, y: Tensor | None, x: Tensor, weight: Any, bias: Any, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    small = 2 * x.shape[1] + sum(tensor.numel() for tensor in args[:GATE] if tensor is not None)
    residual = x.new_empty(0) if y is None else _dense_like(x)
    return _dense_like(x), residual, x.new_empty(small, dtype=torch.float32)


def _dense_like(x: Tensor, *args: Any) -> Tensor:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


class _NormCE(torch.autograd.Function):
    """Keeps x, what is small, and y if there was a residual and an activation.

    Takes what has a gradient, and the rest of the arguments of norm_ce in one tuple: autograd
    looks at each of its own.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *differentiable, (running, averages, constants) = args
        x, residual, weight, bias, *gate = differentiable
        with torch._C._AutoDispatchBelowAutograd():
            y, state = norm_ce(*args[:4], *running, *gate, *averages, *constants)
        used = y if residual is not None and constants[-2] != "none" else None
        ctx.save_for_backward(used, x, weight, bias, *gate, state)
        ctx.constants = constants
        ctx.has_residual = residual is not None
        ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * (4 + GATE + 1)
        y, x, *parameters, state = ctx.saved_tensors
        *settings, act, slope = ctx.constants
        if y is not None and detect_fake_mode([grad]) is not None:
            # left to the compiler, which joins it with the addition that made `grad`
            grad, y, act = _through_activation(grad, y, act, slope), None, "none"
        args = (grad, y, x, *parameters, state, *settings, act, slope)
        dx, residual, small = norm_ce_backward(*args)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(ctx.needs_input_grad[2:]):
            grads = _parts(small, x.shape[1], parameters)
        shortcut = (grad if y is None else residual) if ctx.has_residual else None
        return dx, shortcut, *grads, None


def _parts(
    small: Tensor, channels: int, parameters: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of γ, β (there even if these are not) and the others, in the parameters' dtypes."""
    sizes = [channels, channels, *(p.numel() for p in parameters[2:] if p is not None)]
    parts = iter(torch.split_with_sizes(small, sizes))
    grads: list[Tensor | None] = []
    for i, parameter in enumerate(parameters):
        part = next(parts) if i < 2 or parameter is not None else None
        if part is None or parameter is None:
            grads.append(None)
            continue
        part = part if parameter.dim() == 1 else part.view(parameter.shape)
        grads.append(part if parameter.dtype == torch.float32 else part.to(parameter.dtype))
    return grads


def _through_activation(grad: Tensor, y: Tensor, act: str, slope: float) -> Tensor:
    """Gradient of the activation's argument, told by what it returned."""
    if act == "relu":
        return torch.where(y > 0, grad, 0)
    slopes = slope if act == "leaky_relu" else y.float() + slope
    return torch.where(y > 0, grad, (slopes * grad.float()).to(grad.dtype))


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return norm_ce_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "the kernels of cenet have no second derivative; run the forward pass inside "
            'cenet.ops.backend("torch") to differentiate twice'
        )


def _autograd_norm_ce(*args: Any) -> Any:
    if not _wants_gradients(args):
        with torch._C._AutoDispatchBelowAutograd():
            return norm_ce(*args)
    running, gate = args[4:FIXED], args[FIXED : FIXED + GATE]
    averages, constants = args[FIXED + GATE : TENSORS + 1], args[TENSORS + 1 :]
    return _NormCE.apply(*args[:4], *gate, (running, averages, constants))


def _autograd_norm_ce_backward(*args: Any) -> Any:
    if _wants_gradients(args):
        return _NoSecondDerivative.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return norm_ce_backward(*args)


def _wants_gradients(args: Sequence[Any]) -> bool:
    wanted = (isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return torch.is_grad_enabled() and any(wanted)


def _refuse_gradients(*args: Any) -> Any:
    if _wants_gradients(args):
        raise RuntimeError("cenet::folded_ce has no gradient; call it under torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return folded_ce(*args)


for _name, _cuda, _fake in (
    ("norm_ce", _norm_ce, _fake_norm_ce),
    ("norm_ce_backward", _norm_ce_backward, _fake_norm_ce_backward),
    ("folded_ce", _folded_ce, _dense_like),
):
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"cenet::{_name}", _fake, lib=_library)
_library.impl("norm_ce", _autograd_norm_ce, "Autograd")
_library.impl("norm_ce_backward", _autograd_norm_ce_backward, "Autograd")
_library.impl("folded_ce", _refuse_gradients, "Autograd")


def before_activation(op: Any, args: Sequence[Any]) -> Tensor:
    """What norm_ce or folded_ce, called with `args`, gives to its activation; nothing is moved."""
    *rest, _, slope = args
    if op is norm_ce:
        rest[FIXED + GATE : TENSORS] = [None] * AVERAGES
    result = op(*rest, "none", slope)
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


@cache
def _register_flop_formulas() -> None:
    # imported here: the counter imports triton
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.cenet.norm_ce)(_forward_flops)
    register_flop_formula(torch.ops.cenet.norm_ce_backward)(_backward_flops)
    register_flop_formula(torch.ops.cenet.folded_ce)(_folded_flops)


def _forward_flops(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products with the group matrices, one of them only with batch statistics; the gate."""
    (_, bd, ir), group_size, w1 = args[TENSORS], args[TENSORS + 1], args[FIXED - 1]
    entries = _matrix_entries(x_shape, group_size)
    passes = {ABSENT: 0, BATCH: 2, RUNNING: 1}[bd]
    return 2 * passes * entries + (4 * x_shape[0] * w1[0] * w1[1] if ir != ABSENT else 0)


def _backward_flops(
    grad_shape: Any, y_shape: Any, x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Pᵀg and Σ g x̂ᵀ, and Q·x̂ with batch statistics; the gate twice."""
    (_, bd, ir), group_size, w1 = args[GATE + 3], args[GATE + 4], args[2]
    passes = {ABSENT: 0, BATCH: 3, RUNNING: 2}[bd]
    gate = 8 * x_shape[0] * w1[0] * w1[1] if ir != ABSENT else 0
    return 2 * passes * _matrix_entries(x_shape, group_size) + gate


def _folded_flops(
    x_shape: Any, residual_shape: Any, shift_shape: Any, matrix_shape: Any, w1_shape: Any,
    *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """One product with the group matrices; the gate."""
    entries = 0 if matrix_shape is None else _matrix_entries(x_shape, matrix_shape[-1])
    return 2 * entries + 4 * int(x_shape[0] * w1_shape[0] * w1_shape[1])


def _matrix_entries(x_shape: Any, group_size: int) -> int:
    n, channels, height, width = x_shape
    return int(n * height * width * F.num_groups(channels, group_size) * group_size**2)
