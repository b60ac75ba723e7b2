"""The first step between the two passes, one program per group: parts → statistics of the norm.

The parts are put together as the law of total variance says: what varies inside them, and what
varies between their means.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.launch import empty, launch
from cenet.kernels.modes import ABSENT, BATCH, RUNNING, Mode
from cenet.kernels.moments import Parts
from cenet.kernels.tiles import ceil_div, dot, power_of_2

ROWS = 128  # samples a program looks at together
GRAMS = 16  # Gram matrices of 16 × 16 a program adds at a time
IS_BATCH = tl.constexpr(BATCH)
IS_RUNNING = tl.constexpr(RUNNING)


class Statistics(NamedTuple):
    """What is known of x between the passes. What the mode has no use for is empty."""

    # center, rstd, γ, β and offset of the map; batch variance; mean of x̂, pooled if
    # its covariance is; scale = γ · rstd
    values: Tensor  # (8, C)
    instances: Tensor  # (2, N, C): mean − center, and variance
    matrices: Tensor  # (3, G, K, K): W, P, and the covariance of x̂
    iterates: Tensor  # (G, 3·steps, K, K), Newton's Y, step and Z


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
def part_pixels(part, splits, split_pixels, L):
    """Pixels in a part."""
    return tl.minimum(split_pixels, L - part % splits * split_pixels).to(tl.float32)


@triton.jit
def load_apart(pivot_ptr, rest_ptr, part, origin, channel, valid, parts, C):
    """Means of some parts, as they lie apart from `origin`, and where there are any.

    Neither term cancels: pivots are values of x, the rest is small.
    """
    pivot, mask = load_rows(pivot_ptr, part, channel, valid, parts, C)
    rest, _ = load_rows(rest_ptr, part, channel, valid, parts, C)
    return tl.where(mask, (pivot - origin[None, :]) + rest, 0.0), mask


@triton.jit
def mean_apart(
    pivot_ptr, rest_ptr, origin, channel, valid, parts, splits, split_pixels, L, C,
    KP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Mean over all parts, weighed by their pixels, as it lies apart from `origin`."""
    total = tl.zeros((KP,), tl.float32)
    for start in range(0, parts, BN):
        part = start + tl.arange(0, BN)
        apart, _ = load_apart(pivot_ptr, rest_ptr, part, origin, channel, valid, parts, C)
        total += tl.sum(apart * part_pixels(part, splits, split_pixels, L)[:, None], 0)
    return total / (tl.cast(parts // splits, tl.float32) * L)


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


@triton.jit(do_not_specialize=["N", "L", "splits", "split_pixels"])
def _statistics_kernel(
    pivot_ptr,  # (N·splits, C), or None
    rest_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    weight_ptr,  # (C,), or None
    bias_ptr,  # (C,), or None
    running_mean_ptr,  # (C,), or None
    running_var_ptr,  # (C,), or None
    values_ptr,  # (8, C)
    instances_ptr,  # (2, N, C)
    s_ptr,  # (G,)
    between_ptr,  # (G, K, K), or None
    N,
    C,
    L,
    splits,
    split_pixels,
    norm_eps,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
):
    group = tl.program_id(0)
    place, channel, valid = group_channels(group, C, K, KP)
    gamma = tl.where(valid, 1.0, 0.0)
    if weight_ptr is not None:
        gamma = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    beta = tl.zeros((KP,), tl.float32)
    if bias_ptr is not None:
        beta = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)

    # the norm: x̂ = (x − center) · rstd
    parts = N * splits
    pixels = tl.cast(N, tl.float32) * L
    # the mean of the batch is origin + middle; x̂ is centered there unless the norm says otherwise
    origin = tl.zeros((KP,), tl.float32)
    middle = tl.zeros((KP,), tl.float32)
    if pivot_ptr is not None:
        origin = tl.load(pivot_ptr + channel, mask=valid, other=0.0)
    if (NORM == IS_BATCH) or (BD == IS_BATCH) or (IR == IS_BATCH):
        middle = mean_apart(
            pivot_ptr, rest_ptr, origin, channel, valid, parts, splits, split_pixels, L, C, KP, BN
        )
        center = origin + middle
    else:
        center = tl.zeros((KP,), tl.float32)
    if NORM == IS_RUNNING:
        center = tl.load(running_mean_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    # within the parts and between them, per channel and for the group; instance moments
    squares = tl.zeros((KP,), tl.float32)
    instances = tl.zeros((KP,), tl.float32)
    between = tl.zeros((KP, KP), tl.float32)
    if pivot_ptr is not None:
        SAMPLES: tl.constexpr = BN // SP
        row = tl.arange(0, BN)
        split = row % SP
        for start in range(0, N, SAMPLES):
            n = start + row // SP
            inside = (n < N) & (split < splits)
            part = tl.where(inside, n * splits + split, parts)
            weight = part_pixels(part, splits, split_pixels, L)[:, None]
            apart, mask = load_apart(pivot_ptr, rest_ptr, part, origin, channel, valid, parts, C)
            square, _ = load_rows(square_ptr, part, channel, valid, parts, C)
            if IR > 0:
                sample = start + tl.arange(0, SAMPLES)
                mean, spread = sample_moments(apart, square, weight, mask, L, SAMPLES, SP, KP)
                in_batch = (sample < N)[:, None] & valid[None, :]
                offsets = sample[:, None].to(tl.int64) * C + channel[None, :]
                tl.store(instances_ptr + offsets, mean + (origin - center)[None, :], mask=in_batch)
                offsets += tl.cast(N, tl.int64) * C
                tl.store(instances_ptr + offsets, spread, mask=in_batch)
                instances += tl.sum(spread, 0)
            apart = tl.where(mask, apart - middle[None, :], 0.0)
            squares += tl.sum(square + weight * apart * apart, 0)
            if between_ptr is not None:
                between += dot(tl.trans(apart * weight), apart)
    var = squares / pixels
    rstd = tl.where(valid, 1.0, 0.0)
    if NORM == IS_RUNNING:
        var = tl.load(running_var_ptr + channel, mask=valid, other=1.0).to(tl.float32)
    if NORM > 0:
        rstd = tl.where(valid, 1 / tl.sqrt(var + norm_eps), 0.0)
    else:
        beta = center  # x = x̂ + center
    scale = gamma * rstd
    if IR == IS_BATCH:
        tl.store(s_ptr + group, tl.sum(instances * scale * scale))
    if between_ptr is not None:
        i, j = place[:, None], place[None, :]
        offsets = group.to(tl.int64) * K * K + i * K + j
        tl.store(between_ptr + offsets, between, mask=(i < K) & (j < K))
    tl.store(values_ptr + channel, center, mask=valid)
    tl.store(values_ptr + C + channel, rstd, mask=valid)
    tl.store(values_ptr + 2 * C + channel, gamma, mask=valid)
    tl.store(values_ptr + 3 * C + channel, beta, mask=valid)
    tl.store(values_ptr + 5 * C + channel, var, mask=valid)
    mean = ((origin - center) + middle) * rstd
    tl.store(values_ptr + 6 * C + channel, mean, mask=valid)
    tl.store(values_ptr + 7 * C + channel, scale, mask=valid)
    if BD == 0:
        tl.store(values_ptr + 4 * C + channel, tl.zeros((KP,), tl.float32), mask=valid)


def statistics(
    parts: Parts | None,
    shape: torch.Size,
    group_size: int,
    mode: Mode,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_eps: float,
    steps: int,
    device: torch.device,
) -> tuple[Statistics, Tensor]:
    """Statistics from the parts of the measuring pass (None if nothing is measured).

    `between` fills in matrices and iterates; until then the last matrix holds what varies between
    the parts. The second result is Σ σ̃² of each group, (G,), for the gate.
    """
    n, channels, height, width = shape
    groups = ceil_div(channels, group_size)
    matrix = (groups, group_size, group_size)
    out = Statistics(
        empty(device, 8, channels),
        empty(device, 2, n if mode.ir != ABSENT else 0, channels),
        empty(device, 3, *(matrix if mode.bd != ABSENT else (0, 0, 0))),
        empty(device, groups if mode.bd == BATCH else 0, 3 * steps, *matrix[1:]),
    )
    s_parts = empty(device, groups)
    measured: tuple[Tensor | None, ...] = (None, None, None)
    splits, split_pixels, pooled = 1, height * width, False
    if parts is not None:
        measured = parts.pivot, parts.rest, parts.square
        splits, split_pixels = parts.splits, parts.split_pixels
        pooled = parts.pooled_rest is not None
    between = out.matrices[2] if mode.bd == BATCH and not pooled else None
    constants = group_constants(group_size, mode)
    del constants["BR"]
    padded_splits = 1 << (splits - 1).bit_length()
    constants["BN"] = max(constants["BN"], padded_splits)
    launch(
        _statistics_kernel, (groups,),
        *measured, weight, bias, running_mean, running_var, out.values, out.instances, s_parts,
        between, n, channels, height * width, splits, split_pixels, norm_eps, SP=padded_splits,
        **constants,
    )  # fmt: skip
    return out, s_parts


def group_constants(group_size: int, mode: Mode) -> dict[str, int]:
    """What a kernel is compiled for."""
    padded = power_of_2(group_size)
    return {
        "K": group_size,
        "KP": padded,
        "BN": max(16, ROWS * 16 // padded),
        "BR": max(1, GRAMS * 256 // padded**2),
        "num_warps": 4,
        "NORM": mode.norm,
        "BD": mode.bd,
        "IR": mode.ir,
    }
