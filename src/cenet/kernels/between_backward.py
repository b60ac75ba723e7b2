"""Between the backward passes: what the statistics and the norm hand on to γ, β, the gate and x.

Norm and block are one function of x̂ = (x − μ) · rstd. Loss and block depend on γ and x̂ only through
γ ⊙ x̂ + β, so what batch norm subtracts from the gradient of x̂ is known without another sum over
pixels: its mean is γ gβ / M, its mean against x̂ is γ gγ / M.

Jobs that do not need each other share a launch: first sums over chunks of samples and the gate's
hidden layer, then decorrelation and the variances, last the rest of each group and the gate's
weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.between import gate_constants
from cenet.kernels.decorrelation import decorrelate_backward
from cenet.kernels.gate import (
    DEPTH,
    MOST_DEPTH,
    ROWS,
    WIDTH,
    GateState,
    GateWeights,
    load_blend,
    load_lambda,
    span_of,
    tile,
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
    chunk_constants,
    chunk_parts,
    gram_rows,
    group_channels,
    group_constants,
    load_rows,
    store_gram,
    sum_of_grams,
    sum_of_rows,
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


@triton.jit
def _collect(
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


@triton.jit(do_not_specialize=["N", "G", "splits", "together", "chunks", "columns", "depths"])
def _first_kernel(
    grad_P_ptr,  # (N·splits, G, K, K), or None
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    w_ptr,  # (N, C), or None
    P_sums_ptr,  # (S, G, K, K), or None
    sums_ptr,  # (4, S, C)
    values_ptr,  # (10, C)
    gate_ptr,  # (N, C), or None
    w2_ptr,  # (C, H), or None
    inv_std_ptr,  # (), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    grad_logit_ptr,  # (N, C)
    grad_hidden_ptr,  # (depths, N, H)
    N,
    C,
    H,
    G,
    splits,
    together,
    chunks,
    columns,
    depths,
    span,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GATE_BN: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < G * chunks:
        _collect(
            program % G, program // G, grad_P_ptr, grad_d_ptr, grad_c_ptr, w_ptr, P_sums_ptr,
            sums_ptr, N, C, G, splits, together, chunks, SP, K, KP, BN, BR,
        )  # fmt: skip
    if gate_ptr is not None:
        if program >= G * chunks:
            block = program - G * chunks
            hidden_backward(
                block // columns // depths, block // depths % columns, block % depths, grad_d_ptr,
                grad_c_ptr, values_ptr, gate_ptr, w2_ptr, inv_std_ptr, mix_logit_ptr, blend_ptr,
                grad_logit_ptr, grad_hidden_ptr, N, C, H, span, splits, GATE_BN, GATE_BW, GATE_BK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["N", "L", "groups", "windows", "chunks", "splits", "columns"])
def _second_kernel(
    P_sums_ptr,  # (S, G, K, K), or None
    sums_ptr,  # (4, S, C)
    values_ptr,  # (10, C)
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    Q_ptr,  # (G, K, K), or None
    pooled_offset_ptr,  # (C,), or None
    affine_ptr,  # (2, C)
    group_scalars_ptr,  # (G, 2)
    standard_ptr,  # (N, H), or None
    spread_ptr,  # (N,)
    grad_hidden_ptr,  # (depths, N, H)
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    w1_ptr,  # (H, C)
    var_ptr,  # (N, C)
    gate_ptr,  # (N, C)
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    grad_u_ptr,  # (N, C)
    through_var_ptr,  # (rows, C)
    gate_scalars_ptr,  # (rows·columns, 3)
    grad_norm_ptr,  # (N, H)
    grad_z_ptr,  # (N, H)
    N,
    C,
    L,
    H,
    groups,
    windows,
    chunks,
    splits,
    columns,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
    DEPTHS: tl.constexpr,
    WHOLE: tl.constexpr,  # a block holds all units
    GATE_BN: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    first = 0  # program of the variances
    if BD > 0:
        first = groups
        if program < groups:
            decorrelate_backward(
                program, P_sums_ptr, sums_ptr, values_ptr, matrices_ptr, iterates_ptr,
                mix_logit_ptr, blend_ptr, Q_ptr, pooled_offset_ptr, affine_ptr, group_scalars_ptr,
                N, C, L, groups, windows, chunks, K, KP, BR, BS, STEPS, BD,
            )  # fmt: skip
    if standard_ptr is not None:
        if program >= first:
            block = program - first
            variance_backward(
                block // columns, block % columns, columns, standard_ptr, spread_ptr,
                grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, w1_ptr, var_ptr, gate_ptr,
                grad_d_ptr, grad_c_ptr, values_ptr, grad_u_ptr, through_var_ptr, gate_scalars_ptr,
                grad_norm_ptr, grad_z_ptr, N, C, H, splits, DEPTHS, WHOLE, GATE_BN, GATE_BW,
                GATE_BK,
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


@triton.jit(
    do_not_specialize=["N", "L", "groups", "chunks", "rows", "blocks", "finishers", "columns"]
)
def _last_kernel(
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
    scalars_ptr,  # (G, 2)
    standard_ptr,  # (N, H), or None
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    grad_norm_ptr,  # (N, H)
    grad_z_ptr,  # (N, H)
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
    chunks,
    rows,
    blocks,
    finishers,
    columns,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    WEIGHED: tl.constexpr,
    POOLED: tl.constexpr,
    GP: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < finishers:
        _finish_group(
            program % groups, program // groups, sums_ptr, grad_u_ptr, through_var_ptr,
            gate_scalars_ptr, values_ptr, instances_ptr, inv_std_ptr, mix_logit_ptr, blend_ptr,
            affine_ptr, Q_ptr, e_ptr, f_ptr, grad_gamma_ptr, grad_beta_ptr, scalars_ptr, N, C, L,
            chunks, rows, blocks, K, KP, BN, BS, NORM, BD, IR, WEIGHED, POOLED,
        )  # fmt: skip
    if IR > 0:
        if program >= finishers:
            block = (program - finishers) // 2
            weights_backward(
                block // columns, block % columns, program % 2 == finishers % 2, standard_ptr,
                norm_weight_ptr, norm_bias_ptr, grad_norm_ptr, grad_z_ptr, grad_logit_ptr,
                instances_ptr + tl.cast(N, tl.int64) * C, values_ptr, inv_std_ptr, mix_logit_ptr,
                blend_ptr, gate_scalars_ptr, scalars_ptr if BD > 0 else None, grad_w1_ptr,
                grad_norm_weight_ptr, grad_norm_bias_ptr, grad_w2_ptr, grad_mix_logit_ptr,
                grad_blend_ptr, N, C, H, groups, blocks, GP, GATE_BW, GATE_BK,
            )  # fmt: skip


class _Gate(NamedTuple):
    """What the backward pass of the gate leaves behind."""

    grad_u: Tensor  # (N, C)
    through_var: Tensor  # (rows, C)
    scalars: Tensor  # (rows·columns, 3)
    grad_norm: Tensor  # (N, H)
    grad_z: Tensor  # (N, H)


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
    rows, columns = ceil_div(n, ROWS), ceil_div(units, WIDTH)

    cut = chunk_constants(group_size, sums.splits) | gate_constants(channels)
    chunks = ceil_div(n, cut["BN"] // cut["SP"])
    depths = 0 if gate is None else ceil_div(channels, span_of(channels))
    P_sums = None if sums.P is None else empty(device, chunks, groups, group_size, group_size)
    chunk_sums = empty(device, 4, chunks, channels)
    grad_logit = empty(device, n if gate is not None else 0, channels)
    grad_hidden = empty(device, depths, n, units)
    launch(
        _first_kernel, (groups * chunks + rows * columns * depths,),
        sums.P, sums.d, sums.c, mapping.w, P_sums, chunk_sums, found.values,
        state and state.gates[0], gate and gate.w2, state and state.inv_std, mix_logit, blend,
        grad_logit, grad_hidden, n, channels, units, groups, sums.splits, sums.samples, chunks, columns, depths,
        span_of(channels), **cut,
    )  # fmt: skip

    Q = torch.empty_like(found.matrices[2]) if mode.bd == BATCH else None
    pooled_offset = empty(device, channels) if mode.bd == BATCH and pool > 1 else None
    affine, scalars = empty(device, 2, channels), empty(device, groups, 2)
    columns = ceil_div(channels, WIDTH)
    given: tuple[Tensor | None, ...] = (None,) * 10
    back, grads = None, None
    if gate is not None and state is not None:
        back = _Gate(
            empty(device, n, channels), empty(device, rows, channels),
            empty(device, rows * columns, 3), *empty(device, 2, n, units),
        )  # fmt: skip
        given = (
            state.hidden, state.spread, grad_hidden, gate.norm_weight, gate.norm_bias, gate.w1,
            found.instances[1], state.gates[0], sums.d, sums.c,
        )  # fmt: skip
        grads = GateWeights(*(torch.empty_like(weight) for weight in gate))
    constants = group_constants(group_size, mode)
    norm, ir = constants.pop("NORM"), constants.pop("IR")
    programs = (groups if mode.bd != ABSENT else 0) + (0 if gate is None else rows * columns)
    if programs:
        wide = tile(max(units, 1), MOST_DEPTH)
        warps = wide.pop("num_warps")
        launch(
            _second_kernel, (programs,),
            P_sums, chunk_sums, found.values, found.matrices, found.iterates, mix_logit, blend, Q,
            pooled_offset, affine, scalars, *given, *(back or (None,) * 5), n, channels, pixels,
            units, groups, windows, chunks, sums.splits, columns, STEPS=steps, DEPTHS=depths,
            WHOLE=units <= MOST_DEPTH, num_stages=1,
            **{f"GATE_{name}": size for name, size in wide.items()},
            **{**constants, "num_warps": warps},
        )  # fmt: skip

    grad_mix_logit = None if mix_logit is None else torch.empty_like(mix_logit)
    grad_blend = None if blend is None else torch.empty_like(blend)
    e, f = empty(device, 2, n, channels)
    gamma, beta = empty(device, channels), empty(device, channels)
    finishers = groups * ceil_div(n, cut["BN"])
    del constants["BR"]
    launch(
        _last_kernel, (finishers + 2 * ceil_div(units, WIDTH) * columns,),
        chunk_sums, *(back[:3] if back else (None,) * 3), found.values, found.instances,
        state and state.inv_std, mix_logit, blend, affine, Q, e, f, gamma, beta, scalars,
        state and state.hidden, gate and gate.norm_weight, gate and gate.norm_bias,
        *(back[3:] if back else (None,) * 2), grad_logit, *(grads or (None,) * 4), grad_mix_logit,
        grad_blend, n, channels, pixels, units, groups, chunks, rows, rows * columns, finishers,
        columns, BN=cut["BN"], NORM=norm, IR=ir, WEIGHED=mapping.w is not None,
        POOLED=pooled_offset is not None, GP=power_of_2(groups), GATE_BW=WIDTH,
        GATE_BK=power_of_2(min(n, DEPTH)), **constants,
    )  # fmt: skip
    if gate is None and grad_blend is not None:
        through_W, through_w = scalars.sum(0)
        grad_blend = (through_W - through_w).to(grad_blend.dtype).reshape(grad_blend.shape)
    through = StatisticsGradient(Q, e, f, pooled_offset)
    return SmallGradients(through, gamma, beta, grads, grad_mix_logit, grad_blend)
