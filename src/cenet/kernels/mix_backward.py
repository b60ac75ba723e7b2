"""The two backward passes of `mix`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map, cuts, grid, map_walk, pointers, sizes, tile_constants
from cenet.kernels.modes import ACTIVATIONS
from cenet.kernels.pooling import backward_pooled_kernel
from cenet.kernels.tiles import (
    NONE,
    Walk,
    activation_gradient,
    activation_gradient_from_output,
    apply,
    ceil_div,
    diagonal,
    dot,
    first_row,
    in_two_parts,
    load_channel_values,
    load_matrix,
    load_tile,
    load_w,
    locate,
    matrix_offsets,
    power_of_2,
    round_to,
    same_group,
    standardize,
    store_tile,
    tile_offsets,
    walk,
)


class Sums(NamedTuple):
    """What the reducing pass found, in parts."""

    P: Tensor | None  # (rows, G, K, K)
    d: Tensor  # (N·splits, C)
    c: Tensor  # (N·splits, C)
    splits: int
    masked: Tensor | None  # (N, C, H, W), g


class StatisticsGradient(NamedTuple):
    """How dx depends on x̂ through the statistics."""

    Q: Tensor | None  # (G, K, K), divided by `size`
    e: Tensor  # (N, C), divided by `size`
    f: Tensor  # (N, C)
    size: Tensor  # (G,)
    pooled_offset: Tensor | None  # (C,): Q is applied to pooled x̂, and this is added


@triton.jit
def _reduce_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    y_ptr,  # like x, or None to recompute the activation's argument
    masked_ptr,  # like x, or None
    values_ptr,  # (8, C)
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
    PRECISE: tl.constexpr,
    FULL: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.float32 if PRECISE else x_ptr.dtype.element_ty
    DENSE: tl.constexpr = P_ptr is not None
    row, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC)
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    matrix = tl.zeros((BC, BC), DTYPE)
    if DENSE:
        fixed = load_matrix(P_ptr, channel[None, :], channel[:, None], valid, K)  # Pᵀ
        matrix = round_to(fixed + diagonal(w * gamma, BC), DTYPE)
    # with a matrix the tensor cores take the sums, except those that must not see rounded values
    products = tl.zeros((BC, BC), tl.float32)
    aligned = tl.zeros((BL, BC), tl.float32)
    sums = tl.zeros((16 if DENSE else BL, BC), tl.float32)
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = load_tile(x_ptr, offsets, inside, FULL)
        grad = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        x_hat = standardize(x, center, rstd)
        if not FULL:
            # what is outside may be too large for its dtype, and is multiplied with 0
            x_hat = tl.where(inside, x_hat, 0.0)
        if y_ptr is not None:
            y = load_tile(y_ptr, offsets, inside, FULL).to(tl.float32)
            g = activation_gradient_from_output(grad, y, slope, ACT)
            store_tile(masked_ptr, offsets, g, inside, FULL)
        elif ACT != NONE:
            before = apply(x_hat, matrix, w * gamma, w * beta + offset, DTYPE, DENSE)
            g = activation_gradient(grad, before, slope, ACT)
        else:
            g = grad
        if DENSE:
            products = dot(tl.trans(round_to(g, DTYPE)), round_to(x_hat, DTYPE), products)
            sums = dot(tl.full((16, BL), 1.0, DTYPE), round_to(g, DTYPE), sums)
        else:
            sums += g
        aligned += g * x_hat
    part = tl.cast(row, tl.int64) * C + channel
    if DENSE:
        i, j = channel[:, None], channel[None, :]
        offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
        tl.store(grad_P_ptr + offsets, products, mask=same_group(i, j, valid, K))
        tl.store(grad_c_ptr + part, first_row(sums), mask=valid)
    else:
        tl.store(grad_c_ptr + part, tl.sum(sums, 0), mask=valid)
    tl.store(grad_d_ptr + part, tl.sum(aligned, 0), mask=valid)


@triton.jit
def _backward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    dx_ptr,  # like x
    values_ptr,  # (8, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    size_ptr,  # (G,)
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
    PRECISE: tl.constexpr,
    FULL: tl.constexpr,
    SCALE: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.float32 if PRECISE else x_ptr.dtype.element_ty
    DENSE: tl.constexpr = P_ptr is not None
    _, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC)
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    i, j = channel[:, None], channel[None, :]
    size = tl.load(size_ptr + channel // K, mask=valid, other=1.0)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    e = tl.load(e_ptr + n * C + channel, mask=valid, other=0.0)
    f = tl.load(f_ptr + n * C + channel, mask=valid, other=0.0)
    matrix = tl.zeros((BC, BC), DTYPE)
    rest = matrix
    if DENSE:
        matrix, rest = in_two_parts(
            load_matrix(P_ptr, i, j, valid, K) + diagonal(w * gamma, BC), DTYPE
        )
    statistics = tl.zeros((BC, BC), DTYPE)
    if Q_ptr is not None:
        statistics = round_to(load_matrix(Q_ptr, i, j, valid, K) + diagonal(e, BC), DTYPE)
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = load_tile(x_ptr, offsets, inside, FULL)
        g = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        x_hat = standardize(x, center, rstd)
        if ACT != NONE:
            before = apply(x_hat, tl.trans(matrix), w * gamma, w * beta + offset, DTYPE, DENSE)
            g = activation_gradient(g, before, slope, ACT)
        if Q_ptr is None:
            dx = apply(g, matrix, w * gamma, f, DTYPE, DENSE) + (size * e)[None, :] * x_hat
            if DENSE and tl.float32 != DTYPE:
                dx = dot(round_to(g, DTYPE), rest, dx)
        else:
            dx = dot(round_to(x_hat, DTYPE), statistics)
            if SCALE:
                dx = dx * size[None, :]
            dx = dot(round_to(g, DTYPE), matrix, dx)
            if tl.float32 != DTYPE:
                # a gradient with a mean would show the rounding of the matrix
                dx = dot(round_to(g, DTYPE), rest, dx)
            dx += f[None, :]
        store_tile(dx_ptr, offsets, dx * rstd[None, :], inside, FULL)


def reduce(x: Tensor, grad: Tensor, mapping: Map, y: Tensor | None = None) -> Sums:
    """Gradients of P, d and c, in parts.

    Args:
        x, grad: input, and gradient of the output in the layout of x.
        mapping: what was applied.
        y: the output, if there was a residual. Then the masked gradient is returned too.
    """
    n, channels, _, _ = x.shape
    cut = reduce_walk(x, mapping)
    grad_P = None
    if mapping.P is not None:
        grad_P = empty(x.device, cut.rows(n), *mapping.P.shape)
    grad_d, grad_c = empty(x.device, 2, n * cut.splits, channels)
    masked = None if y is None else torch.empty_like(x)
    groups = ceil_div(channels, mapping.group_size)
    launch(
        _reduce_kernel, grid(x, mapping, cut),
        x, grad, y, masked, *pointers(mapping), grad_P, grad_d, grad_c, *sizes(x), groups,
        mapping.slope, *cuts(x, cut), **tile_constants(x, mapping, cut),
        ACT=ACTIVATIONS[mapping.act],
    )  # fmt: skip
    return Sums(grad_P, grad_d, grad_c, cut.splits, masked)


def backward(
    x: Tensor,
    grad: Tensor,
    mapping: Map,
    through: StatisticsGradient,
    *,
    pool: int = 1,
    masked: bool = False,
) -> Tensor:
    """dx.

    Args:
        x, grad, mapping: as for `reduce`.
        through: the part that comes through the statistics.
        pool: side of the max-pool window before the covariance.
        masked: `grad` is what `reduce` returned as masked.
    """
    dx = torch.empty_like(x)
    act = ACTIVATIONS["none" if masked else mapping.act]
    if through.pooled_offset is not None:
        _launch_pooled(x, grad, dx, mapping, through, act, pool)
        return dx
    cut = map_walk(x, mapping)
    launch(
        _backward_kernel, grid(x, mapping, cut),
        x, grad, dx, *pointers(mapping), through.Q, through.e, through.f, through.size, *sizes(x),
        mapping.slope, *cuts(x, cut), **tile_constants(x, mapping, cut), ACT=act,
        SCALE=x.dtype == torch.float16,
    )  # fmt: skip
    return dx


def _launch_pooled(
    x: Tensor,
    grad: Tensor,
    dx: Tensor,
    mapping: Map,
    through: StatisticsGradient,
    act: int,
    pool: int,
) -> None:
    n, channels, height, width = x.shape
    cut = Walk(64, max(32, power_of_2(mapping.group_size)), 1, 4, 3)
    tiles = ceil_div(ceil_div(height, pool) * ceil_div(width, pool), cut.pixels)
    rows = max(1, min(tiles, 2048 // n))
    grid = (n * rows * cut.blocks(channels, mapping.group_size),)
    fixed = tile_constants(x, mapping, cut)
    del fixed["ALIGN"], fixed["FULL"]
    launch(
        backward_pooled_kernel, grid,
        x, grad, dx, *pointers(mapping), through.Q, through.e, through.f, through.size,
        through.pooled_offset, channels, height, width, mapping.slope, rows,
        **fixed, ACT=act, POOL=pool,
    )  # fmt: skip


def reduce_walk(x: Tensor, mapping: Map) -> Walk:
    """The usual way to cut x up for the reducing pass."""
    n, channels, height, width = x.shape
    return walk(n, height * width, channels, mapping.group_size, 1024, (64, 32, 4))
