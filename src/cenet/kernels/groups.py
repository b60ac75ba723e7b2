"""Between the two passes, one program per group: parts → statistics → Newton → the map, and back.

The backward pass treats norm and block as one function of x̂ = (x − μ) · rstd. Loss and block depend on
γ and x̂ only through γ ⊙ x̂ + β, so what batch norm subtracts from the gradient of x̂ is known without
another sum over pixels: its mean is γ gβ / M, its mean against x̂ is γ gγ / M.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.functional import RIDGE, RIDGE_FLOOR
from cenet.kernels.gate import (
    GateGradient,
    GateState,
    load_blend,
    load_lambda,
    sum_of_scalars,
)
from cenet.kernels.mix import Map, StatisticsGradient, Sums
from cenet.kernels.moments import Parts
from cenet.kernels.tiles import dot, power_of_2, small_dot

ROWS = 128  # samples a program looks at together
GRAMS = 64  # Gram matrices of 16 × 16 a program adds at a time
# where statistics come from
ABSENT, BATCH, RUNNING = 0, 1, 2
_BATCH = tl.constexpr(BATCH)
_RUNNING = tl.constexpr(RUNNING)
_RIDGE = tl.constexpr(RIDGE)
_RIDGE_FLOOR = tl.constexpr(RIDGE_FLOOR)


class Mode(NamedTuple):
    """Which statistics the norm, decorrelation and reweighting use: ABSENT, BATCH or RUNNING."""

    norm: int
    bd: int
    ir: int


class Statistics(NamedTuple):
    """What `groups_forward` makes of the parts. What the mode has no use for is empty."""

    # center, rstd, γ, β and offset of the map; batch variance; mean of pooled x̂; scale = γ · rstd
    values: Tensor  # (8, C)
    instances: Tensor  # (2, N, C): mean − center, and variance
    matrices: Tensor  # (3, G, K, K): W, P, and the covariance of x̂
    iterates: Tensor  # (G, 3·steps, K, K), Newton's Y, step and Z


class GroupsGradient(NamedTuple):
    """What `groups_backward` hands on."""

    through: StatisticsGradient
    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)
    scalars: Tensor  # (G, 2): <W, gM> and Σ gw


@triton.jit
def _load_rows(ptr, row, channel, valid, rows, C):
    mask = (row < rows)[:, None] & valid[None, :]
    offsets = row[:, None].to(tl.int64) * C + channel[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0), mask


@triton.jit
def _part_pixels(part, splits, split_pixels, L):
    """Pixels in a part."""
    return tl.minimum(split_pixels, L - part % splits * split_pixels).to(tl.float32)


@triton.jit
def _mean_of_parts(
    ptr, channel, valid, parts, splits, split_pixels, L, C, KP: tl.constexpr, BN: tl.constexpr
):
    """Mean over all parts, weighed by their pixels, taken around the first so as not to cancel."""
    pivot = tl.load(ptr + channel, mask=valid, other=0.0)
    total = tl.zeros((KP,), tl.float32)
    for start in range(0, parts, BN):
        part = start + tl.arange(0, BN)
        mean, mask = _load_rows(ptr, part, channel, valid, parts, C)
        pixels = _part_pixels(part, splits, split_pixels, L)
        total += tl.sum(tl.where(mask, (mean - pivot[None, :]) * pixels[:, None], 0.0), 0)
    return pivot + total / (tl.cast(parts // splits, tl.float32) * L)


@triton.jit
def _sum_of_grams(ptr, group, rows, C, G, K: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr):
    """Sum over programs of a group's (K, K) matrix, as (KP, KP)."""
    entry = tl.arange(0, KP * KP)
    i, j = entry // KP, entry % KP
    size = tl.minimum(C - group * K, K)
    inside = (i < size) & (j < size)
    total = tl.zeros((KP * KP,), tl.float32)
    for start in range(0, rows, BR):
        row = start + tl.arange(0, BR)
        offsets = (row[:, None].to(tl.int64) * G + group) * K * K + (i * K + j)[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        total += tl.sum(tl.load(ptr + offsets, mask=mask, other=0.0), 0)
    return tl.reshape(total, (KP, KP))


@triton.jit
def _newton(sigma, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """The coupled iteration of `functional.newton_inverse_sqrt`; every step is kept for backward."""
    place = tl.arange(0, sigma.shape[0])
    eye = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    y = sigma
    step = 1.5 * eye - 0.5 * y
    z = step
    for t in tl.static_range(steps):
        if t > 0:
            y = small_dot(y, step)
            step = 1.5 * eye - 0.5 * small_dot(z, y)
            z = small_dot(step, z)
        tl.store(iterates + (3 * t) * K * K + offsets, y, mask=inside)
        tl.store(iterates + (3 * t + 1) * K * K + offsets, step, mask=inside)
        tl.store(iterates + (3 * t + 2) * K * K + offsets, z, mask=inside)
    return z


@triton.jit
def _newton_backward(grad, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """Gradient of the first argument of `_newton`, from that of its result."""
    grad_y = tl.zeros_like(grad)
    grad_step = tl.zeros_like(grad)
    grad_z = grad
    for back in tl.static_range(steps - 1):
        t = steps - 1 - back
        y = tl.load(iterates + (3 * t) * K * K + offsets, mask=inside, other=0.0)
        step = tl.load(iterates + (3 * t + 1) * K * K + offsets, mask=inside, other=0.0)
        y_before = tl.load(iterates + (3 * t - 3) * K * K + offsets, mask=inside, other=0.0)
        step_before = tl.load(iterates + (3 * t - 2) * K * K + offsets, mask=inside, other=0.0)
        z_before = tl.load(iterates + (3 * t - 1) * K * K + offsets, mask=inside, other=0.0)
        grad_step += small_dot(grad_z, tl.trans(z_before))
        grad_zy = -0.5 * grad_step
        grad_y += small_dot(tl.trans(z_before), grad_zy)
        grad_z = small_dot(tl.trans(step), grad_z) + small_dot(grad_zy, tl.trans(y))
        grad_step = small_dot(tl.trans(y_before), grad_y)
        grad_y = small_dot(grad_y, tl.trans(step_before))
    return grad_y - 0.5 * (grad_z + grad_step)


@triton.jit
def _forward_kernel(
    mean_ptr,  # (N·splits, C), or None
    square_ptr,  # (N·splits, C)
    pooled_mean_ptr,  # (N, C), or None
    gram_ptr,  # (rows, G, K, K), or None
    weight_ptr,  # (C,), or None
    bias_ptr,  # (C,), or None
    running_mean_ptr,  # (C,), or None
    running_var_ptr,  # (C,), or None
    running_inv_sqrt_ptr,  # (G, K, K), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (8, C)
    out_mean_ptr,  # (N, C)
    out_var_ptr,  # (N, C)
    s_ptr,  # (G,)
    inv_sqrt_ptr,  # (G, K, K)
    P_ptr,  # (G, K, K)
    cov_ptr,  # (G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    N,
    C,
    L,
    G,
    windows,
    rows,
    splits,
    split_pixels,
    norm_eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
):
    group = tl.program_id(0)
    place = tl.arange(0, KP)
    channel = group * K + place
    valid = (place < K) & (channel < C)
    gamma = tl.where(valid, 1.0, 0.0)
    if weight_ptr is not None:
        gamma = tl.load(weight_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    beta = tl.zeros((KP,), tl.float32)
    if bias_ptr is not None:
        beta = tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)

    # the norm: x̂ = (x − center) · rstd
    parts = N * splits
    pixels = tl.cast(N, tl.float32) * L
    center = tl.zeros((KP,), tl.float32)
    if NORM == _RUNNING:
        center = tl.load(running_mean_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    elif (NORM == _BATCH) or (BD == _BATCH) or (IR == _BATCH):
        center = _mean_of_parts(mean_ptr, channel, valid, parts, splits, split_pixels, L, C, KP, BN)
    # within the parts and between them, per channel and for the group; instance moments
    squares = tl.zeros((KP,), tl.float32)
    instances = tl.zeros((KP,), tl.float32)
    between = tl.zeros((KP, KP), tl.float32)
    if mean_ptr is not None:
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            mask = (n < N)[:, None] & valid[None, :]
            instance_mean = tl.zeros((BN, KP), tl.float32)
            instance_square = tl.zeros((BN, KP), tl.float32)
            for split in range(0, splits):
                part = n * splits + split
                weight = _part_pixels(part, splits, split_pixels, L)[:, None]
                mean, _ = _load_rows(mean_ptr, part, channel, valid, parts, C)
                square, _ = _load_rows(square_ptr, part, channel, valid, parts, C)
                apart = tl.where(mask, mean - center[None, :], 0.0)
                instance_mean += apart * (weight / L)
                instance_square += square
                squares += tl.sum(square + weight * apart * apart, 0)
                if (BD == _BATCH) and (pooled_mean_ptr is None):
                    between += dot(tl.trans(apart * weight), apart)
            if IR > 0:
                if splits > 1:
                    for split in range(0, splits):
                        part = n * splits + split
                        weight = _part_pixels(part, splits, split_pixels, L)[:, None]
                        mean, _ = _load_rows(mean_ptr, part, channel, valid, parts, C)
                        apart = tl.where(mask, mean - center[None, :] - instance_mean, 0.0)
                        instance_square += weight * apart * apart
                offsets = n[:, None].to(tl.int64) * C + channel[None, :]
                tl.store(out_mean_ptr + offsets, instance_mean, mask=mask)
                tl.store(out_var_ptr + offsets, instance_square / L, mask=mask)
                instances += tl.sum(instance_square / L, 0)
    var = squares / pixels
    rstd = tl.where(valid, 1.0, 0.0)
    if NORM == _RUNNING:
        var = tl.load(running_var_ptr + channel, mask=valid, other=1.0).to(tl.float32)
    if (NORM == _BATCH) or (NORM == _RUNNING):
        rstd = tl.where(valid, 1 / tl.sqrt(var + norm_eps), 0.0)
    else:
        beta = center  # x = x̂ + center
    scale = gamma * rstd
    if IR == _BATCH:
        tl.store(s_ptr + group, tl.sum(instances * scale * scale))

    # decorrelation
    offset = tl.zeros((KP,), tl.float32)
    pooled = tl.zeros((KP,), tl.float32)
    if BD > 0:
        i, j = place[:, None], place[None, :]
        inside = valid[:, None] & valid[None, :]
        whole = (i < K) & (j < K)
        eye = tl.where(i == j, 1.0, 0.0)
        offsets = i * K + j
        matrix = group.to(tl.int64) * K * K + offsets
        if BD == _BATCH:
            cov = _sum_of_grams(gram_ptr, group, rows, C, G, K, KP, BR)
            if pooled_mean_ptr is not None:
                pooled = _mean_of_parts(pooled_mean_ptr, channel, valid, N, 1, L, L, C, KP, BN)
                for start in range(0, N, BN):
                    n = start + tl.arange(0, BN)
                    mean, mask = _load_rows(pooled_mean_ptr, n, channel, valid, N, C)
                    apart = tl.where(mask, mean - pooled[None, :], 0.0)
                    between += dot(tl.trans(apart), apart)
                cov = (cov / windows + between) / N
                pooled = (pooled - center) * rstd
            else:
                cov = (cov + between) / pixels
            cov = tl.where(inside, cov * rstd[:, None] * rstd[None, :], 0.0)
            tl.store(cov_ptr + matrix, cov, mask=whole)
            sigma = cov * gamma[:, None] * gamma[None, :]
            trace = tl.sum(tl.sum(sigma * eye, 0))
            channels = tl.sum(tl.where(valid, 1.0, 0.0))
            sigma += tl.where(inside, eye * (_RIDGE * trace / channels + _RIDGE_FLOOR), 0.0)
            trace = tl.sum(tl.sum(sigma * eye, 0))
            iterates = iterates_ptr + group.to(tl.int64) * 3 * STEPS * K * K
            W = _newton(sigma / trace, iterates, whole, offsets, STEPS, K)
            W = tl.where(inside, W, eye)
            tl.store(inv_sqrt_ptr + matrix, W, mask=whole)
        else:
            W = tl.load(running_inv_sqrt_ptr + matrix, mask=whole, other=0.0).to(tl.float32)
            tl.store(inv_sqrt_ptr + matrix, W, mask=whole)
        W = load_blend(blend_ptr) * load_lambda(mix_logit_ptr, 1.0) * W
        tl.store(P_ptr + matrix, W * gamma[None, :], mask=whole)
        offset = tl.sum(W * beta[None, :], 1)

    tl.store(values_ptr + channel, center, mask=valid)
    tl.store(values_ptr + C + channel, rstd, mask=valid)
    tl.store(values_ptr + 2 * C + channel, gamma, mask=valid)
    tl.store(values_ptr + 3 * C + channel, beta, mask=valid)
    tl.store(values_ptr + 4 * C + channel, offset, mask=valid)
    tl.store(values_ptr + 5 * C + channel, var, mask=valid)
    tl.store(values_ptr + 6 * C + channel, pooled, mask=valid)
    tl.store(values_ptr + 7 * C + channel, scale, mask=valid)


@triton.jit
def _backward_kernel(
    grad_P_ptr,  # (rows, G, K, K), or None
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    grad_u_ptr,  # (N, C), or None
    gate_scalars_ptr,  # (blocks, 2), or None
    values_ptr,  # (8, C)
    mean_ptr,  # (N, C)
    var_ptr,  # (N, C)
    w_ptr,  # (N, C), or None
    inv_std_ptr,  # (), or None
    inv_sqrt_ptr,  # (G, K, K)
    cov_ptr,  # (G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    size_ptr,  # (G,)
    pooled_offset_ptr,  # (C,), or None
    grad_gamma_ptr,  # (C,)
    grad_beta_ptr,  # (C,)
    scalars_ptr,  # (G, 2)
    N,
    C,
    L,
    G,
    windows,
    rows,
    splits,
    blocks,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    SCALE: tl.constexpr,
):
    group = tl.program_id(0)
    place = tl.arange(0, KP)
    channel = group * K + place
    valid = (place < K) & (channel < C)
    gamma = tl.load(values_ptr + 2 * C + channel, mask=valid, other=0.0)
    beta = tl.load(values_ptr + 3 * C + channel, mask=valid, other=0.0)
    rstd = tl.load(values_ptr + C + channel, mask=valid, other=0.0)
    pixels = tl.cast(N, tl.float32) * L

    # u = σ̃² r² and s = mean of σ̃², where σ̃² = γ² v̂: what σ̃² gets is gu r² plus one number for all
    r2 = 0.0
    through_s = 0.0
    if IR > 0:
        r = tl.load(inv_std_ptr)
        r2 = r * r
        if IR == _BATCH:
            share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0))
            grad_r = share * sum_of_scalars(gate_scalars_ptr, 0, blocks)
            grad_r += 2 * r * sum_of_scalars(gate_scalars_ptr, 1, blocks)
            through_s = -0.5 * r2 * r * grad_r / N / C

    grad_c_rows = tl.zeros((BN, KP), tl.float32)
    grad_d_rows = tl.zeros((BN, KP), tl.float32)
    grad_gamma_rows = tl.zeros((BN, KP), tl.float32)
    grad_beta_rows = tl.zeros((BN, KP), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        grad_d = _sum_of_splits(grad_d_ptr, n, channel, valid, N, C, splits)
        grad_c = _sum_of_splits(grad_c_ptr, n, channel, valid, N, C, splits)
        grad_c_rows += grad_c
        grad_d_rows += grad_d
        if w_ptr is not None:
            w, _ = _load_rows(w_ptr, n, channel, valid, N, C)
            grad_gamma_rows += grad_d * w
            grad_beta_rows += grad_c * w
        if IR > 0:
            var, _ = _load_rows(var_ptr, n, channel, valid, N, C)
            grad_u, _ = _load_rows(grad_u_ptr, n, channel, valid, N, C)
            twice = (2 * gamma * rstd * rstd)[None, :]
            grad_gamma_rows += twice * var * (grad_u * r2 + through_s)
    grad_c_sum = tl.sum(grad_c_rows, 0)
    grad_w_sum = tl.sum(grad_d_rows, 0) * gamma + grad_c_sum * beta
    grad_gamma = tl.sum(grad_gamma_rows, 0)
    grad_beta = tl.sum(grad_beta_rows, 0)

    through_W = 0.0
    size = 0.0
    if BD > 0:
        i, j = place[:, None], place[None, :]
        inside = valid[:, None] & valid[None, :]
        whole = (i < K) & (j < K)
        eye = tl.where(i == j, 1.0, 0.0)
        offsets = i * K + j
        matrix = group.to(tl.int64) * K * K + offsets
        W = tl.load(inv_sqrt_ptr + matrix, mask=inside, other=0.0)
        share = load_blend(blend_ptr) * load_lambda(mix_logit_ptr, 1.0)
        grad_P = _sum_of_grams(grad_P_ptr, group, rows, C, G, K, KP, BR)
        grad_M = grad_P * gamma[None, :] + grad_c_sum[:, None] * beta[None, :]
        through_W = tl.sum(tl.sum(W * grad_M, 0))
        grad_gamma += share * tl.sum(W * grad_P, 0)
        grad_beta += share * tl.sum(W * grad_c_sum[:, None], 0)
        if BD == _BATCH:
            cov = tl.load(cov_ptr + matrix, mask=inside, other=0.0)
            sigma = cov * gamma[:, None] * gamma[None, :]
            trace = tl.sum(tl.sum(sigma * eye, 0))
            channels = tl.sum(tl.where(valid, 1.0, 0.0))
            ridge = _RIDGE * trace / channels + _RIDGE_FLOOR
            trace = trace + channels * ridge
            iterates = iterates_ptr + group.to(tl.int64) * 3 * STEPS * K * K
            grad_S = _newton_backward(share * grad_M, iterates, inside, offsets, STEPS, K)
            S = (sigma + tl.where(inside, eye * ridge, 0.0)) / trace
            grad_sigma = (grad_S - eye * tl.sum(tl.sum(grad_S * S, 0))) / trace
            grad_sigma = tl.where(inside, grad_sigma, 0.0)
            grad_trace = tl.sum(tl.sum(grad_sigma * eye, 0))
            grad_sigma += tl.where(inside, eye * (_RIDGE * grad_trace / channels), 0.0)
            grad_sigma = grad_sigma + tl.trans(grad_sigma)
            grad_gamma += tl.sum(grad_sigma * cov * gamma[:, None], 0)
            measured = pixels
            if pooled_offset_ptr is not None:
                measured = tl.cast(N, tl.float32) * windows
            Q = grad_sigma * gamma[:, None] * gamma[None, :] / measured
            if pooled_offset_ptr is not None:
                pooled = tl.load(values_ptr + 6 * C + channel, mask=valid, other=0.0)
                pooled_offset = -tl.sum(Q * pooled[:, None], 0)
                tl.store(pooled_offset_ptr + channel, pooled_offset, mask=valid)
            if SCALE:
                size = tl.max(tl.max(tl.abs(Q), 0))

    mean_grad = tl.zeros((KP,), tl.float32)
    slope_grad = tl.zeros((KP,), tl.float32)
    if NORM == _BATCH:
        mean_grad = gamma * grad_beta / pixels
        slope_grad = gamma * grad_gamma / pixels
    if SCALE:
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            e, _ = _variance_gradient(
                grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L, KP, BN, IR
            )
            size = tl.maximum(size, tl.max(tl.max(tl.abs(e - slope_grad[None, :]), 0)))
        size = tl.where(size > 0, size, 1.0)
    else:
        size = 1.0
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        e, mask = _variance_gradient(
            grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L, KP, BN, IR
        )
        f = -mean_grad[None, :]
        if IR > 0:
            f -= e * rstd[None, :] * _load_rows(mean_ptr, n, channel, valid, N, C)[0]
        rows_offset = n[:, None].to(tl.int64) * C + channel[None, :]
        tl.store(e_ptr + rows_offset, (e - slope_grad[None, :]) / size, mask=mask)
        tl.store(f_ptr + rows_offset, f + tl.zeros_like(e), mask=mask)
    if BD == _BATCH:
        tl.store(Q_ptr + matrix, Q / size, mask=whole)
    tl.store(size_ptr + group, size)
    tl.store(grad_gamma_ptr + channel, grad_gamma, mask=valid)
    tl.store(grad_beta_ptr + channel, grad_beta, mask=valid)
    tl.store(scalars_ptr + group * 2, through_W)
    tl.store(scalars_ptr + group * 2 + 1, tl.sum(grad_w_sum))


@triton.jit
def _sum_of_splits(ptr, n, channel, valid, N, C, splits):
    total, _ = _load_rows(ptr, n * splits, channel, valid, N * splits, C)
    for split in range(1, splits):
        total += _load_rows(ptr, n * splits + split, channel, valid, N * splits, C)[0]
    return total


@triton.jit
def _variance_gradient(
    grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L,
    KP: tl.constexpr, BN: tl.constexpr, IR: tl.constexpr,
):  # fmt: skip
    """2/L times the gradient of v̂."""
    mask = (n < N)[:, None] & valid[None, :]
    if IR == 0:
        return tl.zeros((BN, KP), tl.float32), mask
    else:
        grad_u, _ = _load_rows(grad_u_ptr, n, channel, valid, N, C)
        return 2 / L * (gamma * gamma)[None, :] * (grad_u * r2 + through_s), mask


def groups_forward(
    parts: Parts | None,
    shape: torch.Size,
    group_size: int,
    mode: Mode,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    inv_sqrt: Tensor | None,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    norm_eps: float,
    steps: int,
    pool: int,
    device: torch.device,
) -> tuple[Statistics, Tensor]:
    """Statistics and map from the parts of the measuring pass (None if nothing is measured).

    The second result is Σ σ̃² of each group, (G,), for the gate.
    """
    n, channels, height, width = shape
    groups = -(-channels // group_size)
    small = {"dtype": torch.float32, "device": device}
    matrix = (groups, group_size, group_size)
    out = Statistics(
        torch.empty(8, channels, **small),
        torch.empty(2, n if mode.ir != ABSENT else 0, channels, **small),
        torch.empty(3, *(matrix if mode.bd != ABSENT else (0, 0, 0)), **small),
        torch.empty(groups if mode.bd == BATCH else 0, 3 * steps, *matrix[1:], **small),
    )
    s_parts = torch.empty(groups, **small)
    found = parts or Parts(None, None, None, None, 1, height * width)
    _forward_kernel[(groups,)](
        found.mean, found.square, found.pooled_mean, found.gram, weight, bias, running_mean,
        running_var, inv_sqrt, mix_logit, blend, out.values, *out.instances, s_parts, *out.matrices,
        out.iterates, n, channels, height * width, groups, -(-height // pool) * -(-width // pool),
        0 if found.gram is None else len(found.gram), found.splits, found.split_pixels, norm_eps,
        STEPS=steps, **_constants(group_size, mode),
    )  # fmt: skip
    return out, s_parts


def groups_backward(
    sums: Sums,
    shape: torch.Size,
    mapping: Map,
    mode: Mode,
    found: Statistics,
    gate: GateState | None,
    gate_grad: GateGradient | None,
    *,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    steps: int,
    pool: int,
    half: bool,
) -> GroupsGradient:
    """Gradients of γ and β, and what dx gets through the statistics.

    With `half`, Q and e are scaled to fit float16.
    """
    n, channels, height, width = shape
    small = {"dtype": torch.float32, "device": found.values.device}
    group_size = mapping.group_size
    groups = -(-channels // group_size)
    W, _, cov = found.matrices
    Q = None if mode.bd != BATCH else torch.empty_like(cov)
    pooled_offset = torch.empty(channels, **small) if mode.bd == BATCH and pool > 1 else None
    e, f = torch.empty(2, n, channels, **small)
    grad_gamma, grad_beta = torch.empty(channels, **small), torch.empty(channels, **small)
    size, scalars = torch.empty(groups, **small), torch.empty(groups, 2, **small)
    _backward_kernel[(groups,)](
        sums.P, sums.d, sums.c, gate_grad and gate_grad.u, gate_grad and gate_grad.scalars,
        found.values, *found.instances, mapping.w, gate and gate.inv_std, W, cov,
        found.iterates, mix_logit, blend, Q, e, f, size, pooled_offset, grad_gamma,
        grad_beta, scalars, n, channels, height * width, groups,
        -(-height // pool) * -(-width // pool), 0 if sums.P is None else len(sums.P), sums.splits,
        0 if gate_grad is None else len(gate_grad.scalars), STEPS=steps, SCALE=half,
        **_constants(group_size, mode),
    )  # fmt: skip
    through = StatisticsGradient(Q, e, f, size, pooled_offset)
    return GroupsGradient(through, grad_gamma, grad_beta, scalars)


def _constants(group_size: int, mode: Mode) -> dict[str, int]:
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
