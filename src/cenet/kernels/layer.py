"""Norm → CE → activation from the kernels: which launches make up a forward and a backward pass."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.kernels import few_pixels, mix, mix_backward
from cenet.kernels.between import between
from cenet.kernels.between_backward import SmallGradients, between_backward
from cenet.kernels.folded_gate import SPLITS, folded_gate
from cenet.kernels.gate import GateWeights, gate_forward
from cenet.kernels.launch import empty, empty_like
from cenet.kernels.modes import ABSENT, BATCH, Mode
from cenet.kernels.moments import measure
from cenet.kernels.replay import replay
from cenet.kernels.running import Averages, average_
from cenet.kernels.state import Saved, Shape, size, unpack
from cenet.kernels.statistics import condense
from cenet.kernels.tiles import ceil_div, is_channels_last


class Block(NamedTuple):
    """Parameters and running statistics. What the mode does not use is None."""

    weight: Tensor | None  # (C,), γ
    bias: Tensor | None  # (C,), β
    running_mean: Tensor | None  # (C,)
    running_var: Tensor | None  # (C,)
    inv_sqrt: Tensor | None  # (G, K, K)
    inv_std: Tensor | None  # ()
    gate: GateWeights | None
    mix_logit: Tensor | None  # ()
    blend: Tensor | None  # ()

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, one after the other."""
        return (*self[:6], *(self.gate or (None,) * 4), *self[7:])


class Settings(NamedTuple):
    """The block's constants."""

    mode: Mode
    group_size: int
    steps: int
    pool: int
    norm_eps: float
    eps: float
    act: str
    slope: float


class Gradients(NamedTuple):
    """Gradients of everything that may have one."""

    x: Tensor
    residual: Tensor | None
    small: Tensor  # of the parameters, one after the other: see `small_shapes`


def forward(
    x: Tensor,
    residual: Tensor | None,
    block: Block,
    settings: Settings,
    averages: Averages | None = None,
) -> tuple[Tensor, Tensor]:
    """y = act(CE(norm(x)) [+ residual]), in the dtype and layout of x, and its `state`.

    `averages` move to the statistics of this batch.
    """
    x = dense(x)
    residual = None if residual is None else like(residual, x)
    y = empty_like(x)
    state = empty(x.device, size(shape_of(x, block, settings)))
    moved, momenta = (averages[:7], averages.momenta) if averages else ((None,) * 7, None)
    _run(
        ("forward", momenta), x, (x, residual, y, state, *block.tensors(), *moved), block, settings,
        lambda: _forward(x, residual, y, state, block, settings, averages),
    )  # fmt: skip
    return y, state


def _forward(
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    state: Tensor,
    block: Block,
    settings: Settings,
    averages: Averages | None,
) -> None:
    mode = settings.mode
    n, _, height, width = x.shape
    saved = unpack(state, shape_of(x, block, settings))
    found = saved.found
    high, wide = ceil_div(height, settings.pool), ceil_div(width, settings.pool)
    few = _has_few_pixels(x, settings)
    chunks = None
    if BATCH in mode or mode.ir != ABSENT:
        gram = mode.bd == BATCH
        if few:
            parts = few_pixels.measure(x, settings.group_size, gram=gram)
        else:
            pool = settings.pool
            parts = measure(x, settings.group_size, gram=gram, pool=pool, weight=block.weight)
        chunks = condense(
            parts, found.instances, height * width, high * wide,
            ceil_div(high, parts.splits) * wide, settings.group_size,
        )  # fmt: skip
    hidden = between(
        found,
        chunks,
        x.shape,
        settings.group_size,
        mode,
        weight=block.weight,
        bias=block.bias,
        running_mean=block.running_mean,
        running_var=block.running_var,
        inv_sqrt=block.inv_sqrt,
        gate=block.gate,
        mix_logit=block.mix_logit,
        blend=block.blend,
        norm_eps=settings.norm_eps,
        steps=settings.steps,
        windows=high * wide,
    )
    count = n * height * width
    if hidden is not None and block.gate is not None and saved.gate is not None:
        gate_forward(
            hidden, block.gate, saved.gate, block.inv_std, block.mix_logit, block.blend,
            settings.eps, averages, found, count,
        )  # fmt: skip
    elif averages is not None:
        average_(averages, found.values, found.matrices[0], None, count)
    mapping = _map(saved, block, settings, x.shape)
    (few_pixels if few else mix).forward(x, y, mapping, residual)


def backward(
    grad: Tensor, x: Tensor, y: Tensor | None, block: Block, settings: Settings, state: Tensor
) -> Gradients:
    """Gradients, from that of y. `y` is given if there was a residual and an activation."""
    x = dense(x)
    grad = like(grad, x)
    dx = empty_like(x)
    masked = None if y is None else empty_like(x)
    small = empty(x.device, sum(map(prod, small_shapes(block, x.shape[1]))))
    _run(
        "backward", x, (x, grad, y, state, dx, masked, small, *block.tensors()), block, settings,
        lambda: _backward(grad, x, y, block, settings, state, dx, masked, small),
    )  # fmt: skip
    return Gradients(dx, grad if masked is None else masked, small)


def _backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    block: Block,
    settings: Settings,
    state: Tensor,
    dx: Tensor,
    masked: Tensor | None,
    small: Tensor,
) -> None:
    saved = unpack(state, shape_of(x, block, settings))
    mapping = _map(saved, block, settings, x.shape)
    few = _has_few_pixels(x, settings)
    sums = (few_pixels if few else mix_backward).reduce(x, grad, mapping, y, masked)
    through = between_backward(
        sums,
        x.shape,
        mapping,
        settings.mode,
        saved.found,
        block.gate,
        saved.gate,
        _small_gradients(small, block, x.shape[1]),
        mix_logit=block.mix_logit,
        blend=block.blend,
        steps=settings.steps,
        pool=settings.pool,
    )
    g = grad if masked is None else masked
    if few:
        few_pixels.backward(x, g, dx, mapping, through, masked=masked is not None)
    else:
        pool = settings.pool
        mix_backward.backward(x, g, dx, mapping, through, pool=pool, masked=masked is not None)


def small_shapes(block: Block, channels: int) -> list[tuple[int, ...]]:
    """Shapes of the gradients of γ, β, the gate, λ's logit and α, those that exist."""
    given = [*(block.gate or ()), block.mix_logit, block.blend]
    shapes = [tuple(tensor.shape) for tensor in given if tensor is not None]
    return [(channels,), (channels,), *shapes]


def _small_gradients(small: Tensor, block: Block, channels: int) -> SmallGradients:
    shapes = small_shapes(block, channels)
    parts = small.split([prod(shape) for shape in shapes])
    views = iter([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    return SmallGradients(
        next(views),
        next(views),
        None if block.gate is None else GateWeights(*(next(views) for _ in block.gate)),
        None if block.mix_logit is None else next(views),
        None if block.blend is None else next(views),
    )


def folded(
    x: Tensor,
    residual: Tensor | None,
    values: Tensor,
    matrix: Tensor | None,
    gate: GateWeights,
    inv_std: Tensor,
    share: Tensor,
    offset: Tensor,
    act: tuple[str, float],
) -> Tensor:
    """act((M + Diag(w_n)) (x + shift) [+ residual]) of a folded layer, without gradients.

    `values` (5, C) are −shift, 1, 1, 0 and 0.
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
    """x without gaps: channels last if it is, else contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` in the dtype and layout of x."""
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return tensor.to(x.dtype).contiguous(memory_format=layout)


def shape_of(x: Tensor, block: Block, settings: Settings) -> Shape:
    """What the size of the state depends on."""
    units = 0 if block.gate is None else len(block.gate.w1)
    n, channels = x.shape[:2]
    return Shape(n, channels, units, settings.group_size, settings.steps, settings.mode)


def _run(
    kind: Any,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    block: Block,
    settings: Settings,
    run: Callable[[], None],
) -> None:
    if block.blend is not None and block.gate is None:
        return run()  # 1 − α is not computed by a kernel
    units = 0 if block.gate is None else len(block.gate.w1)
    key = (kind, x.shape, is_channels_last(x), units, settings)
    return replay(key, tensors, x.device, run)


def _has_few_pixels(x: Tensor, settings: Settings) -> bool:
    return settings.pool == 1 and few_pixels.has_few_pixels(x)


def _map(saved: Saved, block: Block, settings: Settings, shape: torch.Size) -> mix.Map:
    w = None if saved.gate is None else saved.gate.gates[1]
    if w is None and block.blend is not None:
        w = (1 - block.blend.float()).expand(shape[:2]).contiguous()
    P = None if settings.mode.bd == ABSENT else saved.found.matrices[1]
    return mix.Map(saved.found.values, P, w, settings.group_size, settings.act, settings.slope)
