"""The applying pass and its two backward passes.

    x̂  = (x − center) · rstd
    y   = act(P·x̂ + w_n ⊙ (γ ⊙ x̂ + β) + b [+ residual])

The operator of a sample is one matrix per group, P + Diag(w_n γ), so a tile takes one dot. Backward
recomputes the sign of the activation from x, or reads it off y when there was a residual:

    g       = grad ⊙ act'
    reduce    gP = Σ g x̂ᵀ,  gd_n = Σ_hw g ⊙ x̂,  gc_n = Σ_hw g
    dx      = rstd ⊙ (Pᵀg + w_n γ ⊙ g + Q·x̂ + e_n ⊙ x̂ + f_n)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.moments import load_pixel_of_window, window_offsets
from cenet.kernels.tiles import (
    ACTIVATIONS,
    NONE,
    Walk,
    activate,
    activation_gradient,
    activation_gradient_from_output,
    alignment,
    block_channels,
    diagonal,
    diagonal_of,
    dot,
    first_row,
    is_channels_last,
    load_tile,
    matrix_offsets,
    power_of_2,
    same_group,
    standardize,
    store_tile,
    tile_offsets,
    walk,
)


class Map(NamedTuple):
    """The map that `mix` applies, in float32."""

    center: Tensor  # (C,)
    rstd: Tensor  # (C,)
    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)
    offset: Tensor  # (C,), b
    P: Tensor | None  # (G, K, K)
    w: Tensor | None  # (N, C)
    group_size: int
    act: str
    slope: float


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
def _channel_values(center_ptr, rstd_ptr, gamma_ptr, beta_ptr, offset_ptr, channel, valid):
    center = tl.load(center_ptr + channel, mask=valid, other=0.0)
    rstd = tl.load(rstd_ptr + channel, mask=valid, other=0.0)
    gamma = tl.load(gamma_ptr + channel, mask=valid, other=0.0)
    beta = tl.load(beta_ptr + channel, mask=valid, other=0.0)
    offset = tl.load(offset_ptr + channel, mask=valid, other=0.0)
    return center, rstd, gamma, beta, offset


@triton.jit
def _load_matrix(P_ptr, row, column, valid, K: tl.constexpr):
    mask = same_group(row, column, valid, K)
    return tl.load(P_ptr + matrix_offsets(row, column, K), mask=mask, other=0.0)


@triton.jit
def _apply(x_hat, matrix, d, c, DTYPE: tl.constexpr, DENSE: tl.constexpr):
    """(matrix or Diag(d)) · x̂ + c, for the rows x̂ of a tile."""
    if DENSE:
        return dot(x_hat.to(DTYPE), matrix) + c[None, :]
    else:
        return x_hat * d[None, :] + c[None, :]


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    residual_ptr,  # like x, or None
    y_ptr,  # like x
    center_ptr,  # (C,)
    rstd_ptr,  # (C,)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    offset_ptr,  # (C,)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    N,
    C,
    L,
    slope,
    splits,
    split_pixels,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    FULL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    DENSE: tl.constexpr = P_ptr is not None
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    channel, valid = block_channels(program % blocks, C, K, BC)
    center, rstd, gamma, beta, offset = _channel_values(
        center_ptr, rstd_ptr, gamma_ptr, beta_ptr, offset_ptr, channel, valid
    )
    n = tl.cast(row // splits, tl.int64)
    w = tl.zeros((BC,), tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + n * C + channel, mask=valid, other=0.0)
    matrix = tl.zeros((BC, BC), DTYPE)
    if DENSE:
        fixed = _load_matrix(P_ptr, channel[None, :], channel[:, None], valid, K)  # Pᵀ
        matrix = (fixed + diagonal(w * gamma, BC)).to(DTYPE)
    begin = row % splits * split_pixels
    end = tl.minimum(begin + split_pixels, L)
    for start in range(begin, end, BL):
        offsets = n * C * L + tile_offsets(start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = load_tile(x_ptr, offsets, inside, FULL)
        x_hat = standardize(x, center, rstd)
        y = _apply(x_hat, matrix, w * gamma, w * beta + offset, DTYPE, DENSE)
        if residual_ptr is not None:
            y += load_tile(residual_ptr, offsets, inside, FULL).to(tl.float32)
        store_tile(y_ptr, offsets, activate(y, slope, ACT), inside, FULL)


@triton.jit
def _reduce_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    y_ptr,  # like x, or None to recompute the activation's argument
    masked_ptr,  # like x, or None
    center_ptr,  # (C,)
    rstd_ptr,  # (C,)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    offset_ptr,  # (C,)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    grad_P_ptr,  # (rows, G, K, K)
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    N,
    C,
    L,
    G,
    slope,
    splits,
    split_pixels,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    FULL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    DENSE: tl.constexpr = P_ptr is not None
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    channel, valid = block_channels(program % blocks, C, K, BC)
    center, rstd, gamma, beta, offset = _channel_values(
        center_ptr, rstd_ptr, gamma_ptr, beta_ptr, offset_ptr, channel, valid
    )
    n = tl.cast(row // splits, tl.int64)
    w = tl.zeros((BC,), tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + n * C + channel, mask=valid, other=0.0)
    matrix = tl.zeros((BC, BC), DTYPE)
    if DENSE:
        fixed = _load_matrix(P_ptr, channel[None, :], channel[:, None], valid, K)  # Pᵀ
        matrix = (fixed + diagonal(w * gamma, BC)).to(DTYPE)
    # with a matrix the tensor cores take every sum, else they are taken at the end
    products = tl.zeros((BC if DENSE else BL, BC), tl.float32)
    sums = tl.zeros((16 if DENSE else BL, BC), tl.float32)
    begin = row % splits * split_pixels
    end = tl.minimum(begin + split_pixels, L)
    for start in range(begin, end, BL):
        offsets = n * C * L + tile_offsets(start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = load_tile(x_ptr, offsets, inside, FULL)
        grad = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        x_hat = standardize(x, center, rstd)
        if y_ptr is not None:
            y = load_tile(y_ptr, offsets, inside, FULL).to(tl.float32)
            g = activation_gradient_from_output(grad, y, slope, ACT)
            store_tile(masked_ptr, offsets, g, inside, FULL)
        elif ACT != NONE:
            before = _apply(x_hat, matrix, w * gamma, w * beta + offset, DTYPE, DENSE)
            g = activation_gradient(grad, before, slope, ACT)
        else:
            g = grad
        if DENSE:
            products = dot(tl.trans(g.to(DTYPE)), x_hat.to(DTYPE), products)
            sums = dot(tl.full((16, BL), 1.0, DTYPE), g.to(DTYPE), sums)
        else:
            products += g * x_hat
            sums += g
    part = tl.cast(row, tl.int64) * C + channel
    if DENSE:
        i, j = channel[:, None], channel[None, :]
        offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
        tl.store(grad_P_ptr + offsets, products, mask=same_group(i, j, valid, K))
        tl.store(grad_d_ptr + part, tl.sum(diagonal_of(products), 0), mask=valid)
        tl.store(grad_c_ptr + part, first_row(sums), mask=valid)
    else:
        tl.store(grad_d_ptr + part, tl.sum(products, 0), mask=valid)
        tl.store(grad_c_ptr + part, tl.sum(sums, 0), mask=valid)


@triton.jit
def _backward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    dx_ptr,  # like x
    center_ptr,  # (C,)
    rstd_ptr,  # (C,)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    offset_ptr,  # (C,)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    size_ptr,  # (G,)
    N,
    C,
    L,
    slope,
    splits,
    split_pixels,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    FULL: tl.constexpr,
    SCALE: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    DENSE: tl.constexpr = P_ptr is not None
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    channel, valid = block_channels(program % blocks, C, K, BC)
    center, rstd, gamma, beta, offset = _channel_values(
        center_ptr, rstd_ptr, gamma_ptr, beta_ptr, offset_ptr, channel, valid
    )
    i, j = channel[:, None], channel[None, :]
    size = tl.load(size_ptr + channel // K, mask=valid, other=1.0)
    n = tl.cast(row // splits, tl.int64)
    w = tl.zeros((BC,), tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + n * C + channel, mask=valid, other=0.0)
    e = tl.load(e_ptr + n * C + channel, mask=valid, other=0.0)
    f = tl.load(f_ptr + n * C + channel, mask=valid, other=0.0)
    matrix = tl.zeros((BC, BC), DTYPE)
    if DENSE:
        matrix = (_load_matrix(P_ptr, i, j, valid, K) + diagonal(w * gamma, BC)).to(DTYPE)
    statistics = tl.zeros((BC, BC), DTYPE)
    if Q_ptr is not None:
        statistics = (_load_matrix(Q_ptr, i, j, valid, K) + diagonal(e, BC)).to(DTYPE)
    begin = row % splits * split_pixels
    end = tl.minimum(begin + split_pixels, L)
    for start in range(begin, end, BL):
        offsets = n * C * L + tile_offsets(start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = load_tile(x_ptr, offsets, inside, FULL)
        g = load_tile(grad_ptr, offsets, inside, FULL).to(tl.float32)
        x_hat = standardize(x, center, rstd)
        if ACT != NONE:
            before = _apply(x_hat, tl.trans(matrix), w * gamma, w * beta + offset, DTYPE, DENSE)
            g = activation_gradient(g, before, slope, ACT)
        if Q_ptr is None:
            dx = _apply(g, matrix, w * gamma, f, DTYPE, DENSE) + (size * e)[None, :] * x_hat
        else:
            dx = dot(x_hat.to(DTYPE), statistics)
            if SCALE:
                dx = dx * size[None, :]
            dx = dot(g.to(DTYPE), matrix, dx) + f[None, :]
        store_tile(dx_ptr, offsets, dx * rstd[None, :], inside, FULL)


@triton.jit
def _backward_pooled_kernel(
    x_ptr,  # (N, C, H, W) or (N, H, W, C)
    grad_ptr,  # like x
    dx_ptr,  # like x
    center_ptr,  # (C,)
    rstd_ptr,  # (C,)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    offset_ptr,  # (C,)
    P_ptr,  # (G, K, K)
    w_ptr,  # (N, C), or None
    Q_ptr,  # (G, K, K)
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    size_ptr,  # (G,)
    pooled_offset_ptr,  # (C,)
    C,
    H,
    W,
    slope,
    rows,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    POOL: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    windows = tl.cdiv(H, POOL) * tl.cdiv(W, POOL)
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    n = tl.cast(program // blocks // rows, tl.int64)
    channel, valid = block_channels(program % blocks, C, K, BC)
    center, rstd, gamma, beta, offset = _channel_values(
        center_ptr, rstd_ptr, gamma_ptr, beta_ptr, offset_ptr, channel, valid
    )
    i, j = channel[:, None], channel[None, :]
    w = tl.zeros((BC,), tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + n * C + channel, mask=valid, other=0.0)
    e = tl.load(e_ptr + n * C + channel, mask=valid, other=0.0)
    f = tl.load(f_ptr + n * C + channel, mask=valid, other=0.0)
    size = tl.load(size_ptr + channel // K, mask=valid, other=1.0)
    pooled_offset = tl.load(pooled_offset_ptr + channel, mask=valid, other=0.0)
    matrix = (_load_matrix(P_ptr, i, j, valid, K) + diagonal(w * gamma, BC)).to(DTYPE)
    Q = _load_matrix(Q_ptr, i, j, valid, K).to(DTYPE)
    sign = tl.where(gamma.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)
    sample = n * C * H * W
    for start in range(program // blocks % rows * BL, windows, rows * BL):
        window = start + tl.arange(0, BL)
        largest = tl.full((BL, BC), float("-inf"), tl.float32)
        which = tl.zeros((BL, BC), tl.int32)
        for k in tl.static_range(POOL * POOL):
            x, mask = load_pixel_of_window(
                x_ptr + sample, window, k // POOL, k % POOL, channel, valid, C, H, W, POOL,
                CHANNELS_LAST,
            )  # fmt: skip
            signed = tl.where(mask, x.to(tl.float32) * sign[None, :], float("-inf"))
            which = tl.where(signed > largest, k, which)
            largest = tl.maximum(largest, signed)
        inside = (window < windows)[:, None] & valid[None, :]
        largest = tl.where(inside, largest * sign[None, :], 0.0)
        pooled = (largest - center[None, :]) * rstd[None, :]
        through_pool = size[None, :] * dot(pooled.to(DTYPE), Q) + pooled_offset[None, :]
        for k in tl.static_range(POOL * POOL):
            offsets, mask = window_offsets(
                window, k // POOL, k % POOL, channel, valid, C, H, W, POOL, CHANNELS_LAST
            )
            x = tl.load(x_ptr + sample + offsets, mask=mask, other=0.0)
            g = tl.load(grad_ptr + sample + offsets, mask=mask, other=0.0).to(tl.float32)
            x_hat = standardize(x, center, rstd)
            if ACT != NONE:
                before = _apply(x_hat, tl.trans(matrix), w, w * beta + offset, DTYPE, True)
                g = activation_gradient(g, before, slope, ACT)
            dx = _apply(g, matrix, w, f, DTYPE, True) + (size * e)[None, :] * x_hat
            dx += tl.where(which == k, through_pool, 0.0)
            tl.store(dx_ptr + sample + offsets, (dx * rstd[None, :]).to(DTYPE), mask=mask)


def forward(
    x: Tensor, mapping: Map, residual: Tensor | None = None, walked: Walk | None = None
) -> Tensor:
    """Apply the map to x, in the layout of x."""
    y = torch.empty_like(x)
    cut = walked or map_walk(x, mapping)
    _forward_kernel[_grid(x, mapping, cut)](
        x, residual, y, *_pointers(mapping), *_sizes(x), mapping.slope, *_cuts(x, cut),
        **_constants(x, mapping, cut), ACT=ACTIVATIONS[mapping.act],
    )  # fmt: skip
    return y


def reduce(
    x: Tensor, grad: Tensor, mapping: Map, y: Tensor | None = None, walked: Walk | None = None
) -> Sums:
    """Gradients of P, d and c, in parts.

    Args:
        x, grad: input, and gradient of the output in the layout of x.
        mapping: what was applied.
        y: the output, if there was a residual. Then the masked gradient is returned too.
        walked: how to cut x, instead of the usual way.
    """
    n, channels, _, _ = x.shape
    cut = walked or reduce_walk(x, mapping)
    small = {"dtype": torch.float32, "device": x.device}
    grad_P = None
    if mapping.P is not None:
        grad_P = torch.empty(cut.rows(n), *mapping.P.shape, **small)
    grad_d, grad_c = torch.empty(2, n * cut.splits, channels, **small)
    masked = None if y is None else torch.empty_like(x)
    groups = -(-channels // mapping.group_size)
    _reduce_kernel[_grid(x, mapping, cut)](
        x, grad, y, masked, *_pointers(mapping), grad_P, grad_d, grad_c, *_sizes(x), groups,
        mapping.slope, *_cuts(x, cut), **_constants(x, mapping, cut), ACT=ACTIVATIONS[mapping.act],
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
    walked: Walk | None = None,
) -> Tensor:
    """dx.

    Args:
        x, grad, mapping: as for `reduce`.
        through: the part that comes through the statistics.
        pool: side of the max-pool window before the covariance.
        masked: `grad` is what `reduce` returned as masked.
        walked: how to cut x, instead of the usual way.
    """
    dx = torch.empty_like(x)
    act = ACTIVATIONS["none" if masked else mapping.act]
    if through.pooled_offset is not None:
        _launch_pooled(x, grad, dx, mapping, through, act, pool)
        return dx
    cut = walked or map_walk(x, mapping)
    _backward_kernel[_grid(x, mapping, cut)](
        x, grad, dx, *_pointers(mapping), through.Q, through.e, through.f, through.size, *_sizes(x),
        mapping.slope, *_cuts(x, cut), **_constants(x, mapping, cut), ACT=act, SCALE=x.dtype == torch.float16,
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
    tiles = -(-(-(-height // pool) * -(-width // pool)) // cut.pixels)
    rows = max(1, min(tiles, 2048 // n))
    grid = (n * rows * cut.blocks(channels, mapping.group_size),)
    constants = _constants(x, mapping, cut)
    del constants["ALIGN"], constants["FULL"]
    _backward_pooled_kernel[grid](
        x, grad, dx, *_pointers(mapping), through.Q, through.e, through.f, through.size,
        through.pooled_offset, channels, height, width, mapping.slope, rows, **constants, ACT=act,
        POOL=pool,
    )  # fmt: skip


def map_walk(x: Tensor, mapping: Map) -> Walk:
    """The usual way to cut x up for the passes that write a tensor."""
    n, channels, height, width = x.shape
    wide = 64 if height * width >= 2048 else 32
    return walk(n, height * width, channels, mapping.group_size, 2048, (64, wide, 4))


def reduce_walk(x: Tensor, mapping: Map) -> Walk:
    """The usual way to cut x up for the reducing pass."""
    n, channels, height, width = x.shape
    return walk(n, height * width, channels, mapping.group_size, 1024, (64, 32, 4))


def _grid(x: Tensor, mapping: Map, cut: Walk) -> tuple[int]:
    return (cut.rows(x.shape[0]) * cut.blocks(x.shape[1], mapping.group_size),)


def _pointers(mapping: Map) -> tuple[Tensor | None, ...]:
    return mapping[:7]


def _sizes(x: Tensor) -> tuple[int, int, int]:
    n, channels, height, width = x.shape
    return n, channels, height * width


def _cuts(x: Tensor, cut: Walk) -> tuple[int, int]:
    return cut.splits, cut.split_pixels(x.shape[2] * x.shape[3])


def _constants(x: Tensor, mapping: Map, cut: Walk) -> dict[str, int | bool]:
    return {
        "K": mapping.group_size,
        "BL": cut.pixels,
        "BC": cut.channels,
        "ALIGN": alignment(x),
        "CHANNELS_LAST": is_channels_last(x),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "FULL": cut.is_full(x.shape[2] * x.shape[3], x.shape[1], mapping.group_size),
    }
