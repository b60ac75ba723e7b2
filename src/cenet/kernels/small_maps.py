"""The passes over maps of at most 8 pixels: each program takes several samples.

A row of a tile is one pixel. The samples of a program share the products with P and Q, and their
Gram matrices are added before they are written: one by one these would be larger than x. Values per
sample are loaded as matrices, equal in all rows of the sample. Everything is in float32: with few
pixels gradients cancel, and rounding would show.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.internals import is_channels_last
from cenet.kernels.call import FUSED_ACTIVATIONS
from cenet.kernels.launch import empty, launch
from cenet.kernels.mix import Map, StatisticsGradient, Sums
from cenet.kernels.moments import Parts, chunk_constants
from cenet.kernels.tiles import (
    NONE,
    activate,
    activation_gradient,
    activation_gradient_from_output,
    block_channels,
    ceil_div,
    dot,
    load_channel_values,
    load_matrix,
    matrix_offsets,
    power_of_2,
    same_group,
    store_tile,
)

# size of a tile
ROWS = 64
CHANNELS = 32
WARPS = 4


class _Cut(NamedTuple):
    """How x is cut up: samples per program, rows per sample, channels per tile."""

    samples: int
    rows: int
    channels: int


@triton.jit
def _tile(N, C, L, K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr, LAST):
    """The part of x a program works on.

    Returns its number among the programs of its channels, the sample of each row, its channels, the
    offsets of its tile, and which of them are inside x.
    """
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    channel, valid = block_channels(program % blocks, C, K, BC)
    row = tl.arange(0, S * SP)
    n = (program // blocks * S + row // SP).to(tl.int64)
    pixel = row % SP
    inside = ((n < N) & (pixel < L))[:, None] & valid[None, :]
    if LAST:
        offsets = (n * L + pixel)[:, None] * C + channel[None, :]
    else:
        offsets = (n * C * L + pixel)[:, None] + channel[None, :] * L
    return program // blocks, n, channel, valid, offsets, inside


@triton.jit
def _of_samples(ptr, n, channel, inside, C):
    """Rows of an (N, C) matrix for the rows of a tile; zero outside, or without a matrix."""
    if ptr is None:
        return tl.zeros(inside.shape, tl.float32)
    else:
        return tl.load(ptr + n[:, None] * C + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _load_map(
    x_ptr, values_ptr, P_ptr, w_ptr, n, channel, valid, offsets, inside, C, K: tl.constexpr
):
    """x̂ of a tile, and the map of each of its rows: rstd, γ, β, offset, w, P.

    Without P, its place holds an arbitrary value (not every release of Triton can return None).
    """
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x = (x - center[None, :]) * rstd[None, :]
    w = _of_samples(w_ptr, n, channel, inside, C)
    if P_ptr is None:
        return x, rstd, gamma, beta, offset, w, center
    else:
        P = load_matrix(P_ptr, channel[:, None], channel[None, :], valid, K)
        return x, rstd, gamma, beta, offset, w, P


@triton.jit
def _sum_in_samples(values, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr):
    """(S·SP, BC) → (S, BC)."""
    return tl.sum(tl.reshape(values, (S, SP, BC)), 1)


@triton.jit
def _store_samples(ptr, row, channel, valid, values, N, C, S: tl.constexpr):
    """Write the rows of an (N, C) matrix that belong to the samples of a program."""
    n = row.to(tl.int64) * S + tl.arange(0, S)
    mask = (n < N)[:, None] & valid[None, :]
    tl.store(ptr + n[:, None] * C + channel[None, :], values, mask=mask)


@triton.jit
def _store_products(ptr, row, channel, valid, values, G, K: tl.constexpr):
    """Write the matrices of the groups of a block to a row of (rows, G, K, K)."""
    i, j = channel[:, None], channel[None, :]
    offsets = row.to(tl.int64) * G * K * K + matrix_offsets(i, j, K)
    tl.store(ptr + offsets, values, mask=same_group(i, j, valid, K))


@triton.jit
def _mapped(x, w, gamma, beta, offset, P, DENSE: tl.constexpr):
    """P x̂ + w ⊙ (γ ⊙ x̂ + β) + offset; without P if not DENSE."""
    y = w * (gamma[None, :] * x + beta[None, :]) + offset[None, :]
    if DENSE:
        y += dot(x, tl.trans(P))
    return y


@triton.jit(do_not_specialize=["N", "L", "G"])
def _measure_small_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    pivot_ptr,  # (N, C)
    rest_ptr,  # (N, C)
    square_ptr,  # (N, C)
    gram_ptr,  # (rows, G, K, K), or None
    N,
    C,
    L,
    G,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    row, _, channel, valid, offsets, inside = _tile(N, C, L, K, S, SP, BC, CHANNELS_LAST)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    first = (tl.arange(0, S * SP) % SP == 0)[:, None]
    pivot = _sum_in_samples(tl.where(first, x, 0.0), S, SP, BC)
    apart = tl.reshape(tl.reshape(x, (S, SP, BC)) - pivot[:, None, :], (S * SP, BC))
    rest = _sum_in_samples(tl.where(inside, apart, 0.0), S, SP, BC) / L
    apart = tl.reshape(tl.reshape(apart, (S, SP, BC)) - rest[:, None, :], (S * SP, BC))
    apart = tl.where(inside, apart, 0.0)
    _store_samples(pivot_ptr, row, channel, valid, pivot, N, C, S)
    _store_samples(rest_ptr, row, channel, valid, rest, N, C, S)
    square = _sum_in_samples(apart * apart, S, SP, BC)
    _store_samples(square_ptr, row, channel, valid, square, N, C, S)
    if gram_ptr is not None:
        gram = dot(tl.trans(apart), apart)
        _store_products(gram_ptr, row, channel, valid, gram, G, K)


@triton.jit(do_not_specialize=["N", "L"])
def _forward_small_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    residual_ptr,  # like x, or None
    y_ptr,  # like x
    values_ptr,  # (5 or more, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    N,
    C,
    L,
    slope,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
):
    _, n, channel, valid, offsets, inside = _tile(N, C, L, K, S, SP, BC, CHANNELS_LAST)
    x, _, gamma, beta, offset, w, P = _load_map(
        x_ptr, values_ptr, P_ptr, w_ptr, n, channel, valid, offsets, inside, C, K
    )
    y = _mapped(x, w, gamma, beta, offset, P, P_ptr is not None)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    store_tile(y_ptr, offsets, activate(y, slope, ACT), inside, False)


@triton.jit(do_not_specialize=["N", "L", "G"])
def _reduce_small_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    y_ptr,  # like x, or None to recompute the activation's argument
    masked_ptr,  # like x, or None
    values_ptr,  # (5 or more, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    grad_P_ptr,  # (rows, G, K, K), or None
    grad_d_ptr,  # (N, C)
    grad_c_ptr,  # (N, C)
    N,
    C,
    L,
    G,
    slope,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
):
    row, n, channel, valid, offsets, inside = _tile(N, C, L, K, S, SP, BC, CHANNELS_LAST)
    x, _, gamma, beta, offset, w, P = _load_map(
        x_ptr, values_ptr, P_ptr, w_ptr, n, channel, valid, offsets, inside, C, K
    )
    g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        y = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        g = activation_gradient_from_output(g, y, slope, ACT)
        store_tile(masked_ptr, offsets, g, inside, False)
    elif ACT != NONE:
        g = activation_gradient(
            g, _mapped(x, w, gamma, beta, offset, P, P_ptr is not None), slope, ACT
        )
    _store_samples(grad_c_ptr, row, channel, valid, _sum_in_samples(g, S, SP, BC), N, C, S)
    grad_d = _sum_in_samples(g * x, S, SP, BC)
    _store_samples(grad_d_ptr, row, channel, valid, grad_d, N, C, S)
    if grad_P_ptr is not None:
        _store_products(grad_P_ptr, row, channel, valid, dot(tl.trans(g), x), G, K)


@triton.jit(do_not_specialize=["N", "L"])
def _backward_small_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    grad_ptr,  # like x
    dx_ptr,  # like x
    values_ptr,  # (5 or more, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    N,
    C,
    L,
    slope,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
):
    _, n, channel, valid, offsets, inside = _tile(N, C, L, K, S, SP, BC, CHANNELS_LAST)
    g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x, rstd, gamma, beta, offset, w, P = _load_map(
        x_ptr, values_ptr, P_ptr, w_ptr, n, channel, valid, offsets, inside, C, K
    )
    if ACT != NONE:
        g = activation_gradient(
            g, _mapped(x, w, gamma, beta, offset, P, P_ptr is not None), slope, ACT
        )
    dx = w * gamma[None, :] * g + _of_samples(e_ptr, n, channel, inside, C) * x
    dx += _of_samples(f_ptr, n, channel, inside, C)
    if P_ptr is not None:
        dx += dot(g, P)
    if Q_ptr is not None:
        # symmetric
        dx += dot(x, load_matrix(Q_ptr, channel[:, None], channel[None, :], valid, K))
    store_tile(dx_ptr, offsets, dx * rstd[None, :], inside, False)


def measure(x: Tensor, group_size: int, *, gram: bool) -> Parts:
    """See `moments.measure`."""
    n, channels, height, width = x.shape
    cut, groups = _cut(x, group_size), ceil_div(channels, group_size)
    found = None
    if gram:
        found = empty(x.device, ceil_div(n, cut.samples), groups, group_size, group_size)
    pivot, rest, square = empty(x.device, 3, n, channels)
    launch(
        _measure_small_kernel, _grid(x, cut, group_size),
        x, pivot, rest, square, found, n, channels, height * width, groups,
        **_constants(x, cut, group_size),
    )  # fmt: skip
    return Parts(pivot, rest, square, found, None, 1, height * width, cut.samples)


def forward(x: Tensor, y: Tensor, mapping: Map, residual: Tensor | None = None) -> None:
    """See `mix.forward`."""
    n, channels, height, width = x.shape
    cut = _cut(x, mapping.group_size)
    launch(
        _forward_small_kernel, _grid(x, cut, mapping.group_size),
        x, residual, y, *mapping[:3], n, channels, height * width, mapping.slope,
        **_constants(x, cut, mapping.group_size), ACT=FUSED_ACTIVATIONS[mapping.act],
    )  # fmt: skip


def reduce(
    x: Tensor, grad: Tensor, mapping: Map, y: Tensor | None = None, masked: Tensor | None = None
) -> Sums:
    """See `mix.reduce`."""
    n, channels, height, width = x.shape
    cut = _cut(x, mapping.group_size)
    grad_P = None
    if mapping.P is not None:
        grad_P = empty(x.device, ceil_div(n, cut.samples), *mapping.P.shape)
    grad_d, grad_c = empty(x.device, 2, n, channels)
    launch(
        _reduce_small_kernel, _grid(x, cut, mapping.group_size),
        x, grad, y, masked, *mapping[:3], grad_P, grad_d, grad_c, n, channels, height * width,
        ceil_div(channels, mapping.group_size), mapping.slope,
        **_constants(x, cut, mapping.group_size), ACT=FUSED_ACTIVATIONS[mapping.act],
    )  # fmt: skip
    return Sums(grad_P, grad_d, grad_c, 1, cut.samples)


def backward(
    x: Tensor,
    grad: Tensor,
    dx: Tensor,
    mapping: Map,
    through: StatisticsGradient,
    *,
    masked: bool = False,
) -> None:
    """See `mix.backward`."""
    n, channels, height, width = x.shape
    cut = _cut(x, mapping.group_size)
    launch(
        _backward_small_kernel, _grid(x, cut, mapping.group_size),
        x, grad, dx, *mapping[:3], through.Q, through.e, through.f, n, channels, height * width,
        mapping.slope, **_constants(x, cut, mapping.group_size),
        ACT=FUSED_ACTIVATIONS["none" if masked else mapping.act],
    )  # fmt: skip


def _cut(x: Tensor, group_size: int) -> _Cut:
    channels = max(CHANNELS, power_of_2(group_size))
    rows = 1 << (x.shape[2] * x.shape[3] - 1).bit_length()
    # samples that share a Gram matrix belong to one chunk
    most = chunk_constants(group_size, 1)["BN"]
    return _Cut(min(ROWS * CHANNELS // channels // rows, most), rows, channels)


def _grid(x: Tensor, cut: _Cut, group_size: int) -> tuple[int]:
    n, channels = x.shape[:2]
    width = cut.channels // group_size * group_size
    return (ceil_div(n, cut.samples) * ceil_div(channels, width),)


def _constants(x: Tensor, cut: _Cut, group_size: int) -> dict[str, int | bool]:
    return {
        "K": group_size,
        "S": cut.samples,
        "SP": cut.rows,
        "BC": cut.channels,
        "CHANNELS_LAST": is_channels_last(x),
        "num_warps": WARPS,
    }
