"""Between the backward passes: what the statistics and the norm hand on to γ, β, the gate and x.

Norm and block are one function of x̂ = (x − μ) · rstd. Loss and block depend on γ and x̂ only through
γ ⊙ x̂ + β, so what batch norm subtracts from the gradient of x̂ is known without another sum over
pixels: its mean is γ gβ / M, its mean against x̂ is γ gγ / M.

Jobs that do not need each other share a launch: decorrelation and the gate's hidden layer first,
the rest of each group and the gate's weights last, the variances between them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.between import between_constants
from cenet.kernels.decorrelation import decorrelate_backward, sum_of_splits
from cenet.kernels.gate import (
    DEPTH,
    ROWS,
    WIDTH,
    GateState,
    GateWeights,
    load_blend,
    load_lambda,
)
from cenet.kernels.gate_backward import (
    hidden_backward,
    sum_of_scalars,
    variance_backward,
    weights_backward,
)
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map
from cenet.kernels.mix_backward import StatisticsGradient, Sums
from cenet.kernels.modes import ABSENT, BATCH, Mode
from cenet.kernels.statistics import (
    IS_BATCH,
    Statistics,
    group_channels,
    group_constants,
    load_rows,
)
from cenet.kernels.tiles import ceil_div, power_of_2


class SmallGradients(NamedTuple):
    """Gradients of everything but x, and what dx gets through the statistics."""

    through: StatisticsGradient
    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)
    gate: GateWeights | None
    mix_logit: Tensor | None
    blend: Tensor | None


@triton.jit(do_not_specialize=["N", "L", "groups", "windows", "rows", "columns"])
def _first_kernel(
    grad_P_ptr,  # (rows, G, K, K), or None
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    values_ptr,  # (8, C)
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    Q_ptr,  # (G, K, K), or None
    pooled_offset_ptr,  # (C,), or None
    affine_ptr,  # (2, C)
    scalars_ptr,  # (G, 2)
    gate_ptr,  # (N, C), or None
    w2_ptr,  # (C, H), or None
    inv_std_ptr,  # (), or None
    grad_logit_ptr,  # (N, C)
    grad_hidden_ptr,  # (N, H)
    N,
    C,
    L,
    H,
    groups,
    windows,
    rows,
    splits,
    columns,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    GATE_BN: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    first = 0  # program of the hidden layer
    if BD > 0:
        first = groups
        if program < groups:
            decorrelate_backward(
                program, grad_P_ptr, grad_c_ptr, values_ptr, matrices_ptr, iterates_ptr,
                mix_logit_ptr, blend_ptr, Q_ptr, pooled_offset_ptr, affine_ptr, scalars_ptr, N, C,
                L, groups, windows, rows, splits, K, KP, BN, BR, STEPS, BD,
            )  # fmt: skip
    if IR > 0:
        if program >= first:
            block = program - first
            hidden_backward(
                block // columns, block % columns, columns, grad_d_ptr, grad_c_ptr, values_ptr,
                gate_ptr, w2_ptr, inv_std_ptr, mix_logit_ptr, blend_ptr, grad_logit_ptr,
                grad_hidden_ptr, N, C, H, splits, GATE_BN, GATE_BW, GATE_BK,
            )  # fmt: skip


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
def _finish_group(
    group,
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    grad_u_ptr,  # (N, C), or None
    gate_scalars_ptr,  # (blocks, 3), or None
    values_ptr,  # (8, C)
    instances_ptr,  # (2, N, C)
    w_ptr,  # (N, C), or None
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
    splits,
    blocks,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    POOLED: tl.constexpr,
):
    """γ, β, and what dx gets through the statistics of a group."""
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

    grad_c_rows = tl.zeros((BN, KP), tl.float32)
    grad_d_rows = tl.zeros((BN, KP), tl.float32)
    grad_gamma_rows = tl.zeros((BN, KP), tl.float32)
    grad_beta_rows = tl.zeros((BN, KP), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        grad_d = sum_of_splits(grad_d_ptr, n, channel, valid, N, C, splits)
        grad_c = sum_of_splits(grad_c_ptr, n, channel, valid, N, C, splits)
        grad_c_rows += grad_c
        grad_d_rows += grad_d
        if w_ptr is not None:
            w, _ = load_rows(w_ptr, n, channel, valid, N, C)
            grad_gamma_rows += grad_d * w
            grad_beta_rows += grad_c * w
        if IR > 0:
            var, _ = load_rows(instances_ptr + tl.cast(N, tl.int64) * C, n, channel, valid, N, C)
            grad_u, _ = load_rows(grad_u_ptr, n, channel, valid, N, C)
            twice = (2 * gamma * rstd * rstd)[None, :]
            grad_gamma_rows += twice * var * (grad_u * r2 + through_s)
    grad_c_sum = tl.sum(grad_c_rows, 0)
    grad_w_sum = tl.sum(grad_d_rows, 0) * gamma + grad_c_sum * beta
    grad_gamma = tl.sum(grad_gamma_rows, 0)
    grad_beta = tl.sum(grad_beta_rows, 0)

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
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        e, mask = _variance_gradient(
            grad_u_ptr, n, channel, valid, gamma, r2, through_s, N, C, L, KP, BN, IR
        )
        f = -(mean_grad + centering)[None, :]
        if IR > 0:
            f -= e * rstd[None, :] * load_rows(instances_ptr, n, channel, valid, N, C)[0]
        rows_offset = n[:, None].to(tl.int64) * C + channel[None, :]
        tl.store(e_ptr + rows_offset, e - slope_grad[None, :], mask=mask)
        tl.store(f_ptr + rows_offset, f + tl.zeros_like(e), mask=mask)
    tl.store(grad_gamma_ptr + channel, grad_gamma, mask=valid)
    tl.store(grad_beta_ptr + channel, grad_beta, mask=valid)
    tl.store(scalars_ptr + group * 2 + 1, tl.sum(grad_w_sum))


@triton.jit(do_not_specialize=["N", "L", "groups", "blocks", "columns"])
def _last_kernel(
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    grad_u_ptr,  # (N, C), or None
    gate_scalars_ptr,  # (blocks, 3), or None
    values_ptr,  # (8, C)
    instances_ptr,  # (2, N, C)
    w_ptr,  # (N, C), or None
    inv_std_ptr,  # (), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    affine_ptr,  # (2, C)
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    grad_gamma_ptr,  # (C,)
    grad_beta_ptr,  # (C,)
    scalars_ptr,  # (G, 2)
    gate_rows_ptr,  # (4, N, H), or None
    grad_logit_ptr,  # (N, C)
    grad_w1_ptr,  # (H, C)
    grad_norm_weight_ptr,  # (H,)
    grad_norm_bias_ptr,  # (H,)
    grad_w2_ptr,  # (C, H)
    grad_mix_logit_ptr,  # (), or None
    grad_blend_ptr,  # (), or None
    N,
    C,
    L,
    H,
    groups,
    splits,
    blocks,
    columns,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    POOLED: tl.constexpr,
    GP: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < groups:
        _finish_group(
            program, grad_d_ptr, grad_c_ptr, grad_u_ptr, gate_scalars_ptr, values_ptr,
            instances_ptr, w_ptr, inv_std_ptr, mix_logit_ptr, blend_ptr, affine_ptr, Q_ptr, e_ptr,
            f_ptr, grad_gamma_ptr, grad_beta_ptr, scalars_ptr, N, C, L,
            splits, blocks, K, KP, BN, NORM, BD, IR, POOLED,
        )  # fmt: skip
    if IR > 0:
        if program >= groups:
            block = program - groups
            one = tl.cast(N, tl.int64) * H
            weights_backward(
                block // columns, block % columns, gate_rows_ptr, gate_rows_ptr + one,
                gate_rows_ptr + 2 * one, gate_rows_ptr + 3 * one, grad_logit_ptr,
                instances_ptr + tl.cast(N, tl.int64) * C, values_ptr, inv_std_ptr, mix_logit_ptr,
                blend_ptr, gate_scalars_ptr, scalars_ptr if BD > 0 else None, grad_w1_ptr,
                grad_norm_weight_ptr, grad_norm_bias_ptr, grad_w2_ptr, grad_mix_logit_ptr,
                grad_blend_ptr, N, C, H, groups, blocks, GP, GATE_BW, GATE_BK,
            )  # fmt: skip


def between_backward(
    sums: Sums,
    shape: torch.Size,
    mapping: Map,
    mode: Mode,
    found: Statistics,
    gate: GateWeights | None,
    state: GateState | None,
    *,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    steps: int,
    pool: int,
) -> SmallGradients:
    """Everything between the two backward passes."""
    n, channels, height, width = shape
    group_size, device = mapping.group_size, found.values.device
    groups = ceil_div(channels, group_size)
    pixels, windows = height * width, ceil_div(height, pool) * ceil_div(width, pool)
    units = 0 if gate is None else gate.w1.shape[0]
    columns = ceil_div(units, WIDTH)
    Q = torch.empty_like(found.matrices[2]) if mode.bd == BATCH else None
    pooled_offset = empty(device, channels) if mode.bd == BATCH and pool > 1 else None
    affine, scalars = empty(device, 2, channels), empty(device, groups, 2)
    grad_logit = empty(device, n if gate is not None else 0, channels)
    grad_hidden = empty(device, n, units)
    programs = groups if mode.bd != ABSENT else 0
    launch(
        _first_kernel, (programs + ceil_div(n, ROWS) * columns,),
        sums.P, sums.d, sums.c, found.values, found.matrices, found.iterates, mix_logit, blend, Q,
        pooled_offset, affine, scalars, state and state.gates, gate and gate.w2,
        state and state.inv_std, grad_logit, grad_hidden, n, channels, pixels, units, groups,
        windows, 0 if sums.P is None else len(sums.P), sums.splits, columns, STEPS=steps,
        **between_constants(group_size, mode, channels),
    )  # fmt: skip
    grad_u = gate_scalars = gate_rows = grads = None
    if gate is not None and state is not None:
        grad_u, gate_scalars, gate_rows = variance_backward(
            sums, grad_hidden, found.instances[1], found.values, gate, state
        )
        grads = GateWeights(*(torch.empty_like(weight) for weight in gate))
    grad_mix_logit = None if mix_logit is None else torch.empty_like(mix_logit)
    grad_blend = None if blend is None else torch.empty_like(blend)
    e, f = empty(device, 2, n, channels)
    gamma, beta = empty(device, channels), empty(device, channels)
    columns = ceil_div(channels, WIDTH)
    constants = group_constants(group_size, mode)
    del constants["BR"]
    launch(
        _last_kernel, (groups + ceil_div(units, WIDTH) * columns,),
        sums.d, sums.c, grad_u, gate_scalars, found.values, found.instances, mapping.w,
        state and state.inv_std, mix_logit, blend, affine, Q, e, f, gamma, beta,
        scalars, gate_rows, grad_logit, *(grads or (None,) * 4), grad_mix_logit, grad_blend, n,
        channels, pixels, units, groups, sums.splits,
        0 if gate_scalars is None else len(gate_scalars), columns,
        POOLED=pooled_offset is not None, GP=power_of_2(groups), GATE_BW=WIDTH,
        GATE_BK=power_of_2(min(n, DEPTH)), **constants,
    )  # fmt: skip
    if gate is None and grad_blend is not None:
        through_W, through_w = scalars.sum(0)
        grad_blend = (through_W - through_w).to(grad_blend.dtype).reshape(grad_blend.shape)
    through = StatisticsGradient(Q, e, f, pooled_offset)
    return SmallGradients(through, gamma, beta, grads, grad_mix_logit, grad_blend)
