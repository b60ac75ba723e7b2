"""`torch.library` operators around the kernels: registration, gradients, fakes and FLOP counts.

    cenet::norm_ce             norm → CE → activation; moves running averages in place
    cenet::norm_ce_backward    its gradients
    cenet::folded_ce           CE in deployment, without gradients

The operators take CUDA tensors. CPU tensors, float64, export and second derivatives go to
`functional`; `use_kernels` decides, and `backend` overrides it.

The records of `kernels.call` describe the arguments of norm_ce and folded_ce. The second result of
norm_ce, `state`, is one tensor with all that the backward pass needs besides x
(`kernels.layer.Saved`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from cenet import functional as F
from cenet.internals import below_autograd, detect_fake_mode, increment_version, is_exporting
from cenet.kernels.call import (
    ABSENT,
    BATCH,
    CONSTANTS,
    FOLDED_CE,
    NORM_CE,
    NORM_CE_BACKWARD,
    RUNNING,
    FoldedCECall,
    NormCECall,
    gradient_sizes,
)

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
    """Choose what CE layers run on inside this context, in all threads.

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
    """Whether to run x and these parameters on the kernels.

    Backend "triton" raises RuntimeError where they cannot. `unless` is the caller's own reason why
    they cannot, if it has one.
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
    if is_exporting():
        return "an exported program must not depend on them"
    return None


_library: Any = torch.library.Library("cenet", "DEF")  # type: ignore[no-untyped-call]
_library.define(NORM_CE)
_library.define(NORM_CE_BACKWARD)
_library.define(FOLDED_CE)
norm_ce = torch.ops.cenet.norm_ce.default
norm_ce_backward = torch.ops.cenet.norm_ce_backward.default
folded_ce = torch.ops.cenet.folded_ce.default
# operators with an activation inside, and the records of their calls
CALLS = {norm_ce: NormCECall, folded_ce: FoldedCECall}
_ACT, _SLOPE = CONSTANTS.index("act"), CONSTANTS.index("slope")


def _norm_ce(*args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels import layer

    call = NormCECall.without_gaps(args)
    moved = [average for average in call.averages() if average is not None]
    if moved:
        increment_version(moved)
    with device_of(call.x):
        return layer.forward(call)


def _norm_ce_backward(grad: Tensor, y: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from cenet.kernels import layer

    call, state = NormCECall.from_backward(*args)
    call = NormCECall.without_gaps(call)
    with device_of(call.x):
        dx, residual, small = layer.backward(call, grad, y, state)
    return dx, call.x.new_empty(0) if residual is None or y is None else residual, small


def _folded_ce(*args: Any) -> Tensor:
    from cenet.kernels import layer

    call = FoldedCECall._make(args).without_gaps()
    with device_of(call.x):
        return layer.folded(call)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of x is the current one, where launches go."""
    if x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _fake_norm_ce(*args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels.layer import state_size

    call = NormCECall(*args)
    return dense_like(call.x), call.x.new_empty(state_size(call), dtype=torch.float32)


def _fake_norm_ce_backward(
    grad: Tensor, y: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, _ = NormCECall.from_backward(*args)
    x = call.x
    residual = x.new_empty(0) if y is None else dense_like(x)
    small = sum(gradient_sizes(x.shape[1], call.parameters()))
    return dense_like(x), residual, x.new_empty(small, dtype=torch.float32)


def dense_like(x: Tensor, *args: Any) -> Tensor:
    """An uninitialized result like x, without gaps; further arguments are ignored."""
    layout = torch.channels_last if F.is_channels_last(x) else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


class _NormCE(torch.autograd.Function):
    """Saves x, the small tensors, and y if there are both a residual and an activation.

    Its arguments are the tensors that may have a gradient, then the whole call as one object, which
    autograd does not look into.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call: NormCECall = args[-1]
        with below_autograd():
            y, state = norm_ce(*call)
        ctx.has_residual = call.residual is not None
        # with a residual, the sign of the activation's argument cannot be recomputed from x
        kept = y if ctx.has_residual and call.act != "none" else None
        ctx.save_for_backward(kept, call.x, *call.parameters(), state)
        ctx.constants = call.constants()
        ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        y, x, *parameters, state = ctx.saved_tensors
        constants = list(ctx.constants)
        if y is not None and detect_fake_mode([grad]) is not None:
            # left to the compiler, which joins it with the addition that made `grad`
            grad = _through_activation(grad, y, constants[_ACT], constants[_SLOPE])
            y, constants[_ACT] = None, "none"
        dx, residual, small = norm_ce_backward(grad, y, x, *parameters, state, *constants)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(ctx.needs_input_grad[2:]):
            grads = _parameter_gradients(small, x.shape[1], parameters)
        shortcut = (grad if y is None else residual) if ctx.has_residual else None
        return dx, shortcut, *grads, None


def _parameter_gradients(
    small: Tensor, channels: int, parameters: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of each parameter in its shape and dtype, from all of them in one tensor."""
    parts = torch.split_with_sizes(small, gradient_sizes(channels, parameters))
    grads: list[Tensor | None] = []
    for part, parameter in zip(parts, parameters, strict=True):
        if parameter is None:
            grads.append(None)
            continue
        part = part if parameter.dim() == 1 else part.view(parameter.shape)
        grads.append(part if parameter.dtype == torch.float32 else part.to(parameter.dtype))
    return grads


def _through_activation(grad: Tensor, y: Tensor, act: str, slope: float) -> Tensor:
    """Gradient of the activation's argument, read off the activation's result."""
    if act == "relu":
        return torch.where(y > 0, grad, 0)
    if act not in ("leaky_relu", "elu"):
        raise ValueError(f"_through_activation has no gradient of {act}; add it")
    slopes = slope if act == "leaky_relu" else y.float() + slope
    return torch.where(y > 0, grad, (slopes * grad.float()).to(grad.dtype))


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        with below_autograd():
            return operator(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "the kernels of cenet have no second derivative; run the forward pass inside "
            'cenet.ops.backend("torch") to differentiate twice'
        )


def _autograd_norm_ce(*args: Any) -> Any:
    if not _wants_gradients(args):
        with below_autograd():
            return norm_ce(*args)
    call = NormCECall._make(args)
    return _NormCE.apply(call.x, call.residual, *call.parameters(), call)


def without_derivative(operator: Any, *args: Any) -> Any:
    """Call an operator of a backward pass; its own backward pass raises RuntimeError."""
    if _wants_gradients(args):
        return _NoSecondDerivative.apply(operator, *args)
    with below_autograd():
        return operator(*args)


def _wants_gradients(args: Sequence[Any]) -> bool:
    wanted = (isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return torch.is_grad_enabled() and any(wanted)


def _refuse_gradients(*args: Any) -> Any:
    if _wants_gradients(args):
        raise RuntimeError("cenet::folded_ce has no gradient; call it under torch.no_grad()")
    with below_autograd():
        return folded_ce(*args)


for _name, _cuda, _fake in (
    ("norm_ce", _norm_ce, _fake_norm_ce),
    ("norm_ce_backward", _norm_ce_backward, _fake_norm_ce_backward),
    ("folded_ce", _folded_ce, dense_like),
):
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"cenet::{_name}", _fake, lib=_library)
_library.impl("norm_ce", _autograd_norm_ce, "Autograd")
_library.impl("norm_ce_backward", partial(without_derivative, norm_ce_backward), "Autograd")
_library.impl("folded_ce", _refuse_gradients, "Autograd")


@cache
def _register_flop_formulas() -> None:
    # imported here: the counter imports triton
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.cenet.norm_ce)(_forward_flops)
    register_flop_formula(torch.ops.cenet.norm_ce_backward)(_backward_flops)
    register_flop_formula(torch.ops.cenet.folded_ce)(_folded_flops)


# FLOP formulas get shapes in the place of tensors


def _forward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products with the group matrices, one of them only with batch statistics; the gate."""
    return _flops(NormCECall(*args), {ABSENT: 0, BATCH: 2, RUNNING: 1}, 4)


def _backward_flops(
    grad_shape: Any, y_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Pᵀg and Σ g x̂ᵀ, and Q·x̂ with batch statistics; the gate twice."""
    call, _ = NormCECall.from_backward(*args)
    return _flops(call, {ABSENT: 0, BATCH: 3, RUNNING: 2}, 8)


def _flops(call: Any, products: dict[int, int], gate: int) -> int:
    """Products with the group matrices by the source of decorrelation, and those of the gate."""
    x, w1 = call.x, call.w1
    matrices = 2 * products[call.mode.bd] * _matrix_entries(x, call.group_size)
    return matrices + (gate * x[0] * w1[0] * w1[1] if call.mode.ir != ABSENT else 0)


def _folded_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """One product with the group matrices; the gate."""
    call: Any = FoldedCECall._make(args)
    entries = 0 if call.matrix is None else _matrix_entries(call.x, call.matrix[-1])
    return 2 * entries + 4 * int(call.x[0] * call.w1[0] * call.w1[1])


def _matrix_entries(x_shape: Any, group_size: int) -> int:
    n, channels, height, width = x_shape
    return int(n * height * width * F.num_groups(channels, group_size) * group_size**2)
