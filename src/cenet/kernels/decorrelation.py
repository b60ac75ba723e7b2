"""Batch decorrelation of one group, the twin of `functional.decorrelation`, and its backward.

Covariance → Newton's iteration → W → P. Jobs of one program, put into kernels by `coefficients`.
"""

import triton
import triton.language as tl

from cenet.functional import RIDGE, RIDGE_FLOOR
from cenet.kernels.moments import (
    chunk_samples,
    group_channels,
    load_rows,
    sum_of_grams,
    sum_of_rows,
)
from cenet.kernels.tiles import (
    BETA,
    COVARIANCE,
    GAMMA,
    IS_BATCH,
    MAP,
    MEAN,
    OFFSET,
    dot,
    load_blend,
    load_lambda,
    load_value,
    small_dot,
    store_value,
)

RELATIVE_RIDGE = tl.constexpr(RIDGE)
LEAST_RIDGE = tl.constexpr(RIDGE_FLOOR)


@triton.jit
def newton(sigma, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """The coupled form of `functional.newton_inverse_sqrt`; every step is kept for backward."""
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
def newton_backward(grad, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """Gradient of the first argument of `newton`, from the gradient of its result."""
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
def covariance_of_chunks(
    group, mean_ptr, gram_ptr, middle, N, C, L, G, chunks, samples,
    K: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Covariance of a group over the batch, whose mean is `middle`."""
    _, channel, valid = group_channels(group, C, K, KP)
    cov = sum_of_grams(gram_ptr, group, 0, chunks, C, G, K, KP, BR)
    for start in range(0, chunks, BS):
        chunk = start + tl.arange(0, BS)
        mean, mask = load_rows(mean_ptr, chunk, channel, valid, chunks, C)
        apart = tl.where(mask, mean - middle[None, :], 0.0)
        weight = chunk_samples(chunk, N, samples)[:, None] * L
        cov += dot(tl.trans(apart * weight), apart)
    return cov / (tl.cast(N, tl.float32) * L)


@triton.jit
def decorrelate(
    group,
    mean_ptr,  # (S, C), of the pooled x if pooled
    gram_ptr,  # (S, G, K, K), or None
    running_inv_sqrt_ptr,  # (G, K, K), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (10, C): writes offset
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    middle,
    rstd,
    gamma,
    beta,
    N,
    C,
    L,  # pixels per sample of the map whose covariance is taken
    G,
    chunks,
    samples,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
):
    """W by Newton's iteration, or the running one; P = αλ W Diag(γ) and the offset αλ W β."""
    place, channel, valid = group_channels(group, C, K, KP)
    size = tl.cast(G, tl.int64) * K * K
    i, j = place[:, None], place[None, :]
    inside = valid[:, None] & valid[None, :]
    whole = (i < K) & (j < K)
    eye = tl.where(i == j, 1.0, 0.0)
    offsets = i * K + j
    matrix = group.to(tl.int64) * K * K + offsets
    if BD == IS_BATCH:
        cov = covariance_of_chunks(
            group, mean_ptr, gram_ptr, middle, N, C, L, G, chunks, samples, K, KP, BR, BS
        )
        cov = tl.where(inside, cov * rstd[:, None] * rstd[None, :], 0.0)
        tl.store(matrices_ptr + size * COVARIANCE + matrix, cov, mask=whole)
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
    tl.store(matrices_ptr + size * MAP + matrix, W * gamma[None, :], mask=whole)
    store_value(values_ptr, OFFSET, channel, valid, C, tl.sum(W * beta[None, :], 1))


@triton.jit
def decorrelate_backward(
    group,
    grad_P_ptr,  # (S, G, K, K)
    sums_ptr,  # (4, S, C): the first are those of gc
    values_ptr,  # (10, C)
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
    chunks,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
):
    """Gradients of γ, β and the covariance; Q · x̂ is the gradient of x̂ through the latter."""
    place, channel, valid = group_channels(group, C, K, KP)
    gamma = load_value(values_ptr, GAMMA, channel, valid, C)
    beta = load_value(values_ptr, BETA, channel, valid, C)
    size = tl.cast(G, tl.int64) * K * K
    grad_c_sum = sum_of_rows(sums_ptr, channel, valid, chunks, C, KP, BS)
    i, j = place[:, None], place[None, :]
    inside = valid[:, None] & valid[None, :]
    whole = (i < K) & (j < K)
    eye = tl.where(i == j, 1.0, 0.0)
    offsets = i * K + j
    matrix = group.to(tl.int64) * K * K + offsets
    W = tl.load(matrices_ptr + matrix, mask=inside, other=0.0)
    share = load_blend(blend_ptr) * load_lambda(mix_logit_ptr, 1.0)
    grad_P = sum_of_grams(grad_P_ptr, group, 0, chunks, C, G, K, KP, BR)
    grad_M = grad_P * gamma[None, :] + grad_c_sum[:, None] * beta[None, :]
    through_W = tl.sum(tl.sum(W * grad_M, 0))
    grad_gamma = share * tl.sum(W * grad_P, 0)
    grad_beta = share * tl.sum(W * grad_c_sum[:, None], 0)
    if BD == IS_BATCH:
        cov = tl.load(matrices_ptr + size * COVARIANCE + matrix, mask=inside, other=0.0)
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
            pooled = load_value(values_ptr, MEAN, channel, valid, C)
            pooled_offset = -tl.sum(Q * pooled[:, None], 0)
            tl.store(pooled_offset_ptr + channel, pooled_offset, mask=valid)
        tl.store(Q_ptr + matrix, Q, mask=whole)
    tl.store(affine_ptr + channel, grad_gamma, mask=valid)
    tl.store(affine_ptr + C + channel, grad_beta, mask=valid)
    tl.store(scalars_ptr + group * 2, through_W)
