"""Everything between the passes over x, the twin of `functional.coefficients`, and its backward.

Jobs that do not need each other's results share a launch:

    forward     norm and decorrelation of a group ∥ the gate's hidden layer
    backward 1  sums over chunks of samples ∥ the gate's hidden layer
    backward 2  decorrelation of a group ∥ the instance variances
    backward 3  norm of a group, e and f of dx ∥ the gate's weights, λ and α

In the forward launch each program joins the chunks for its own channels. That repeats little work,
and no program has to wait for another.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.call import ABSENT, BATCH, NormCECall
from cenet.kernels.decorrelation import decorrelate, decorrelate_backward
from cenet.kernels.gate import (
    DEPTH,
    ROWS,
    WIDTH,
    GateState,
    Hidden,
    hidden_backward,
    hidden_layer,
    layer_norm_backward,
    shares_backward,
    span_of,
    tile,
    tile_of_units,
    variance_backward,
    weights_backward,
)
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map, StatisticsGradient, Sums
from cenet.kernels.moments import (
    Chunks,
    Statistics,
    chunk_constants,
    group_channels,
    group_constants,
)
from cenet.kernels.norm import collect, finish_group, mean_of_chunks, settle_norm
from cenet.kernels.tiles import IS_BATCH, MEAN, OFFSET, ceil_div, power_of_2, store_value

# programs of eight warps that run at a time: about two on each multiprocessor
ROOM = 272


@triton.jit(
    do_not_specialize=[
        *("N", "batch", "L", "groups", "windows", "chunks", "samples", "columns", "depths")
    ]
)
def _coefficients_kernel(
    origin_ptr,  # (C,), or None: nothing was measured
    mean_ptr,  # (S, C)
    square_ptr,  # (S, C)
    spread_ptr,  # (S, C), or None
    gram_ptr,  # (S, G, K, K), or None
    pooled_mean_ptr,  # (S, C), or None
    shift_ptr,  # (C,), or None
    weight_ptr,  # (C,), or None
    bias_ptr,  # (C,), or None
    running_mean_ptr,  # (C,), or None
    running_var_ptr,  # (C,), or None
    running_inv_sqrt_ptr,  # (G, K, K), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (10, C)
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    var_ptr,  # (N, C), or None
    w1_ptr,  # (H, C), or None
    s_ptr,  # (depths,), or None
    hidden_ptr,  # (depths, N, H)
    N,
    batch,  # N, or 1: see `moments.Merged`
    C,
    L,
    H,
    groups,
    windows,
    chunks,
    samples,
    columns,
    depths,
    span,
    norm_eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    GATE_BN: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < groups:
        BATCH_ANY: tl.constexpr = NORM == IS_BATCH or BD == IS_BATCH or IR == IS_BATCH
        _, channel, valid = group_channels(program, C, K, KP)
        apart, middle, rstd, gamma, beta = settle_norm(
            channel, valid, origin_ptr, shift_ptr, mean_ptr, square_ptr, spread_ptr, weight_ptr,
            bias_ptr, running_mean_ptr, running_var_ptr, values_ptr, batch, C, L, chunks, samples,
            norm_eps, KP, BS, NORM, BATCH_ANY,
        )  # fmt: skip
        pixels = L
        if pooled_mean_ptr is not None:
            middle = mean_of_chunks(
                pooled_mean_ptr, channel, valid, batch, C, chunks, samples, KP, BS
            )
            pixels = windows
        store_value(values_ptr, MEAN, channel, valid, C, (apart + middle) * rstd)
        if BD > 0:
            decorrelate(
                program, mean_ptr if pooled_mean_ptr is None else pooled_mean_ptr, gram_ptr,
                running_inv_sqrt_ptr, mix_logit_ptr, blend_ptr, values_ptr, matrices_ptr,
                iterates_ptr, middle, rstd, gamma, beta, batch, C, pixels, groups, chunks, samples,
                K, KP, BR, BS, STEPS, BD,
            )  # fmt: skip
        else:
            store_value(values_ptr, OFFSET, channel, valid, C, tl.zeros((KP,), tl.float32))
    if IR > 0:
        if program >= groups:
            block = program - groups
            hidden_layer(
                block // columns // depths, block // depths % columns, block % depths, mean_ptr,
                square_ptr, spread_ptr, weight_ptr, running_var_ptr, var_ptr, w1_ptr, s_ptr,
                hidden_ptr, N, batch, C, L, H, span, chunks, samples, norm_eps, NORM, BS, GATE_BN,
                GATE_BW, GATE_BK,
            )  # fmt: skip


def coefficients(
    call: NormCECall, found: Statistics, chunks: Chunks | None, *, windows: int
) -> Hidden | None:
    """Fill in `found` from the measured chunks; return the hidden layer if there is a gate.

    `windows` is the number of pixels that pooling leaves of a sample.
    """
    n, channels, height, width = call.x.shape
    group_size, mode, units = call.group_size, call.mode, call.units
    groups, device = ceil_div(channels, group_size), found.values.device
    rows = ceil_div(max(n, 1), ROWS)  # without a sample, one program finds s of the other ranks
    columns = depths = span = 0
    hidden = None
    if units:
        span = span_of(n, channels, units)
        columns, depths = ceil_div(units, WIDTH), ceil_div(channels, span)
        s = empty(device, depths) if mode.ir == BATCH else None
        hidden = Hidden(empty(device, depths, n, units), s)
    measured = (None,) * 6 if chunks is None else chunks[:6]
    merged = None if chunks is None else chunks.merged
    batch, pixels, windows = (1, 1, 1) if merged else (n, height * width, windows)
    launch(
        _coefficients_kernel, (groups + rows * columns * depths,),
        *measured, merged and merged.shift, call.weight, call.bias, call.running_mean,
        call.running_var, call.inv_sqrt, call.mix_logit, call.blend, found.values, found.matrices,
        found.iterates, found.instance_var if units else None, call.w1, hidden and hidden.s,
        hidden and hidden.parts, n, batch, channels, pixels, units, groups, windows,
        0 if chunks is None else len(chunks.mean), 0 if chunks is None else chunks.samples,
        columns, depths, span, call.norm_eps, STEPS=call.steps,
        **group_constants(group_size, mode), **gate_constants(channels),
    )  # fmt: skip
    return hidden


@triton.jit(do_not_specialize=["N", "G", "splits", "together", "chunks", "columns", "depths"])
def _collect_kernel(
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


@triton.jit(
    do_not_specialize=["N", "batch", "L", "groups", "windows", "chunks", "splits", "columns"]
)
def _branches_backward_kernel(
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
    batch,  # N, or 1: see `moments.Merged`
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
    first = 0  # first program of the variances
    if BD > 0:
        first = groups
        if program < groups:
            decorrelate_backward(
                program, P_sums_ptr, sums_ptr, values_ptr, matrices_ptr, iterates_ptr,
                mix_logit_ptr, blend_ptr, Q_ptr, pooled_offset_ptr, affine_ptr, group_scalars_ptr,
                batch, C, L, groups, windows, chunks, K, KP, BR, BS, STEPS, BD,
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
    do_not_specialize=[
        *("N", "batch", "L", "groups", "chunks", "rows", "blocks", "finishers", "columns")
    ]
)
def _parameters_backward_kernel(
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
    batch,  # N, or 1: see `moments.Merged`
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
            affine_ptr, Q_ptr, e_ptr, f_ptr, grad_gamma_ptr, grad_beta_ptr, scalars_ptr, N, batch,
            C, L, chunks, rows, blocks, K, KP, BN, BS, NORM, BD, IR, WEIGHED, POOLED,
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
                layer_norm_backward(
                    job - 2 * units * columns, standard_ptr, grad_norm_ptr, grad_norm_weight_ptr,
                    grad_norm_bias_ptr, N, H, GATE_BW, GATE_BK,
                )  # fmt: skip
            else:
                shares_backward(
                    inv_std_ptr, mix_logit_ptr, blend_ptr, gate_scalars_ptr,
                    scalars_ptr if BD > 0 else None, grad_mix_logit_ptr, grad_blend_ptr, groups,
                    blocks, GP,
                )  # fmt: skip


class Collected(NamedTuple):
    """Results of the first backward launch: sums over chunks of samples, and the hidden layer."""

    P: Tensor | None  # (S, G, K, K), Σ gP
    sums: Tensor  # (4, S, C): of gc, gd, gc ⊙ w, gd ⊙ w
    grad_logit: Tensor  # (N, C), gradient of the sigmoid's argument
    grad_hidden: Tensor  # (depths, N, H), gradient of h in parts


class GateGradient(NamedTuple):
    """Results of the second backward launch for the gate."""

    grad_u: Tensor  # (N, C)
    through_var: Tensor  # (rows, C), Σ gu ⊙ v over the samples of a row of blocks
    scalars: Tensor  # (rows·columns, 3), of a block: Σ gw ⊙ gate, Σ gu ⊙ σ̃², Σ gw
    grad_norm: Tensor  # (N, H), gradient of relu's argument
    grad_z: Tensor  # (N, H)


class BranchGradients(NamedTuple):
    """Results of the second backward launch."""

    Q: Tensor | None  # (G, K, K)
    pooled_offset: Tensor | None  # (C,)
    affine: Tensor  # (2, C), what γ and β get through decorrelation
    scalars: Tensor  # (G, 2): <W, gM>, and Σ gw, which the third launch adds
    gate: GateGradient | None


def coefficients_backward(
    call: NormCECall,
    sums: Sums,
    mapping: Map,
    found: Statistics,
    state: GateState | None,
    grads: dict[str, Tensor | None],
) -> StatisticsGradient:
    """Fill in the parameters' `grads`; return the part of dx that goes through the statistics."""
    n, channels = call.x.shape[:2]
    e, f = empty(found.values.device, 2, n, channels)
    branches = _backward(call, sums, mapping, found, state, grads, (e, f), None)
    return StatisticsGradient(branches.Q, e, f, branches.pooled_offset)


def local_backward(
    call: NormCECall,
    sums: Sums,
    mapping: Map,
    found: Statistics,
    state: GateState | None,
    grads: dict[str, Tensor | None],
    grad_u: Tensor,
) -> BranchGradients:
    """The part of `coefficients_backward` that a rank can compute alone, where ranks are merged.

    Fills in `grad_u`, (N, C) with a gate. The result is not divided by the number of pixels of the
    statistics, because they are merged means.
    """
    return _backward(call, sums, mapping, found, state, grads, None, grad_u)


def _backward(
    call: NormCECall,
    sums: Sums,
    mapping: Map,
    found: Statistics,
    state: GateState | None,
    grads: dict[str, Tensor | None],
    through: tuple[Tensor, Tensor] | None,
    grad_u: Tensor | None,
) -> BranchGradients:
    collected = collect_sums(call, sums, mapping, found, state)
    branches = branches_backward(call, sums, collected, found, state, grad_u)
    parameters_backward(call, sums, collected, branches, mapping, found, state, grads, through)
    grad_blend = grads["blend"]
    if state is None and grad_blend is not None:
        through_W, through_w = branches.scalars.sum(0)
        grad_blend.copy_(through_W - through_w)
    return branches


def collect_sums(
    call: NormCECall, sums: Sums, mapping: Map, found: Statistics, state: GateState | None
) -> Collected:
    """First launch: sums over chunks of samples ∥ the gate's hidden layer."""
    n, channels = call.x.shape[:2]
    group_size, units, device = call.group_size, call.units, found.values.device
    groups = ceil_div(channels, group_size)
    rows, columns = ceil_div(n, ROWS), ceil_div(units, WIDTH)
    cut = chunk_constants(group_size, sums.splits) | gate_constants(channels)
    chunks = ceil_div(n, cut["BN"] // cut["SP"])
    span = span_of(n, channels, units) if units else channels
    depths = ceil_div(channels, span) if units else 0
    collected = Collected(
        None if sums.P is None else empty(device, chunks, groups, group_size, group_size),
        empty(device, 4, chunks, channels),
        empty(device, n if units else 0, channels),
        empty(device, depths, n, units),
    )
    launch(
        _collect_kernel, (groups * chunks + rows * columns * depths,),
        sums.P, sums.d, sums.c, mapping.w, collected.P, collected.sums, found.values,
        state and state.gate, call.w2, state and state.inv_std, call.mix_logit, call.blend,
        collected.grad_logit, collected.grad_hidden, n, channels, units, groups, sums.splits,
        sums.samples, chunks, columns, depths, span, **cut,
    )  # fmt: skip
    return collected


def branches_backward(
    call: NormCECall,
    sums: Sums,
    collected: Collected,
    found: Statistics,
    state: GateState | None,
    grad_u: Tensor | None = None,
) -> BranchGradients:
    """Second launch: decorrelation of each group ∥ the instance variances.

    Where ranks are merged, the gradient of u is written to `grad_u`.
    """
    n, channels, height, width = call.x.shape
    group_size, pool, units, mode = call.group_size, call.pool, call.units, call.mode
    groups, device = ceil_div(channels, group_size), found.values.device
    windows = ceil_div(height, pool) * ceil_div(width, pool)
    rows, columns = ceil_div(n, ROWS), ceil_div(channels, WIDTH)
    given: tuple[Tensor | None, ...] = (None,) * 10
    gate = None
    if state is not None:
        gate = GateGradient(
            empty(device, n, channels) if grad_u is None else grad_u, empty(device, rows, channels),
            empty(device, rows * columns, 3), *empty(device, 2, n, units),
        )  # fmt: skip
        given = (
            state.hidden, state.spread, collected.grad_hidden, call.norm_weight, call.norm_bias,
            call.w1, found.instance_var, state.gate, sums.d, sums.c,
        )  # fmt: skip
    branches = BranchGradients(
        empty(device, groups, group_size, group_size) if mode.bd == BATCH else None,
        empty(device, channels) if mode.bd == BATCH and pool > 1 and grad_u is None else None,
        empty(device, 2, channels),
        empty(device, groups, 2),
        gate,
    )
    programs = (groups if mode.bd != ABSENT else 0) + (rows * columns if units else 0)
    if not programs:
        return branches
    constants = group_constants(group_size, mode)
    del constants["NORM"], constants["IR"]
    batch, pixels, windows = (n, height * width, windows) if grad_u is None else (1, 1, 1)
    wide = tile_of_units(max(units, 1))
    shared = {name: wide.pop(name) for name in ("num_warps", "num_stages", "WHOLE")}
    launch(
        _branches_backward_kernel, (programs,),
        collected.P, collected.sums, found.values, found.matrices, found.iterates, call.mix_logit,
        call.blend, *branches[:4], *given, *(gate or (None,) * 5), n, batch, channels, pixels,
        units, groups, windows, collected.sums.shape[1], sums.splits, columns, STEPS=call.steps,
        DEPTHS=len(collected.grad_hidden),
        **{f"GATE_{name}": size for name, size in wide.items()}, **{**constants, **shared},
    )  # fmt: skip
    return branches


def parameters_backward(
    call: NormCECall,
    sums: Sums,
    collected: Collected,
    branches: BranchGradients,
    mapping: Map,
    found: Statistics,
    state: GateState | None,
    grads: dict[str, Tensor | None],
    through: tuple[Tensor, Tensor] | None,
) -> None:
    """Third launch: norm of each group, e and f of dx ∥ the gate's weights, λ and α.

    e and f are written to `through`, which is None where ranks are merged.
    """
    n, channels, height, width = call.x.shape
    units, gate = call.units, branches.gate
    groups = ceil_div(channels, call.group_size)
    rows, columns = ceil_div(n, ROWS), ceil_div(channels, WIDTH)
    samples = chunk_constants(call.group_size, sums.splits)["BN"]
    finishers = groups if through is None else groups * ceil_div(n, samples)
    weights = ceil_div(units, WIDTH) * (2 * columns + 1) + 1 if units else 0
    constants = group_constants(call.group_size, call.mode)
    del constants["BR"]
    if units and finishers + weights <= ROOM:
        constants["num_warps"] = 8
    e, f = through or (None, None)
    launch(
        _parameters_backward_kernel, (finishers + weights,),
        collected.sums, *(gate[:3] if gate else (None,) * 3), found.values, found.instances,
        state and state.inv_std, call.mix_logit, call.blend, branches.affine, branches.Q, e, f,
        grads["weight"], grads["bias"], branches.scalars, state and state.hidden,
        call.norm_weight, call.norm_bias, *(gate[3:] if gate else (None,) * 2),
        collected.grad_logit, grads["w1"], grads["norm_weight"], grads["norm_bias"], grads["w2"],
        grads["mix_logit"], grads["blend"], n, 1 if through is None else n, channels,
        height * width, units, groups,
        collected.sums.shape[1], rows, rows * columns, finishers, columns, BN=samples,
        WEIGHED=mapping.w is not None, POOLED=branches.pooled_offset is not None,
        GP=power_of_2(groups), GATE_BW=WIDTH, GATE_BK=power_of_2(min(n, DEPTH)), **constants,
    )  # fmt: skip


def gate_constants(channels: int) -> dict[str, int]:
    """Constants of the gate's jobs over channels, with their prefix."""
    cut = tile(channels)
    del cut["num_warps"]
    return {f"GATE_{name}": size for name, size in cut.items()}
