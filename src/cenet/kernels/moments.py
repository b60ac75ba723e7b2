"""The measuring pass: instance mean and spread, and the centered Gram matrix of each group.

Every program centers what it sees before it multiplies, and writes what it found: there are no
atomics, so the result is the same bit for bit. `statistics` and `between` put the parts together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.launch import empty, launch
from cenet.kernels.pooling import MEASURE_TILE, measure_pooled_kernel, pooled_walk
from cenet.kernels.tiles import (
    MOST_SPLITS,
    Tile,
    alignment,
    at_least_0,
    ceil_div,
    dot,
    is_channels_last,
    is_raw,
    locate,
    matrix_offsets,
    pivot_of,
    round_to,
    same_group,
    tile_offsets,
    walk_over,
)

# if channels_last, and if not
TILES = {
    True: (Tile(512, 32, 32, 2, 4, 2048, 8), Tile(1, 16, 32, 1, 5, 2048, 16)),
    False: (Tile(1, 64, 16, 1, 3, 2048, 8),),
}


class Parts(NamedTuple):
    """What the programs found. A part is a sample, or a split of one."""

    # the mean is their sum: a value near it, and what is left. Sums of squares are around the mean
    pivot: Tensor  # (N·splits, C)
    rest: Tensor  # (N·splits, C)
    square: Tensor  # (N·splits, C)
    # sum of products around the mean, of the pooled x if pooled
    gram: Tensor | None  # (rows, G, K, K)
    pooled_rest: Tensor | None  # (N·splits, C), of the pooled x
    splits: int
    split_pixels: int
    samples: int = 1  # that share a Gram matrix


@triton.jit
def _measure_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    pivot_ptr,  # (N·splits, C)
    rest_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    gram_ptr,  # (rows, G, K, K)
    C,
    L,
    G,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    GRAM: tl.constexpr,
    HALF: tl.constexpr,
    RAW: tl.constexpr,
    STAGES: tl.constexpr,
):
    row, n, channel, valid, begin, end = locate(
        C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST
    )
    pivot = pivot_of(x_ptr + n * C * L, begin, end - begin, channel, valid, C, L, CHANNELS_LAST)
    # not of rounded values: errors, alike for all x of a magnitude, would not average out
    sums = tl.zeros((BL, BC), tl.float32)
    squares = tl.zeros((BL, BC), tl.float32)
    products = tl.zeros((BC, BC), tl.float32)
    for start in tl.range(begin, end, BL, num_stages=STAGES):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        # masked even if all are inside: faster than without
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        centered = tl.where(inside, x.to(tl.float32) - pivot[None, :], 0.0)
        if GRAM:
            # the difference of two float16 may not fit float16; its half does
            operand = round_to(centered * HALF, x.dtype if RAW else tl.float32)
            products = dot(tl.trans(operand), operand, products)
        sums += centered
        squares += centered * centered
    sum_ = tl.sum(sums, 0)
    rest = sum_ / (end - begin)
    part = tl.cast(row, tl.int64) * C + channel
    tl.store(pivot_ptr + part, pivot, mask=valid)
    tl.store(rest_ptr + part, rest, mask=valid)
    tl.store(square_ptr + part, at_least_0(tl.sum(squares, 0) - sum_ * rest), mask=valid)
    if GRAM:
        i, j = channel[:, None], channel[None, :]
        gram = products / (HALF * HALF) - sum_[:, None] * rest[None, :]
        offsets = tl.cast(row, tl.int64) * G * K * K + matrix_offsets(i, j, K)
        tl.store(gram_ptr + offsets, gram, mask=same_group(i, j, valid, K))


def measure(
    x: Tensor,
    group_size: int,
    *,
    gram: bool,
    pool: int = 1,
    weight: Tensor | None = None,
    most_splits: int = MOST_SPLITS,
) -> Parts:
    """Measure x, contiguous in one of the two layouts.

    Args:
        x: (N, C, H, W) in float32, float16 or bfloat16.
        group_size: K, at most 64.
        gram: take the Gram matrices too.
        pool, weight: side of the max-pool window before them, and the values whose sign it follows.
        most_splits: of a sample (not if pooled).
    """
    n, channels, height, width = x.shape
    pixels = height * width
    groups = ceil_div(channels, group_size)
    pooled = gram and pool > 1
    if pooled:
        cut = pooled_walk(x, group_size, pool, MEASURE_TILE)
    else:
        cut = walk_over(x, group_size, TILES, most_splits)
    half = 0.5 if x.dtype == torch.float16 else 1.0
    pivot, rest, square = empty(x.device, 3, n * cut.splits, channels)
    grams = empty(x.device, cut.rows(n) if gram else 0, groups, group_size, group_size)
    grid = (cut.rows(n) * cut.blocks(channels, group_size),)
    shared = {"CHANNELS_LAST": is_channels_last(x), "HALF": half, "RAW": is_raw(x)}
    shared |= {"K": group_size, "BL": cut.pixels, "BC": cut.channels}
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    if pooled:
        pooled_rest = empty(x.device, n * cut.splits, channels)
        high = ceil_div(ceil_div(height, pool), cut.splits)
        launch(
            measure_pooled_kernel, grid,
            x, weight, pivot, rest, square, pooled_rest, grams, channels, height, width, groups,
            cut.splits, high, POOL=pool, **shared, **options,
        )  # fmt: skip
        return Parts(pivot, rest, square, grams, pooled_rest, cut.splits, high * pool * width)
    tiles = cut.tiles(pixels)
    launch(
        _measure_kernel, grid,
        x, pivot, rest, square, grams, channels, pixels, groups, cut.splits, tiles,
        ALIGN=alignment(x), GRAM=gram, STAGES=cut.stages, **shared, **options,
    )  # fmt: skip
    found = grams if gram else None
    return Parts(pivot, rest, square, found, None, cut.splits, tiles * cut.pixels)
