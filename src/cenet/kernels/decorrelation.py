"""Batch decorrelation of one group: covariance → W → P, and back.

Jobs of a program, put into kernels by `between` and `between_backward`.
"""

import triton
import triton.language as tl

from cenet.functional import RIDGE, RIDGE_FLOOR
from cenet.kernels.gate import load_blend, load_lambda
from cenet.kernels.newton import newton, newton_backward
from cenet.kernels.statistics import (
    IS_BATCH,
    group_channels,
    load_apart,
    load_rows,
    mean_apart,
    part_pixels,
)
from cenet.kernels.tiles import dot

RELATIVE_RIDGE = tl.constexpr(RIDGE)
LEAST_RIDGE = tl.constexpr(RIDGE_FLOOR)


@triton.jit
def sum_of_grams(ptr, group, rows, C, G, K: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr):
    """Sum over programs of a group's (K, K) matrix, as (KP, KP)."""
    entry = tl.arange(0, KP * KP)
    i, j = entry // KP, entry % KP
    size = tl.minimum(C - group * K, K)
    inside = (i < size) & (j < size)
    total = tl.zeros((BR, KP * KP), tl.float32)
    for start in tl.range(0, rows, BR, num_stages=4):
        row = start + tl.arange(0, BR)
        offsets = (row[:, None].to(tl.int64) * G + group) * K * K + (i * K + j)[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        total += tl.load(ptr + offsets, mask=mask, other=0.0)
    return tl.reshape(tl.sum(total, 0), (KP, KP))


@triton.jit
def sum_of_splits(ptr, n, channel, valid, N, C, splits):
    """A block of an (N·splits, C) matrix, splits of a row added."""
    total, _ = load_rows(ptr, n * splits, channel, valid, N * splits, C)
    for split in range(1, splits):
        total += load_rows(ptr, n * splits + split, channel, valid, N * splits, C)[0]
    return total


@triton.jit
def decorrelate(
    group,
    gram_ptr,  # (rows, G, K, K), or None
    pivot_ptr,  # (N·splits, C), if pooled
    pooled_rest_ptr,  # (N·splits, C), or None
    running_inv_sqrt_ptr,  # (G, K, K), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (8, C): reads center, rstd, γ and β, writes offset and pooled mean
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    N,
    C,
    L,
    G,
    windows,
    splits,
    split_windows,
    rows,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
):
    """W by Newton's iteration, or the running one; P = αλ W Diag(γ) and the offset αλ W β."""
    place, channel, valid = group_channels(group, C, K, KP)
    center = tl.load(values_ptr + channel, mask=valid, other=0.0)
    rstd = tl.load(values_ptr + C + channel, mask=valid, other=0.0)
    gamma = tl.load(values_ptr + 2 * C + channel, mask=valid, other=0.0)
    beta = tl.load(values_ptr + 3 * C + channel, mask=valid, other=0.0)
    size = tl.cast(G, tl.int64) * K * K
    i, j = place[:, None], place[None, :]
    inside = valid[:, None] & valid[None, :]
    whole = (i < K) & (j < K)
    eye = tl.where(i == j, 1.0, 0.0)
    offsets = i * K + j
    matrix = group.to(tl.int64) * K * K + offsets
    if BD == IS_BATCH:
        cov = sum_of_grams(gram_ptr, group, rows, C, G, K, KP, BR)
        if pooled_rest_ptr is not None:
            origin = tl.load(pivot_ptr + channel, mask=valid, other=0.0)
            parts = N * splits
            middle = mean_apart(
                pivot_ptr, pooled_rest_ptr, origin, channel, valid, parts, splits, split_windows,
                windows, C, KP, BN,
            )  # fmt: skip
            between = tl.zeros((KP, KP), tl.float32)
            for start in range(0, parts, BN):
                part = start + tl.arange(0, BN)
                apart, mask = load_apart(
                    pivot_ptr, pooled_rest_ptr, part, origin, channel, valid, parts, C
                )
                apart = tl.where(mask, apart - middle[None, :], 0.0)
                weight = part_pixels(part, splits, split_windows, windows)[:, None]
                between += dot(tl.trans(apart * weight), apart)
            cov = (cov + between) / (tl.cast(N, tl.float32) * windows)
            pooled = ((origin - center) + middle) * rstd
            tl.store(values_ptr + 6 * C + channel, pooled, mask=valid)
        else:
            between = tl.load(matrices_ptr + 2 * size + matrix, mask=whole, other=0.0)
            cov = (cov + between) / (tl.cast(N, tl.float32) * L)
        cov = tl.where(inside, cov * rstd[:, None] * rstd[None, :], 0.0)
        tl.store(matrices_ptr + 2 * size + matrix, cov, mask=whole)
        sigma = cov * gamma[:, None] * gamma[None, :]
        trace = tl.sum(tl.sum(sigma * eye, 0))
        channels = tl.sum(tl.where(valid, 1.0, 0.0))
        sigma += tl.where(inside, eye * (RELATIVE_RIDGE * trace / channels + LEAST_RIDGE), 0.0)
        trace = tl.sum(tl.sum(sigma * eye, 0))
        iterates = iterates_ptr + group.to(tl.int64) * 3 * STEPS * K * K
        W = newton(sigma / trace, iterates, whole, offsets, STEPS, K)
        W = tl.where(inside, W, eye)
        tl.store(matrices_ptr + matrix, W, mask=whole)
    else:
        W = tl.load(running_inv_sqrt_ptr + matrix, mask=whole, other=0.0).to(tl.float32)
        tl.store(matrices_ptr + matrix, W, mask=whole)
    W = load_blend(blend_ptr) * load_lambda(mix_logit_ptr, 1.0) * W
    tl.store(matrices_ptr + size + matrix, W * gamma[None, :], mask=whole)
    tl.store(values_ptr + 4 * C + channel, tl.sum(W * beta[None, :], 1), mask=valid)


@triton.jit
def decorrelate_backward(
    group,
    grad_P_ptr,  # (rows, G, K, K)
    grad_c_ptr,  # (N·splits, C)
    values_ptr,  # (8, C)
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    Q_ptr,  # (G, K, K), or None
    pooled_offset_ptr,  # (C,), or None
    affine_ptr,  # (2, C): what γ and β get
    scalars_ptr,  # (G, 2): <W, gM> is the first
    N,
    C,
    L,
    G,
    windows,
    rows,
    splits,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
):
    """Gradients of W and of the covariance; Q is what the latter means for x̂."""
    place, channel, valid = group_channels(group, C, K, KP)
    gamma = tl.load(values_ptr + 2 * C + channel, mask=valid, other=0.0)
    beta = tl.load(values_ptr + 3 * C + channel, mask=valid, other=0.0)
    size = tl.cast(G, tl.int64) * K * K
    grad_c_rows = tl.zeros((BN, KP), tl.float32)
    for start in tl.range(0, N * splits, BN, num_stages=4):
        part = start + tl.arange(0, BN)
        grad_c_rows += load_rows(grad_c_ptr, part, channel, valid, N * splits, C)[0]
    grad_c_sum = tl.sum(grad_c_rows, 0)
    i, j = place[:, None], place[None, :]
    inside = valid[:, None] & valid[None, :]
    whole = (i < K) & (j < K)
    eye = tl.where(i == j, 1.0, 0.0)
    offsets = i * K + j
    matrix = group.to(tl.int64) * K * K + offsets
    W = tl.load(matrices_ptr + matrix, mask=inside, other=0.0)
    share = load_blend(blend_ptr) * load_lambda(mix_logit_ptr, 1.0)
    grad_P = sum_of_grams(grad_P_ptr, group, rows, C, G, K, KP, BR)
    grad_M = grad_P * gamma[None, :] + grad_c_sum[:, None] * beta[None, :]
    through_W = tl.sum(tl.sum(W * grad_M, 0))
    grad_gamma = share * tl.sum(W * grad_P, 0)
    grad_beta = share * tl.sum(W * grad_c_sum[:, None], 0)
    if BD == IS_BATCH:
        cov = tl.load(matrices_ptr + 2 * size + matrix, mask=inside, other=0.0)
        sigma = cov * gamma[:, None] * gamma[None, :]
        trace = tl.sum(tl.sum(sigma * eye, 0))
        channels = tl.sum(tl.where(valid, 1.0, 0.0))
        ridge = RELATIVE_RIDGE * trace / channels + LEAST_RIDGE
        trace = trace + channels * ridge
        iterates = iterates_ptr + group.to(tl.int64) * 3 * STEPS * K * K
        grad_S = newton_backward(share * grad_M, iterates, inside, offsets, STEPS, K)
        S = (sigma + tl.where(inside, eye * ridge, 0.0)) / trace
        grad_sigma = (grad_S - eye * tl.sum(tl.sum(grad_S * S, 0))) / trace
        grad_sigma = tl.where(inside, grad_sigma, 0.0)
        grad_trace = tl.sum(tl.sum(grad_sigma * eye, 0))
        grad_sigma += tl.where(inside, eye * (RELATIVE_RIDGE * grad_trace / channels), 0.0)
        grad_sigma = grad_sigma + tl.trans(grad_sigma)
        grad_gamma += tl.sum(grad_sigma * cov * gamma[:, None], 0)
        measured = tl.cast(N, tl.float32) * L
        if pooled_offset_ptr is not None:
            measured = tl.cast(N, tl.float32) * windows
        Q = grad_sigma * gamma[:, None] * gamma[None, :] / measured
        if pooled_offset_ptr is not None:
            pooled = tl.load(values_ptr + 6 * C + channel, mask=valid, other=0.0)
            pooled_offset = -tl.sum(Q * pooled[:, None], 0)
            tl.store(pooled_offset_ptr + channel, pooled_offset, mask=valid)
        tl.store(Q_ptr + matrix, Q, mask=whole)
    tl.store(affine_ptr + channel, grad_gamma, mask=valid)
    tl.store(affine_ptr + C + channel, grad_beta, mask=valid)
    tl.store(scalars_ptr + group * 2, through_W)
