"""Measuring x, the twin of `functional.moments`: one pass over x, then one small launch.

`measure` finds mean, sum of squares and Gram matrices of each part: a sample, or a split of one.
Every program centers its values before it multiplies them and writes its own result. There are no
atomics, so results are equal bit for bit from run to run.

`condense` joins the parts of a few samples to a chunk, one program per group and chunk. Later
kernels join the chunks to the batch. Both follow the law of total variance: what varies inside the
parts, plus what varies between their means.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.internals import is_channels_last
from cenet.kernels.call import Mode
from cenet.kernels.launch import empty, launch
from cenet.kernels.pooling import MEASURE_TILE, measure_pooled_kernel, pooled_walk
from cenet.kernels.tiles import (
    MAP,
    MOST_SPLITS,
    Tile,
    alignment,
    at_least_0,
    ceil_div,
    dot,
    is_raw,
    locate,
    matrix_offsets,
    pivot_of,
    power_of_2,
    round_to,
    same_group,
    tile_offsets,
    walk_over,
)

# by layout: channels_last or not
TILES = {
    True: (Tile(512, 32, 32, 2, 4, 2048, 8), Tile(1, 16, 32, 1, 5, 2048, 16)),
    False: (Tile(1, 64, 16, 1, 3, 2048, 8),),
}
CHUNK_PARTS = 64  # parts of a chunk, if groups have 16 channels
GRAMS = 16  # Gram matrices of 16 × 16 that a program adds at a time
CHUNKS = 16  # chunks that a program loads at a time


class Parts(NamedTuple):
    """Results of the measuring pass. A part is a sample, or a split of one."""

    pivot: Tensor  # (N·splits, C), a value near the mean; the mean is pivot + rest
    rest: Tensor  # (N·splits, C)
    square: Tensor  # (N·splits, C), sum of squares around the mean
    # sum of products around the mean; of the pooled x where the covariance is pooled
    gram: Tensor | None  # (rows, G, K, K)
    pooled_rest: Tensor | None  # (N·splits, C), of the pooled x
    splits: int
    split_pixels: int
    samples: int = 1  # samples that share a Gram matrix


class Statistics(NamedTuple):
    """Statistics and map of a batch, as the passes share them. Unused ones are empty."""

    values: Tensor  # (10, C): rows CENTER, RSTD, … of `tiles`
    instances: Tensor  # (2, N, C): mean − origin, and variance
    matrices: Tensor  # (3, G, K, K): W, P, and the covariance of x̂
    iterates: Tensor  # (G, 3·steps, K, K), Newton's Y, step and Z

    @property
    def W(self) -> Tensor:
        """The decorrelation matrices, (G, K, K)."""
        return self.matrices[0]

    @property
    def P(self) -> Tensor:
        """αλ W Diag(γ), (G, K, K)."""
        return self.matrices[MAP.value]

    @property
    def instance_var(self) -> Tensor:
        """(N, C)."""
        return self.instances[1]


class Chunks(NamedTuple):
    """Measurements of a few samples together. Means are stored as distances from `origin`."""

    origin: Tensor  # (C,), a value of x
    mean: Tensor  # (S, C)
    square: Tensor  # (S, C), sum of squares around the mean
    spread: Tensor | None  # (S, C), sum of the instance variances
    gram: Tensor | None  # (S, G, K, K), sum of products around the mean, of the pooled x if pooled
    pooled_mean: Tensor | None  # (S, C), of the pooled x
    samples: int  # per chunk; the last may have fewer
    merged: "Merged | None" = None


class Merged(NamedTuple):
    """Marks a single chunk that holds means over all ranks instead of sums over this one.

    Kernels treat it as one sample of one pixel, `batch` = L = 1. The chunk is equal on all ranks,
    bit for bit; the numbers here differ between ranks.
    """

    shift: Tensor  # (C,), origin of this rank's instance means, less that of the chunk
    correction: Tensor  # (), makes the variance unbiased; NaN of less than two values


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
    # sums take unrounded values: rounding errors are alike for all x of a magnitude, and would not
    # average out
    sums = tl.zeros((BL, BC), tl.float32)
    squares = tl.zeros((BL, BC), tl.float32)
    products = tl.zeros((BC, BC), tl.float32)
    for start in tl.range(begin, end, BL, num_stages=STAGES):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        # masked even where all are inside: that is faster
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
        most_splits: largest number of splits per sample (ignored with pooling).
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


@triton.jit
def group_channels(group, C, K: tl.constexpr, KP: tl.constexpr):
    """Places 0 … KP − 1 of a group, their channels, and which places hold a channel."""
    place = tl.arange(0, KP)
    channel = group * K + place
    return place, channel, (place < K) & (channel < C)


@triton.jit
def load_rows(ptr, row, channel, valid, rows, C):
    """A block of an (…, C) matrix, zero outside, and the mask of its inside."""
    mask = (row < rows)[:, None] & valid[None, :]
    offsets = row[:, None].to(tl.int64) * C + channel[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0), mask


@triton.jit
def sum_of_rows(ptr, channel, valid, rows, C, BW: tl.constexpr, BS: tl.constexpr):
    """Sum over the rows of (rows, C)."""
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, rows, BS):
        total += tl.sum(load_rows(ptr, start + tl.arange(0, BS), channel, valid, rows, C)[0], 0)
    return total


@triton.jit
def sum_of_grams(
    ptr, group, first, last, C, G, K: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr
):
    """Sum of some rows of (rows, G, K, K) for a group, as (KP, KP)."""
    entry = tl.arange(0, KP * KP)
    i, j = entry // KP, entry % KP
    size = tl.minimum(C - group * K, K)
    inside = (i < size) & (j < size)
    total = tl.zeros((BR, KP * KP), tl.float32)
    for start in tl.range(first, last, BR, num_stages=4):
        row = start + tl.arange(0, BR)
        offsets = (row[:, None].to(tl.int64) * G + group) * K * K + (i * K + j)[None, :]
        mask = (row < last)[:, None] & inside[None, :]
        total += tl.load(ptr + offsets, mask=mask, other=0.0)
    return tl.reshape(tl.sum(total, 0), (KP, KP))


@triton.jit
def store_gram(ptr, row, group, G, place, values, K: tl.constexpr):
    """Write a group's matrix of (rows, G, K, K)."""
    i, j = place[:, None], place[None, :]
    offsets = (tl.cast(row, tl.int64) * G + group) * K * K + i * K + j
    tl.store(ptr + offsets, values, mask=(i < K) & (j < K))


@triton.jit
def chunk_parts(chunk, N, splits, samples, SP: tl.constexpr, BN: tl.constexpr):
    """Sample and part of each row of a chunk, and which rows hold a part; SP rows per sample."""
    row = tl.arange(0, BN)
    n = chunk * samples + row // SP
    inside = (row // SP < samples) & (n < N) & (row % SP < splits)
    return n, tl.where(inside, n * splits + row % SP, N * splits), inside


@triton.jit
def gram_rows(chunk, parts, chunk_size, together):
    """First and last row of the Gram matrices of a chunk; `together` parts share one."""
    first = chunk * chunk_size // together
    return first, tl.minimum(first + chunk_size // together, tl.cdiv(parts, together))


@triton.jit
def chunk_samples(chunk, N, samples):
    """Number of samples in a chunk; 0 beyond the last chunk."""
    return tl.maximum(tl.minimum(samples, N - chunk * samples), 0).to(tl.float32)


@triton.jit
def _centered(
    pivot_ptr, rest_ptr, part, origin, channel, valid, parts, pixels, splits, split_pixels, whole,
    C,
):  # fmt: skip
    """Means of the parts of a chunk, and the mean of the chunk, as distances from `origin`.

    Returns the means of the parts, their distances from the mean of the chunk (masked), the mask,
    the mean of the chunk, and the weights of the parts.

    Neither term of a mean cancels: pivots are values of x, the rest is small.
    """
    pivot, mask = load_rows(pivot_ptr, part, channel, valid, parts, C)
    rest, _ = load_rows(rest_ptr, part, channel, valid, parts, C)
    apart = tl.where(mask, (pivot - origin[None, :]) + rest, 0.0)
    weight = tl.minimum(split_pixels, pixels - part % splits * split_pixels).to(tl.float32)[:, None]
    mean = tl.sum(apart * weight, 0) / whole
    return apart, tl.where(mask, apart - mean[None, :], 0.0), mask, mean, weight


@triton.jit
def sample_moments(
    apart, square, weight, mask, L, SAMPLES: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr
):
    """Mean and variance of samples, (SAMPLES, KP), from those of their SP parts, (SAMPLES·SP, KP).

    `square` is summed over the `weight` pixels of a part; `mask` says where there is one.
    """
    shape: tl.constexpr = (SAMPLES, SP, KP)
    mean = tl.sum(tl.reshape(tl.where(mask, apart * weight, 0.0), shape), 1) / L
    rest = tl.reshape(apart, shape) - mean[:, None, :]
    rest = tl.reshape(rest, (SAMPLES * SP, KP))
    square = tl.where(mask, square + weight * rest * rest, 0.0)
    return mean, tl.sum(tl.reshape(square, shape), 1) / L


@triton.jit(
    do_not_specialize=[
        *("N", "L", "G", "splits", "split_pixels", "together", "windows", "split_windows")
    ]
)
def _condense_kernel(
    pivot_ptr,  # (N·splits, C)
    rest_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    pooled_rest_ptr,  # (N·splits, C), or None
    gram_ptr,  # (N·splits, G, K, K), or None
    mean_out_ptr,  # (S, C)
    square_out_ptr,  # (S, C)
    spread_out_ptr,  # (S, C), or None
    instances_ptr,  # (2, N, C)
    pooled_out_ptr,  # (S, C), or None
    gram_out_ptr,  # (S, G, K, K), or None
    N,
    C,
    L,
    G,
    splits,
    split_pixels,
    together,
    windows,
    split_windows,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    SAMPLES: tl.constexpr = BN // SP
    group, chunk = tl.program_id(0) % G, tl.program_id(0) // G
    place, channel, valid = group_channels(group, C, K, KP)
    parts = N * splits
    samples = chunk_samples(chunk, N, SAMPLES)
    origin = tl.load(pivot_ptr + channel, mask=valid, other=0.0)
    _, part, _ = chunk_parts(chunk, N, splits, SAMPLES, SP, BN)
    apart, centered, mask, mean, weight = _centered(
        pivot_ptr, rest_ptr, part, origin, channel, valid, parts, L, splits, split_pixels,
        samples * L, C,
    )  # fmt: skip
    square, _ = load_rows(square_ptr, part, channel, valid, parts, C)
    here = tl.cast(chunk, tl.int64) * C + channel
    tl.store(mean_out_ptr + here, mean, mask=valid)
    tl.store(square_out_ptr + here, tl.sum(square + weight * centered * centered, 0), mask=valid)
    if spread_out_ptr is not None:
        sample = chunk * SAMPLES + tl.arange(0, SAMPLES)
        means, spread = sample_moments(apart, square, weight, mask, L, SAMPLES, SP, KP)
        in_batch = (sample < N)[:, None] & valid[None, :]
        offsets = sample[:, None].to(tl.int64) * C + channel[None, :]
        tl.store(instances_ptr + offsets, means, mask=in_batch)
        tl.store(instances_ptr + tl.cast(N, tl.int64) * C + offsets, spread, mask=in_batch)
        tl.store(spread_out_ptr + here, tl.sum(spread, 0), mask=valid)
    if gram_ptr is not None:
        first, last = gram_rows(chunk, parts, SAMPLES * splits, together)
        gram = sum_of_grams(gram_ptr, group, first, last, C, G, K, KP, BR)
        if pooled_rest_ptr is not None:
            _, centered, _, mean, weight = _centered(
                pivot_ptr, pooled_rest_ptr, part, origin, channel, valid, parts, windows, splits,
                split_windows, samples * windows, C,
            )  # fmt: skip
            tl.store(pooled_out_ptr + here, mean, mask=valid)
        gram += dot(tl.trans(centered * weight), centered)
        store_gram(gram_out_ptr, chunk, group, G, place, gram, K)


def condense(
    parts: Parts, instances: Tensor, pixels: int, windows: int, split_windows: int, group_size: int
) -> Chunks:
    """Join parts to chunks; write the moments of each sample to `instances`.

    Args:
        parts: result of the measuring pass.
        instances: (2, N, C), or (2, 0, C) if they are not needed.
        pixels, windows: of a sample, and those left by pooling.
        split_windows: windows of every split but the last.
        group_size: K.
    """
    channels = parts.pivot.shape[1]
    n = len(parts.pivot) // parts.splits
    groups = ceil_div(channels, group_size)
    cut = chunk_constants(group_size, parts.splits)
    samples = cut["BN"] // cut["SP"]
    device, count = parts.pivot.device, ceil_div(n, samples)
    wanted = instances.shape[1] > 0
    gram = pooled = None
    if parts.gram is not None:
        gram = empty(device, count, groups, group_size, group_size)
        pooled = None if parts.pooled_rest is None else empty(device, count, channels)
    found = Chunks(
        parts.pivot[0],
        empty(device, count, channels),
        empty(device, count, channels),
        empty(device, count, channels) if wanted else None,
        gram,
        pooled,
        samples,
    )
    launch(
        _condense_kernel, (groups * count,),
        parts.pivot, parts.rest, parts.square, parts.pooled_rest, parts.gram, found.mean,
        found.square, found.spread, instances, pooled, gram, n, channels, pixels, groups,
        parts.splits, parts.split_pixels, parts.samples, windows, split_windows, **cut,
    )  # fmt: skip
    return found


def chunk_constants(group_size: int, splits: int) -> dict[str, int]:
    """Constants of a kernel whose programs take a chunk of samples of a group."""
    padded, padded_splits = power_of_2(group_size), 1 << (splits - 1).bit_length()
    return {
        "SP": padded_splits,
        "K": group_size,
        "KP": padded,
        "BN": max(16, CHUNK_PARTS * 16 // padded, padded_splits),
        "BR": max(1, GRAMS * 256 // padded**2),
        "num_warps": 4,
    }


def group_constants(group_size: int, mode: Mode) -> dict[str, int]:
    """Constants of a kernel whose programs take a group."""
    padded = power_of_2(group_size)
    return {
        "K": group_size,
        "KP": padded,
        "BR": max(1, GRAMS * 256 // padded**2),
        "BS": CHUNKS,
        "NORM": mode.norm,
        "BD": mode.bd,
        "IR": mode.ir,
        "num_warps": 4,
    }
