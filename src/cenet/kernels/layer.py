"""Norm → CE → activation on the kernels: the launches of a forward and of a backward pass.

    forward     measure x → condense → coefficients → gate → mix
    backward    reduce (grad, x) → three launches of coefficients_backward → mix_backward

Each pass is recorded the first time and replayed afterwards (`replay`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.functional import Gate
from cenet.kernels import few_pixels, mix, mix_backward
from cenet.kernels.between import between
from cenet.kernels.between_backward import between_backward
from cenet.kernels.call import ABSENT, BATCH, PARAMETERS, NormCECall, gradient_sizes
from cenet.kernels.folded_gate import SPLITS, folded_gate
from cenet.kernels.gate import gate_forward
from cenet.kernels.launch import empty, empty_like
from cenet.kernels.moments import measure
from cenet.kernels.replay import replay
from cenet.kernels.running import average_
from cenet.kernels.state import Saved, state_size, unpack
from cenet.kernels.statistics import condense
from cenet.kernels.tiles import ceil_div, is_channels_last


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
    state = empty(x.device, state_size(call))
    _run(
        ("forward", *call.momenta), x, (x, residual, y, state, *call.small_tensors()), call,
        lambda: _forward(call, x, residual, y, state),
    )  # fmt: skip
    return y, state


def _forward(
    call: NormCECall, x: Tensor, residual: Tensor | None, y: Tensor, state: Tensor
) -> None:
    mode = call.mode
    _, _, height, width = x.shape
    saved = unpack(state, call)
    high, wide = ceil_div(height, call.pool), ceil_div(width, call.pool)
    few = _has_few_pixels(x, call)
    chunks = None
    if BATCH in mode or mode.ir != ABSENT:
        gram = mode.bd == BATCH
        if few:
            parts = few_pixels.measure(x, call.group_size, gram=gram)
        else:
            parts = measure(x, call.group_size, gram=gram, pool=call.pool, weight=call.weight)
        chunks = condense(
            parts, saved.found.instances, height * width, high * wide,
            ceil_div(high, parts.splits) * wide, call.group_size,
        )  # fmt: skip
    hidden = between(call, saved.found, chunks, windows=high * wide)
    if hidden is not None and saved.gate is not None:
        gate_forward(call, hidden, saved.gate, saved.found)
    elif any(average is not None for average in call.averages()):
        average_(call, saved.found.values, saved.found.matrices[0])
    (few_pixels if few else mix).forward(x, y, _map(call, saved), residual)


def backward(call: NormCECall, grad: Tensor, y: Tensor | None, state: Tensor) -> Gradients:
    """Gradients, from that of y. `y` is given if there was a residual and an activation."""
    x = dense(call.x)
    grad = like(grad, x)
    dx = empty_like(x)
    masked = None if y is None else empty_like(x)
    small = empty(x.device, sum(gradient_sizes(x.shape[1], call.parameters())))
    _run(
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
    mapping = _map(call, saved)
    few = _has_few_pixels(x, call)
    sums = (few_pixels if few else mix_backward).reduce(x, grad, mapping, y, masked)
    through = between_backward(call, sums, mapping, saved, parameter_gradients(call, small))
    g = grad if masked is None else masked
    if few:
        few_pixels.backward(x, g, dx, mapping, through, masked=masked is not None)
    else:
        pool = call.pool
        mix_backward.backward(x, g, dx, mapping, through, pool=pool, masked=masked is not None)


def parameter_gradients(call: NormCECall, small: Tensor) -> dict[str, Tensor | None]:
    """By name of the parameter, its part of `small`, flat; None if there is no such parameter.

    The kernels write gradients of γ and β in any case.
    """
    sizes = gradient_sizes(call.x.shape[1], call.parameters())
    parts = zip(PARAMETERS, small.split(sizes), strict=True)
    return {name: part if len(part) else None for name, part in parts}


def folded(
    x: Tensor,
    residual: Tensor | None,
    values: Tensor,
    matrix: Tensor | None,
    gate: Gate,
    inv_std: Tensor,
    share: Tensor,
    offset: Tensor,
    act: tuple[str, float],
) -> Tensor:
    """act((M + Diag(w_n)) (x + shift) [+ residual]) of a folded layer, without gradients.

    `values` (5, C) are −shift, 1, 1, 0 and 0: the first rows of `statistics.Statistics.values`.
    """
    x = dense(x)
    residual = None if residual is None else like(residual, x)
    y = empty_like(x)
    group_size = 16 if matrix is None else matrix.shape[-1]

    def run() -> None:
        few = few_pixels.has_few_pixels(x)
        if few:
            parts = few_pixels.measure(x, group_size, gram=False)
        else:
            parts = measure(x, group_size, gram=False, most_splits=SPLITS)
        w = folded_gate(parts, x.shape[2] * x.shape[3], gate, inv_std, share, offset)
        mapping = mix.Map(values, matrix, w, group_size, *act)
        (few_pixels if few else mix).forward(x, y, mapping, residual)

    key = ("folded", x.shape, is_channels_last(x), len(gate.w1), group_size, act)
    tensors = (x, residual, y, values, matrix, *gate, inv_std, share, offset)
    replay(key, tensors, x.device, run)
    return y


def dense(x: Tensor) -> Tensor:
    """x without gaps: channels_last if it is, else contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` in the dtype and layout of x."""
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return tensor.to(x.dtype).contiguous(memory_format=layout)


def _run(
    kind: Any,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    call: NormCECall,
    run: Callable[[], None],
) -> None:
    if call.blend is not None and call.w1 is None:
        return run()  # 1 − α comes from PyTorch here, not from a kernel that could be replayed
    key = (kind, x.shape, is_channels_last(x), call.units, *call.hashable_constants())
    return replay(key, tensors, x.device, run)


def _has_few_pixels(x: Tensor, call: NormCECall) -> bool:
    return call.pool == 1 and few_pixels.has_few_pixels(x)


def _map(call: NormCECall, saved: Saved) -> mix.Map:
    w = None if saved.gate is None else saved.gate.gates[1]
    if w is None and call.blend is not None:
        w = (1 - call.blend.float()).expand(call.x.shape[:2]).contiguous()
    P = None if call.mode.bd == ABSENT else saved.found.matrices[1]
    return mix.Map(saved.found.values, P, w, call.group_size, call.act, call.slope)
