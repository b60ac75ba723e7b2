"""The applying pass. Its two backward passes are in `mix_backward`.

    x̂  = (x − center) · rstd
    y   = act(P·x̂ + w_n ⊙ (γ ⊙ x̂ + β) + b [+ residual])

The operator of a sample is one matrix per group, P + Diag(w_n γ), so a tile takes one dot. Backward
recomputes the sign of the activation from x, or reads it off y when there was a residual:

    g       = grad ⊙ act'
    reduce    gP = Σ g x̂ᵀ,  gd_n = Σ_hw g ⊙ x̂,  gc_n = Σ_hw g
    dx      = rstd ⊙ (Pᵀg + w_n γ ⊙ g + Q·x̂ + e_n ⊙ x̂ + f_n)
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.call import ACTIVATIONS
from cenet.kernels.launch import launch
from cenet.kernels.operands import map_of_x, operand_of, shift_of, transform
from cenet.kernels.tiles import (
    Tile,
    Walk,
    activate,
    alignment,
    is_channels_last,
    is_raw,
    load_channel_values,
    load_matrix,
    load_tile,
    load_w,
    locate,
    store_tile,
    tile_offsets,
    walk_over,
)

# if channels_last, and if not
TILES = {
    True: (
        Tile(512, 64, 64, 4, 4, 4096, 4),
        Tile(128, 64, 32, 4, 3, 2048, 4),
        Tile(1, 32, 32, 1, 3, 2048, 4),
    ),
    False: (Tile(2048, 64, 64, 4, 4, 4096, 4), Tile(1, 256, 16, 4, 3, 2048, 4)),
}


class Map(NamedTuple):
    """The map that `mix` applies, in float32."""

    values: Tensor  # (5 or more, C): center, rstd, γ, β, b
    P: Tensor | None  # (G, K, K)
    w: Tensor | None  # (N, C)
    group_size: int
    act: str
    slope: float


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, C, L) or (N, L, C)
    residual_ptr,  # like x, or None
    y_ptr,  # like x
    values_ptr,  # (10, C)
    P_ptr,  # (G, K, K), or None
    w_ptr,  # (N, C), or None
    C,
    L,
    slope,
    splits,
    tiles,
    K: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
    ALIGN: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACT: tl.constexpr,
    RAW: tl.constexpr,
    FULL: tl.constexpr,
):
    DENSE: tl.constexpr = P_ptr is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if RAW and DENSE else tl.float32
    _, n, channel, valid, begin, end = locate(C, L, splits, tiles, K, BL, BC, ALIGN, CHANNELS_LAST)
    center, rstd, gamma, beta, offset = load_channel_values(values_ptr, channel, valid, C)
    w = load_w(w_ptr, n, channel, valid, C, BC)
    c = w * beta + offset
    if DENSE:
        P = load_matrix(P_ptr, channel[:, None], channel[None, :], valid, K)
        shift, left = shift_of(center, rstd, DTYPE, RAW)
        matrix, _, unit, c = map_of_x(P, w * gamma, rstd, c, left, DTYPE, RAW, BC)
    else:
        shift, unit = center, w * gamma * rstd
    for start in range(begin, end, BL):
        offsets = tile_offsets(n, start, channel, C, L, ALIGN, BL, CHANNELS_LAST)
        inside = (start + tl.arange(0, BL) < end)[:, None] & valid[None, :]
        operand = operand_of(load_tile(x_ptr, offsets, inside, FULL), shift, DTYPE)
        if DENSE:
            y = transform(operand, matrix, unit, c, DTYPE)
        else:
            y = operand * unit[None, :] + c[None, :]
        if residual_ptr is not None:
            y += load_tile(residual_ptr, offsets, inside, FULL).to(tl.float32)
        store_tile(y_ptr, offsets, activate(y, slope, ACT), inside, FULL)


def forward(x: Tensor, y: Tensor, mapping: Map, residual: Tensor | None = None) -> None:
    """Write to y what the map makes of x."""
    cut = walk_over(x, mapping.group_size, TILES)
    launch(
        _forward_kernel, grid(x, mapping, cut),
        x, residual, y, *pointers(mapping), *sizes(x), mapping.slope, *cuts(x, cut),
        **tile_constants(x, mapping, cut), ACT=ACTIVATIONS[mapping.act],
    )  # fmt: skip


def grid(x: Tensor, mapping: Map, cut: Walk) -> tuple[int]:
    """Number of programs."""
    return (cut.rows(x.shape[0]) * cut.blocks(x.shape[1], mapping.group_size),)


def pointers(mapping: Map) -> tuple[Tensor | None, ...]:
    """The map as kernels take it."""
    return mapping[:3]


def sizes(x: Tensor) -> tuple[int, int]:
    """C and L."""
    _, channels, height, width = x.shape
    return channels, height * width


def cuts(x: Tensor, cut: Walk) -> tuple[int, int]:
    """How kernels find their part of x."""
    return cut.splits, cut.tiles(x.shape[2] * x.shape[3])


def tile_constants(x: Tensor, mapping: Map, cut: Walk) -> dict[str, int | bool]:
    """What a kernel is compiled for."""
    return {
        "K": mapping.group_size,
        "BL": cut.pixels,
        "BC": cut.channels,
        "ALIGN": alignment(x),
        "CHANNELS_LAST": is_channels_last(x),
        "RAW": is_raw(x),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "FULL": cut.is_full(x.shape[2] * x.shape[3], x.shape[1], mapping.group_size),
    }
