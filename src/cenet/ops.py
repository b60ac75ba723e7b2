"""`torch.library` operators around the kernels, and their gradients, fakes and FLOP counts.

    cenet::norm_ce             norm → CE → activation, with its statistics
    cenet::norm_ce_backward    its gradients
    cenet::average_            the running averages of a training step, in place
    cenet::folded_ce           CE in deployment, without gradients

The operators take CUDA tensors. Everything else (CPU, float64, export, second derivatives) is the
business of `functional`; `backend` chooses.

Arguments of norm_ce: x (N, C, H, W); the residual added before the activation; γ and β of the norm;
statistics, where `mode` says RUNNING; the gate; λ's logit and α; for norm, decorrelation and
reweighting ABSENT, BATCH or RUNNING; constants of the block; an activation of `kernels.modes` and
LeakyReLU's slope or ELU's α. `kernels.statistics` and `kernels.gate` say what the results are.
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
    "int[] mode, int group_size, int steps, int pool, float norm_eps, float eps, str act, "
    "float slope"
)
_GATE = (
    "Tensor? w1, Tensor? norm_weight, Tensor? norm_bias, Tensor? w2, Tensor? mix_logit, "
    "Tensor? blend"
)
_library.define(
    "norm_ce(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? running_mean, "
    f"Tensor? running_var, Tensor? inv_sqrt, Tensor? inv_std, {_GATE}, {_CONSTANTS}) -> "
    "(Tensor y, Tensor values, Tensor instances, Tensor matrices, Tensor iterates, Tensor hidden, "
    "Tensor spread, Tensor gates, Tensor batch_inv_std)"
)
_library.define(
    f"norm_ce_backward(Tensor grad, Tensor? y, Tensor x, Tensor? weight, Tensor? bias, {_GATE}, "
    "Tensor values, Tensor instances, Tensor matrices, Tensor iterates, Tensor hidden, "
    f"Tensor spread, Tensor gates, Tensor inv_std, {_CONSTANTS}) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "average_(Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? norm_count, "
    "Tensor(d!)? inv_sqrt, Tensor(e!)? bd_count, Tensor(f!)? inv_std, Tensor(g!)? ir_count, "
    "Tensor values, Tensor batch_inv_sqrt, Tensor batch_inv_std, SymInt count, "
    "float[] momenta) -> ()"
)
_library.define(
    "folded_ce(Tensor x, Tensor? residual, Tensor values, Tensor? matrix, Tensor w1, "
    "Tensor norm_weight, Tensor norm_bias, Tensor w2, Tensor inv_std, Tensor share, Tensor offset, "
    "str act, float slope) -> Tensor"
)
norm_ce = torch.ops.cenet.norm_ce.default
norm_ce_backward = torch.ops.cenet.norm_ce_backward.default
average_ = torch.ops.cenet.average_.default
folded_ce = torch.ops.cenet.folded_ce.default

TENSORS = 14  # among the arguments of norm_ce
GATE = 6  # gate, λ and α, the last of them
SAVED = 8  # among the results, for backward


def _norm_ce(x: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    from cenet.kernels import layer

    with _device_of(x):
        y, saved = layer.forward(x, residual, *_block_and_settings(*args))
    empty = x.new_empty(0, dtype=torch.float32)
    gate = saved.gate or tuple(empty.clone() for _ in range(4))
    return y, *saved.found, *gate


def _norm_ce_backward(
    grad: Tensor, y: Tensor | None, x: Tensor, weight: Any, bias: Any, *args: Any
) -> tuple[Tensor, ...]:
    from cenet.kernels import layer
    from cenet.kernels.gate import GateState
    from cenet.kernels.statistics import Statistics

    gate, saved, constants = args[:GATE], args[GATE : GATE + SAVED], args[GATE + SAVED :]
    running = (None,) * 4
    block, settings = _block_and_settings(weight, bias, *running, *gate, *constants)
    state = None if gate[0] is None else GateState(*saved[4:])
    with _device_of(x):
        grads = layer.backward(
            grad, x, y, block, settings, layer.Saved(Statistics(*saved[:4]), state)
        )
    flat = (
        grads.x, grads.residual if y is not None else None, grads.weight, grads.bias,
        *(grads.gate or (None,) * 4), grads.mix_logit, grads.blend,
    )  # fmt: skip
    return tuple(x.new_empty(0) if value is None else value for value in flat)


def _block_and_settings(*args: Any) -> tuple[Any, Any]:
    from cenet.kernels import layer
    from cenet.kernels.gate import GateWeights

    *tensors, w1, norm_weight, norm_bias, w2, mix_logit, blend = args[: TENSORS - 2]
    mode, *constants = args[TENSORS - 2 :]
    gate = None
    if w1 is not None:
        gate = GateWeights(w1.contiguous(), norm_weight, norm_bias, w2.contiguous())
    block = layer.Block(*(*tensors, gate, mix_logit, blend))
    return block, layer.Settings(Mode(*mode), *constants)


def _average_(*args: Any) -> None:
    from cenet.kernels import running

    norm, bd, ir, (values, *rest) = args[:3], args[3:5], args[5:7], args[7:]
    with _device_of(values):
        running.average_(norm, bd, ir, values, *rest)
    torch.autograd.graph.increment_version([tensor for tensor in args[:7] if tensor is not None])


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


def _fake_norm_ce(
    x: Tensor, residual: Any, weight: Any, bias: Any, mean: Any, var: Any, inv_sqrt: Any,
    inv_std: Any, w1: Any, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (_, bd, ir), group_size, steps = args[5], args[6], args[7]
    n, channels = x.shape[:2]
    groups = F.num_groups(channels, group_size)
    matrix = (groups, group_size, group_size)

    def small(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    return (
        _dense_like(x),
        small(10, channels),
        small(2, n if ir != ABSENT else 0, channels),
        small(3, *(matrix if bd != ABSENT else (0, 0, 0))),
        small(groups if bd == BATCH else 0, 3 * steps, *matrix[1:]),
        small(0) if w1 is None else small(n, w1.shape[0]),
        small(0) if w1 is None else small(n),
        small(0) if w1 is None else small(2, n, channels),
        small(0) if w1 is None else small(),
    )


def _fake_norm_ce_backward(
    grad: Tensor, y: Tensor | None, x: Tensor, weight: Any, bias: Any, *args: Any
) -> tuple[Tensor, ...]:
    vector = x.new_empty(x.shape[1], dtype=torch.float32)
    given = [None if tensor is None else torch.empty_like(tensor) for tensor in args[:GATE]]
    flat = [_dense_like(x), None if y is None else _dense_like(x), vector, vector.clone(), *given]
    return tuple(x.new_empty(0) if value is None else value for value in flat)


def _dense_like(x: Tensor, *args: Any) -> Tensor:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


class _NormCE(torch.autograd.Function):
    """Keeps x, small tensors, and y if there was a residual and an activation."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = norm_ce(*args)
        x, residual, weight, bias = args[:4]
        y = output[0] if residual is not None and args[-2] != "none" else None
        gate = args[TENSORS - GATE : TENSORS]
        ctx.save_for_backward(y, x, weight, bias, *gate, *output[1:])
        ctx.constants = args[TENSORS:]
        ctx.has_residual = residual is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        constants = (None,) * len(ctx.constants)
        if grad is None:
            return (None,) * TENSORS + constants
        y, x, weight, bias, *rest = ctx.saved_tensors
        *settings, act, slope = ctx.constants
        if y is not None and detect_fake_mode([grad]) is not None:
            # left to the compiler, which joins it with the addition that made `grad`
            grad, y, act = _through_activation(grad, y, act, slope), None, "none"
        grads = norm_ce_backward(grad, y, x, weight, bias, *rest, *settings, act, slope)
        residual = (grads[1] if y is not None else grad) if ctx.has_residual else None
        affine = (_like(grads[2], weight), _like(grads[3], bias))
        gate = [None if p is None else g for p, g in zip(rest[:GATE], grads[4:], strict=True)]
        return (grads[0], residual, *affine, None, None, None, None, *gate, *constants)


def _through_activation(grad: Tensor, y: Tensor, act: str, slope: float) -> Tensor:
    """Gradient of the activation's argument, told by what it returned."""
    if act == "relu":
        return torch.where(y > 0, grad, 0)
    slopes = slope if act == "leaky_relu" else y.float() + slope
    return torch.where(y > 0, grad, (slopes * grad.float()).to(grad.dtype))


def _like(grad: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else grad.to(parameter.dtype)


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


def _with_autograd(op: Any, function: Any) -> Any:
    def run(*args: Any) -> Any:
        wanted = (isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if torch.is_grad_enabled() and any(wanted):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run


def _refuse_gradients(*args: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        raise RuntimeError("cenet::folded_ce has no gradient; call it under torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return folded_ce(*args)


for _name, _cuda, _fake in (
    ("norm_ce", _norm_ce, _fake_norm_ce),
    ("norm_ce_backward", _norm_ce_backward, _fake_norm_ce_backward),
    ("average_", _average_, lambda *args: None),
    ("folded_ce", _folded_ce, _dense_like),
):
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"cenet::{_name}", _fake, lib=_library)
_library.impl("norm_ce", _with_autograd(norm_ce, _NormCE), "Autograd")
_library.impl("norm_ce_backward", _with_autograd(norm_ce_backward, _NoSecondDerivative), "Autograd")
_library.impl("folded_ce", _refuse_gradients, "Autograd")


@cache
def _register_flop_formulas() -> None:
    # imported here: the counter imports triton
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.cenet.norm_ce)(_forward_flops)
    register_flop_formula(torch.ops.cenet.norm_ce_backward)(_backward_flops)
    register_flop_formula(torch.ops.cenet.folded_ce)(_folded_flops)


def _forward_flops(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products with the group matrices, one of them only with batch statistics; the gate."""
    (_, bd, ir), group_size, w1 = args[13], args[14], args[7]
    entries = _matrix_entries(x_shape, group_size)
    passes = {ABSENT: 0, BATCH: 2, RUNNING: 1}[bd]
    return 2 * passes * entries + (4 * x_shape[0] * w1[0] * w1[1] if ir != ABSENT else 0)


def _backward_flops(
    grad_shape: Any, y_shape: Any, x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Pᵀg and Σ g x̂ᵀ, and Q·x̂ with batch statistics; the gate twice."""
    (_, bd, ir), group_size, w1 = args[16], args[17], args[2]
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
