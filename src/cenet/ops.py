"""`torch.library` operators around the kernels: registration, gradients, fakes and FLOP counts.

    cenet::norm_ce                  norm → CE → activation; moves running averages in place
    cenet::norm_ce_backward         its gradients
    cenet::sync_norm_ce             the same with the statistics of several ranks
    cenet::sync_norm_ce_backward    its gradients
    cenet::folded_ce                CE in deployment, without gradients

The operators take CUDA tensors. CPU tensors, float64, export and second derivatives go to
`functional`; `use_kernels` decides, and `backend` overrides it.

The records of `kernels.call` describe the arguments of norm_ce and folded_ce. The second result of
norm_ce, `state`, is one tensor with all that the backward pass needs besides x
(`kernels.layer.Saved`). The synchronized operators talk to the other ranks inside: one collective
each (`kernels.merging`).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from cenet import cpu
from cenet import functional as F
from cenet.internals import (
    below_autograd,
    detect_fake_mode,
    hears_operators,
    increment_version,
    is_exporting,
    memory_format_of,
    shared_memory,
    triton_cache_key,
)
from cenet.kernels.call import (
    ABSENT,
    BATCH,
    CONSTANTS,
    FOLDED_CE,
    NORM_CE,
    NORM_CE_BACKWARD,
    RUNNING,
    SYNC_NORM_CE,
    SYNC_NORM_CE_BACKWARD,
    FoldedCECall,
    NormCECall,
    gradient_sizes,
)

Backend = Literal["auto", "triton", "torch"]
BACKENDS = ("auto", "triton", "torch")
HAS_TRITON = find_spec("triton") is not None
LARGEST_GROUP = 64
# bytes of shared memory that groups of more than 32 channels need
ROOM_FOR_LARGEST, LARGEST_IN_LESS = 144 * 2**10, 32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _checked(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{where}={name!r} must be one of {', '.join(BACKENDS)}")
    return name


def _choose(name: str) -> None:
    global _backend
    _backend = name
    cpu.enabled = name == "auto"


_backend = "auto"
_choose(_checked(os.environ.get("CENET_BACKEND", "auto"), "CENET_BACKEND"))


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose what CE layers run on inside this context, in all threads.

    Args:
        name: "auto" takes the kernels where they run and plain PyTorch elsewhere, "triton" raises
            where they do not run, "torch" never takes them. The environment variable CENET_BACKEND
            sets the backend outside of such contexts.

    >>> with backend("torch"):
    ...     pass
    """
    before = _backend
    _choose(_checked(name, "backend"))
    try:
        yield
    finally:
        _choose(before)


def start_gpu(device: torch.device, *, kernels: bool) -> None:
    """Load what the first step on a GPU loads once: CUDA, cuDNN, and Triton if `kernels` are used.

    Much of that is not Python code, so another thread can run meanwhile. Does nothing on a CPU.
    """
    if device.type != "cuda":
        return
    image = torch.zeros(1, 1, 3, 3, device=device)
    torch.nn.functional.conv2d(image, image)
    if kernels and HAS_TRITON:
        import_module("cenet.kernels.preparation")
        triton_cache_key()  # reads all of Triton's library, half a gigabyte


def use_kernels(
    x: Tensor,
    tensors: Sequence[Tensor | None],
    group_size: int,
    unless: str | None = None,
    *,
    synchronized: bool = False,
) -> bool:
    """Whether to run x and these parameters on the kernels.

    Backend "triton" raises RuntimeError where they cannot. `unless` is the caller's own reason why
    they cannot, if it has one. In a synchronized layer they can run without an image, too.
    """
    if _backend == "torch" or (_backend == "auto" and not x.is_cuda):
        return False
    reason = unless or _why_not(x, tensors, group_size, synchronized)
    if _backend == "triton" and reason:
        raise RuntimeError(f'backend "triton" was asked for, but {reason}; use backend "auto"')
    if reason is None and not torch.compiler.is_compiling():
        _register_flop_formulas()
    return reason is None


def _why_not(
    x: Tensor, tensors: Sequence[Tensor | None], group_size: int, synchronized: bool
) -> str | None:
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
    if group_size > LARGEST_IN_LESS and (room := shared_memory(x.device)) < ROOM_FOR_LARGEST:
        where = f"on a GPU with {room // 2**10} KB of shared memory"
        return f"group_size={group_size} is more than {LARGEST_IN_LESS} {where}"
    if x.numel() == 0 and not synchronized:
        return "the batch is empty"
    if is_exporting():
        return "an exported program must not depend on them"
    return None


_library: Any = torch.library.Library("cenet", "DEF")  # type: ignore[no-untyped-call]
_library.define(NORM_CE)
_library.define(NORM_CE_BACKWARD)
_library.define(SYNC_NORM_CE)
_library.define(SYNC_NORM_CE_BACKWARD)
_library.define(FOLDED_CE)
norm_ce = torch.ops.cenet.norm_ce.default
norm_ce_backward = torch.ops.cenet.norm_ce_backward.default
sync_norm_ce = torch.ops.cenet.sync_norm_ce.default
sync_norm_ce_backward = torch.ops.cenet.sync_norm_ce_backward.default
folded_ce = torch.ops.cenet.folded_ce.default
# operators with an activation inside, and the records of their calls; arguments about the ranks
# follow
CALLS: dict[Any, Any] = {norm_ce: NormCECall, sync_norm_ce: NormCECall, folded_ce: FoldedCECall}
_FIELDS = len(NormCECall._fields)
_TENSORS = NormCECall._fields.index("momenta")  # the fields before it are tensors, or None
_FOLDED_TENSORS = FoldedCECall._fields.index("act")
_ACT, _SLOPE = CONSTANTS.index("act"), CONSTANTS.index("slope")


def run_norm_ce(call: NormCECall, ranks: tuple[Any, ...] = ()) -> Tensor:
    """y of a call, with the statistics of several ranks if their number and group are given.

    Calling an operator takes the host longer than the kernels take, and it is called twice in each
    direction, with autograd and below it. So kernels are called directly unless something observes
    operators.
    """
    tensors = (*call,)[:_TENSORS]  # torch.compile of torch 2.8 cannot slice a NamedTuple itself
    if not _is_plain(tensors):
        y, *_ = sync_norm_ce(*call, *ranks) if ranks else norm_ce(*call)
    elif _wants_gradients(tensors):
        y, *_ = _NormCE.apply(call.x, call.residual, *call.parameters(), call, ranks, True)
    else:
        y, *_ = _sync_norm_ce(*call, *ranks) if ranks else _norm_ce(*call)
    return cast(Tensor, y)


def run_folded_ce(call: FoldedCECall) -> Tensor:
    """y of a call of the folded layer, by the operator if something observes operators."""
    tensors = (*call,)[:_FOLDED_TENSORS]
    if _is_plain(tensors) and not _wants_gradients(tensors):
        return _folded_ce(*call)
    return cast(Tensor, folded_ce(*call))


def _is_plain(tensors: Iterable[Any]) -> bool:
    """Whether nothing observes operators, and no tensor is of a class with its own operators."""
    if hears_operators():
        return False
    for tensor in tensors:
        kind = type(tensor)
        if kind is not Parameter and kind is not Tensor and tensor is not None:
            return False
    return True


def _norm_ce(*args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels import layer

    call = _moving(args)
    with _device_of(call.x):
        return layer.forward(call)


def _moving(args: Sequence[Any]) -> NormCECall:
    """The call, without gaps. Autograd is told that its averages will change."""
    call = NormCECall.without_gaps(args)
    moved = [average for average in call.averages() if average is not None]
    if moved:
        increment_version(moved)
    return call


def _norm_ce_backward(grad: Tensor, y: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from cenet.kernels import layer

    call, state = NormCECall.from_backward(*args)
    call = NormCECall.without_gaps(call)
    with _device_of(call.x):
        dx, residual, small = layer.backward(call, grad, y, state)
    return dx, call.x.new_empty(0) if residual is None or y is None else residual, small


def _sync_norm_ce(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from cenet.kernels import merging

    call = _moving(args[:_FIELDS])
    with _device_of(call.x):
        return merging.forward(call, *args[_FIELDS:])


def _sync_norm_ce_backward(
    grad: Tensor, y: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from cenet.kernels import merging

    *given, message, messages, group_name = args
    call, state = NormCECall.from_backward(*given)
    call = NormCECall.without_gaps(call)
    with _device_of(call.x):
        dx, residual, small = merging.backward(call, grad, y, state, message, messages, group_name)
    return dx, call.x.new_empty(0) if residual is None or y is None else residual, small


def _folded_ce(*args: Any) -> Tensor:
    from cenet.kernels import layer

    call = FoldedCECall._make(args).without_gaps()
    with _device_of(call.x):
        return layer.folded(call)


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of x is the current one, where launches go."""
    if x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _fake_norm_ce(*args: Any) -> tuple[Tensor, Tensor]:
    from cenet.kernels.layer import state_size

    call = NormCECall(*args)
    return _dense_like(call.x), call.x.new_empty(state_size(call), dtype=torch.float32)


def _fake_norm_ce_backward(
    grad: Tensor, y: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, _ = NormCECall.from_backward(*args)
    x = call.x
    residual = x.new_empty(0) if y is None else _dense_like(x)
    small = sum(gradient_sizes(x.shape[1], call.parameters()))
    return _dense_like(x), residual, x.new_empty(small, dtype=torch.float32)


def _fake_sync_norm_ce(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from cenet.kernels.merging import layout_of

    y, state = _fake_norm_ce(*args[:_FIELDS])
    size = layout_of(NormCECall(*args[:_FIELDS])).size()
    return y, state, state.new_empty(size), state.new_empty(args[_FIELDS] * size)


def _fake_sync_norm_ce_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_norm_ce_backward(*args[:-3])


def _dense_like(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=memory_format_of(x))


class _NormCE(torch.autograd.Function):
    """Saves x, the small tensors, and y if there are both a residual and an activation.

    Its arguments are the tensors that may have a gradient, then the whole call as one object, which
    autograd does not look into; the ranks to merge: none, or their number and group; and whether
    to call the kernels without the operator.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call: NormCECall = args[-3]
        ranks: tuple[Any, ...] = args[-2]
        if args[-1]:
            y, state, *told = _sync_norm_ce(*call, *ranks) if ranks else _norm_ce(*call)
        else:
            with below_autograd():
                y, state, *told = sync_norm_ce(*call, *ranks) if ranks else norm_ce(*call)
        ctx.has_residual = call.residual is not None
        # with a residual, the sign of the activation's argument cannot be recomputed from x
        kept = y if ctx.has_residual and call.act != "none" else None
        ctx.save_for_backward(kept, *told, call.x, *call.parameters(), state)
        ctx.constants, ctx.ranks = call.constants(), ranks
        ctx.mark_non_differentiable(state, *told)
        ctx.set_materialize_grads(False)
        return y, state, *told

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        y, *saved = ctx.saved_tensors
        told = [saved.pop(0), saved.pop(0), ctx.ranks[1]] if ctx.ranks else []
        x, *parameters, state = saved
        constants = list(ctx.constants)
        if not torch.is_grad_enabled() and _is_plain((grad, x, *parameters)):
            backward = _sync_norm_ce_backward if told else _norm_ce_backward
        else:
            backward = sync_norm_ce_backward if told else norm_ce_backward
            if y is not None and detect_fake_mode([grad]) is not None:
                # left to the compiler, which joins it with the addition that made `grad`
                grad = _through_activation(grad, y, constants[_ACT], constants[_SLOPE])
                y, constants[_ACT] = None, "none"
        dx, residual, small = backward(grad, y, x, *parameters, state, *constants, *told)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(ctx.needs_input_grad[2:]):
            grads = _parameter_gradients(small, x.shape[1], parameters)
        shortcut = (grad if y is None else residual) if ctx.has_residual else None
        return dx, shortcut, *grads, None, None, None


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
        shape = parameter.shape
        part = part if len(shape) == 1 else part.view(shape)
        grads.append(part if parameter.dtype is torch.float32 else part.to(parameter.dtype))
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
    return _NormCE.apply(call.x, call.residual, *call.parameters(), call, (), False)


def _autograd_sync_norm_ce(*args: Any) -> Any:
    if not _wants_gradients(args):
        with below_autograd():
            return sync_norm_ce(*args)
    call = NormCECall._make(args[:_FIELDS])
    return _NormCE.apply(call.x, call.residual, *call.parameters(), call, args[_FIELDS:], False)


def _without_derivative(operator: Any, *args: Any) -> Any:
    """Call a backward operator; its own backward pass raises RuntimeError."""
    if _wants_gradients(args):
        return _NoSecondDerivative.apply(operator, *args)
    with below_autograd():
        return operator(*args)


def _wants_gradients(args: Iterable[Any]) -> bool:
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


def _refuse_gradients(*args: Any) -> Any:
    if _wants_gradients(args):
        raise RuntimeError("cenet::folded_ce has no gradient; call it under torch.no_grad()")
    with below_autograd():
        return folded_ce(*args)


for _name, _cuda, _fake in (
    ("norm_ce", _norm_ce, _fake_norm_ce),
    ("norm_ce_backward", _norm_ce_backward, _fake_norm_ce_backward),
    ("sync_norm_ce", _sync_norm_ce, _fake_sync_norm_ce),
    ("sync_norm_ce_backward", _sync_norm_ce_backward, _fake_sync_norm_ce_backward),
    ("folded_ce", _folded_ce, _dense_like),
):
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"cenet::{_name}", _fake, lib=_library)
_library.impl("norm_ce", _autograd_norm_ce, "Autograd")
_library.impl("sync_norm_ce", _autograd_sync_norm_ce, "Autograd")
for _backward in (norm_ce_backward, sync_norm_ce_backward):
    _library.impl(_backward, partial(_without_derivative, _backward), "Autograd")
_library.impl("folded_ce", _refuse_gradients, "Autograd")


@cache
def _register_flop_formulas() -> None:
    # imported here: the counter imports triton
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.cenet.norm_ce)(_forward_flops)
    register_flop_formula(torch.ops.cenet.norm_ce_backward)(_backward_flops)
    # the arguments after the call, which are about ranks, have no part in it
    register_flop_formula(torch.ops.cenet.sync_norm_ce)(
        lambda *args, **shapes: _forward_flops(*args[:_FIELDS], **shapes)
    )
    register_flop_formula(torch.ops.cenet.sync_norm_ce_backward)(
        lambda *args, **shapes: _backward_flops(*args[:-3], **shapes)
    )
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
