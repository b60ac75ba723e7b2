"""The instance gate: variances → gate → weights w_n, and its backward, in few launches.

    u = σ̃² r²      z = u W1ᵀ      h = relu(LN(z))      gate = sigmoid(h W2ᵀ)      r = s^{-1/2}
    w = α(1−λ) r · gate + (1−α)

Programs take 16 samples at a time. α = 1 without a blend, λ = 0 without decorrelation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.functional import GATE_NORM_EPS
from cenet.kernels.tiles import dot, power_of_2

# a program takes ROWS samples and WIDTH columns of the result, and adds up DEPTH terms at a time
ROWS = 16
WIDTH = 32
DEPTH = 64
WARPS = 4


class GateWeights(NamedTuple):
    """The gate's parameters, with H hidden units."""

    w1: Tensor  # (H, C)
    norm_weight: Tensor  # (H,)
    norm_bias: Tensor  # (H,)
    w2: Tensor  # (C, H)


class GateState(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    hidden: Tensor  # (N, H), z
    gates: Tensor  # (2, N, C): gate and w
    inv_std: Tensor  # (), r


class GateGradient(NamedTuple):
    """Gradients on their way to the variances and to the gate's own weights."""

    u: Tensor  # (N, C)
    scalars: Tensor  # (blocks, 2): Σ gw·gate and Σ gu·σ̃², in parts
    rows: Tensor  # (4, N, H): h, standardized z, gradient of relu's argument, gradient of z
    logit: Tensor  # (N, C), gradient of the sigmoid's argument


@triton.jit
def load_lambda(mix_logit_ptr, default):
    """λ, or `default` where there is no choice between branches."""
    if mix_logit_ptr is None:
        return default
    else:
        return tl.sigmoid(tl.load(mix_logit_ptr).to(tl.float32))


@triton.jit
def load_blend(blend_ptr):
    """α, or 1."""
    if blend_ptr is None:
        return 1.0
    else:
        return tl.load(blend_ptr).to(tl.float32)


@triton.jit
def _load(ptr, row, column, rows, columns):
    """A block of a matrix of that many rows and columns, in float32."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, row, column, rows, columns, values):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_sum_of_splits(ptr, row, column, rows, columns, splits):
    """A block of a (rows·splits, columns) matrix, splits of a row added."""
    total = _load(ptr, row * splits, column, rows * splits, columns)
    for split in range(1, splits):
        total += _load(ptr, row * splits + split, column, rows * splits, columns)
    return total


@triton.jit
def _vector(ptr, index, size):
    return tl.load(ptr + index, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def _hidden_kernel(
    var_ptr,  # (N, C)
    scale_ptr,  # (C,)
    w1_ptr,  # (H, C)
    s_ptr,  # (G,) parts of Σ σ̃², or None
    running_inv_std_ptr,  # (), if there are no parts
    inv_std_ptr,  # (), r
    hidden_ptr,  # (N, H)
    N,
    C,
    H,
    G,
    eps,
    GP: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    h = tl.program_id(1) * BW + tl.arange(0, BW)
    if s_ptr is not None:
        part = tl.arange(0, GP)
        s = tl.sum(tl.load(s_ptr + part, mask=part < G, other=0.0)) / N / C
        r = 1 / tl.sqrt(s + eps)
    else:
        r = tl.load(running_inv_std_ptr).to(tl.float32)
    total = tl.zeros((BN, BW), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        scale = _vector(scale_ptr, c, C) * r
        u = _load(var_ptr, n, c, N, C) * (scale * scale)[None, :]
        total += dot(u, tl.trans(_load(w1_ptr, h, c, H, C)))
    _store(hidden_ptr, n, h, N, H, total)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inv_std_ptr, r)


@triton.jit
def _row_moments(hidden_ptr, n, N, H, eps, BN: tl.constexpr, BK: tl.constexpr):
    """Mean and inverse spread of the rows of z."""
    mean = tl.zeros((BN,), tl.float32)
    for start in range(0, H, BK):
        mean += tl.sum(_load(hidden_ptr, n, start + tl.arange(0, BK), N, H), 1)
    mean = mean / H
    square = tl.zeros((BN,), tl.float32)
    for start in range(0, H, BK):
        h = start + tl.arange(0, BK)
        z = _load(hidden_ptr, n, h, N, H) - mean[:, None]
        square += tl.sum(tl.where((h < H)[None, :], z * z, 0.0), 1)
    return mean, 1 / tl.sqrt(square / H + eps)


@triton.jit
def _gate_kernel(
    hidden_ptr,  # (N, H)
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    w2_ptr,  # (C, H)
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    gate_ptr,  # (N, C)
    w_ptr,  # (N, C)
    N,
    C,
    H,
    eps,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    mean, spread = _row_moments(hidden_ptr, n, N, H, eps, BN, BK)
    total = tl.zeros((BN, BW), tl.float32)
    for start in range(0, H, BK):
        h = start + tl.arange(0, BK)
        z = (_load(hidden_ptr, n, h, N, H) - mean[:, None]) * spread[:, None]
        norm = z * _vector(norm_weight_ptr, h, H)[None, :] + _vector(norm_bias_ptr, h, H)[None, :]
        norm = tl.maximum(norm, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total += dot(norm, tl.trans(_load(w2_ptr, c, h, C, H)))
    gate = tl.sigmoid(total)
    blend = load_blend(blend_ptr)
    share = blend * (1 - load_lambda(mix_logit_ptr, 0.0)) * tl.load(inv_std_ptr)
    _store(gate_ptr, n, c, N, C, gate)
    _store(w_ptr, n, c, N, C, share * gate + (1 - blend))


@triton.jit
def _load_grad_w(grad_d_ptr, grad_c_ptr, gamma_ptr, beta_ptr, n, c, N, C, splits):
    """gw = gd γ + gc β."""
    grad_d = load_sum_of_splits(grad_d_ptr, n, c, N, C, splits)
    grad_c = load_sum_of_splits(grad_c_ptr, n, c, N, C, splits)
    return grad_d * _vector(gamma_ptr, c, C)[None, :] + grad_c * _vector(beta_ptr, c, C)[None, :]


@triton.jit
def _hidden_backward_kernel(
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    gate_ptr,  # (N, C)
    w2_ptr,  # (C, H)
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    grad_logit_ptr,  # (N, C), gradient of the sigmoid's argument
    grad_hidden_ptr,  # (N, H), gradient of h
    N,
    C,
    H,
    splits,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    h = tl.program_id(1) * BW + tl.arange(0, BW)
    share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0)) * tl.load(inv_std_ptr)
    total = tl.zeros((BN, BW), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, gamma_ptr, beta_ptr, n, c, N, C, splits)
        gate = _load(gate_ptr, n, c, N, C)
        grad_logit = share * grad_w * gate * (1 - gate)
        total += dot(grad_logit, _load(w2_ptr, c, h, C, H))
        if tl.program_id(1) == 0:
            _store(grad_logit_ptr, n, c, N, C, grad_logit)
    _store(grad_hidden_ptr, n, h, N, H, total)


@triton.jit
def _norm_backward(
    hidden_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, mean, spread, n, h, N, H
):
    """Standardized z, and the gradient of relu's argument."""
    z = (_load(hidden_ptr, n, h, N, H) - mean[:, None]) * spread[:, None]
    weight = _vector(norm_weight_ptr, h, H)[None, :]
    active = z * weight + _vector(norm_bias_ptr, h, H)[None, :] > 0
    return z, tl.where(active, _load(grad_hidden_ptr, n, h, N, H), 0.0), weight


@triton.jit
def _variance_backward_kernel(
    hidden_ptr,  # (N, H)
    grad_hidden_ptr,  # (N, H)
    norm_weight_ptr,  # (H,)
    norm_bias_ptr,  # (H,)
    w1_ptr,  # (H, C)
    var_ptr,  # (N, C)
    gate_ptr,  # (N, C)
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    gamma_ptr,  # (C,)
    beta_ptr,  # (C,)
    scale_ptr,  # (C,)
    grad_u_ptr,  # (N, C)
    scalars_ptr,  # (blocks, 2)
    norm_ptr,  # (N, H), h
    standard_ptr,  # (N, H), standardized z
    grad_norm_ptr,  # (N, H), gradient of relu's argument
    grad_z_ptr,  # (N, H)
    N,
    C,
    H,
    splits,
    eps,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    mean, spread = _row_moments(hidden_ptr, n, N, H, eps, BN, BK)
    first = tl.zeros((BN,), tl.float32)
    second = tl.zeros((BN,), tl.float32)
    for start in range(0, H, BK):
        h = start + tl.arange(0, BK)
        z, grad, weight = _norm_backward(
            hidden_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, mean, spread, n, h, N, H
        )
        first += tl.sum(grad * weight, 1)
        second += tl.sum(grad * weight * z, 1)
    first, second = first / H, second / H
    grad_u = tl.zeros((BN, BW), tl.float32)
    for start in range(0, H, BK):
        h = start + tl.arange(0, BK)
        z, grad, weight = _norm_backward(
            hidden_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, mean, spread, n, h, N, H
        )
        grad_z = spread[:, None] * (grad * weight - first[:, None] - z * second[:, None])
        grad_u += dot(grad_z, _load(w1_ptr, h, c, H, C))
        if tl.program_id(1) == 0:
            norm = z * weight + _vector(norm_bias_ptr, h, H)[None, :]
            _store(norm_ptr, n, h, N, H, tl.maximum(norm, 0.0))
            _store(standard_ptr, n, h, N, H, z)
            _store(grad_norm_ptr, n, h, N, H, grad)
            _store(grad_z_ptr, n, h, N, H, grad_z)
    _store(grad_u_ptr, n, c, N, C, grad_u)
    scale = _vector(scale_ptr, c, C)[None, :]
    grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, gamma_ptr, beta_ptr, n, c, N, C, splits)
    block = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(scalars_ptr + block, tl.sum(grad_w * _load(gate_ptr, n, c, N, C)))
    tl.store(scalars_ptr + block + 1, tl.sum(grad_u * _load(var_ptr, n, c, N, C) * scale * scale))


@triton.jit
def _weights_backward_kernel(
    norm_ptr,  # (N, H)
    standard_ptr,  # (N, H)
    grad_norm_ptr,  # (N, H)
    grad_z_ptr,  # (N, H)
    grad_logit_ptr,  # (N, C)
    var_ptr,  # (N, C)
    scale_ptr,  # (C,)
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    scalars_ptr,  # (blocks, 2)
    group_scalars_ptr,  # (G, 2): <W, gM> and Σ gw
    grad_w1_ptr,  # (H, C)
    grad_norm_weight_ptr,  # (H,)
    grad_norm_bias_ptr,  # (H,)
    grad_w2_ptr,  # (C, H)
    grad_mix_logit_ptr,  # (), or None
    grad_blend_ptr,  # (), or None
    N,
    C,
    H,
    G,
    blocks,
    GP: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    h = tl.program_id(0) * BW + tl.arange(0, BW)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    r = tl.load(inv_std_ptr)
    scale = _vector(scale_ptr, c, C) * r
    grad_w1 = tl.zeros((BW, BW), tl.float32)
    grad_w2 = tl.zeros((BW, BW), tl.float32)
    grad_norm_weight = tl.zeros((BK, BW), tl.float32)
    grad_norm_bias = tl.zeros((BK, BW), tl.float32)
    for start in range(0, N, BK):
        n = start + tl.arange(0, BK)
        u = _load(var_ptr, n, c, N, C) * (scale * scale)[None, :]
        grad_w1 = dot(tl.trans(_load(grad_z_ptr, n, h, N, H)), u, grad_w1)
        grad_logit = tl.trans(_load(grad_logit_ptr, n, c, N, C))
        grad_w2 = dot(grad_logit, _load(norm_ptr, n, h, N, H), grad_w2)
        if tl.program_id(1) == 0:
            grad = _load(grad_norm_ptr, n, h, N, H)
            grad_norm_weight += grad * _load(standard_ptr, n, h, N, H)
            grad_norm_bias += grad
    _store(grad_w1_ptr, h, c, H, C, grad_w1)
    _store(grad_w2_ptr, c, h, C, H, grad_w2)
    if tl.program_id(1) == 0:
        tl.store(grad_norm_weight_ptr + h, tl.sum(grad_norm_weight, 0), mask=h < H)
        tl.store(grad_norm_bias_ptr + h, tl.sum(grad_norm_bias, 0), mask=h < H)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        group = tl.arange(0, GP)
        through_W = tl.sum(tl.load(group_scalars_ptr + group * 2, mask=group < G, other=0.0))
        through_w = tl.sum(tl.load(group_scalars_ptr + group * 2 + 1, mask=group < G, other=0.0))
        gated = r * sum_of_scalars(scalars_ptr, 0, blocks)
        lam = load_lambda(mix_logit_ptr, 0.0)
        blend = load_blend(blend_ptr)
        if grad_mix_logit_ptr is not None:
            tl.store(grad_mix_logit_ptr, blend * (through_W - gated) * lam * (1 - lam))
        if grad_blend_ptr is not None:
            tl.store(grad_blend_ptr, lam * through_W + (1 - lam) * gated - through_w)


@triton.jit
def sum_of_scalars(scalars_ptr, which, blocks):
    """Sum of one of the two columns of (blocks, 2)."""
    total = 0.0
    for start in range(0, blocks, 256):
        block = start + tl.arange(0, 256)
        total += tl.sum(tl.load(scalars_ptr + block * 2 + which, mask=block < blocks, other=0.0))
    return total


def gate_forward(
    var: Tensor,
    scale: Tensor,
    weights: GateWeights,
    s_parts: Tensor | None,
    running_inv_std: Tensor | None,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    eps: float,
) -> GateState:
    """w_n from the instance variances (N, C) and the norm's scale.

    s^{-1/2} comes from the parts of Σ σ̃², or is the running one.
    """
    n, channels = var.shape
    units = weights.w1.shape[0]
    hidden, inv_std = var.new_empty(n, units), var.new_empty(())
    gates = var.new_empty(2, n, channels)
    groups = 0 if s_parts is None else len(s_parts)
    _hidden_kernel[(-(-n // ROWS), -(-units // WIDTH))](
        var, scale, weights.w1, s_parts, running_inv_std, inv_std, hidden, n, channels, units,
        groups, eps, GP=power_of_2(max(groups, 1)), **_tile(channels),
    )  # fmt: skip
    _gate_kernel[(-(-n // ROWS), -(-channels // WIDTH))](
        hidden, weights.norm_weight, weights.norm_bias, weights.w2, inv_std, mix_logit, blend,
        *gates, n, channels, units, GATE_NORM_EPS, **_tile(units),
    )  # fmt: skip
    return GateState(hidden, gates, inv_std)


def gate_backward(
    grad_d: Tensor,
    grad_c: Tensor,
    splits: int,
    var: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor,
    weights: GateWeights,
    state: GateState,
    mix_logit: Tensor | None,
    blend: Tensor | None,
) -> GateGradient:
    """Gradients of the variances and of what the gate's weights were multiplied with."""
    n, channels = var.shape
    units = weights.w1.shape[0]
    grad_logit, grad_u = var.new_empty(2, n, channels)
    grad_hidden, rows = var.new_empty(n, units), var.new_empty(4, n, units)
    grid = (-(-n // ROWS), -(-channels // WIDTH))
    scalars = var.new_empty(grid[0] * grid[1], 2)
    _hidden_backward_kernel[(-(-n // ROWS), -(-units // WIDTH))](
        grad_d, grad_c, gamma, beta, state.gates[0], weights.w2, state.inv_std, mix_logit, blend,
        grad_logit, grad_hidden, n, channels, units, splits, **_tile(channels),
    )  # fmt: skip
    _variance_backward_kernel[grid](
        state.hidden, grad_hidden, weights.norm_weight, weights.norm_bias, weights.w1, var,
        state.gates[0], grad_d, grad_c, gamma, beta, scale, grad_u, scalars, *rows, n, channels, units,
        splits, GATE_NORM_EPS, **_tile(units),
    )  # fmt: skip
    return GateGradient(grad_u, scalars, rows, grad_logit)


def gate_weights_backward(
    grad: GateGradient,
    group_scalars: Tensor,
    var: Tensor,
    scale: Tensor,
    weights: GateWeights,
    state: GateState,
    mix_logit: Tensor | None,
    blend: Tensor | None,
) -> tuple[GateWeights, Tensor | None, Tensor | None]:
    """Gradients of the gate's weights, of the logit of λ and of α."""
    n, channels = var.shape
    units = weights.w1.shape[0]
    grads = GateWeights(*(torch.empty_like(weight) for weight in weights))
    grad_mix_logit = None if mix_logit is None else torch.empty_like(mix_logit)
    grad_blend = None if blend is None else torch.empty_like(blend)
    groups = len(group_scalars)
    _weights_backward_kernel[(-(-units // WIDTH), -(-channels // WIDTH))](
        *grad.rows, grad.logit, var, scale, state.inv_std, mix_logit, blend, grad.scalars,
        group_scalars, *grads, grad_mix_logit, grad_blend, n, channels, units, groups,
        len(grad.scalars), GP=power_of_2(groups), BW=WIDTH, BK=power_of_2(min(n, DEPTH)),
        num_warps=WARPS,
    )  # fmt: skip
    return grads, grad_mix_logit, grad_blend


def _tile(depth: int) -> dict[str, int]:
    return {"BN": ROWS, "BW": WIDTH, "BK": min(DEPTH, power_of_2(depth)), "num_warps": WARPS}
