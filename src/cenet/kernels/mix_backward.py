"""The two backward passes of `mix`."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.call import ACTIVATIONS
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import TILES as MAP_TILES
from cenet.kernels.mix import Map, cuts, grid, pointers, sizes, tile_constants
from cenet.kernels.operands import add_transposed, map_of_x, operand_of, shift_of, transform
from cenet.kernels.pooling import ADD_TILE, add_pooled_kernel, pooled_walk
from cenet.kernels.tiles import (
    NONE,
    RELU,
    Tile,
    activation_gradient,
    activation_gradient_from_output,
    ceil_div,
    diagonal_of,
    dot,
    first_row,
    in_two_parts,
    load_channel_values,
    load_matrix,
    load_tile,
    load_w,
    locate,
    matrix_offsets,
    round_to,
    same_group,
    store_tile,
    tile_offsets,
    walk_over,
)

# if channels_last, and if not; when the activation is recomputed, read off y, or absent
_NCHW_REDUCE_TILES: tuple[Tile, ...] = (
    Tile(2048, 64, 16, 1, 3, 2048, 8),
    Tile(1, 64, 16, 1, 2, 2048, 8),
)
REDUCE_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (
        Tile(2048, 64, 32, 4, 3, 4096, 8),
        Tile(512, 64, 32, 4, 5, 2048, 8),
        Tile(1, 32, 32, 2, 4, 2048, 8),
    ),
    False: _NCHW_REDUCE_TILES,
}
REDUCE_Y_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (Tile(1, 32, 32, 2, 3, 2048, 8),),
    False: _NCHW_REDUCE_TILES,
}
REDUCE_BARE_TILES: dict[bool, tuple[Tile, ...]] = {
    True: (Tile(1, 32, 64, 4, 3, 2048, 8), Tile(1, 32, 32, 2, 4, 2048, 8)),
    False: _NCHW_REDUCE_TILES,
}
TILES = {
    True: (
        Tile(2048, 64, 64, 4, 4, 4096, 4),
        Tile(512, 64, 32, 2, 4, 2048, 4),
        *MAP_TILES[True][1:],
    ),
    False: (Tile(1, 128, 16, 4, 3, 2048, 4),),
}


class Sums(NamedTuple):
    """What the reducing pass found, in parts."""

    P: Tensor | None  # (rows, G, K, K)
    d: Tensor  # (N·splits, C)
    c: Tensor  # (N·splits, C)
    splits: int
    samples: int = 1  # that share a row of P


class StatisticsGradient(NamedTuple):
    """How dx depends on x̂ through the statistics."""

    Q: Tensor | None  # (G, K, K)
    e: Tensor  # (N, C)
    f: Tensor  # (N, C)
    pooled_offset: Tensor | None  # (C,): Q is applied to pooled x̂, and this is added


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
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    # g is more than grad or 0, and nobody has rounded it yet
    ROUNDED: tl.constexpr = ACT != NONE and ACT != RELU and y_ptr is None
    row, n, channel, valid, begin, end = locate(
        C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST
    )
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    c = w * beta + offset
    if DENSE:
        P = load_matrix(P_ptr, channel[:, None], channel[None, :], valid, K)
        shift, left = shift_of(center, rstd, DTYPE, RAW)
        matrix, _, unit, c = map_of_x(P, w * gamma, rstd, c, left, DTYPE, RAW, BC)
    else:
        shift, unit = center, w * gamma * rstd
    # with a matrix the tensor cores take the sums
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
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    _, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST)
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    e = tl.load(e_ptr + n * C + channel, mask=valid, other=0.0)
    f = tl.load(f_ptr + n * C + channel, mask=valid, other=0.0) * rstd
    c = w * beta + offset
    i, j = channel[:, None], channel[None, :]
    if DENSE:
        P = load_matrix(P_ptr, i, j, valid, K)
        shift, left = shift_of(center, rstd, DTYPE, RAW)
        matrix, rest, unit, c = map_of_x(P, w * gamma, rstd, c, left, DTYPE, RAW, BC)
    else:
        shift, left, unit = center, tl.zeros_like(center), w * gamma * rstd
    if Q_ptr is not None:
        Q = rstd[:, None] * load_matrix(Q_ptr, i, j, valid, K)  # symmetric
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


def reduce(
    x: Tensor, grad: Tensor, mapping: Map, y: Tensor | None = None, masked: Tensor | None = None
) -> Sums:
    """Gradients of P, d and c, in parts.

    Args:
        x, grad: input, and gradient of the output in the layout of x.
        mapping: what was applied.
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
        ACT=ACTIVATIONS[mapping.act],
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
    cut = walk_over(x, mapping.group_size, TILES)
    launch(
        _backward_kernel, grid(x, mapping, cut),
        x, grad, dx, *pointers(mapping), None if pooled else through.Q, through.e, through.f,
        *sizes(x), mapping.slope, *cuts(x, cut), **tile_constants(x, mapping, cut),
        ACT=ACTIVATIONS["none" if masked else mapping.act],
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
