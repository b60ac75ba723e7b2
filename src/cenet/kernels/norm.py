"""The norm inside the kernels: x̂ = (x − center) · rstd, and its backward. Jobs of one program.

Forward: `settle_norm` finds center and rstd of a group's channels, from the chunks or from running
statistics. Backward: `collect` sums over a chunk of samples before decorrelation is differentiated,
`finish_group` does the rest of a group after it.

Norm and block are one function of x̂. Loss and block depend on γ and x̂ only through γ ⊙ x̂ + β, so
the terms that batch norm subtracts from the gradient of x̂ need no other sum over pixels: its mean
is γ gβ / M, and the mean of its product with x̂ is γ gγ / M.

`coefficients` puts these jobs into kernels.
"""

import triton
import triton.language as tl

from cenet.kernels.moments import (
    chunk_parts,
    chunk_samples,
    gram_rows,
    group_channels,
    load_rows,
    store_gram,
    sum_of_grams,
    sum_of_rows,
)
from cenet.kernels.tiles import (
    BETA,
    CENTER,
    GAMMA,
    GRAD_C_W,
    GRAD_D,
    GRAD_D_W,
    IS_BATCH,
    IS_RUNNING,
    MEAN,
    ORIGIN,
    RSTD,
    SCALE,
    SPREAD,
    VARIANCE,
    load_blend,
    load_lambda,
    load_value,
    store_value,
)


@triton.jit
def mean_of_chunks(
    mean_ptr, channel, valid, N, C, chunks, samples, BW: tl.constexpr, BS: tl.constexpr
):
    """Mean over the batch, as a distance from the origin."""
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
    channel, valid, origin_ptr, shift_ptr, mean_ptr, square_ptr, spread_ptr, weight_ptr, bias_ptr,
    running_mean_ptr, running_var_ptr, values_ptr, N, C, L, chunks, samples, norm_eps,
    KP: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr, BATCH_ANY: tl.constexpr,
):  # fmt: skip
    """Write the norm x̂ = (x − center) · rstd of a group, and its other rows of `values`.

    Returns origin − center, the mean of the batch as a distance from the origin, rstd, γ, β.
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
    # without running statistics of the norm, x̂ is centered at the mean of the batch
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
    store_value(values_ptr, CENTER, channel, valid, C, center)
    store_value(values_ptr, RSTD, channel, valid, C, rstd)
    store_value(values_ptr, GAMMA, channel, valid, C, gamma)
    store_value(values_ptr, BETA, channel, valid, C, beta)
    store_value(values_ptr, VARIANCE, channel, valid, C, var)
    store_value(values_ptr, SCALE, channel, valid, C, gamma * rstd)
    apart = origin - center
    if shift_ptr is not None:
        apart += tl.load(shift_ptr + channel, mask=valid, other=0.0)
    store_value(values_ptr, ORIGIN, channel, valid, C, apart)
    store_value(values_ptr, SPREAD, channel, valid, C, spread)
    return origin - center, middle, rstd, gamma, beta


@triton.jit
def collect(
    group,
    chunk,
    grad_P_ptr,  # (N·splits, G, K, K), or None
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    w_ptr,  # (N, C), or None
    P_sums_ptr,  # (S, G, K, K), or None
    sums_ptr,  # (4, S, C): of gc, gd, gc ⊙ w, gd ⊙ w
    N,
    C,
    G,
    splits,
    together,
    chunks,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Sums over a chunk of samples for a group."""
    SAMPLES: tl.constexpr = BN // SP
    place, channel, valid = group_channels(group, C, K, KP)
    n, part, inside = chunk_parts(chunk, N, splits, SAMPLES, SP, BN)
    grad_c, _ = load_rows(grad_c_ptr, part, channel, valid, N * splits, C)
    grad_d, _ = load_rows(grad_d_ptr, part, channel, valid, N * splits, C)
    sums_ptr += tl.cast(chunk, tl.int64) * C + channel
    one = tl.cast(chunks, tl.int64) * C
    tl.store(sums_ptr, tl.sum(grad_c, 0), mask=valid)
    tl.store(sums_ptr + one * GRAD_D, tl.sum(grad_d, 0), mask=valid)
    if w_ptr is not None:
        w, _ = load_rows(w_ptr, tl.where(inside, n, N), channel, valid, N, C)
        tl.store(sums_ptr + one * GRAD_C_W, tl.sum(grad_c * w, 0), mask=valid)
        tl.store(sums_ptr + one * GRAD_D_W, tl.sum(grad_d * w, 0), mask=valid)
    if grad_P_ptr is not None:
        first, last = gram_rows(chunk, N * splits, SAMPLES * splits, together)
        gram = sum_of_grams(grad_P_ptr, group, first, last, C, G, K, KP, BR)
        store_gram(P_sums_ptr, chunk, group, G, place, gram, K)


@triton.jit
def sum_of_scalars(scalars_ptr, which, blocks):
    """Sum of one of the three columns of (blocks, 3)."""
    total = 0.0
    for start in range(0, blocks, 1024):
        block = start + tl.arange(0, 1024)
        total += tl.sum(tl.load(scalars_ptr + block * 3 + which, mask=block < blocks, other=0.0))
    return total


@triton.jit
def gradient_of_s(r, gate_scalars_ptr, mix_logit_ptr, blend_ptr, blocks):
    """Gradient of s, the mean of σ̃² over samples and channels, where r = s^{-1/2}."""
    share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0))
    grad_r = share * sum_of_scalars(gate_scalars_ptr, 0, blocks)
    grad_r += 2 * r * sum_of_scalars(gate_scalars_ptr, 1, blocks)
    return -0.5 * r * r * r * grad_r


@triton.jit
def variance_gradient(
    grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L,
    KP: tl.constexpr, BN: tl.constexpr, IR: tl.constexpr,
):  # fmt: skip
    """2/L times the gradient of v̂."""
    mask = (n < N)[:, None] & valid[None, :]
    if IR == 0:
        return tl.zeros((BN, KP), tl.float32), mask
    else:
        grad_u, _ = load_rows(grad_u_ptr, n, channel, valid, N, C)
        return 2 / L * (gamma * gamma)[None, :] * (grad_u * r2 + through_s), mask


@triton.jit
def instance_means(values_ptr, instances_ptr, n, channel, valid, N, C):
    """Means of samples as distances from the center."""
    apart = load_value(values_ptr, ORIGIN, channel, valid, C)[None, :]
    return apart + load_rows(instances_ptr, n, channel, valid, N, C)[0]


@triton.jit
def finish_group(
    group,
    chunk,
    sums_ptr,  # (4, S, C)
    grad_u_ptr,  # (N, C), or None
    through_var_ptr,  # (rows, C), or None
    gate_scalars_ptr,  # (blocks, 3), or None
    values_ptr,  # (10, C)
    instances_ptr,  # (2, N, C)
    inv_std_ptr,  # (), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    affine_ptr,  # (2, C)
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C), or None: ranks are merged first
    f_ptr,  # (N, C)
    grad_gamma_ptr,  # (C,)
    grad_beta_ptr,  # (C,)
    scalars_ptr,  # (G, 2): Σ gw is the second
    N,
    batch,
    C,
    L,
    chunks,
    rows,
    blocks,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    WEIGHED: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Gradients of γ and β, and e and f of dx, for a group and BN samples."""
    place, channel, valid = group_channels(group, C, K, KP)
    gamma = load_value(values_ptr, GAMMA, channel, valid, C)
    beta = load_value(values_ptr, BETA, channel, valid, C)
    rstd = load_value(values_ptr, RSTD, channel, valid, C)

    # u = σ̃² r² and s = mean of σ̃², where σ̃² = γ² v̂. So the gradient of σ̃² is gu r² plus one number
    # that all samples and channels share
    r2 = 0.0
    through_s = 0.0
    if IR > 0:
        r = tl.load(inv_std_ptr)
        r2 = r * r
        if IR == IS_BATCH:
            through_s = gradient_of_s(r, gate_scalars_ptr, mix_logit_ptr, blend_ptr, blocks)
            through_s = through_s / batch / C

    one = tl.cast(chunks, tl.int64) * C
    grad_gamma = tl.zeros((KP,), tl.float32)
    grad_beta = tl.zeros((KP,), tl.float32)
    if WEIGHED:
        grad_beta += sum_of_rows(sums_ptr + one * GRAD_C_W, channel, valid, chunks, C, KP, BS)
        grad_gamma += sum_of_rows(sums_ptr + one * GRAD_D_W, channel, valid, chunks, C, KP, BS)
    if IR > 0:
        through_var = r2 * sum_of_rows(through_var_ptr, channel, valid, rows, C, KP, BS)
        through_var += through_s * load_value(values_ptr, SPREAD, channel, valid, C)
        grad_gamma += 2 * gamma * rstd * rstd * through_var

    if BD > 0:
        grad_gamma += tl.load(affine_ptr + channel, mask=valid, other=0.0)
        grad_beta += tl.load(affine_ptr + C + channel, mask=valid, other=0.0)
    if e_ptr is not None:
        centering = tl.zeros((KP,), tl.float32)
        if BD == IS_BATCH:
            i, j = place[:, None], place[None, :]
            whole = (i < K) & (j < K)
            matrix = group.to(tl.int64) * K * K + i * K + j
            Q = tl.load(Q_ptr + matrix, mask=whole, other=0.0)
            if not POOLED:
                # Q acts on x̂ − mean; the mean is 0 unless the norm uses running statistics
                mean = load_value(values_ptr, MEAN, channel, valid, C)
                centering = tl.sum(Q * mean[:, None], 0)
        mean_grad = tl.zeros((KP,), tl.float32)
        slope_grad = tl.zeros((KP,), tl.float32)
        if NORM == IS_BATCH:
            pixels = tl.cast(N, tl.float32) * L
            mean_grad = gamma * grad_beta / pixels
            slope_grad = gamma * grad_gamma / pixels
        n = chunk * BN + tl.arange(0, BN)
        e, mask = variance_gradient(
            grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L, KP, BN, IR
        )
        f = -(mean_grad + centering)[None, :]
        if IR > 0:
            apart = instance_means(values_ptr, instances_ptr, n, channel, valid, N, C)
            f -= e * rstd[None, :] * apart
        rows_offset = n[:, None].to(tl.int64) * C + channel[None, :]
        tl.store(e_ptr + rows_offset, e - slope_grad[None, :], mask=mask)
        tl.store(f_ptr + rows_offset, f + tl.zeros_like(e), mask=mask)
    if chunk == 0:
        grad_w = gamma * sum_of_rows(sums_ptr + one * GRAD_D, channel, valid, chunks, C, KP, BS)
        grad_w += beta * sum_of_rows(sums_ptr, channel, valid, chunks, C, KP, BS)
        tl.store(grad_gamma_ptr + channel, grad_gamma, mask=valid)
        tl.store(grad_beta_ptr + channel, grad_beta, mask=valid)
        tl.store(scalars_ptr + group * 2 + 1, tl.sum(grad_w))
