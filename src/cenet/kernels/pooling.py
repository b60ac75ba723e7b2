"""Max-pooling before the covariance, inside the passes: tiles of windows instead of pixels.

Pooling commutes with the norm if it follows the sign of γ, so x itself is pooled, after its sign.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.tiles import (
    MOST_SPLITS,
    Walk,
    at_least_0,
    block_channels,
    ceil_div,
    dot,
    first_row,
    load_channel_values,
    load_matrix,
    map_of_x,
    matrix_offsets,
    operand_of,
    pivot_of,
    power_of_2,
    round_to,
    same_group,
    shift_of,
    sign_of,
    transform,
)

# bytes of shared memory: if three pipeline stages of a tile do not fit, there is one stage
ROOM = 2**16
# lower bound on rows of windows per split
LEAST_ROWS = 4


class WindowTile(NamedTuple):
    """A tile of windows, and how its program is launched."""

    windows: int
    channels: int
    warps: int
    stages: int


MEASURE_TILE = WindowTile(16, 32, 2, 3)
ADD_TILE = WindowTile(16, 64, 4, 2)


def pooled_walk(x: Tensor, group_size: int, pool: int, tile: WindowTile) -> Walk:
    """Cut x up into tiles of windows, and samples into splits of whole rows of windows."""
    n, all_channels, height, _ = x.shape
    channels = max(tile.channels, power_of_2(group_size))
    blocks = ceil_div(all_channels, channels // group_size * group_size)
    high = ceil_div(height, pool)
    splits = max(1, min(2048 // blocks // n, high // LEAST_ROWS, MOST_SPLITS))
    splits = ceil_div(high, ceil_div(high, splits))  # no split is empty
    fits = 3 * pool**2 * tile.windows * channels * x.element_size() <= ROOM
    warps = tile.warps * channels // tile.channels
    return Walk(tile.windows, channels, splits, warps, tile.stages if fits else 1)


@triton.jit
def window_offsets(
    start, k, channel, valid, C, H, W, BL: tl.constexpr, POOL: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Offsets (BL, 1, BC) into a sample of pixel k of the windows from `start`, and where there is
    one: windows at the border are cut."""
    wide = tl.cdiv(W, POOL)
    window = start + tl.arange(0, BL)
    top = start // wide
    y = (window // wide - top) * POOL + k // POOL
    x = window % wide * POOL + k % POOL
    inside = (y < H - top * POOL) & (x < W)
    pixel = y * W + x
    first = tl.cast(top * POOL, tl.int64) * W
    if CHANNELS_LAST:
        offsets = first * C + (pixel[:, None] * C + channel[None, :])
    else:
        offsets = first + pixel[:, None] + channel[None, :].to(tl.int64) * (H * W)
    return offsets[:, None, :], (inside[:, None] & valid[None, :])[:, None, :]


@triton.jit
def measure_pooled_kernel(
    x_ptr,  # (N, C, H, W) or (N, H, W, C)
    weight_ptr,  # (C,) whose sign says which way x is pooled, or None
    pivot_ptr,  # (N·splits, C)
    rest_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    pooled_rest_ptr,  # (N·splits, C)
    gram_ptr,  # (N·splits, G, K, K)
    C,
    H,
    W,
    G,
    splits,
    high,  # rows of windows of every split but the last
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    POOL: tl.constexpr,
    HALF: tl.constexpr,
    RAW: tl.constexpr,
):
    """Like `moments._measure_kernel`, with the Gram matrix of the pooled x."""
    L = H * W
    wide = tl.cdiv(W, POOL)
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    n = tl.cast(row // splits, tl.int64)
    channel, valid = block_channels(program % blocks, C, K, BC)
    top = row % splits * high
    bottom = tl.minimum(top + high, tl.cdiv(H, POOL))
    pixels = (tl.minimum(bottom * POOL, H) - top * POOL) * W
    windows = (bottom - top) * wide
    sign = tl.full((BC,), 1.0, tl.float32)
    if weight_ptr is not None:
        sign = sign_of(tl.load(weight_ptr + channel, mask=valid, other=1.0).to(tl.float32))
    base = x_ptr + n * C * L
    pivot = pivot_of(base, top * POOL * W, pixels, channel, valid, C, L, CHANNELS_LAST)
    sums = tl.zeros((BL, 1, BC), tl.float32)
    squares = tl.zeros((BL, 1, BC), tl.float32)
    pooled_sums = tl.zeros((16, BC), tl.float32)
    products = tl.zeros((BC, BC), tl.float32)
    for start in range(top * wide, bottom * wide, BL):
        among = (start + tl.arange(0, BL) < bottom * wide)[:, None, None]
        pooled = tl.full((BL, 1, BC), float("-inf"), tl.float32)
        for k in tl.static_range(POOL * POOL):
            offsets, mask = window_offsets(
                start, k, channel, valid, C, H, W, BL, POOL, CHANNELS_LAST
            )
            mask = mask & among
            x = tl.load(base + offsets, mask=mask, other=0.0)
            centered = tl.where(mask, x.to(tl.float32) - pivot[None, None, :], 0.0)
            sums += centered
            squares += centered * centered
            signed = tl.where(mask, centered * sign[None, None, :], float("-inf"))
            pooled = tl.maximum(pooled, signed, propagate_nan=tl.PropagateNan.ALL)
        pooled = tl.where(among & valid[None, None, :], pooled * sign[None, None, :], 0.0)
        pooled = tl.reshape(pooled, (BL, BC))
        operand = round_to(pooled * HALF, x_ptr.dtype.element_ty if RAW else tl.float32)
        pooled_sums += dot(tl.full((16, BL), 1.0, operand.dtype), operand)
        products += dot(tl.trans(operand), operand)
    part = tl.cast(row, tl.int64) * C + channel
    sums = tl.sum(tl.reshape(sums, (BL, BC)), 0)
    squares = tl.sum(tl.reshape(squares, (BL, BC)), 0)
    pooled_sums = first_row(pooled_sums) / HALF
    products = products / (HALF * HALF)
    tl.store(pivot_ptr + part, pivot, mask=valid)
    tl.store(rest_ptr + part, sums / pixels, mask=valid)
    tl.store(square_ptr + part, at_least_0(squares - sums * (sums / pixels)), mask=valid)
    tl.store(pooled_rest_ptr + part, pooled_sums / windows, mask=valid)
    i, j = channel[:, None], channel[None, :]
    gram = products - pooled_sums[:, None] * (pooled_sums / windows)[None, :]
    offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
    tl.store(gram_ptr + offsets, gram, mask=same_group(i, j, valid, K))


@triton.jit
def add_pooled_kernel(
    x_ptr,  # (N, C, H, W) or (N, H, W, C)
    dx_ptr,  # like x: added to
    values_ptr,  # (10, C)
    Q_ptr,  # (G, K, K)
    pooled_offset_ptr,  # (C,)
    C,
    H,
    W,
    rows,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    RAW: tl.constexpr,
    POOL: tl.constexpr,
):
    """Add the gradient of the pooled x̂ to dx, at the pixel of each window that was the largest."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW else tl.float32
    windows = tl.cdiv(H, POOL) * tl.cdiv(W, POOL)
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    n = tl.cast(program // blocks // rows, tl.int64)
    channel, valid = block_channels(program % blocks, C, K, BC)
    center, rstd, gamma, _, _ = load_channel_values(values_ptr, channel, valid, C)
    offset = tl.load(pooled_offset_ptr + channel, mask=valid, other=0.0) * rstd
    shift, left = shift_of(center, rstd, DTYPE, RAW)
    Q = rstd[:, None] * load_matrix(Q_ptr, channel[:, None], channel[None, :], valid, K)
    nothing = tl.zeros((BC,), tl.float32)
    matrix, _, unit, c = map_of_x(Q, nothing, rstd, offset, left, DTYPE, RAW, BC)
    sign = sign_of(gamma)
    sample = n * C * H * W
    for start in range(program // blocks % rows * BL, windows, rows * BL):
        # a middle dimension of size 1 keeps these tensors out of the register layout of products
        largest = tl.full((BL, 1, BC), float("-inf"), tl.float32)
        which = tl.zeros((BL, 1, BC), tl.int32)
        for k in tl.static_range(POOL * POOL):
            offsets, mask = window_offsets(
                start, k, channel, valid, C, H, W, BL, POOL, CHANNELS_LAST
            )
            x = tl.load(x_ptr + sample + offsets, mask=mask, other=0.0).to(tl.float32)
            signed = tl.where(mask, x * sign[None, None, :], float("-inf"))
            which = tl.where(signed > largest, k, which)
            largest = tl.maximum(largest, signed)
        inside = (start + tl.arange(0, BL) < windows)[:, None] & valid[None, :]
        largest = tl.where(inside, tl.reshape(largest, (BL, BC)) * sign[None, :], 0.0)
        operand = operand_of(largest.to(x_ptr.dtype.element_ty), shift, DTYPE)
        added = transform(operand, matrix, unit, c, DTYPE)[:, None, :]
        for k in tl.static_range(POOL * POOL):
            offsets, mask = window_offsets(
                start, k, channel, valid, C, H, W, BL, POOL, CHANNELS_LAST
            )
            # every pixel is loaded and stored: whole vectors are faster than single values
            dx = tl.load(dx_ptr + sample + offsets, mask=mask, other=0.0).to(tl.float32)
            dx += tl.where(which == k, added, 0.0)
            tl.store(dx_ptr + sample + offsets, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
