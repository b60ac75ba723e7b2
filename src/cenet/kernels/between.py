"""The second step between the passes: decorrelation and the gate's hidden layer in one launch.

They do not need each other, and each alone leaves most of the device idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.decorrelation import decorrelate
from cenet.kernels.gate import ROWS, WIDTH, GateWeights, hidden_layer, tile
from cenet.kernels.launch import empty, launch
from cenet.kernels.modes import ABSENT, BATCH, Mode
from cenet.kernels.moments import Parts
from cenet.kernels.statistics import Statistics, group_constants
from cenet.kernels.tiles import ceil_div, power_of_2


@triton.jit(
    do_not_specialize=[
        *("N", "L", "groups", "windows", "splits", "split_windows", "rows", "columns"),
    ]
)
def _between_kernel(
    gram_ptr,  # (rows, G, K, K), or None
    pivot_ptr,  # (N·splits, C), if pooled
    pooled_rest_ptr,  # (N·splits, C), or None
    running_inv_sqrt_ptr,  # (G, K, K), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (8, C)
    matrices_ptr,  # (3, G, K, K)
    iterates_ptr,  # (G, 3·steps, K, K)
    var_ptr,  # (N, C), or None
    w1_ptr,  # (H, C), or None
    s_ptr,  # (G,), or None
    running_inv_std_ptr,  # (), or None
    inv_std_ptr,  # ()
    hidden_ptr,  # (N, H)
    N,
    C,
    L,
    H,
    groups,
    windows,
    splits,
    split_windows,
    rows,
    columns,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
    BD: tl.constexpr,
    IR: tl.constexpr,
    GP: tl.constexpr,
    GATE_BN: tl.constexpr,
    GATE_BW: tl.constexpr,
    GATE_BK: tl.constexpr,
):
    program = tl.program_id(0)
    first = 0  # program of the hidden layer
    if BD > 0:
        first = groups
        if program < groups:
            decorrelate(
                program, gram_ptr, pivot_ptr, pooled_rest_ptr, running_inv_sqrt_ptr, mix_logit_ptr,
                blend_ptr, values_ptr, matrices_ptr, iterates_ptr, N, C, L, groups, windows, splits,
                split_windows, rows, K, KP, BN, BR, STEPS, BD,
            )  # fmt: skip
    if IR > 0:
        if program >= first:
            block = program - first
            hidden_layer(
                block // columns, block % columns, var_ptr, values_ptr, w1_ptr, s_ptr,
                running_inv_std_ptr, inv_std_ptr, hidden_ptr, N, C, H, groups, eps, GP,
                GATE_BN, GATE_BW, GATE_BK,
            )  # fmt: skip


def between(
    found: Statistics,
    s_parts: Tensor,
    parts: Parts | None,
    shape: torch.Size,
    group_size: int,
    mode: Mode,
    *,
    inv_sqrt: Tensor | None,
    inv_std: Tensor | None,
    gate: GateWeights | None,
    mix_logit: Tensor | None,
    blend: Tensor | None,
    eps: float,
    steps: int,
    pool: int,
) -> tuple[Tensor, Tensor] | None:
    """Fill in `found`; return the hidden layer (N, H) and s^{-1/2} if there is a gate.

    `inv_sqrt` and `inv_std` are the running statistics, where the mode says so.
    """
    n, channels, height, width = shape
    groups = ceil_div(channels, group_size)
    units = 0 if gate is None else gate.w1.shape[0]
    hidden, batch_inv_std = empty(s_parts.device, n, units), empty(s_parts.device)
    columns = ceil_div(units, WIDTH)
    programs = groups if mode.bd != ABSENT else 0
    programs += ceil_div(n, ROWS) * columns
    gram = pivot = pooled = None
    splits = 1
    if parts is not None:
        gram, pivot, pooled, splits = parts.gram, parts.pivot, parts.pooled_rest, parts.splits
    high, wide = ceil_div(height, pool), ceil_div(width, pool)
    launch(
        _between_kernel, (programs,),
        gram, pivot, pooled, inv_sqrt, mix_logit, blend,
        found.values, found.matrices, found.iterates, None if gate is None else found.instances[1],
        None if gate is None else gate.w1, s_parts if mode.ir == BATCH else None, inv_std,
        batch_inv_std, hidden, n, channels, height * width, units, groups,
        high * wide, splits, ceil_div(high, splits) * wide, 0 if gram is None else len(gram),
        columns, eps, STEPS=steps, GP=power_of_2(groups),
        **between_constants(group_size, mode, channels),
    )  # fmt: skip
    return None if gate is None else (hidden, batch_inv_std)


def between_constants(group_size: int, mode: Mode, depth: int) -> dict[str, int]:
    """What a kernel is compiled for that does a job for each group and a job of the gate."""
    constants = group_constants(group_size, mode)
    del constants["NORM"]
    gate = {f"GATE_{name}": value for name, value in tile(depth).items() if name != "num_warps"}
    return constants | gate
