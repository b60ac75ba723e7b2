"""The instance gate, the twin of `functional.instance_gain`, and its backward.

    u = σ̃² r²      z = u W1ᵀ      h = relu(LN(z))      gate = sigmoid(h W2ᵀ)      r = s^{-1/2}
    w = α(1−λ) r · gate + (1−α)

α = 1 without a blend, λ = 0 without decorrelation. Programs take 16 samples at a time.

Forward: `hidden_layer` computes z in parts, `gate_kernel` the rest; running averages are moved in
programs beside it. Backward, in three launches: `hidden_backward`, `variance_backward`, then
`weights_backward`, `layer_norm_backward` and `shares_backward`. All but `gate_kernel` are jobs of
one program, put into kernels by `coefficients`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.functional import GATE_NORM_EPS
from cenet.kernels.averages import JOBS, average, matrix_entries_and_correction
from cenet.kernels.call import NormCECall
from cenet.kernels.launch import launch
from cenet.kernels.moments import Merged, Statistics, sum_of_rows
from cenet.kernels.norm import inverse_spread, load_gamma, mean_of_chunks, sum_of_scalars
from cenet.kernels.tiles import (
    BETA,
    FEW_PROGRAMS,
    GAMMA,
    IS_BATCH,
    SCALE,
    VARIANCE,
    at_least_0,
    ceil_div,
    dot,
    load_blend,
    load_lambda,
    load_value,
    power_of_2,
)

# a program takes ROWS samples and WIDTH columns of the result, and adds up DEPTH terms at a time
ROWS = 16
WIDTH = 32
DEPTH = 64
WARPS = 4
MOST_DEPTH = 128
PARTS = 4  # upper bound on parts of the hidden layer, which programs compute independently


class Hidden(NamedTuple):
    """The hidden layer, z / r², as a sum of parts: one part for each span of channels."""

    parts: Tensor  # (depths, N, H)
    s: Tensor | None  # (depths,), parts of Σ σ̃²; None if r is a running statistic


class GateState(NamedTuple):
    """Results of the gate that its backward pass needs."""

    hidden: Tensor  # (N, H), z standardized
    spread: Tensor  # (N,), 1/std of z
    gates: Tensor  # (2, N, C): gate and w
    inv_std: Tensor  # (), r

    @property
    def gate(self) -> Tensor:
        """(N, C)."""
        return self.gates[0]

    @property
    def w(self) -> Tensor:
        """(N, C)."""
        return self.gates[1]


@triton.jit
def load_block(ptr, row, column, rows, columns):
    """A block of a (rows, columns) matrix in float32, zero outside."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(ptr, row, column, rows, columns, values):
    """Write a block of a (rows, columns) matrix."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(ptr, index, size):
    """Part of a vector, zero outside, in float32."""
    return tl.load(ptr + index, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def hidden_layer(
    row,
    column,
    depth,
    mean_ptr,  # (S, C)
    square_ptr,  # (S, C)
    spread_ptr,  # (S, C), sum of the instance variances
    weight_ptr,  # (C,), or None
    running_var_ptr,  # (C,), or None
    var_ptr,  # (N, C)
    w1_ptr,  # (H, C)
    s_ptr,  # (depths,) parts of Σ σ̃², or None
    hidden_ptr,  # (depths, N, H)
    N,
    batch,  # N, or 1: see `moments.Merged`
    C,
    L,
    H,
    span,  # channels per part
    chunks,
    samples,
    norm_eps,
    NORM: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """The share of one span of channels in z / r², for a block of samples and of units."""
    n = row * BN + tl.arange(0, BN)
    h = column * BW + tl.arange(0, BW)
    part = tl.zeros((BN, BW), tl.float32)
    variances = tl.zeros((BK,), tl.float32)
    for start in range(depth * span, tl.minimum((depth + 1) * span, C), BK):
        c = start + tl.arange(0, BK)
        valid = c < C
        middle = tl.zeros((BK,), tl.float32)
        if NORM == IS_BATCH:
            middle = mean_of_chunks(mean_ptr, c, valid, batch, C, chunks, samples, BK, BS)
        rstd, _ = inverse_spread(
            mean_ptr if NORM == IS_BATCH else None, square_ptr, running_var_ptr, middle, c, valid,
            batch, C, L, chunks, samples, norm_eps, NORM, BK, BS,
        )  # fmt: skip
        scale = load_gamma(weight_ptr, c, valid) * rstd
        u = load_block(var_ptr, n, c, N, C) * (scale * scale)[None, :]
        part += dot(u, tl.trans(load_block(w1_ptr, h, c, H, C)))
        if s_ptr is not None:
            if (row == 0) & (column == 0):
                spread = sum_of_rows(spread_ptr, c, valid, chunks, C, BK, BS)
                variances += spread * scale * scale
    store_block(hidden_ptr + tl.cast(depth, tl.int64) * N * H, n, h, N, H, part)
    if s_ptr is not None:
        if (row == 0) & (column == 0):
            tl.store(s_ptr + depth, tl.sum(variances))


@triton.jit
def load_hidden(hidden_ptr, n, h, N, H, r2, DEPTHS: tl.constexpr):
    """A block of z, from its parts."""
    z = load_block(hidden_ptr, n, h, N, H)
    for depth in tl.static_range(1, DEPTHS):
        z += load_block(hidden_ptr + tl.cast(depth, tl.int64) * N * H, n, h, N, H)
    return z * r2


@triton.jit
def row_moments(
    hidden_ptr, n, N, H, r2, eps, BN: tl.constexpr, BK: tl.constexpr, DEPTHS: tl.constexpr
):
    """Mean and inverse spread of the rows of z."""
    mean = tl.zeros((BN,), tl.float32)
    for start in range(0, H, BK):
        mean += tl.sum(load_hidden(hidden_ptr, n, start + tl.arange(0, BK), N, H, r2, DEPTHS), 1)
    mean = mean / H
    square = tl.zeros((BN,), tl.float32)
    for start in range(0, H, BK):
        h = start + tl.arange(0, BK)
        z = load_hidden(hidden_ptr, n, h, N, H, r2, DEPTHS) - mean[:, None]
        square += tl.sum(tl.where((h < H)[None, :], z * z, 0.0), 1)
    return mean, 1 / tl.sqrt(square / H + eps)


@triton.jit
def _gated(standard, norm_weight_ptr, norm_bias_ptr, w2_ptr, c, h, C, H):
    """The share of some hidden units in the sigmoid's argument."""
    weight = load_vector(norm_weight_ptr, h, H)[None, :]
    hidden = at_least_0(standard * weight + load_vector(norm_bias_ptr, h, H)[None, :])
    return dot(hidden, tl.trans(load_block(w2_ptr, c, h, C, H)))


@triton.jit
def _gate_block(
    row, column, r, hidden_ptr, norm_weight_ptr, norm_bias_ptr, w2_ptr, mix_logit_ptr, blend_ptr,
    share_ptr, offset_ptr, standard_ptr, spread_ptr, gate_ptr, inv_std_ptr, w_ptr, N, C, H,
    norm_eps, DEPTHS: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Gate and w for a block of samples and channels."""
    n = row * BN + tl.arange(0, BN)
    c = column * BW + tl.arange(0, BW)
    if WHOLE:
        h = tl.arange(0, BK)
        z = load_hidden(hidden_ptr, n, h, N, H, r * r, DEPTHS)
        z = tl.where((h < H)[None, :], z - tl.sum(z, 1)[:, None] / H, 0.0)
        spread = 1 / tl.sqrt(tl.sum(z * z, 1) / H + norm_eps)
        standard = z * spread[:, None]
        total = _gated(standard, norm_weight_ptr, norm_bias_ptr, w2_ptr, c, h, C, H)
        if standard_ptr is not None:
            if column == 0:
                store_block(standard_ptr, n, h, N, H, standard)
    else:
        mean, spread = row_moments(hidden_ptr, n, N, H, r * r, norm_eps, BN, BK, DEPTHS)
        total = tl.zeros((BN, BW), tl.float32)
        for start in range(0, H, BK):
            h = start + tl.arange(0, BK)
            z = load_hidden(hidden_ptr, n, h, N, H, r * r, DEPTHS) - mean[:, None]
            standard = z * spread[:, None]
            total += _gated(standard, norm_weight_ptr, norm_bias_ptr, w2_ptr, c, h, C, H)
            if standard_ptr is not None:
                if column == 0:
                    store_block(standard_ptr, n, h, N, H, standard)
    gate = tl.sigmoid(total)
    if share_ptr is None:
        share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0))
        offset = 1 - load_blend(blend_ptr)
    else:
        share = tl.load(share_ptr).to(tl.float32)
        offset = tl.load(offset_ptr).to(tl.float32)
    store_block(w_ptr, n, c, N, C, share * r * gate + offset)
    if standard_ptr is not None:
        store_block(gate_ptr, n, c, N, C, gate)
        if column == 0:
            tl.store(spread_ptr + n, spread, mask=n < N)
            if row == 0:
                tl.store(inv_std_ptr, r)


@triton.jit
def gate_kernel(
    hidden_ptr,  # (DEPTHS, N, H)
    s_ptr,  # (DEPTHS,), or None
    running_inv_std_ptr,  # (), if there is no s
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    w2_ptr,  # (C, H)
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    share_ptr,  # (), or None
    offset_ptr,  # (), if there is a share
    standard_ptr,  # (N, H), or None: none of these four is wanted
    spread_ptr,  # (N,)
    gate_ptr,  # (N, C)
    inv_std_ptr,  # ()
    w_ptr,  # (N, C)
    mean_ptr,  # (C,), or None; these seven are running averages
    var_ptr,  # (C,)
    norm_count_ptr,  # (), or None
    inv_sqrt_ptr,  # (G, K, K), or None
    bd_count_ptr,  # ()
    running_ptr,  # (), or None
    ir_count_ptr,  # ()
    values_ptr,  # (10, C), or None
    matrices_ptr,  # (3, G, K, K), or None
    N,
    batch,  # N, or 1: see `moments.Merged`
    C,
    H,
    eps,
    norm_eps,
    blocks,
    entries,
    correction,
    correction_ptr,  # (), or None
    norm_momentum,
    bd_momentum,
    ir_momentum,
    DEPTHS: tl.constexpr,
    DP: tl.constexpr,
    WHOLE: tl.constexpr,  # a block holds all units
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """The gate by blocks of samples and channels; running averages in the programs after those."""
    if s_ptr is not None:
        depth = tl.arange(0, DP)
        s = tl.sum(tl.load(s_ptr + depth, mask=depth < DEPTHS, other=0.0)) / batch / C
        r = 1 / tl.sqrt(s + eps)
    else:
        r = tl.load(running_inv_std_ptr).to(tl.float32)
    program = tl.program_id(0)
    if program < blocks:
        columns = tl.cdiv(C, BW)
        _gate_block(
            program // columns, program % columns, r, hidden_ptr, norm_weight_ptr, norm_bias_ptr,
            w2_ptr, mix_logit_ptr, blend_ptr, share_ptr, offset_ptr, standard_ptr, spread_ptr,
            gate_ptr, inv_std_ptr, w_ptr, N, C, H, norm_eps, DEPTHS, WHOLE, BN, BW, BK,
        )  # fmt: skip
    if values_ptr is not None:
        if program >= blocks:
            average(
                program - blocks, mean_ptr, var_ptr, norm_count_ptr, inv_sqrt_ptr, bd_count_ptr,
                running_ptr, ir_count_ptr, values_ptr, values_ptr + C * VARIANCE, matrices_ptr, r,
                C, entries, correction, correction_ptr, norm_momentum, bd_momentum, ir_momentum,
            )  # fmt: skip


def gate_forward(
    call: NormCECall,
    hidden: Hidden,
    state: GateState,
    found: Statistics,
    merged: Merged | None = None,
) -> None:
    """Fill in `state`, from the hidden layer of `coefficients`, and move running averages."""
    depths, n, units = hidden.parts.shape
    channels = call.x.shape[1]
    blocks = ceil_div(n, ROWS) * ceil_div(channels, WIDTH)
    averages = call.averages()
    moving = any(average is not None for average in averages)
    programs = blocks + (JOBS if moving else 0)
    if not programs:
        return
    launch(
        gate_kernel, (programs,),
        hidden.parts, hidden.s, call.inv_std, call.norm_weight, call.norm_bias, call.w2,
        call.mix_logit, call.blend, None, None, state.hidden, state.spread, state.gate,
        state.inv_std, state.w, *averages, found.values if moving else None,
        found.matrices if moving else None, n, 1 if merged else n, channels, units, call.eps,
        GATE_NORM_EPS, blocks, *matrix_entries_and_correction(call), merged and merged.correction,
        *call.momenta, DEPTHS=depths, DP=power_of_2(depths),
        **tile_of_units(units),
    )  # fmt: skip


@triton.jit
def load_sum_of_splits(ptr, row, column, rows, columns, splits):
    """A block of a (rows·splits, columns) matrix, splits of a row added."""
    total = load_block(ptr, row * splits, column, rows * splits, columns)
    for split in range(1, splits):
        total += load_block(ptr, row * splits + split, column, rows * splits, columns)
    return total


@triton.jit
def _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits):
    """gw = gd γ + gc β."""
    grad_d = load_sum_of_splits(grad_d_ptr, n, c, N, C, splits)
    grad_c = load_sum_of_splits(grad_c_ptr, n, c, N, C, splits)
    return (
        grad_d * load_value(values_ptr, GAMMA, c, c < C, C)[None, :]
        + grad_c * load_value(values_ptr, BETA, c, c < C, C)[None, :]
    )


@triton.jit
def hidden_backward(
    row,
    column,
    depth,
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    values_ptr,  # (10, C)
    gate_ptr,  # (N, C)
    w2_ptr,  # (C, H)
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    grad_logit_ptr,  # (N, C), gradient of the sigmoid's argument
    grad_hidden_ptr,  # (depths, N, H), gradient of h in parts
    N,
    C,
    H,
    span,  # channels per part
    splits,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """The share of one span of channels in the gradient of h, for a block of samples and units."""
    n = row * BN + tl.arange(0, BN)
    h = column * BW + tl.arange(0, BW)
    share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0)) * tl.load(inv_std_ptr)
    part = tl.zeros((BN, BW), tl.float32)
    for start in range(depth * span, tl.minimum((depth + 1) * span, C), BK):
        c = start + tl.arange(0, BK)
        grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
        gate = load_block(gate_ptr, n, c, N, C)
        grad_logit = share * grad_w * gate * (1 - gate)
        part += dot(grad_logit, load_block(w2_ptr, c, h, C, H))
        if column == 0:
            store_block(grad_logit_ptr, n, c, N, C, grad_logit)
    store_block(grad_hidden_ptr + tl.cast(depth, tl.int64) * N * H, n, h, N, H, part)


@triton.jit
def _relu_backward(
    standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS: tl.constexpr
):
    """Standardized z, the gradient of relu's argument, and the LayerNorm's weight."""
    z = load_block(standard_ptr, n, h, N, H)
    weight = load_vector(norm_weight_ptr, h, H)[None, :]
    active = z * weight + load_vector(norm_bias_ptr, h, H)[None, :] > 0
    grad = load_block(grad_hidden_ptr, n, h, N, H)
    for depth in tl.static_range(1, DEPTHS):
        grad += load_block(grad_hidden_ptr + tl.cast(depth, tl.int64) * N * H, n, h, N, H)
    return z, tl.where(active, grad, 0.0), weight


@triton.jit
def variance_backward(
    row,
    column,
    columns,
    standard_ptr,  # (N, H), standardized z
    spread_ptr,  # (N,)
    grad_hidden_ptr,  # (depths, N, H)
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    w1_ptr,  # (H, C)
    var_ptr,  # (N, C)
    gate_ptr,  # (N, C)
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    values_ptr,  # (10, C)
    grad_u_ptr,  # (N, C)
    through_var_ptr,  # (rows, C): Σ gu ⊙ v over the samples of a block
    scalars_ptr,  # (rows·columns, 3)
    grad_norm_ptr,  # (N, H), gradient of relu's argument
    grad_z_ptr,  # (N, H)
    N,
    C,
    H,
    splits,
    DEPTHS: tl.constexpr,
    WHOLE: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradient of u for a block of samples and channels, and the sums that later launches need."""
    n = row * BN + tl.arange(0, BN)
    c = column * BW + tl.arange(0, BW)
    spread = load_vector(spread_ptr, n, N)
    if WHOLE:
        h = tl.arange(0, BK)
        z, grad, weight = _relu_backward(
            standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS
        )
        first, second = tl.sum(grad * weight, 1) / H, tl.sum(grad * weight * z, 1) / H
        grad_z = spread[:, None] * (grad * weight - first[:, None] - z * second[:, None])
        grad_u = dot(grad_z, load_block(w1_ptr, h, c, H, C))
        if column == 0:
            store_block(grad_norm_ptr, n, h, N, H, grad)
            store_block(grad_z_ptr, n, h, N, H, grad_z)
    else:
        first = tl.zeros((BN,), tl.float32)
        second = tl.zeros((BN,), tl.float32)
        for start in range(0, H, BK):
            h = start + tl.arange(0, BK)
            z, grad, weight = _relu_backward(
                standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS
            )
            first += tl.sum(grad * weight, 1)
            second += tl.sum(grad * weight * z, 1)
        first, second = first / H, second / H
        grad_u = tl.zeros((BN, BW), tl.float32)
        for start in range(0, H, BK):
            h = start + tl.arange(0, BK)
            z, grad, weight = _relu_backward(
                standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS
            )
            grad_z = spread[:, None] * (grad * weight - first[:, None] - z * second[:, None])
            grad_u += dot(grad_z, load_block(w1_ptr, h, c, H, C))
            if column == 0:
                store_block(grad_norm_ptr, n, h, N, H, grad)
                store_block(grad_z_ptr, n, h, N, H, grad_z)
    store_block(grad_u_ptr, n, c, N, C, grad_u)
    scale = load_value(values_ptr, SCALE, c, c < C, C)
    grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
    through_var = tl.sum(grad_u * load_block(var_ptr, n, c, N, C), 0)
    tl.store(through_var_ptr + tl.cast(row, tl.int64) * C + c, through_var, mask=c < C)
    block = (row * columns + column) * 3
    tl.store(scalars_ptr + block, tl.sum(grad_w * load_block(gate_ptr, n, c, N, C)))
    tl.store(scalars_ptr + block + 1, tl.sum(through_var * scale * scale))
    tl.store(scalars_ptr + block + 2, tl.sum(grad_w))


@triton.jit
def weights_backward(
    row,
    column,
    second,  # W2
    standard_ptr,  # (N, H)
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    grad_z_ptr,  # (N, H)
    grad_logit_ptr,  # (N, C)
    var_ptr,  # (N, C)
    values_ptr,  # (10, C)
    inv_std_ptr,  # ()
    grad_w1_ptr,  # (H, C)
    grad_w2_ptr,  # (C, H)
    N,
    C,
    H,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradient of W1, or that of W2, for a block of units and channels."""
    h = row * BW + tl.arange(0, BW)
    c = column * BW + tl.arange(0, BW)
    total = tl.zeros((BW, BW), tl.float32)
    if second:
        weight = load_vector(norm_weight_ptr, h, H)[None, :]
        bias = load_vector(norm_bias_ptr, h, H)[None, :]
        for start in range(0, N, BK):
            n = start + tl.arange(0, BK)
            grad_logit = tl.trans(load_block(grad_logit_ptr, n, c, N, C))
            hidden = at_least_0(load_block(standard_ptr, n, h, N, H) * weight + bias)
            total = dot(grad_logit, hidden, total)
        store_block(grad_w2_ptr, c, h, C, H, total)
    else:
        scale = load_value(values_ptr, SCALE, c, c < C, C) * tl.load(inv_std_ptr)
        for start in range(0, N, BK):
            n = start + tl.arange(0, BK)
            u = load_block(var_ptr, n, c, N, C) * (scale * scale)[None, :]
            total = dot(tl.trans(load_block(grad_z_ptr, n, h, N, H)), u, total)
        store_block(grad_w1_ptr, h, c, H, C, total)


@triton.jit
def layer_norm_backward(
    row,
    standard_ptr,  # (N, H)
    grad_norm_ptr,  # (N, H)
    grad_norm_weight_ptr,  # (H,)
    grad_norm_bias_ptr,  # (H,)
    N,
    H,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of the LayerNorm's weight and bias for a block of units."""
    h = row * BW + tl.arange(0, BW)
    grad_norm_weight = tl.zeros((BK, BW), tl.float32)
    grad_norm_bias = tl.zeros((BK, BW), tl.float32)
    for start in range(0, N, BK):
        n = start + tl.arange(0, BK)
        grad = load_block(grad_norm_ptr, n, h, N, H)
        grad_norm_weight += grad * load_block(standard_ptr, n, h, N, H)
        grad_norm_bias += grad
    tl.store(grad_norm_weight_ptr + h, tl.sum(grad_norm_weight, 0), mask=h < H)
    tl.store(grad_norm_bias_ptr + h, tl.sum(grad_norm_bias, 0), mask=h < H)


@triton.jit
def shares_backward(
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    scalars_ptr,  # (blocks, 3)
    group_scalars_ptr,  # (G, 2): <W, gM> is the first, or None
    grad_mix_logit_ptr,  # (), or None
    grad_blend_ptr,  # (), or None
    G,
    blocks,
    GP: tl.constexpr,
):
    """Gradients of λ's logit and of α."""
    through_W = 0.0
    if group_scalars_ptr is not None:
        group = tl.arange(0, GP)
        through_W = tl.sum(tl.load(group_scalars_ptr + group * 2, mask=group < G, other=0.0))
    through_w = sum_of_scalars(scalars_ptr, 2, blocks)
    gated = tl.load(inv_std_ptr) * sum_of_scalars(scalars_ptr, 0, blocks)
    lam = load_lambda(mix_logit_ptr, 0.0)
    blend = load_blend(blend_ptr)
    if grad_mix_logit_ptr is not None:
        tl.store(grad_mix_logit_ptr, blend * (through_W - gated) * lam * (1 - lam))
    if grad_blend_ptr is not None:
        tl.store(grad_blend_ptr, lam * through_W + (1 - lam) * gated - through_w)


def span_of(n: int, channels: int, units: int) -> int:
    """Channels per part of the hidden layer; there are enough parts to fill the device."""
    depth = tile(channels)["BK"]
    rows = ceil_div(max(n, 1), ROWS)
    parts = max(1, min(PARTS, FEW_PROGRAMS // (rows * ceil_div(units, WIDTH))))
    return ceil_div(ceil_div(channels, parts), depth) * depth


def tile(depth: int, most: int = DEPTH) -> dict[str, int]:
    """Constants of a kernel that sums over `depth` terms, at most `most` at a time."""
    deep = min(most, power_of_2(depth))
    return {"BN": ROWS, "BW": WIDTH, "BK": deep, "num_warps": 8 if deep > DEPTH else WARPS}


def tile_of_units(units: int) -> dict[str, int]:
    """Constants of a kernel that sums over hidden units: all at a time, if they are few."""
    whole = units <= MOST_DEPTH
    cut = tile(units, MOST_DEPTH if whole else DEPTH)
    return {**cut, "WHOLE": whole, "num_stages": 1 if whole else 3}
