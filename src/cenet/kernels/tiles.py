"""How kernels walk over x, tile by tile, and the device functions that all of them share.

In order: cutting x up into tiles; finding a program's part of it; loading the map and its
per-channel values; what tensor cores multiply, and how exactly; activations and their gradients.
"""

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.internals import is_channels_last, shared_memory
from cenet.kernels.call import BATCH, FUSED_ACTIVATIONS, RUNNING
from cenet.kernels.launch import INTERPRETED

IS_BATCH = tl.constexpr(BATCH)
IS_RUNNING = tl.constexpr(RUNNING)
NONE = tl.constexpr(FUSED_ACTIVATIONS["none"])
RELU = tl.constexpr(FUSED_ACTIVATIONS["relu"])
LEAKY_RELU = tl.constexpr(FUSED_ACTIVATIONS["leaky_relu"])
ELU = tl.constexpr(FUSED_ACTIVATIONS["elu"])

# Rows of `values`, (10, C): statistics of each channel. The first five are the map's.
CENTER = tl.constexpr(0)  # x̂ = (x − center) · rstd
RSTD = tl.constexpr(1)
GAMMA = tl.constexpr(2)  # γ of the norm, 1 without one
BETA = tl.constexpr(3)  # β of the norm; the center without one, as x = x̂ + center
OFFSET = tl.constexpr(4)  # αλ W β
VARIANCE = tl.constexpr(5)  # of the batch
MEAN = tl.constexpr(6)  # of x̂ over the batch; of the pooled x̂ where the covariance is pooled
SCALE = tl.constexpr(7)  # γ · rstd
ORIGIN = tl.constexpr(8)  # origin − center; instance means are stored as distances from the origin
SPREAD = tl.constexpr(9)  # sum of the instance variances
ROWS_OF_VALUES = 10
# Entries of `matrices`, (3, G, K, K); W is the first
MAP = tl.constexpr(1)  # P
COVARIANCE = tl.constexpr(2)  # of x̂
# Entries of `sums`, (4, S, C): gradients of c and d, and the same times w; that of c is the first
GRAD_D = tl.constexpr(1)
GRAD_C_W = tl.constexpr(2)
GRAD_D_W = tl.constexpr(3)

# the GPU that the tables of tiles are for; benchmarks/tune_tiles.py finds those of another
TUNED_ON = "NVIDIA H200"
# channels of a tile in half precision, unless a group has more
WIDEST = 64
# upper bound on splits per sample: one program later reduces over all of them
MOST_SPLITS = 128
# with fewer programs the device is not full
FEW_PROGRAMS = 256
# bytes of shared memory that tiles of 64 channels need
ROOM_FOR_WIDEST = 96 * 2**10
# maps of at most this many pixels have kernels of their own: with more, a sample fills a tile
SMALL_MAP = 8
# distance of a mean from 0, in standard deviations, beyond which x is shifted before products
FAR = tl.constexpr(16.0)
# largest entry of a matrix in float16: one that is smaller by 28 binary digits is still normal
LARGEST = tl.constexpr(2.0**14)


class Tile(NamedTuple):
    """Tuned sizes for samples of at least `least` pixels."""

    least: int
    pixels: int
    channels: int
    warps: int
    stages: int
    programs: int  # samples are split until there are about this many programs
    tiles: int  # lower bound on tiles per split


class Walk(NamedTuple):
    """How one launch cuts x up.

    A program takes a sample, or one of its splits, for one block of channels: as many whole groups
    as fit into a tile.
    """

    pixels: int  # per tile
    channels: int  # per tile
    splits: int  # per sample
    warps: int
    stages: int

    def rows(self, n: int) -> int:
        """Programs per block of channels."""
        return n * self.splits

    def tiles(self, pixels: int) -> int:
        """Tiles per split; the last split may have fewer."""
        return ceil_div(ceil_div(pixels, self.pixels), self.splits)

    def blocks(self, channels: int, group_size: int) -> int:
        """Number of blocks of channels."""
        return ceil_div(channels, self.channels // group_size * group_size)

    def is_full(self, pixels: int, channels: int, group_size: int) -> bool:
        """Whether every tile is full."""
        return not (pixels % self.pixels or channels % self.channels or self.channels % group_size)


@cache
def walk(
    n: int,
    channels: int,
    pixels: int,
    group_size: int,
    raw: bool,
    choices: tuple[Tile, ...],
    most_splits: int,
    widest: int,
) -> Walk:
    """Cut x up by the first choice that fits its pixels and fills the device, or by the last."""
    for tile in choices:
        if pixels >= tile.least:
            cut = _cut(n, channels, pixels, group_size, raw, tile, most_splits, widest)
            if cut.rows(n) * cut.blocks(channels, group_size) >= FEW_PROGRAMS:
                break
    return cut


def _cut(
    n: int,
    channels: int,
    pixels: int,
    group_size: int,
    raw: bool,
    tile: Tile,
    most_splits: int,
    widest: int,
) -> Walk:
    most_per_warp = 2048 if raw else 512  # with more elements, registers spill
    least_channels = min(tile.channels, widest)
    tile_channels = max(least_channels, power_of_2(group_size))
    tile_pixels = max(16, tile.pixels * least_channels // tile_channels)  # tl.dot needs 16
    tile_pixels = min(tile_pixels, power_of_2(pixels))
    blocks = ceil_div(channels, tile_channels // group_size * group_size)
    tiles = ceil_div(pixels, tile_pixels)
    splits = max(1, min(tile.programs // blocks // n, tiles // tile.tiles, most_splits))
    splits = ceil_div(tiles, ceil_div(tiles, splits))  # no split is empty
    warps = max(tile.warps, tile_pixels * tile_channels // most_per_warp, tile_channels**2 // 1024)
    return Walk(tile_pixels, tile_channels, splits, warps, tile.stages)


def walk_over(
    x: Tensor,
    group_size: int,
    tiles: Mapping[bool, tuple[Tile, ...]],
    most_splits: int = MOST_SPLITS,
) -> Walk:
    """Cut x up by the tiles for its layout: channels_last or not."""
    n, channels, height, width = x.shape
    choices, raw = tiles[is_channels_last(x)], is_raw(x)
    widest = WIDEST if raw and room_for(x) >= ROOM_FOR_WIDEST else WIDEST // 2
    return walk(n, channels, height * width, group_size, raw, choices, most_splits, widest)


def room_for(x: Tensor) -> int:
    """Bytes of shared memory for a program that works on x."""
    return shared_memory(x.device) if x.is_cuda else ROOM_FOR_WIDEST


def is_raw(x: Tensor) -> bool:
    """Whether products multiply x itself, in half precision: exact, and summed in float32.

    Otherwise they multiply x − center in float32. That is also the case for few pixels: gradients
    cancel there, and rounding the matrices would show.
    """
    n, _, height, width = x.shape
    return x.dtype != torch.float32 and height * width >= 16 and n * height * width > 512


def is_small_map(x: Tensor) -> bool:
    """Whether x has so few pixels that `small_maps` takes it."""
    return x.shape[2] * x.shape[3] <= SMALL_MAP


def ceil_div(value: int, by: int) -> int:
    """value / by, rounded up."""
    return -(-value // by)


def power_of_2(value: int) -> int:
    """The next power of two, at least 16, as tl.dot needs."""
    return max(16, 1 << (value - 1).bit_length())


def alignment(x: Tensor) -> int:
    """A power of two that divides the stride between rows of a tile of x, 16 at most."""
    return gcd(16, x.shape[1] if is_channels_last(x) else x.shape[2] * x.shape[3])


@triton.jit
def block_channels(block, C, K: tl.constexpr, BC: tl.constexpr):
    """The channels of a block, and which of its BC places hold a channel."""
    width: tl.constexpr = BC // K * K
    place = tl.arange(0, BC)
    channel = block * width + place
    return channel, (place < width) & (channel < C)


@triton.jit
def locate(
    C,
    L,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """The part of x a program works on: its row, sample, channels, and pixels from begin to end."""
    blocks = tl.cdiv(C, BC // K * K)
    program = tl.program_id(0)
    row = program // blocks
    channel, valid = block_channels(program % blocks, C, K, BC)
    begin = row % splits * tiles * BL
    end = tl.minimum(begin + tiles * BL, L)
    if not CHANNELS_LAST:
        # does not change the value, but shows the compiler how wide masked loads may be
        end = end // ALIGN * ALIGN
    return row, tl.cast(row // splits, tl.int64), channel, valid, begin, end


@triton.jit
def tile_offsets(
    n, begin, channel, C, L, ALIGN: tl.constexpr, BL: tl.constexpr, CHANNELS_LAST: tl.constexpr
):
    """Offsets (BL, BC) of the pixels from `begin` of sample n; ALIGN divides the stride."""
    pixel = tl.arange(0, BL)
    if CHANNELS_LAST:
        stride = C // ALIGN * ALIGN
        return (n * L + begin) * stride + (pixel[:, None] * stride + channel[None, :])
    else:
        stride = tl.cast(L // ALIGN * ALIGN, tl.int64)
        return n * C * stride + begin + pixel[:, None] + channel[None, :] * stride


@triton.jit
def load_tile(ptr, offsets, inside, FULL: tl.constexpr):
    """A tile in its own dtype, zero outside x; FULL tiles lie inside and need no mask."""
    if FULL:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, offsets, values, inside, FULL: tl.constexpr):
    """Write the part of a tile that lies inside x."""
    if FULL:
        tl.store(ptr + offsets, round_to(values, ptr.dtype.element_ty))
    else:
        tl.store(ptr + offsets, round_to(values, ptr.dtype.element_ty), mask=inside)


@triton.jit
def matrix_offsets(row, column, K: tl.constexpr):
    """Offsets into (G, K, K) of the entries that join channel `row` and channel `column`."""
    return (row // K) * K * K + (row % K) * K + column % K


@triton.jit
def same_group(row, column, valid, K: tl.constexpr):
    """Which pairs of channels of a block share a group."""
    return (row // K == column // K) & valid[:, None] & valid[None, :]


@triton.jit
def diagonal(values, BC: tl.constexpr):
    """Diag(values), (BC, BC)."""
    place = tl.arange(0, BC)
    return tl.where(place[:, None] == place[None, :], values[None, :], 0.0)


@triton.jit
def diagonal_of(matrix, BC: tl.constexpr):
    """The matrix with zeros off its diagonal."""
    place = tl.arange(0, BC)
    return tl.where(place[:, None] == place[None, :], matrix, 0.0)


@triton.jit
def first_row(matrix):
    """The first row of a matrix."""
    place = tl.arange(0, matrix.shape[0])
    return tl.sum(tl.where((place == 0)[:, None], matrix, 0.0), 0)


@triton.jit
def at_least_0(values):
    """max(value, 0); a NaN stays a NaN."""
    return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sign_of(values):
    """+1 or −1, never 0."""
    return tl.where(values.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)


@triton.jit
def pivot_of(base, begin, count, channel, valid, C, L, CHANNELS_LAST: tl.constexpr):
    """A value per channel near its mean: the average of four pixels."""
    pivot = tl.zeros_like(channel).to(tl.float32)
    for i in tl.static_range(4):
        pixel = tl.cast(begin + (2 * i + 1) * count // 8, tl.int64)
        if CHANNELS_LAST:
            offset = pixel * C + channel
        else:
            offset = channel.to(tl.int64) * L + pixel
        pivot += tl.load(base + offset, mask=valid, other=0.0).to(tl.float32)
    return pivot / 4


@triton.jit
def load_value(values_ptr, ROW: tl.constexpr, channel, valid, C):
    """One row of `values` for some channels, 0 outside."""
    return tl.load(values_ptr + C * ROW + channel, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_value(values_ptr, ROW: tl.constexpr, channel, valid, C, values):
    """Write one row of `values` for some channels."""
    tl.store(values_ptr + C * ROW + channel, values, mask=valid)


@triton.jit
def load_channel_values(values_ptr, channel, valid, C):
    """center, rstd, γ, β and offset of the map for each channel of a block."""
    center = load_value(values_ptr, CENTER, channel, valid, C)
    rstd = load_value(values_ptr, RSTD, channel, valid, C)
    gamma = load_value(values_ptr, GAMMA, channel, valid, C)
    beta = load_value(values_ptr, BETA, channel, valid, C)
    offset = load_value(values_ptr, OFFSET, channel, valid, C)
    return center, rstd, gamma, beta, offset


@triton.jit
def load_matrix(P_ptr, row, column, valid, K: tl.constexpr):
    """The block-diagonal matrix of a block of channels."""
    mask = same_group(row, column, valid, K)
    return tl.load(P_ptr + matrix_offsets(row, column, K), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_w(w_ptr, n, channel, valid, C, BC: tl.constexpr):
    """w_n for the channels of a block; 0 without a gate."""
    if w_ptr is None:
        return tl.zeros((BC,), tl.float32)
    else:
        return tl.load(w_ptr + n * C + channel, mask=valid, other=0.0)


@triton.jit
def load_lambda(mix_logit_ptr, default):
    """λ, or `default` where there is only one branch."""
    if mix_logit_ptr is None:
        return default
    else:
        return tl.sigmoid(tl.load(mix_logit_ptr).to(tl.float32))


@triton.jit
def load_blend(blend_ptr):
    """α, or 1 without a blend."""
    if blend_ptr is None:
        return 1.0
    else:
        return tl.load(blend_ptr).to(tl.float32)


@triton.jit
def round_to(values, DTYPE: tl.constexpr):
    """float32 values in another dtype, rounded to nearest (the interpreter truncates)."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def in_two_parts(values, DTYPE: tl.constexpr):
    """values = first + second, each rounded to DTYPE."""
    first = round_to(values, DTYPE)
    return first, round_to(values - first.to(tl.float32), DTYPE)


@triton.jit
def dot(a, b, c=None):
    """a · b [+ c] in float32; float32 operands are multiplied in three tf32 parts."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    else:
        return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def small_dot(a, b):
    """a · b of float32 matrices; at 16 × 16 plain multiplication is faster than tensor cores."""
    if a.shape[0] <= 16:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return dot(a, b)


# In half precision x itself is exact, so products multiply it as it is, and the norm goes into the
# matrix: M = (P + Diag(d)) · Diag(rstd). Only M is rounded. The constant of the map is computed
# from the rounded M, so that the error does not grow with the distance of x from 0.


@triton.jit
def shift_of(center, rstd, DTYPE: tl.constexpr, RAW: tl.constexpr):
    """The shift that is subtracted from x before products, and center − shift.

    RAW x is exact as it is. It is shifted only if it is far from 0 for its spread, because products
    and constant would cancel. The difference is exact again, because x is near the shift.
    """
    if RAW:
        shift = tl.where(tl.abs(center) * rstd > FAR, center, 0.0)
        shift = round_to(shift, DTYPE).to(tl.float32)
        return shift, center - shift
    else:
        return center, tl.zeros_like(center)


@triton.jit
def operand_of(x, shift, DTYPE: tl.constexpr):
    """x − shift of a tile: the operand of products."""
    return round_to(x.to(tl.float32) - shift[None, :], DTYPE)


@triton.jit
def unit_of(matrix, DTYPE: tl.constexpr):
    """The factor a matrix is divided by before it is rounded, so that it fits float16.

    A power of two: two blocks of channels round the same entry in the same way.
    """
    if tl.float16 == DTYPE:
        largest = tl.max(tl.max(tl.abs(matrix), 1), 0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.where(power > 0, power, 1.0) / LARGEST
    else:
        return 1.0


@triton.jit
def map_of_x(P, d, rstd, c, left, DTYPE: tl.constexpr, RAW: tl.constexpr, BC: tl.constexpr):
    """(P + Diag(d)) · (x − center) · rstd + c as a map of x − shift; left = center − shift.

    Returns the matrix in units, in two parts (the first is exact enough for values), the unit, and
    the constant.
    """
    exact = (P + diagonal(d, BC)) * rstd[None, :]
    unit = unit_of(exact, DTYPE)
    matrix, rest = in_two_parts(exact / unit, DTYPE)
    if RAW:
        # from the rounded matrix, so that its rounding error does not grow with the mean of x
        c -= unit * tl.sum(matrix.to(tl.float32) * left[None, :], 1)
    return matrix, rest, unit, c


@triton.jit
def load_map(
    values_ptr, P_ptr, w_ptr, n, channel, valid, C, K: tl.constexpr, BC: tl.constexpr,
    DTYPE: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """The map of sample n, y = P x̂ + w_n ⊙ (γ ⊙ x̂ + β) + offset, as a map of x − shift.

    Returns rstd, the shift, center − shift, and of the map: matrix and its rest (see `map_of_x`),
    unit and constant. Without P the map is unit · (x − shift) + constant, and matrix and rest are
    arbitrary (not every release of Triton can return None).
    """
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    c = w * beta + offset
    if P_ptr is not None:
        P = load_matrix(P_ptr, channel[:, None], channel[None, :], valid, K)
        shift, left = shift_of(center, rstd, DTYPE, RAW)
        matrix, rest, unit, c = map_of_x(P, w * gamma, rstd, c, left, DTYPE, RAW, BC)
        return rstd, shift, left, matrix, rest, unit, c
    else:
        return rstd, center, tl.zeros_like(center), center, center, w * gamma * rstd, c


@triton.jit
def transform(operand, matrix, unit, c, DTYPE: tl.constexpr):
    """unit · matrix · operand + c, for the rows of a tile."""
    product = dot(operand, tl.trans(matrix))
    if tl.float16 == DTYPE:
        return product * unit + c[None, :]
    else:
        return product + c[None, :]


@triton.jit
def add_transposed(total, g, matrix, rest, unit, DTYPE: tl.constexpr):
    """total + unit · matrixᵀ · g, for the rows of a tile.

    The matrix is used in two parts: a gradient with a mean would show its rounding.
    """
    if tl.float16 == DTYPE:
        product = dot(g, rest, dot(g, matrix))
        return total + unit * product
    elif tl.float32 == DTYPE:
        return dot(g, matrix, total)
    else:
        return dot(g, rest, dot(g, matrix, total))


@triton.jit
def activate(y, slope, ACT: tl.constexpr):
    """The activation. `slope` is the LeakyReLU's, or the ELU's α."""
    if ACT == NONE:
        return y
    elif ACT == RELU:
        return at_least_0(y)
    elif ACT == LEAKY_RELU:
        return tl.where(y > 0, y, slope * y)
    elif ACT == ELU:
        return tl.where(y > 0, y, slope * (tl.exp(tl.minimum(y, 0.0)) - 1))
    else:
        tl.static_assert(False, "this activation is not written here")


@triton.jit
def activation_gradient(grad, before, slope, ACT: tl.constexpr):
    """grad ⊙ act'(before), where `before` is the activation's argument."""
    if ACT == NONE:
        return grad
    elif ACT == RELU:
        return tl.where(before > 0, grad, 0.0)
    elif ACT == LEAKY_RELU:
        return tl.where(before > 0, grad, slope * grad)
    elif ACT == ELU:
        return tl.where(before > 0, grad, grad * slope * tl.exp(tl.minimum(before, 0.0)))
    else:
        tl.static_assert(False, "this activation is not written here")


@triton.jit
def activation_gradient_from_output(grad, after, slope, ACT: tl.constexpr):
    """grad ⊙ act', from the activation's result `after`; needs a positive slope."""
    if ACT == NONE:
        return grad
    elif ACT == RELU:
        return tl.where(after > 0, grad, 0.0)
    elif ACT == LEAKY_RELU:
        return tl.where(after > 0, grad, slope * grad)
    elif ACT == ELU:
        return tl.where(after > 0, grad, grad * (after + slope))
    else:
        tl.static_assert(False, "this activation is not written here")
