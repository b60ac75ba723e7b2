"""The measuring pass: instance mean and spread, and the centered Gram matrix of each group.

Every program centers what it sees before it multiplies, and writes what it found: there are no
atomics, so the result is the same bit for bit. `groups` puts the parts together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.tiles import (
    Walk,
    alignment,
    block_channels,
    diagonal_of,
    dot,
    first_row,
    is_channels_last,
    matrix_offsets,
    power_of_2,
    same_group,
    tile_offsets,
    walk,
)


class Parts(NamedTuple):
    """What the programs found. A part is a sample, or a split of one."""

    mean: Tensor  # (N·splits, C)
    square: Tensor  # (N·splits, C), sum of squares around `mean`
    gram: Tensor | None  # (rows, G, K, K), sum of products around `mean`, of the pooled x if pooled
    pooled_mean: Tensor | None  # (N, C)
    splits: int
    split_pixels: int


@triton.jit
def _pivot(base, begin, count, channel, valid, C, L, CHANNELS_LAST: tl.constexpr):
    """A value per channel near its mean: the average of four pixels."""
    pivot = tl.zeros_like(channel).to(tl.float32)
    for i in tl.static_range(4):
        pixel = tl.cast(begin + (2 * i + 1) * count // 8, tl.int64)
        if CHANNELS_LAST:
            offset = pixel * C + channel
        else:
            offset = channel.to(tl.int64) * L + pixel
        pivot += tl.load(base + offset, mask=valid, other=0.0).to(tl.float32)
    return pivot / 4


@triton.jit
def _measure_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    mean_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    gram_ptr,  # (rows, G, K, K)
    C,
    L,
    G,
    splits,
    split_pixels,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    GRAM: tl.constexpr,
    HALF: tl.constexpr,
):
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    channel, valid = block_channels(program % blocks, C, K, BC)
    begin = row % splits * split_pixels
    end = tl.minimum(begin + split_pixels, L)
    base = x_ptr + tl.cast(row // splits, tl.int64) * C * L
    pivot = _pivot(base, begin, end - begin, channel, valid, C, L, CHANNELS_LAST)
    # with a Gram matrix the tensor cores take every sum, else they are taken at the end
    sums = tl.zeros((16 if GRAM else BL, BC), tl.float32)
    products = tl.zeros((BC if GRAM else BL, BC), tl.float32)
    for start in range(begin, end, BL):
        offsets = tile_offsets(start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        x = tl.load(base + offsets, mask=inside, other=0.0)
        centered = tl.where(inside, x.to(tl.float32) - pivot[None, :], 0.0)
        if GRAM:
            # the difference of two float16 may not fit float16; its half does
            operand = (centered * HALF).to(x.dtype)
            sums = dot(tl.full((16, BL), 1.0, x.dtype), operand, sums)
            products = dot(tl.trans(operand), operand, products)
        else:
            sums += centered
            products += centered * centered
    if GRAM:
        sum_ = first_row(sums) / HALF
        square = tl.sum(diagonal_of(products), 0) / (HALF * HALF)
    else:
        sum_ = tl.sum(sums, 0)
        square = tl.sum(products, 0)
    rest = sum_ / (end - begin)
    part = tl.cast(row, tl.int64) * C + channel
    tl.store(mean_ptr + part, pivot + rest, mask=valid)
    tl.store(square_ptr + part, tl.maximum(square - sum_ * rest, 0.0), mask=valid)
    if GRAM:
        i, j = channel[:, None], channel[None, :]
        gram = products / (HALF * HALF) - sum_[:, None] * rest[None, :]
        offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
        tl.store(gram_ptr + offsets, gram, mask=same_group(i, j, valid, K))


@triton.jit
def _measure_pooled_kernel(
    x_ptr,  # (N, C, H, W) or (N, H, W, C)
    weight_ptr,  # (C,) whose sign says which way x is pooled, or None
    mean_ptr,  # (N, C)
    square_ptr,  # (N, C)
    pooled_mean_ptr,  # (N, C)
    gram_ptr,  # (N, G, K, K)
    C,
    H,
    W,
    G,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    POOL: tl.constexpr,
    HALF: tl.constexpr,
):
    L = H * W
    wide = tl.cdiv(W, POOL)
    windows = tl.cdiv(H, POOL) * wide
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    n = tl.cast(program // blocks, tl.int64)
    channel, valid = block_channels(program % blocks, C, K, BC)
    sign = tl.full((BC,), 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + channel, mask=valid, other=1.0).to(tl.float32)
        sign = tl.where(weight.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)
    base = x_ptr + n * C * L
    pivot = _pivot(base, 0, L, channel, valid, C, L, CHANNELS_LAST)
    sums = tl.zeros((BL, BC), tl.float32)
    squares = tl.zeros((BL, BC), tl.float32)
    pooled_sums = tl.zeros((16, BC), tl.float32)
    products = tl.zeros((BC, BC), tl.float32)
    for start in range(0, windows, BL):
        window = start + tl.arange(0, BL)
        pooled = tl.full((BL, BC), float("-inf"), tl.float32)
        for dy in tl.static_range(POOL):
            for dx in tl.static_range(POOL):
                x, mask = load_pixel_of_window(
                    base, window, dy, dx, channel, valid, C, H, W, POOL, CHANNELS_LAST
                )
                centered = tl.where(mask, x.to(tl.float32) - pivot[None, :], 0.0)
                sums += centered
                squares += centered * centered
                signed = tl.where(mask, centered * sign[None, :], float("-inf"))
                pooled = tl.maximum(pooled, signed, propagate_nan=tl.PropagateNan.ALL)
        mask = (window < windows)[:, None] & valid[None, :]
        pooled = tl.where(mask, pooled * sign[None, :], 0.0)
        operand = (pooled * HALF).to(x_ptr.dtype.element_ty)
        pooled_sums += dot(tl.full((16, BL), 1.0, operand.dtype), operand)
        products += dot(tl.trans(operand), operand)
    part = n * C + channel
    sums = tl.sum(sums, 0)
    squares = tl.sum(squares, 0)
    pooled_sums = first_row(pooled_sums) / HALF
    products = products / (HALF * HALF)
    tl.store(mean_ptr + part, pivot + sums / L, mask=valid)
    tl.store(square_ptr + part, tl.maximum(squares - sums * (sums / L), 0.0), mask=valid)
    tl.store(pooled_mean_ptr + part, pivot + pooled_sums / windows, mask=valid)
    i, j = channel[:, None], channel[None, :]
    gram = products - pooled_sums[:, None] * (pooled_sums / windows)[None, :]
    offsets = n * G * K * K + matrix_offsets(i, j, K)
    tl.store(gram_ptr + offsets, gram, mask=same_group(i, j, valid, K))


@triton.jit
def load_pixel_of_window(
    base, window, dy, dx, channel, valid, C, H, W, POOL: tl.constexpr, CHANNELS_LAST: tl.constexpr
):
    """One pixel of each pooling window, and where there is one: windows at the border are cut."""
    offsets, mask = window_offsets(window, dy, dx, channel, valid, C, H, W, POOL, CHANNELS_LAST)
    return tl.load(base + offsets, mask=mask, other=0.0), mask


@triton.jit
def window_offsets(
    window, dy, dx, channel, valid, C, H, W, POOL: tl.constexpr, CHANNELS_LAST: tl.constexpr
):
    """Offsets (BL, BC) into a sample of one pixel of each window, and where there is one."""
    wide = tl.cdiv(W, POOL)
    y = window // wide * POOL + dy
    x = window % wide * POOL + dx
    pixel = (y * W + x).to(tl.int64)
    if CHANNELS_LAST:
        offsets = pixel[:, None] * C + channel[None, :]
    else:
        offsets = channel[None, :].to(tl.int64) * (H * W) + pixel[:, None]
    return offsets, ((y < H) & (x < W))[:, None] & valid[None, :]


def measure(
    x: Tensor,
    group_size: int,
    *,
    gram: bool,
    pool: int = 1,
    weight: Tensor | None = None,
    walked: Walk | None = None,
) -> Parts:
    """Measure x, contiguous in one of the two layouts.

    Args:
        x: (N, C, H, W) in float32, float16 or bfloat16.
        group_size: K, at most 64.
        gram: take the Gram matrices too.
        pool, weight: side of the max-pool window before them, and the values whose sign it follows.
        walked: how to cut x, instead of the usual way.
    """
    n, channels, height, width = x.shape
    pixels = height * width
    groups = -(-channels // group_size)
    cut = walked or measure_walk(x, group_size, gram=gram, pool=pool)
    half = 0.5 if x.dtype == torch.float16 else 1.0
    small = {"dtype": torch.float32, "device": x.device}
    parts = torch.empty(2, n * cut.splits, channels, **small)
    grams = torch.empty(cut.rows(n) if gram else 0, groups, group_size, group_size, **small)
    grid = (cut.rows(n) * cut.blocks(channels, group_size),)
    shared = {"CHANNELS_LAST": is_channels_last(x), "HALF": half}
    shared |= {"K": group_size, "BL": cut.pixels, "BC": cut.channels}
    launch = {"num_warps": cut.warps, "num_stages": cut.stages}
    if gram and pool > 1:
        pooled_mean = torch.empty(n, channels, **small)
        _measure_pooled_kernel[grid](
            x, weight, parts[0], parts[1], pooled_mean, grams, channels, height, width, groups,
            POOL=pool, **shared, **launch,
        )  # fmt: skip
        return Parts(parts[0], parts[1], grams, pooled_mean, 1, pixels)
    split_pixels = cut.split_pixels(pixels)
    _measure_kernel[grid](
        x, parts[0], parts[1], grams, channels, pixels, groups, cut.splits, split_pixels,
        ALIGN=alignment(x), GRAM=gram, **shared, **launch,
    )  # fmt: skip
    return Parts(parts[0], parts[1], grams if gram else None, None, cut.splits, split_pixels)


def measure_walk(x: Tensor, group_size: int, *, gram: bool, pool: int) -> Walk:
    """The usual way to cut x up for measuring."""
    n, channels, height, width = x.shape
    if gram and pool > 1:
        return Walk(64, max(32, power_of_2(group_size)), 1, 4, 3)
    return walk(n, height * width, channels, group_size, 2048, (64, 32, 2))
