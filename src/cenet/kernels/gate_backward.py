"""Backward of the instance gate in three steps: hidden layer, variances, weights.

The first and the last are jobs of a program, put into kernels by `between_backward`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.functional import GATE_NORM_EPS
from cenet.kernels.gate import (
    ROWS,
    WIDTH,
    GateState,
    GateWeights,
    load_blend,
    load_block,
    load_lambda,
    load_vector,
    row_moments,
    store_block,
    tile,
)
from cenet.kernels.launch import launch
from cenet.kernels.mix_backward import Sums
from cenet.kernels.tiles import ceil_div, dot


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
        grad_d * load_vector(values_ptr + 2 * C, c, C)[None, :]
        + grad_c * load_vector(values_ptr + 3 * C, c, C)[None, :]
    )


@triton.jit
def hidden_backward(
    row,
    column,
    columns,
    grad_d_ptr,  # (N·splits, C)
    grad_c_ptr,  # (N·splits, C)
    values_ptr,  # (8, C)
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
    """Gradient of h for a block of samples and a block of units."""
    n = row * BN + tl.arange(0, BN)
    h = column * BW + tl.arange(0, BW)
    share = load_blend(blend_ptr) * (1 - load_lambda(mix_logit_ptr, 0.0)) * tl.load(inv_std_ptr)
    total = tl.zeros((BN, BW), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
        gate = load_block(gate_ptr, n, c, N, C)
        total += dot(share * grad_w * gate * (1 - gate), load_block(w2_ptr, c, h, C, H))
    store_block(grad_hidden_ptr, n, h, N, H, total)
    # the programs of a row share what they all have computed; in the loop, a store would hold it up
    for start in range(column * BK, C, columns * BK):
        c = start + tl.arange(0, BK)
        grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
        gate = load_block(gate_ptr, n, c, N, C)
        store_block(grad_logit_ptr, n, c, N, C, share * grad_w * gate * (1 - gate))


@triton.jit
def _norm_backward(
    hidden_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, mean, spread, n, h, N, H
):
    """Standardized z, and the gradient of relu's argument."""
    z = (load_block(hidden_ptr, n, h, N, H) - mean[:, None]) * spread[:, None]
    weight = load_vector(norm_weight_ptr, h, H)[None, :]
    active = z * weight + load_vector(norm_bias_ptr, h, H)[None, :] > 0
    return z, tl.where(active, load_block(grad_hidden_ptr, n, h, N, H), 0.0), weight


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
    values_ptr,  # (8, C)
    grad_u_ptr,  # (N, C)
    scalars_ptr,  # (blocks, 3)
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
    mean, spread = row_moments(hidden_ptr, n, N, H, eps, BN, BK)
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
        grad_u += dot(grad_z, load_block(w1_ptr, h, c, H, C))
    # the programs of a row share what they all have computed
    for start in range(tl.program_id(1) * BK, H, tl.num_programs(1) * BK):
        h = start + tl.arange(0, BK)
        z, grad, weight = _norm_backward(
            hidden_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, mean, spread, n, h, N, H
        )
        norm = z * weight + load_vector(norm_bias_ptr, h, H)[None, :]
        grad_z = spread[:, None] * (grad * weight - first[:, None] - z * second[:, None])
        store_block(norm_ptr, n, h, N, H, tl.maximum(norm, 0.0))
        store_block(standard_ptr, n, h, N, H, z)
        store_block(grad_norm_ptr, n, h, N, H, grad)
        store_block(grad_z_ptr, n, h, N, H, grad_z)
    store_block(grad_u_ptr, n, c, N, C, grad_u)
    scale = load_vector(values_ptr + 7 * C, c, C)[None, :]
    grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
    block = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(scalars_ptr + block, tl.sum(grad_w * load_block(gate_ptr, n, c, N, C)))
    tl.store(
        scalars_ptr + block + 1, tl.sum(grad_u * load_block(var_ptr, n, c, N, C) * scale * scale)
    )
    tl.store(scalars_ptr + block + 2, tl.sum(grad_w))


@triton.jit
def sum_of_scalars(scalars_ptr, which, blocks):
    """Sum of one of the three columns of (blocks, 3)."""
    total = 0.0
    for start in range(0, blocks, 256):
        block = start + tl.arange(0, 256)
        total += tl.sum(tl.load(scalars_ptr + block * 3 + which, mask=block < blocks, other=0.0))
    return total


@triton.jit
def weights_backward(
    row,
    column,
    norm_ptr,  # (N, H)
    standard_ptr,  # (N, H)
    grad_norm_ptr,  # (N, H)
    grad_z_ptr,  # (N, H)
    grad_logit_ptr,  # (N, C)
    var_ptr,  # (N, C)
    values_ptr,  # (8, C)
    inv_std_ptr,  # ()
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    scalars_ptr,  # (blocks, 3)
    group_scalars_ptr,  # (G, 2): <W, gM> is the first, or None
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
    """Gradients of the gate's weights for a block of units and channels; the first does λ and α."""
    h = row * BW + tl.arange(0, BW)
    c = column * BW + tl.arange(0, BW)
    r = tl.load(inv_std_ptr)
    scale = load_vector(values_ptr + 7 * C, c, C) * r
    grad_w1 = tl.zeros((BW, BW), tl.float32)
    grad_w2 = tl.zeros((BW, BW), tl.float32)
    for start in range(0, N, BK):
        n = start + tl.arange(0, BK)
        u = load_block(var_ptr, n, c, N, C) * (scale * scale)[None, :]
        grad_w1 = dot(tl.trans(load_block(grad_z_ptr, n, h, N, H)), u, grad_w1)
        grad_logit = tl.trans(load_block(grad_logit_ptr, n, c, N, C))
        grad_w2 = dot(grad_logit, load_block(norm_ptr, n, h, N, H), grad_w2)
    store_block(grad_w1_ptr, h, c, H, C, grad_w1)
    store_block(grad_w2_ptr, c, h, C, H, grad_w2)
    if column == 0:
        grad_norm_weight = tl.zeros((BK, BW), tl.float32)
        grad_norm_bias = tl.zeros((BK, BW), tl.float32)
        for start in range(0, N, BK):
            n = start + tl.arange(0, BK)
            grad = load_block(grad_norm_ptr, n, h, N, H)
            grad_norm_weight += grad * load_block(standard_ptr, n, h, N, H)
            grad_norm_bias += grad
        tl.store(grad_norm_weight_ptr + h, tl.sum(grad_norm_weight, 0), mask=h < H)
        tl.store(grad_norm_bias_ptr + h, tl.sum(grad_norm_bias, 0), mask=h < H)
    if (row == 0) & (column == 0):
        through_W = 0.0
        if group_scalars_ptr is not None:
            group = tl.arange(0, GP)
            through_W = tl.sum(tl.load(group_scalars_ptr + group * 2, mask=group < G, other=0.0))
        through_w = sum_of_scalars(scalars_ptr, 2, blocks)
        gated = r * sum_of_scalars(scalars_ptr, 0, blocks)
        lam = load_lambda(mix_logit_ptr, 0.0)
        blend = load_blend(blend_ptr)
        if grad_mix_logit_ptr is not None:
            tl.store(grad_mix_logit_ptr, blend * (through_W - gated) * lam * (1 - lam))
        if grad_blend_ptr is not None:
            tl.store(grad_blend_ptr, lam * through_W + (1 - lam) * gated - through_w)


def variance_backward(
    sums: Sums,
    grad_hidden: Tensor,
    var: Tensor,
    values: Tensor,
    weights: GateWeights,
    state: GateState,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of u, parts of three sums, and what the gradients of the weights are made of."""
    n, channels = var.shape
    units = weights.w1.shape[0]
    grad_u, rows = torch.empty_like(var), var.new_empty(4, n, units)
    grid = (ceil_div(n, ROWS), ceil_div(channels, WIDTH))
    scalars = var.new_empty(grid[0] * grid[1], 3)
    launch(
        _variance_backward_kernel, grid,
        state.hidden, grad_hidden, weights.norm_weight, weights.norm_bias, weights.w1, var,
        state.gates[0], sums.d, sums.c, values, grad_u, scalars, *rows, n, channels, units,
        sums.splits, GATE_NORM_EPS, **tile(units),
    )  # fmt: skip
    return grad_u, scalars, rows
