"""Backward of the norm and of the statistics of one group, before and after decorrelation.

Norm and block are one function of x̂ = (x − μ) · rstd. Loss and block depend on γ and x̂ only through
γ ⊙ x̂ + β, so what batch norm subtracts from the gradient of x̂ is known without another sum over
pixels: its mean is γ gβ / M, its mean against x̂ is γ gγ / M.

Jobs of a program, put into kernels by `between_backward`.
"""

import triton
import triton.language as tl

from cenet.kernels.gate import load_blend, load_lambda
from cenet.kernels.gate_backward import sum_of_scalars
from cenet.kernels.statistics import (
    IS_BATCH,
    chunk_parts,
    gram_rows,
    group_channels,
    load_rows,
    store_gram,
    sum_of_grams,
    sum_of_rows,
)


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
    tl.store(sums_ptr + one, tl.sum(grad_d, 0), mask=valid)
    if w_ptr is not None:
        w, _ = load_rows(w_ptr, tl.where(inside, n, N), channel, valid, N, C)
        tl.store(sums_ptr + 2 * one, tl.sum(grad_c * w, 0), mask=valid)
        tl.store(sums_ptr + 3 * one, tl.sum(grad_d * w, 0), mask=valid)
    if grad_P_ptr is not None:
        first, last = gram_rows(chunk, N * splits, SAMPLES * splits, together)
        gram = sum_of_grams(grad_P_ptr, group, first, last, C, G, K, KP, BR)
        store_gram(P_sums_ptr, chunk, group, G, place, gram, K)


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
        grad_u, _ = load_rows(grad_u_ptr, n, channel, valid, N, C)
        return 2 / L * (gamma * gamma)[None, :] * (grad_u * r2 + through_s), mask


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
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    grad_gamma_ptr,  # (C,)
    grad_beta_ptr,  # (C,)
    scalars_ptr,  # (G, 2): Σ gw is the second
    N,
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
    """γ, β, and what dx gets through the statistics of a group, for BN samples."""
    place, channel, valid = group_channels(group, C, K, KP)
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
        if IR == IS_BATCH:
            share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0))
            grad_r = share * sum_of_scalars(gate_scalars_ptr, 0, blocks)
            grad_r += 2 * r * sum_of_scalars(gate_scalars_ptr, 1, blocks)
            through_s = -0.5 * r2 * r * grad_r / N / C

    one = tl.cast(chunks, tl.int64) * C
    grad_gamma = tl.zeros((KP,), tl.float32)
    grad_beta = tl.zeros((KP,), tl.float32)
    if WEIGHED:
        grad_beta += sum_of_rows(sums_ptr + 2 * one, channel, valid, chunks, C, KP, BS)
        grad_gamma += sum_of_rows(sums_ptr + 3 * one, channel, valid, chunks, C, KP, BS)
    if IR > 0:
        through_var = r2 * sum_of_rows(through_var_ptr, channel, valid, rows, C, KP, BS)
        through_var += through_s * tl.load(values_ptr + 9 * C + channel, mask=valid, other=0.0)
        grad_gamma += 2 * gamma * rstd * rstd * through_var

    centering = tl.zeros((KP,), tl.float32)
    if BD > 0:
        grad_gamma += tl.load(affine_ptr + channel, mask=valid, other=0.0)
        grad_beta += tl.load(affine_ptr + C + channel, mask=valid, other=0.0)
    if BD == IS_BATCH:
        i, j = place[:, None], place[None, :]
        whole = (i < K) & (j < K)
        matrix = group.to(tl.int64) * K * K + i * K + j
        Q = tl.load(Q_ptr + matrix, mask=whole, other=0.0)
        if not POOLED:
            # Q acts on x̂ − its mean, which is 0 unless the norm uses running statistics
            mean = tl.load(values_ptr + 6 * C + channel, mask=valid, other=0.0)
            centering = tl.sum(Q * mean[:, None], 0)

    mean_grad = tl.zeros((KP,), tl.float32)
    slope_grad = tl.zeros((KP,), tl.float32)
    if NORM == IS_BATCH:
        mean_grad = gamma * grad_beta / pixels
        slope_grad = gamma * grad_gamma / pixels
    n = chunk * BN + tl.arange(0, BN)
    e, mask = _variance_gradient(
        grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L, KP, BN, IR
    )
    f = -(mean_grad + centering)[None, :]
    if IR > 0:
        apart = tl.load(values_ptr + 8 * C + channel, mask=valid, other=0.0)[None, :]
        apart += load_rows(instances_ptr, n, channel, valid, N, C)[0]
        f -= e * rstd[None, :] * apart
    rows_offset = n[:, None].to(tl.int64) * C + channel[None, :]
    tl.store(e_ptr + rows_offset, e - slope_grad[None, :], mask=mask)
    tl.store(f_ptr + rows_offset, f + tl.zeros_like(e), mask=mask)
    if chunk == 0:
        grad_w = gamma * sum_of_rows(sums_ptr + one, channel, valid, chunks, C, KP, BS)
        grad_w += beta * sum_of_rows(sums_ptr, channel, valid, chunks, C, KP, BS)
        tl.store(grad_gamma_ptr + channel, grad_gamma, mask=valid)
        tl.store(grad_beta_ptr + channel, grad_beta, mask=valid)
        tl.store(scalars_ptr + group * 2 + 1, tl.sum(grad_w))
