"""The gate of a folded layer: two launches, from the measured moments, without gradients."""

import triton
import triton.language as tl
from torch import Tensor

from cenet.functional import GATE_NORM_EPS
from cenet.kernels.call import AVERAGES, FoldedCECall
from cenet.kernels.gate import (
    DEPTH,
    ROWS,
    WIDTH,
    gate_kernel,
    load_block,
    store_block,
    tile,
    tile_of_units,
)
from cenet.kernels.launch import await_previous_launch, empty, launch
from cenet.kernels.moments import Parts
from cenet.kernels.tiles import ceil_div, dot, power_of_2

# upper bounds on parts of the hidden layer and on splits per sample
PARTS = 8
SPLITS = 8
NO_AVERAGES = (None,) * len(AVERAGES)


@triton.jit
def load_variance(
    pivot_ptr, rest_ptr, square_ptr, n, c, N, C, L, split_pixels, SPLITS: tl.constexpr
):
    """Instance variances of a block of samples and channels, from the parts of the samples."""
    origin = load_block(pivot_ptr, n * SPLITS, c, N * SPLITS, C)
    mean = tl.zeros_like(origin)  # as a distance from the origin
    total = tl.zeros_like(origin)
    seen = 0.0
    for split in tl.static_range(SPLITS):
        part = n * SPLITS + split
        pixels = tl.minimum(split_pixels, L - split * split_pixels).to(tl.float32)
        apart = load_block(pivot_ptr, part, c, N * SPLITS, C) - origin
        apart += load_block(rest_ptr, part, c, N * SPLITS, C) - mean
        share = pixels / (seen + pixels)
        total += load_block(square_ptr, part, c, N * SPLITS, C) + seen * share * apart * apart
        mean += share * apart
        seen += pixels
    return total / L


@triton.jit(do_not_specialize=["N", "L", "split_pixels"])
def _folded_hidden_kernel(
    pivot_ptr,  # (N·splits, C)
    rest_ptr,  # (N·splits, C)
    square_ptr,  # (N·splits, C)
    w1_ptr,  # (H, C)
    hidden_ptr,  # (depths, N, H)
    N,
    C,
    H,
    L,
    split_pixels,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    BK: tl.constexpr,
):
    """z / r² in parts, one for every BK channels."""
    await_previous_launch()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    h = tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BK + tl.arange(0, BK)
    var = load_variance(pivot_ptr, rest_ptr, square_ptr, n, c, N, C, L, split_pixels, SPLITS)
    part = dot(var, tl.trans(load_block(w1_ptr, h, c, H, C)))
    store_block(hidden_ptr + tl.cast(tl.program_id(2), tl.int64) * N * H, n, h, N, H, part)


def folded_gate(call: FoldedCECall, parts: Parts) -> Tensor:
    """w_n = share · s^{-1/2} · gate + offset of a folded layer, (N, C), from the measured parts."""
    n, channels, height, width = call.x.shape
    units = len(call.w1)
    least = DEPTH if parts.splits > 2 else 2 * DEPTH
    cut = tile(channels, max(least, power_of_2(ceil_div(channels, PARTS))))
    depths = ceil_div(channels, cut["BK"])
    device = parts.square.device
    hidden, w = empty(device, depths, n, units), empty(device, n, channels)
    launch(
        _folded_hidden_kernel, (ceil_div(n, ROWS), ceil_div(units, WIDTH), depths),
        parts.pivot, parts.rest, parts.square, call.w1, hidden, n, channels, units,
        height * width, parts.split_pixels, SPLITS=parts.splits, **cut,
    )  # fmt: skip
    blocks = ceil_div(n, ROWS) * ceil_div(channels, WIDTH)
    launch(
        gate_kernel, (blocks,),
        hidden, None, call.inv_std, call.norm_weight, call.norm_bias, call.w2, None, None,
        call.share, call.offset, None, None, None, None, w, *NO_AVERAGES, None, None,
        n, n, channels, units, 0.0, GATE_NORM_EPS, blocks, 0, 1.0, None, 0.0, 0.0, 0.0,
        DEPTHS=depths, DP=power_of_2(depths), **tile_of_units(units),
    )  # fmt: skip
    return w
