"""The first step between the two passes: parts → chunks, one program per group and chunk.

A chunk is a few samples with all their parts. Parts are put together to chunks, and chunks to the
batch, as the law of total variance says: what varies inside them, and what varies between their
means.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.call import BATCH, RUNNING, Mode
from cenet.kernels.launch import empty, launch
from cenet.kernels.moments import Parts
from cenet.kernels.tiles import ceil_div, dot, power_of_2

ROWS = 64  # parts of a chunk, if groups have 16 channels
GRAMS = 16  # Gram matrices of 16 × 16 a program adds at a time
CHUNKS = 16  # a program looks at so many together
IS_BATCH = tl.constexpr(BATCH)
IS_RUNNING = tl.constexpr(RUNNING)


class Statistics(NamedTuple):
    """What is known of x between the passes. What the mode has no use for is empty."""

    # center, rstd, γ, β and offset of the map; batch variance; mean of x̂, pooled if
    # its covariance is; scale = γ · rstd; origin − center; sum of the instance variances
    values: Tensor  # (10, C)
    instances: Tensor  # (2, N, C): mean − origin, and variance
    matrices: Tensor  # (3, G, K, K): W, P, and the covariance of x̂
    iterates: Tensor  # (G, 3·steps, K, K), Newton's Y, step and Z


class Chunks(NamedTuple):
    """What was measured, of a few samples together. Means lie apart from `origin`."""

    origin: Tensor  # (C,), a value of x
    mean: Tensor  # (S, C)
    square: Tensor  # (S, C), sum of squares around the mean
    spread: Tensor | None  # (S, C), sum of the instance variances
    gram: Tensor | None  # (S, G, K, K), sum of products around the mean, of the pooled x if pooled
    pooled_mean: Tensor | None  # (S, C), of the pooled x
    samples: int  # of every chunk but the last


@triton.jit
def group_channels(group, C, K: tl.constexpr, KP: tl.constexpr):
    """Places of a group, their channels, and which of them hold one."""
    place = tl.arange(0, KP)
    channel = group * K + place
    return place, channel, (place < K) & (channel < C)


@triton.jit
def load_rows(ptr, row, channel, valid, rows, C):
    """A block of an (…, C) matrix, zero outside, and where it is inside."""
    mask = (row < rows)[:, None] & valid[None, :]
    offsets = row[:, None].to(tl.int64) * C + channel[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0), mask


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
    """Samples of the rows of a chunk, their parts, and which rows hold one; SP rows a sample."""
    row = tl.arange(0, BN)
    n = chunk * samples + row // SP
    inside = (row // SP < samples) & (n < N) & (row % SP < splits)
    return n, tl.where(inside, n * splits + row % SP, N * splits), inside


@triton.jit
def gram_rows(chunk, parts, chunk_size, together):
    """First and last row of the Gram matrices of a chunk: one for every so many parts."""
    first = chunk * chunk_size // together
    return first, tl.minimum(first + chunk_size // together, tl.cdiv(parts, together))


@triton.jit
def chunk_samples(chunk, N, samples):
    """Samples in a chunk; 0 in one that does not exist."""
    return tl.maximum(tl.minimum(samples, N - chunk * samples), 0).to(tl.float32)


@triton.jit
def _centered(
    pivot_ptr, rest_ptr, part, origin, channel, valid, parts, pixels, splits, split_pixels, whole,
    C,
):  # fmt: skip
    """Means of the parts of a chunk, apart from that of the chunk and masked; the latter; weights.

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
    """What the measuring pass found, in fewer parts; the moments of samples go into `instances`.

    Args:
        parts: of the measuring pass.
        instances: (2, N, C), or (2, 0, C) if nobody wants them.
        pixels, windows: of a sample, and those left by pooling.
        split_windows: of every split but the last.
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


@triton.jit
def mean_of_chunks(
    mean_ptr, channel, valid, N, C, chunks, samples, BW: tl.constexpr, BS: tl.constexpr
):
    """Mean over the batch, as it lies apart from the origin."""
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, chunks, BS):
        chunk = start + tl.arange(0, BS)
        mean, _ = load_rows(mean_ptr, chunk, channel, valid, chunks, C)
        total += tl.sum(mean * chunk_samples(chunk, N, samples)[:, None], 0)
    return total / N


@triton.jit
def variance_of_chunks(
    mean_ptr, square_ptr, middle, channel, valid, N, C, L, chunks, samples,
    BW: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Variance over the batch, whose mean is `middle`."""
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, chunks, BS):
        chunk = start + tl.arange(0, BS)
        mean, mask = load_rows(mean_ptr, chunk, channel, valid, chunks, C)
        square, _ = load_rows(square_ptr, chunk, channel, valid, chunks, C)
        apart = tl.where(mask, mean - middle[None, :], 0.0)
        weight = chunk_samples(chunk, N, samples)[:, None] * L
        total += tl.sum(square + weight * apart * apart, 0)
    return total / (tl.cast(N, tl.float32) * L)


@triton.jit
def sum_of_rows(ptr, channel, valid, rows, C, BW: tl.constexpr, BS: tl.constexpr):
    """Sum over the rows of (rows, C)."""
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, rows, BS):
        total += tl.sum(load_rows(ptr, start + tl.arange(0, BS), channel, valid, rows, C)[0], 0)
    return total


@triton.jit
def inverse_spread(
    mean_ptr, square_ptr, running_var_ptr, middle, channel, valid, N, C, L, chunks, samples,
    norm_eps, NORM: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """rstd of the norm, 1 if there is none and 0 outside; and the variance of the batch.

    Where the norm takes running statistics, the variance is the running one.
    """
    var = tl.zeros((BW,), tl.float32)
    if NORM == IS_RUNNING:
        var = tl.load(running_var_ptr + channel, mask=valid, other=1.0).to(tl.float32)
    elif mean_ptr is not None:
        var = variance_of_chunks(
            mean_ptr, square_ptr, middle, channel, valid, N, C, L, chunks, samples, BW, BS
        )
    if NORM == 0:
        return tl.where(valid, 1.0, 0.0), var
    else:
        return tl.where(valid, 1 / tl.sqrt(var + norm_eps), 0.0), var


@triton.jit
def load_gamma(weight_ptr, channel, valid):
    """γ, 1 if there is none, and 0 outside."""
    if weight_ptr is None:
        return tl.where(valid, 1.0, 0.0)
    else:
        return tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def settle_norm(
    channel, valid, origin_ptr, mean_ptr, square_ptr, spread_ptr, weight_ptr, bias_ptr,
    running_mean_ptr, running_var_ptr, values_ptr, N, C, L, chunks, samples, norm_eps,
    KP: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr, BATCH_ANY: tl.constexpr,
):  # fmt: skip
    """The norm x̂ = (x − center) · rstd and what else is known of a group's channels, in values.

    Returns origin − center, mean of the batch as it lies apart from the origin, rstd, γ, β.
    """
    gamma = load_gamma(weight_ptr, channel, valid)
    beta = tl.zeros((KP,), tl.float32)
    if bias_ptr is not None:
        beta = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    origin = tl.zeros((KP,), tl.float32)
    middle = tl.zeros((KP,), tl.float32)
    center = tl.zeros((KP,), tl.float32)
    if origin_ptr is not None:
        origin = tl.load(origin_ptr + channel, mask=valid, other=0.0)
    # x̂ is centered at the mean of the batch unless the norm says otherwise
    if BATCH_ANY:
        middle = mean_of_chunks(mean_ptr, channel, valid, N, C, chunks, samples, KP, BS)
        center = origin + middle
    if NORM == IS_RUNNING:
        center = tl.load(running_mean_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    rstd, var = inverse_spread(
        mean_ptr, square_ptr, running_var_ptr, middle, channel, valid, N, C, L, chunks, samples,
        norm_eps, NORM, KP, BS,
    )  # fmt: skip
    if NORM == 0:
        beta = center  # x = x̂ + center
    spread = tl.zeros((KP,), tl.float32)
    if spread_ptr is not None:
        spread = sum_of_rows(spread_ptr, channel, valid, chunks, C, KP, BS)
    tl.store(values_ptr + channel, center, mask=valid)
    tl.store(values_ptr + C + channel, rstd, mask=valid)
    tl.store(values_ptr + 2 * C + channel, gamma, mask=valid)
    tl.store(values_ptr + 3 * C + channel, beta, mask=valid)
    tl.store(values_ptr + 5 * C + channel, var, mask=valid)
    tl.store(values_ptr + 7 * C + channel, gamma * rstd, mask=valid)
    tl.store(values_ptr + 8 * C + channel, origin - center, mask=valid)
    tl.store(values_ptr + 9 * C + channel, spread, mask=valid)
    return origin - center, middle, rstd, gamma, beta


def chunk_constants(group_size: int, splits: int) -> dict[str, int]:
    """What a kernel is compiled for that takes a chunk of samples of a group."""
    padded, padded_splits = power_of_2(group_size), 1 << (splits - 1).bit_length()
    return {
        "SP": padded_splits,
        "K": group_size,
        "KP": padded,
        "BN": max(16, ROWS * 16 // padded, padded_splits),
        "BR": max(1, GRAMS * 256 // padded**2),
        "num_warps": 4,
    }


def group_constants(group_size: int, mode: Mode) -> dict[str, int]:
    """What a kernel is compiled for that takes a group."""
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
