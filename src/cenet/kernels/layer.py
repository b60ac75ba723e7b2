"""Norm → CE → activation on the kernels: the launches of a forward and of a backward pass.

    forward     measure x → condense → coefficients → gate → mix
    backward    reduce x, grad → coefficients_backward (three launches) → dx

Each pass is recorded the first time and replayed afterwards (`launch.replay`). The forward pass
leaves all that its backward pass needs, besides x, in one tensor, `state`. Allocating one tensor,
passing it through autograd and saving it takes less time than doing so with eight.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from cenet.internals import is_channels_last, memory_format_of
from cenet.kernels import mix, small_maps
from cenet.kernels.averages import average_
from cenet.kernels.call import (
    ABSENT,
    BATCH,
    PARAMETERS,
    FoldedCECall,
    Mode,
    NormCECall,
    gradient_sizes,
)
from cenet.kernels.coefficients import coefficients, coefficients_backward
from cenet.kernels.folded_gate import SPLITS, folded_gate
from cenet.kernels.gate import GateState, gate_forward
from cenet.kernels.launch import empty, empty_like, replay
from cenet.kernels.moments import Chunks, Statistics, condense, measure
from cenet.kernels.tiles import ROWS_OF_VALUES, ceil_div, is_small_map

ALIGNMENT = 4  # elements: 16 bytes, the widest load of a kernel


class Saved(NamedTuple):
    """All that the backward pass needs besides x (and y, if there was a residual)."""

    found: Statistics
    gate: GateState | None


class Gradients(NamedTuple):
    """Gradients of everything that may have one."""

    x: Tensor
    residual: Tensor | None
    small: Tensor  # of the parameters, one after the other: see `call.gradient_sizes`


def forward(call: NormCECall) -> tuple[Tensor, Tensor]:
    """y = act(CE(norm(x)) [+ residual]), in the dtype and layout of x, and its `state`."""
    x = dense(call.x)
    residual = None if call.residual is None else like(call.residual, x)
    y = empty_like(x)
    state = empty_state(call)
    run_recorded(
        ("forward", *call.momenta), x, (x, residual, y, state, *call.small_tensors()), call,
        lambda: _forward(call, x, residual, y, state),
    )  # fmt: skip
    return y, state


def _forward(
    call: NormCECall, x: Tensor, residual: Tensor | None, y: Tensor, state: Tensor
) -> None:
    mode = call.mode
    saved = unpack(state, call)
    chunks = None
    if BATCH in mode or mode.ir != ABSENT:
        chunks = measure_batch(call, x, saved)
    settle(call, saved, chunks)
    passes_over(call).forward(x, y, map_of(call, saved), residual)


def measure_batch(call: NormCECall, x: Tensor, saved: Saved) -> Chunks:
    """The first pass over x, and the launch after it."""
    _, _, height, width = x.shape
    gram = call.mode.bd == BATCH
    if passes_over(call) is small_maps:
        parts = small_maps.measure(x, call.group_size, gram=gram)
    else:
        parts = measure(x, call.group_size, gram=gram, pool=call.pool, weight=call.weight)
    high, wide = ceil_div(height, call.pool), ceil_div(width, call.pool)
    return condense(
        parts, saved.found.instances, height * width, high * wide,
        ceil_div(high, parts.splits) * wide, call.group_size,
    )  # fmt: skip


def settle(call: NormCECall, saved: Saved, chunks: Chunks | None) -> None:
    """The launches between the passes: fill in `saved`, move running averages."""
    merged = None if chunks is None else chunks.merged
    hidden = coefficients(call, saved.found, chunks, windows=windows_of(call))
    if hidden is not None and saved.gate is not None:
        gate_forward(call, hidden, saved.gate, saved.found, merged)
    elif any(average is not None for average in call.averages()):
        correction = None if merged is None else merged.correction
        average_(call, saved.found.values, saved.found.W, correction=correction)


def backward(call: NormCECall, grad: Tensor, y: Tensor | None, state: Tensor) -> Gradients:
    """Gradients, from that of y. `y` is given if there was a residual and an activation."""
    x = dense(call.x)
    grad = like(grad, x)
    dx = empty_like(x)
    masked = None if y is None else empty_like(x)
    small = empty(x.device, sum(gradient_sizes(x.shape[1], call.parameters())))
    run_recorded(
        "backward", x, (x, grad, y, state, dx, masked, small, *call.parameters()), call,
        lambda: _backward(call, x, grad, y, state, dx, masked, small),
    )  # fmt: skip
    return Gradients(dx, grad if masked is None else masked, small)


def _backward(
    call: NormCECall,
    x: Tensor,
    grad: Tensor,
    y: Tensor | None,
    state: Tensor,
    dx: Tensor,
    masked: Tensor | None,
    small: Tensor,
) -> None:
    saved = unpack(state, call)
    mapping = map_of(call, saved)
    sums = passes_over(call).reduce(x, grad, mapping, y, masked)
    grads = parameter_gradients(call, small)
    through = coefficients_backward(call, sums, mapping, saved.found, saved.gate, grads)
    g = grad if masked is None else masked
    apply_gradient(call, x, g, dx, mapping, through, masked=masked is not None)


def apply_gradient(
    call: NormCECall,
    x: Tensor,
    grad: Tensor,
    dx: Tensor,
    mapping: mix.Map,
    through: mix.StatisticsGradient,
    *,
    masked: bool,
) -> None:
    """The second pass of the backward pass, which writes dx; arguments as of `mix.backward`."""
    if passes_over(call) is small_maps:
        small_maps.backward(x, grad, dx, mapping, through, masked=masked)
    else:
        mix.backward(x, grad, dx, mapping, through, pool=call.pool, masked=masked)


def parameter_gradients(call: NormCECall, small: Tensor) -> dict[str, Tensor | None]:
    """By name of the parameter, its part of `small`, flat; None if there is no such parameter.

    The kernels write gradients of γ and β in any case.
    """
    sizes = gradient_sizes(call.x.shape[1], call.parameters())
    parts = zip(PARAMETERS, small.split(sizes), strict=True)
    return {name: part if len(part) else None for name, part in parts}


def folded(call: FoldedCECall) -> Tensor:
    """y of a folded layer, in the dtype and layout of x."""
    x = dense(call.x)
    residual = None if call.residual is None else like(call.residual, x)
    y = empty_like(x)
    group_size = 16 if call.matrix is None else call.matrix.shape[-1]

    def run() -> None:
        small_map = is_small_map(x)
        if small_map:
            parts = small_maps.measure(x, group_size, gram=False)
        else:
            parts = measure(x, group_size, gram=False, most_splits=SPLITS)
        w = folded_gate(call, parts)
        mapping = mix.Map(call.values, call.matrix, w, group_size, call.act, call.slope)
        (small_maps if small_map else mix).forward(x, y, mapping, residual)

    key = ("folded", x.shape, is_channels_last(x), len(call.w1), group_size, call.act, call.slope)
    replay(key, (x, residual, y, *call.small_tensors()), x.device, run)
    return y


def state_size(call: NormCECall) -> int:
    """Elements of `state`, of float32. Sizes may be symbolic."""
    return sum(_room(part) for part in _parts(*_dimensions(call)))


def empty_state(call: NormCECall) -> Tensor:
    """An uninitialized `state`."""
    return empty(call.x.device, _known_size(*_dimensions(call)))


@cache
def _known_size(*dimensions: Any) -> int:
    return sum(_room(part) for part in _parts(*dimensions))


def unpack(state: Tensor, call: NormCECall) -> Saved:
    """The parts of `state`, which share its memory."""
    begin, views = 0, []
    for part in _parts(*_dimensions(call)):
        views.append(state[begin : begin + prod(part)].view(part))
        begin += _room(part)
    return Saved(Statistics(*views[:4]), GateState(*views[4:]) if call.units else None)


def _dimensions(call: NormCECall) -> tuple[int, int, int, int, int, Mode]:
    """All that the size of `state` depends on."""
    shape = call.x.shape
    return shape[0], shape[1], call.units, call.group_size, call.steps, call.mode


def _parts(
    samples: int, channels: int, units: int, group_size: int, steps: int, mode: Mode
) -> list[tuple[int, ...]]:
    """Shapes of the fields of `Statistics` and `GateState`."""
    groups = -(-channels // group_size)
    side = group_size if mode.bd != ABSENT else 0
    parts: list[tuple[int, ...]] = [
        (ROWS_OF_VALUES, channels),
        (2, samples if mode.ir != ABSENT else 0, channels),
        (3, groups, side, side),
        (groups if mode.bd == BATCH else 0, 3 * steps, group_size, group_size),
    ]
    if units:
        parts += [(samples, units), (samples,), (2, samples, channels), ()]
    return parts


def _room(part: tuple[int, ...]) -> int:
    return -(-prod(part) // ALIGNMENT) * ALIGNMENT


def dense(x: Tensor) -> Tensor:
    """x without gaps: channels_last if it is, else contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` in the dtype and layout of x."""
    return tensor.to(x.dtype).contiguous(memory_format=memory_format_of(x))


def run_recorded(
    kind: Any,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    call: NormCECall,
    run: Callable[[], None],
) -> None:
    """`launch.replay` of one kind of pass; `tensors` are all that it reads or writes."""
    if call.blend is not None and call.w1 is None:
        return run()  # 1 − α comes from PyTorch here, not from a kernel that could be replayed
    key = (kind, x.shape, is_channels_last(x), call.units, *call.hashable_constants())
    return replay(key, tensors, x.device, run)


def passes_over(call: NormCECall) -> ModuleType:
    """The file with the passes for maps of this size."""
    return small_maps if call.pool == 1 and is_small_map(call.x) else mix


def windows_of(call: NormCECall) -> int:
    """Pixels that pooling leaves of a sample."""
    _, _, height, width = call.x.shape
    return ceil_div(height, call.pool) * ceil_div(width, call.pool)


def map_of(call: NormCECall, saved: Saved) -> mix.Map:
    """The map that the passes apply."""
    w = None if saved.gate is None else saved.gate.w
    if w is None and call.blend is not None:
        w = (1 - call.blend.float()).expand(call.x.shape[:2]).contiguous()
    P = None if call.mode.bd == ABSENT else saved.found.P
    return mix.Map(saved.found.values, P, w, call.group_size, call.act, call.slope)
