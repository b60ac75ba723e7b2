"""The second step between the passes: the norm, decorrelation and the gate's hidden layer.

All in one launch: a program puts the chunks together for its own channels, which is little work,
and so none has to wait for another.
"""

import triton
import triton.language as tl

from cenet.kernels.call import BATCH, NormCECall
from cenet.kernels.decorrelation import decorrelate
from cenet.kernels.gate import ROWS, WIDTH, Hidden, hidden_layer, span_of, tile
from cenet.kernels.launch import empty, launch
from cenet.kernels.statistics import (
    IS_BATCH,
    Chunks,
    Statistics,
    group_channels,
    group_constants,
    mean_of_chunks,
    settle_norm,
)
from cenet.kernels.tiles import ceil_div


@triton.jit(
    do_not_specialize=["N", "L", "groups", "windows", "chunks", "samples", "columns", "depths"]
)
def _between_kernel(
    origin_ptr,  # (C,), or None: nothing was measured
    mean_ptr,  # (S, C)
    square_ptr,  # (S, C)
    spread_ptr,  # (S, C), or None
    gram_ptr,  # (S, G, K, K), or None
    pooled_mean_ptr,  # (S, C), or None
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
            channel, valid, origin_ptr, mean_ptr, square_ptr, spread_ptr, weight_ptr, bias_ptr,
            running_mean_ptr, running_var_ptr, values_ptr, N, C, L, chunks, samples, norm_eps, KP,
            BS, NORM, BATCH_ANY,
        )  # fmt: skip
        pixels = L
        if pooled_mean_ptr is not None:
            middle = mean_of_chunks(pooled_mean_ptr, channel, valid, N, C, chunks, samples, KP, BS)
            pixels = windows
        tl.store(values_ptr + 6 * C + channel, (apart + middle) * rstd, mask=valid)
        if BD > 0:
            decorrelate(
                program, mean_ptr if pooled_mean_ptr is None else pooled_mean_ptr, gram_ptr,
                running_inv_sqrt_ptr, mix_logit_ptr, blend_ptr, values_ptr, matrices_ptr,
                iterates_ptr, middle, rstd, gamma, beta, N, C, pixels, groups, chunks, samples, K,
                KP, BR, BS, STEPS, BD,
            )  # fmt: skip
        else:
            tl.store(values_ptr + 4 * C + channel, tl.zeros((KP,), tl.float32), mask=valid)
    if IR > 0:
        if program >= groups:
            block = program - groups
            hidden_layer(
                block // columns // depths, block // depths % columns, block % depths, mean_ptr,
                square_ptr, spread_ptr, weight_ptr, running_var_ptr, var_ptr, w1_ptr, s_ptr,
                hidden_ptr, N, C, L, H, span, chunks, samples, norm_eps, NORM, BS, GATE_BN,
                GATE_BW, GATE_BK,
            )  # fmt: skip


def between(
    call: NormCECall, found: Statistics, chunks: Chunks | None, *, windows: int
) -> Hidden | None:
    """Fill in `found`, from what was measured; return the hidden layer if there is a gate.

    `windows` is the number of pixels that pooling leaves of a sample.
    """
    n, channels, height, width = call.x.shape
    group_size, mode, units = call.group_size, call.mode, call.units
    groups, device = ceil_div(channels, group_size), found.values.device
    columns = depths = span = 0
    hidden = None
    if units:
        span = span_of(n, channels, units)
        columns, depths = ceil_div(units, WIDTH), ceil_div(channels, span)
        s = empty(device, depths) if mode.ir == BATCH else None
        hidden = Hidden(empty(device, depths, n, units), s)
    measured = (None,) * 6 if chunks is None else chunks[:6]
    launch(
        _between_kernel, (groups + ceil_div(n, ROWS) * columns * depths,),
        *measured, call.weight, call.bias, call.running_mean, call.running_var, call.inv_sqrt,
        call.mix_logit, call.blend, found.values, found.matrices, found.iterates,
        found.instances[1] if units else None, call.w1, hidden and hidden.s,
        hidden and hidden.parts, n, channels, height * width, units, groups, windows,
        0 if chunks is None else len(chunks.mean), 0 if chunks is None else chunks.samples,
        columns, depths, span, call.norm_eps, STEPS=call.steps,
        **group_constants(group_size, mode), **gate_constants(channels),
    )  # fmt: skip
    return hidden


def gate_constants(channels: int) -> dict[str, int]:
    """What a kernel is compiled for that does a job of the gate over channels."""
    cut = tile(channels)
    del cut["num_warps"]
    return {f"GATE_{name}": size for name, size in cut.items()}
