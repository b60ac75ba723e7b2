"""Backward of the instance gate in three steps: hidden layer, variances, weights.

Jobs of a program, put into kernels by `between_backward`.
"""

import triton
import triton.language as tl

from cenet.kernels.gate import load_blend, load_block, load_lambda, load_vector, store_block
from cenet.kernels.tiles import at_least_0, dot


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
    span,  # channels of a part
    splits,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradient of h for a block of samples and a block of units: what some channels add to it."""
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
def _norm_backward(
    standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS: tl.constexpr
):
    """Standardized z, the gradient of relu's argument, and the norm's weight."""
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
    """Gradient of u for a block of samples and channels, and sums that others make use of."""
    n = row * BN + tl.arange(0, BN)
    c = column * BW + tl.arange(0, BW)
    spread = load_vector(spread_ptr, n, N)
    if WHOLE:
        h = tl.arange(0, BK)
        z, grad, weight = _norm_backward(
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
            z, grad, weight = _norm_backward(
                standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS
            )
            first += tl.sum(grad * weight, 1)
            second += tl.sum(grad * weight * z, 1)
        first, second = first / H, second / H
        grad_u = tl.zeros((BN, BW), tl.float32)
        for start in range(0, H, BK):
            h = start + tl.arange(0, BK)
            z, grad, weight = _norm_backward(
                standard_ptr, grad_hidden_ptr, norm_weight_ptr, norm_bias_ptr, n, h, N, H, DEPTHS
            )
            grad_z = spread[:, None] * (grad * weight - first[:, None] - z * second[:, None])
            grad_u += dot(grad_z, load_block(w1_ptr, h, c, H, C))
            if column == 0:
                store_block(grad_norm_ptr, n, h, N, H, grad)
                store_block(grad_z_ptr, n, h, N, H, grad_z)
    store_block(grad_u_ptr, n, c, N, C, grad_u)
    scale = load_vector(values_ptr + 7 * C, c, C)
    grad_w = _load_grad_w(grad_d_ptr, grad_c_ptr, values_ptr, n, c, N, C, splits)
    through_var = tl.sum(grad_u * load_block(var_ptr, n, c, N, C), 0)
    tl.store(through_var_ptr + tl.cast(row, tl.int64) * C + c, through_var, mask=c < C)
    block = (row * columns + column) * 3
    tl.store(scalars_ptr + block, tl.sum(grad_w * load_block(gate_ptr, n, c, N, C)))
    tl.store(scalars_ptr + block + 1, tl.sum(through_var * scale * scale))
    tl.store(scalars_ptr + block + 2, tl.sum(grad_w))


@triton.jit
def sum_of_scalars(scalars_ptr, which, blocks):
    """Sum of one of the three columns of (blocks, 3)."""
    total = 0.0
    for start in range(0, blocks, 1024):
        block = start + tl.arange(0, 1024)
        total += tl.sum(tl.load(scalars_ptr + block * 3 + which, mask=block < blocks, other=0.0))
    return total


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
        scale = load_vector(values_ptr + 7 * C, c, C) * tl.load(inv_std_ptr)
        for start in range(0, N, BK):
            n = start + tl.arange(0, BK)
            u = load_block(var_ptr, n, c, N, C) * (scale * scale)[None, :]
            total = dot(tl.trans(load_block(grad_z_ptr, n, h, N, H)), u, total)
        store_block(grad_w1_ptr, h, c, H, C, total)


@triton.jit
def norm_backward(
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
    """Gradients of the norm's weight and bias for a block of units."""
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
