"""Backward of `groups`: what the statistics and the norm hand on to γ, β and x.

Norm and block are one function of x̂ = (x − μ) · rstd. Loss and block depend on γ and x̂ only through
γ ⊙ x̂ + β, so what batch norm subtracts from the gradient of x̂ is known without another sum over
pixels: its mean is γ gβ / M, its mean against x̂ is γ gγ / M.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.gate import GateState, load_blend, load_lambda
from cenet.kernels.gate_backward import GateGradient, sum_of_scalars
from cenet.kernels.groups import (
    BATCH,
    IS_BATCH,
    LEAST_RIDGE,
    RELATIVE_RIDGE,
    Mode,
    Statistics,
    group_constants,
    load_rows,
    sum_of_grams,
)
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map
from cenet.kernels.mix_backward import StatisticsGradient, Sums
from cenet.kernels.newton import newton_backward
from cenet.kernels.tiles import ceil_div


class GroupsGradient(NamedTuple):
    """What `groups_backward` hands on."""

    through: StatisticsGradient
    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)
    scalars: Tensor  # (G, 2): <W, gM> and Σ gw


@triton.jit
def _sum_of_splits(ptr, n, channel, valid, N, C, splits):
    total, _ = load_rows(ptr, n * splits, channel, valid, N * splits, C)
    for split in range(1, splits):
        total += load_rows(ptr, n * splits + split, channel, valid, N * splits, C)[0]
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
        grad_u, _ = load_rows(grad_u_ptr, n, channel, valid, N, C)
        return 2 / L * (gamma * gamma)[None, :] * (grad_u * r2 + through_s), mask


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
        if IR == IS_BATCH:
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
            w, _ = load_rows(w_ptr, n, channel, valid, N, C)
            grad_gamma_rows += grad_d * w
            grad_beta_rows += grad_c * w
        if IR > 0:
            var, _ = load_rows(var_ptr, n, channel, valid, N, C)
            grad_u, _ = load_rows(grad_u_ptr, n, channel, valid, N, C)
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
        grad_P = sum_of_grams(grad_P_ptr, group, rows, C, G, K, KP, BR)
        grad_M = grad_P * gamma[None, :] + grad_c_sum[:, None] * beta[None, :]
        through_W = tl.sum(tl.sum(W * grad_M, 0))
        grad_gamma += share * tl.sum(W * grad_P, 0)
        grad_beta += share * tl.sum(W * grad_c_sum[:, None], 0)
        if BD == IS_BATCH:
            cov = tl.load(cov_ptr + matrix, mask=inside, other=0.0)
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
    if NORM == IS_BATCH:
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
            f -= e * rstd[None, :] * load_rows(mean_ptr, n, channel, valid, N, C)[0]
        rows_offset = n[:, None].to(tl.int64) * C + channel[None, :]
        tl.store(e_ptr + rows_offset, (e - slope_grad[None, :]) / size, mask=mask)
        tl.store(f_ptr + rows_offset, f + tl.zeros_like(e), mask=mask)
    if BD == IS_BATCH:
        tl.store(Q_ptr + matrix, Q / size, mask=whole)
    tl.store(size_ptr + group, size)
    tl.store(grad_gamma_ptr + channel, grad_gamma, mask=valid)
    tl.store(grad_beta_ptr + channel, grad_beta, mask=valid)
    tl.store(scalars_ptr + group * 2, through_W)
    tl.store(scalars_ptr + group * 2 + 1, tl.sum(grad_w_sum))


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
    group_size = mapping.group_size
    groups = ceil_div(channels, group_size)
    W, _, cov = found.matrices
    Q = None if mode.bd != BATCH else torch.empty_like(cov)
    device = found.values.device
    pooled_offset = empty(device, channels) if mode.bd == BATCH and pool > 1 else None
    e, f = empty(device, 2, n, channels)
    grad_gamma, grad_beta = empty(device, channels), empty(device, channels)
    size, scalars = empty(device, groups), empty(device, groups, 2)
    launch(
        _backward_kernel, (groups,),
        sums.P, sums.d, sums.c, gate_grad and gate_grad.u, gate_grad and gate_grad.scalars,
        found.values, *found.instances, mapping.w, gate and gate.inv_std, W, cov,
        found.iterates, mix_logit, blend, Q, e, f, size, pooled_offset, grad_gamma,
        grad_beta, scalars, n, channels, height * width, groups,
        ceil_div(height, pool) * ceil_div(width, pool), 0 if sums.P is None else len(sums.P),
        sums.splits, 0 if gate_grad is None else len(gate_grad.scalars), STEPS=steps, SCALE=half,
        **group_constants(group_size, mode),
    )  # fmt: skip
    through = StatisticsGradient(Q, e, f, size, pooled_offset)
    return GroupsGradient(through, grad_gamma, grad_beta, scalars)
