"""Norm → CE → activation from the kernels: which launches make up a forward and a backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from cenet.kernels import few_pixels, mix, mix_backward
from cenet.kernels.between import between
from cenet.kernels.between_backward import between_backward
from cenet.kernels.gate import (
    FOLDED_SPLITS,
    GateState,
    GateWeights,
    folded_gate,
    gate_forward,
)
from cenet.kernels.modes import ABSENT, BATCH, Mode
from cenet.kernels.moments import measure
from cenet.kernels.statistics import Statistics, condense, room_for
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


class Saved(NamedTuple):
    """What backward needs besides x (and y, if there was a residual)."""

    found: Statistics
    gate: GateState | None


class Gradients(NamedTuple):
    """Gradients of everything that may have one."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor
    gate: GateWeights | None
    mix_logit: Tensor | None
    blend: Tensor | None


def forward(
    x: Tensor, residual: Tensor | None, block: Block, settings: Settings
) -> tuple[Tensor, Saved]:
    """y = act(CE(norm(x)) [+ residual]), in the dtype and layout of x."""
    x = dense(x)
    mode = settings.mode
    n, channels, height, width = x.shape
    found = room_for(n, channels, settings.group_size, mode, settings.steps, x)
    high, wide = ceil_div(height, settings.pool), ceil_div(width, settings.pool)
    chunks = None
    if BATCH in mode or mode.ir != ABSENT:
        gram = mode.bd == BATCH
        if _has_few_pixels(x, settings):
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
    gate = None
    if block.gate is not None and hidden is not None:
        gate = gate_forward(
            hidden, block.gate, block.inv_std, block.mix_logit, block.blend, settings.eps
        )
    saved = Saved(found, gate)
    mapping = _map(saved, block, settings, x.shape)
    passes = few_pixels if _has_few_pixels(x, settings) else mix
    return passes.forward(x, mapping, None if residual is None else like(residual, x)), saved


def backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    block: Block,
    settings: Settings,
    saved: Saved,
) -> Gradients:
    """Gradients, from that of y. `y` is given if there was a residual and an activation."""
    x = dense(x)
    grad = like(grad, x)
    mode, found, gate = settings.mode, saved.found, saved.gate
    mapping = _map(saved, block, settings, x.shape)
    few = _has_few_pixels(x, settings)
    sums = (few_pixels if few else mix_backward).reduce(x, grad, mapping, y)
    small = between_backward(
        sums,
        x.shape,
        mapping,
        mode,
        found,
        block.gate,
        gate,
        mix_logit=block.mix_logit,
        blend=block.blend,
        steps=settings.steps,
        pool=settings.pool,
    )
    grad = grad if sums.masked is None else sums.masked
    masked = sums.masked is not None
    if few:
        dx = few_pixels.backward(x, grad, mapping, small.through, masked=masked)
    else:
        pool = settings.pool
        dx = mix_backward.backward(x, grad, mapping, small.through, pool=pool, masked=masked)
    return Gradients(dx, grad, *small[1:])


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
    group_size = 16 if matrix is None else matrix.shape[-1]
    few = few_pixels.has_few_pixels(x)
    if few:
        parts = few_pixels.measure(x, group_size, gram=False)
    else:
        parts = measure(x, group_size, gram=False, most_splits=FOLDED_SPLITS)
    w = folded_gate(parts, x.shape[2] * x.shape[3], gate, inv_std, share, offset)
    name, slope = act
    mapping = mix.Map(values, matrix, w, group_size, name, slope)
    passes = few_pixels if few else mix
    return passes.forward(x, mapping, None if residual is None else like(residual, x))


def dense(x: Tensor) -> Tensor:
    """x without gaps: channels last if it is, else contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` in the dtype and layout of x."""
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return tensor.to(x.dtype).contiguous(memory_format=layout)


def _has_few_pixels(x: Tensor, settings: Settings) -> bool:
    return settings.pool == 1 and few_pixels.has_few_pixels(x)


def _map(saved: Saved, block: Block, settings: Settings, shape: torch.Size) -> mix.Map:
    w = None if saved.gate is None else saved.gate.gates[1]
    if w is None and block.blend is not None:
        w = (1 - block.blend.float()).expand(shape[:2]).contiguous()
    P = None if settings.mode.bd == ABSENT else saved.found.matrices[1]
    return mix.Map(saved.found.values, P, w, settings.group_size, settings.act, settings.slope)
