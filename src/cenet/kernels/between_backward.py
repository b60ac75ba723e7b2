"""Between the backward passes: what the statistics and the norm hand on to γ, β, the gate and x.

Jobs that do not need each other share a launch: first sums over chunks of samples and the gate's
hidden layer, then decorrelation and the variances, last the rest of each group and the gate's
weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.between import gate_constants
from cenet.kernels.call import ABSENT, BATCH, NormCECall
from cenet.kernels.decorrelation import decorrelate_backward
from cenet.kernels.gate import (
    DEPTH,
    ROWS,
    WIDTH,
    span_of,
    tile_of_units,
)
from cenet.kernels.gate_backward import (
    hidden_backward,
    norm_backward,
    shares_backward,
    variance_backward,
    weights_backward,
)
from cenet.kernels.group_backward import collect, finish_group
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map
from cenet.kernels.mix_backward import StatisticsGradient, Sums
from cenet.kernels.state import Saved
from cenet.kernels.statistics import chunk_constants, group_constants
from cenet.kernels.tiles import ceil_div, power_of_2

# programs of eight warps that run at a time: about two on each multiprocessor
ROOM = 272


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
        collect(
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
        finish_group(
            program % groups, program // groups, sums_ptr, grad_u_ptr, through_var_ptr,
            gate_scalars_ptr, values_ptr, instances_ptr, inv_std_ptr, mix_logit_ptr, blend_ptr,
            affine_ptr, Q_ptr, e_ptr, f_ptr, grad_gamma_ptr, grad_beta_ptr, scalars_ptr, N, C, L,
            chunks, rows, blocks, K, KP, BN, BS, NORM, BD, IR, WEIGHED, POOLED,
        )  # fmt: skip
    if IR > 0:
        if program >= finishers:
            job = program - finishers
            units = tl.cdiv(H, GATE_BW)
            if job < 2 * units * columns:
                weights_backward(
                    job // 2 // columns, job // 2 % columns, job % 2 == 0, standard_ptr,
                    norm_weight_ptr, norm_bias_ptr, grad_z_ptr, grad_logit_ptr,
                    instances_ptr + tl.cast(N, tl.int64) * C, values_ptr, inv_std_ptr, grad_w1_ptr,
                    grad_w2_ptr, N, C, H, GATE_BW, GATE_BK,
                )  # fmt: skip
            elif job < 2 * units * columns + units:
                norm_backward(
                    job - 2 * units * columns, standard_ptr, grad_norm_ptr, grad_norm_weight_ptr,
                    grad_norm_bias_ptr, N, H, GATE_BW, GATE_BK,
                )  # fmt: skip
            else:
                shares_backward(
                    inv_std_ptr, mix_logit_ptr, blend_ptr, gate_scalars_ptr,
                    scalars_ptr if BD > 0 else None, grad_mix_logit_ptr, grad_blend_ptr, groups,
                    blocks, GP,
                )  # fmt: skip


class _Gate(NamedTuple):
    """What the backward pass of the gate leaves behind."""

    grad_u: Tensor  # (N, C)
    through_var: Tensor  # (rows, C)
    scalars: Tensor  # (rows·columns, 3)
    grad_norm: Tensor  # (N, H)
    grad_z: Tensor  # (N, H)


def between_backward(
    call: NormCECall, sums: Sums, mapping: Map, saved: Saved, grads: dict[str, Tensor | None]
) -> StatisticsGradient:
    """Everything between the two backward passes: fill in `grads`, and say what dx gets."""
    n, channels, height, width = call.x.shape
    mode, pool, units = call.mode, call.pool, call.units
    found, state = saved.found, saved.gate
    group_size, device = mapping.group_size, found.values.device
    groups = ceil_div(channels, group_size)
    pixels, windows = height * width, ceil_div(height, pool) * ceil_div(width, pool)
    rows, columns = ceil_div(n, ROWS), ceil_div(units, WIDTH)

    cut = chunk_constants(group_size, sums.splits) | gate_constants(channels)
    chunks = ceil_div(n, cut["BN"] // cut["SP"])
    span = span_of(n, channels, units) if units else channels
    depths = ceil_div(channels, span) if units else 0
    P_sums = None if sums.P is None else empty(device, chunks, groups, group_size, group_size)
    chunk_sums = empty(device, 4, chunks, channels)
    grad_logit = empty(device, n if units else 0, channels)
    grad_hidden = empty(device, depths, n, units)
    launch(
        _first_kernel, (groups * chunks + rows * columns * depths,),
        sums.P, sums.d, sums.c, mapping.w, P_sums, chunk_sums, found.values,
        state and state.gates[0], call.w2, state and state.inv_std, call.mix_logit, call.blend,
        grad_logit, grad_hidden, n, channels, units, groups, sums.splits, sums.samples, chunks,
        columns, depths, span, **cut,
    )  # fmt: skip

    Q = empty(device, *found.matrices[2].shape) if mode.bd == BATCH else None
    pooled_offset = empty(device, channels) if mode.bd == BATCH and pool > 1 else None
    affine, scalars = empty(device, 2, channels), empty(device, groups, 2)
    columns = ceil_div(channels, WIDTH)
    given: tuple[Tensor | None, ...] = (None,) * 10
    back = None
    if state is not None:
        back = _Gate(
            empty(device, n, channels), empty(device, rows, channels),
            empty(device, rows * columns, 3), *empty(device, 2, n, units),
        )  # fmt: skip
        given = (
            state.hidden, state.spread, grad_hidden, call.norm_weight, call.norm_bias, call.w1,
            found.instances[1], state.gates[0], sums.d, sums.c,
        )  # fmt: skip
    constants = group_constants(group_size, mode)
    norm, ir = constants.pop("NORM"), constants.pop("IR")
    programs = (groups if mode.bd != ABSENT else 0) + (rows * columns if units else 0)
    if programs:
        wide = tile_of_units(max(units, 1))
        shared = {name: wide.pop(name) for name in ("num_warps", "num_stages", "WHOLE")}
        launch(
            _second_kernel, (programs,),
            P_sums, chunk_sums, found.values, found.matrices, found.iterates, call.mix_logit,
            call.blend, Q, pooled_offset, affine, scalars, *given, *(back or (None,) * 5), n,
            channels, pixels, units, groups, windows, chunks, sums.splits, columns,
            STEPS=call.steps, DEPTHS=depths,
            **{f"GATE_{name}": size for name, size in wide.items()}, **{**constants, **shared},
        )  # fmt: skip

    e, f = empty(device, 2, n, channels)
    weights = ceil_div(units, WIDTH) * (2 * columns + 1) + 1 if units else 0
    finishers = groups * ceil_div(n, cut["BN"])
    del constants["BR"]
    if units and finishers + weights <= ROOM:
        constants["num_warps"] = 8
    launch(
        _last_kernel, (finishers + weights,),
        chunk_sums, *(back[:3] if back else (None,) * 3), found.values, found.instances,
        state and state.inv_std, call.mix_logit, call.blend, affine, Q, e, f, grads["weight"],
        grads["bias"], scalars, state and state.hidden, call.norm_weight, call.norm_bias,
        *(back[3:] if back else (None,) * 2), grad_logit, grads["w1"], grads["norm_weight"],
        grads["norm_bias"], grads["w2"], grads["mix_logit"], grads["blend"], n, channels, pixels,
        units, groups, chunks, rows, rows * columns, finishers, columns, BN=cut["BN"], NORM=norm,
        IR=ir, WEIGHED=mapping.w is not None, POOLED=pooled_offset is not None,
        GP=power_of_2(groups), GATE_BW=WIDTH, GATE_BK=power_of_2(min(n, DEPTH)), **constants,
    )  # fmt: skip
    grad_blend = grads["blend"]
    if not units and grad_blend is not None:
        through_W, through_w = scalars.sum(0)
        grad_blend.copy_(through_W - through_w)
    return StatisticsGradient(Q, e, f, pooled_offset)
