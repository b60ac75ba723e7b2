"""Applying the map to x, the twin of `functional.mix`, and its two backward passes.

    x̂  = (x − center) · rstd
    y   = act(P·x̂ + w_n ⊙ (γ ⊙ x̂ + β) + offset [+ residual])

The operator of a sample is one matrix per group, P + Diag(w_n γ), so a tile takes one dot. Backward
recomputes the sign of the activation's argument from x, or reads it off y where a residual was
added:

    g       = grad ⊙ act'
    reduce    gP = Σ g x̂ᵀ,  gd_n = Σ_hw g ⊙ x̂,  gc_n = Σ_hw g
    dx      = rstd ⊙ (Pᵀg + w_n γ ⊙ g + Q·x̂ + e_n ⊙ x̂ + f_n)

Q, e and f come from `coefficients`: they are the part of dx that goes through the statistics.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.internals import is_channels_last
from cenet.kernels.call import FUSED_ACTIVATIONS
from cenet.kernels.launch import await_previous_launch, empty, launch
from cenet.kernels.pooling import ADD_TILE, add_pooled_kernel, pooled_walk
from cenet.kernels.tiles import (
    NONE,
    RELU,
    Tile,
    Walk,
    activate,
    activation_gradient,
    activation_gradient_from_output,
    add_transposed,
    alignment,
    ceil_div,
    diagonal_of,
    dot,
    first_row,
    in_two_parts,
    is_raw,
    load_map,
    load_matrix,
    load_tile,
    locate,
    map_of_x,
    matrix_offsets,
    operand_of,
    round_to,
    same_group,
    store_tile,
    tile_offsets,
    transform,
    walk_over,
)

# by layout: channels_last or not
FORWARD_TILES = {
    True: (
        Tile(512, 64, 64, 4, 4, 4096, 4),
        Tile(128, 64, 32, 4, 3, 2048, 4),
        Tile(1, 32, 32, 1, 3, 2048, 4),
    ),
    False: (Tile(2048, 64, 64, 4, 4, 4096, 4), Tile(1, 256, 16, 4, 3, 2048, 4)),
}
_NCHW_REDUCE_TILES: tuple[Tile, ...] = (
    Tile(2048, 64, 16, 1, 3, 2048, 8),
    Tile(1, 64, 16, 1, 2, 2048, 8),
)
# the activation's argument is recomputed from x
REDUCE_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (
        Tile(2048, 64, 32, 4, 3, 4096, 8),
        Tile(512, 64, 32, 4, 5, 2048, 8),
        Tile(1, 32, 32, 2, 4, 2048, 8),
    ),
    False: _NCHW_REDUCE_TILES,
}
# the activation's slope is read off y
REDUCE_Y_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (Tile(1, 32, 32, 2, 3, 2048, 8),),
    False: _NCHW_REDUCE_TILES,
}
# there is no activation
REDUCE_BARE_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (Tile(1, 32, 64, 4, 3, 2048, 8), Tile(1, 32, 32, 2, 4, 2048, 8)),
    False: _NCHW_REDUCE_TILES,
}
BACKWARD_TILES = {
    True: (
        Tile(2048, 64, 64, 4, 4, 4096, 4),
        Tile(512, 64, 32, 2, 4, 2048, 4),
        *FORWARD_TILES[True][1:],
    ),
    False: (Tile(1, 128, 16, 4, 3, 2048, 4),),
}


class Map(NamedTuple):
    """The map that `mix` applies, in float32."""

    values: Tensor  # (5 or more, C): center, rstd, γ, β, b
    P: Tensor | None  # (G, K, K)
    w: Tensor | None  # (N, C)
    group_size: int
    act: str
    slope: float


class Sums(NamedTuple):
    """Gradients of P, d and c, in parts."""

    P: Tensor | None  # (rows, G, K, K)
    d: Tensor  # (N·splits, C)
    c: Tensor  # (N·splits, C)
    splits: int
    samples: int = 1  # samples that share a row of P


class StatisticsGradient(NamedTuple):
    """The part of dx that goes through the statistics: Q x̂ + e ⊙ x̂ + f."""

    Q: Tensor | None  # (G, K, K)
    e: Tensor  # (N, C)
    f: Tensor  # (N, C)
    pooled_offset: Tensor | None  # (C,): Q is applied to pooled x̂, and this is added


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    residual_ptr,  # like x, or None
    y_ptr,  # like x
    values_ptr,  # (10, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    C,
    L,
    slope,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    RAW: tl.constexpr,
    FULL: tl.constexpr,
):
    await_previous_launch()
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    _, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST)
    _, shift, _, matrix, _, unit, c = load_map(
        values_ptr, P_ptr, w_ptr, n, channel, valid, C, K, BC, DTYPE, RAW
    )
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        operand = operand_of(load_tile(x_ptr, offsets, inside, FULL), shift, DTYPE)
        if DENSE:
            y = transform(operand, matrix, unit, c, DTYPE)
        else:
            y = operand * unit[None, :] + c[None, :]
        if residual_ptr is not None:
            y += load_tile(residual_ptr, offsets, inside, FULL).to(tl.float32)
        store_tile(y_ptr, offsets, activate(y, slope, ACT), inside, FULL)


@triton.jit
def _reduce_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    y_ptr,  # like x, or None to recompute the activation's argument
    masked_ptr,  # like x, or None
    values_ptr,  # (10, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    grad_P_ptr,  # (rows, G, K, K)
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    C,
    L,
    G,
    slope,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    RAW: tl.constexpr,
    FULL: tl.constexpr,
):
    await_previous_launch()
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    # g is not just grad or 0, and has not been rounded: products take it in two parts
    ROUNDED: tl.constexpr = ACT != NONE and ACT != RELU and y_ptr is None
    row, n, channel, valid, begin, end = locate(
        C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST
    )
    rstd, shift, left, matrix, _, unit, c = load_map(
        values_ptr, P_ptr, w_ptr, n, channel, valid, C, K, BC, DTYPE, RAW
    )
    # with a matrix, tensor cores do the sums too
    products = tl.zeros((BC if DENSE else BL, BC), tl.float32)
    sums = tl.zeros((16 if DENSE else BL, BC), tl.float32)
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        operand = operand_of(load_tile(x_ptr, offsets, inside, FULL), shift, DTYPE)
        grad = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        if y_ptr is not None:
            y = load_tile(y_ptr, offsets, inside, FULL).to(tl.float32)
            g = activation_gradient_from_output(grad, y, slope, ACT)
            store_tile(masked_ptr, offsets, g, inside, FULL)
        elif ACT == NONE:
            g = grad
        elif DENSE:
            g = activation_gradient(grad, transform(operand, matrix, unit, c, DTYPE), slope, ACT)
        else:
            g = activation_gradient(grad, operand * unit[None, :] + c[None, :], slope, ACT)
        if DENSE:
            g, rest = in_two_parts(g, DTYPE)
            products = dot(tl.trans(g), operand, products)
            sums = dot(tl.full((16, BL), 1.0, DTYPE), g, sums)
            if ROUNDED and tl.float32 != DTYPE:
                products = dot(tl.trans(rest), operand, products)
                sums = dot(tl.full((16, BL), 1.0, DTYPE), rest, sums)
        else:
            products += g * operand
            sums += g
    if DENSE:
        grad_c = first_row(sums)
        products = (products - grad_c[:, None] * left[None, :]) * rstd[None, :]
        grad_d = tl.sum(diagonal_of(products, BC), 0)
        i, j = channel[:, None], channel[None, :]
        offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
        tl.store(grad_P_ptr + offsets, products, mask=same_group(i, j, valid, K))
    else:
        grad_c = tl.sum(sums, 0)
        grad_d = tl.sum(products, 0) * rstd
    part = tl.cast(row, tl.int64) * C + channel
    tl.store(grad_c_ptr + part, grad_c, mask=valid)
    tl.store(grad_d_ptr + part, grad_d, mask=valid)


@triton.jit
def _backward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    dx_ptr,  # like x
    values_ptr,  # (10, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    C,
    L,
    slope,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    RAW: tl.constexpr,
    FULL: tl.constexpr,
):
    await_previous_launch()
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    _, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST)
    rstd, shift, left, matrix, rest, unit, c = load_map(
        values_ptr, P_ptr, w_ptr, n, channel, valid, C, K, BC, DTYPE, RAW
    )
    e = tl.load(e_ptr + n * C + channel, mask=valid, other=0.0)
    f = tl.load(f_ptr + n * C + channel, mask=valid, other=0.0) * rstd
    if Q_ptr is not None:
        # symmetric
        Q = rstd[:, None] * load_matrix(Q_ptr, channel[:, None], channel[None, :], valid, K)
        through, _, through_unit, f = map_of_x(Q, rstd * e, rstd, f, left, DTYPE, RAW, BC)
    else:
        through_unit = rstd * e * rstd
        f -= through_unit * left
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        operand = operand_of(load_tile(x_ptr, offsets, inside, FULL), shift, DTYPE)
        g = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        if ACT != NONE:
            if DENSE:
                before = transform(operand, matrix, unit, c, DTYPE)
            else:
                before = operand * unit[None, :] + c[None, :]
            g = activation_gradient(g, before, slope, ACT)
        if Q_ptr is not None:
            dx = transform(operand, through, through_unit, f, DTYPE)
        else:
            dx = operand.to(tl.float32) * through_unit[None, :] + f[None, :]
        if DENSE:
            dx = add_transposed(dx, round_to(g, DTYPE), matrix, rest, unit, DTYPE)
        else:
            dx += g * unit[None, :]
        store_tile(dx_ptr, offsets, dx, inside, FULL)


def forward(x: Tensor, y: Tensor, mapping: Map, residual: Tensor | None = None) -> None:
    """Apply the map to x, write y."""
    cut = walk_over(x, mapping.group_size, FORWARD_TILES)
    launch(
        _forward_kernel, grid(x, mapping, cut),
        x, residual, y, *pointers(mapping), *sizes(x), mapping.slope, *cuts(x, cut),
        **tile_constants(x, mapping, cut), ACT=FUSED_ACTIVATIONS[mapping.act],
    )  # fmt: skip


def reduce(
    x: Tensor, grad: Tensor, mapping: Map, y: Tensor | None = None, masked: Tensor | None = None
) -> Sums:
    """Gradients of P, d and c, in parts.

    Args:
        x, grad: input, and gradient of the output in the layout of x.
        mapping: the map that was applied.
        y: the output, if there was a residual.
        masked: where the masked gradient goes then.
    """
    n, channels, _, _ = x.shape
    if y is not None:
        tiles = REDUCE_Y_TILES
    else:
        tiles = REDUCE_BARE_TILES if mapping.act == "none" else REDUCE_TILES
    cut = walk_over(x, mapping.group_size, tiles)
    grad_P = None
    if mapping.P is not None:
        grad_P = empty(x.device, cut.rows(n), *mapping.P.shape)
    grad_d, grad_c = empty(x.device, 2, n * cut.splits, channels)
    groups = ceil_div(channels, mapping.group_size)
    launch(
        _reduce_kernel, grid(x, mapping, cut),
        x, grad, y, masked, *pointers(mapping), grad_P, grad_d, grad_c, *sizes(x),
        groups, mapping.slope, *cuts(x, cut), **tile_constants(x, mapping, cut),
        ACT=FUSED_ACTIVATIONS[mapping.act],
    )  # fmt: skip
    return Sums(grad_P, grad_d, grad_c, cut.splits)


def backward(
    x: Tensor,
    grad: Tensor,
    dx: Tensor,
    mapping: Map,
    through: StatisticsGradient,
    *,
    pool: int = 1,
    masked: bool = False,
) -> None:
    """Write dx.

    Args:
        x, grad, mapping: as for `reduce`.
        dx: the gradient of x goes there.
        through: the part that comes through the statistics.
        pool: side of the max-pool window before the covariance.
        masked: `grad` is masked already, by `reduce`.
    """
    pooled = through.pooled_offset is not None
    cut = walk_over(x, mapping.group_size, BACKWARD_TILES)
    launch(
        _backward_kernel, grid(x, mapping, cut),
        x, grad, dx, *pointers(mapping), None if pooled else through.Q, through.e, through.f,
        *sizes(x), mapping.slope, *cuts(x, cut), **tile_constants(x, mapping, cut),
        ACT=FUSED_ACTIVATIONS["none" if masked else mapping.act],
    )  # fmt: skip
    if pooled:
        _add_pooled(x, dx, mapping, through, pool)


def _add_pooled(
    x: Tensor, dx: Tensor, mapping: Map, through: StatisticsGradient, pool: int
) -> None:
    n, channels, height, width = x.shape
    cut = pooled_walk(x, mapping.group_size, pool, ADD_TILE)
    tiles = ceil_div(ceil_div(height, pool) * ceil_div(width, pool), cut.pixels)
    rows = max(1, min(tiles, 4096 // n))
    fixed = tile_constants(x, mapping, cut)
    del fixed["ALIGN"], fixed["FULL"]
    launch(
        add_pooled_kernel, (n * rows * cut.blocks(channels, mapping.group_size),),
        x, dx, mapping.values, through.Q, through.pooled_offset, channels, height, width, rows,
        **fixed, POOL=pool,
    )  # fmt: skip


def grid(x: Tensor, mapping: Map, cut: Walk) -> tuple[int]:
    """Number of programs."""
    return (cut.rows(x.shape[0]) * cut.blocks(x.shape[1], mapping.group_size),)


def pointers(mapping: Map) -> tuple[Tensor | None, ...]:
    """The tensors of the map, as kernels take them."""
    return mapping[:3]


def sizes(x: Tensor) -> tuple[int, int]:
    """C and L."""
    _, channels, height, width = x.shape
    return channels, height * width


def cuts(x: Tensor, cut: Walk) -> tuple[int, int]:
    """Splits per sample and tiles per split."""
    return cut.splits, cut.tiles(x.shape[2] * x.shape[3])


def tile_constants(x: Tensor, mapping: Map, cut: Walk) -> dict[str, int | bool]:
    """Constants of a kernel that walks over x."""
    return {
        "K": mapping.group_size,
        "BL": cut.pixels,
        "BC": cut.channels,
        "ALIGN": alignment(x),
        "CHANNELS_LAST": is_channels_last(x),
        "RAW": is_raw(x),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "FULL": cut.is_full(x.shape[2] * x.shape[3], x.shape[1], mapping.group_size),
    }
