"""The layer over several ranks: its two passes, each cut in two by a collective.

    forward     measure x → condense → pack | all-gather | merge → coefficients → gate → mix
    backward    reduce x, grad → local_backward (three launches) → split
                | reduce-scatter | join → dx

Every rank packs the statistics of its images into a message and merges the messages of all by
Chan's formula, in the order of the ranks: the second moments inside the ranks plus those between
their means. The result has the form of the result of `condense`, so the other launches are
those of a layer that works alone. docs/scaling.md describes the messages.

Backward, a rank splits the gradient of its own loss for the merged statistics into gradients of all
messages. The collective brings it the sum of those of its own message, and `join` turns that into
the part of dx that goes through the statistics.

With r's share of images, pixels or windows p_r, and d_r its mean less that of all:

    μ = Σ p_r μ_r                       gμ_r = p_r (gμ + (gΣ + gΣᵀ) d_r)
    Σ = Σ p_r (Σ_r + d_r d_rᵀ)          gΣ_r = p_r gΣ

Norm and block are one function of γ ⊙ x̂ + β, so gμ = −γ rstd gβ, and the variance of the norm has
the gradient −½ γ rstd² gγ.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels import mix
from cenet.kernels.call import BATCH, NormCECall, gradient_sizes
from cenet.kernels.coefficients import BranchGradients, local_backward
from cenet.kernels.decorrelation import covariance_of_chunks
from cenet.kernels.gate import GateState
from cenet.kernels.launch import empty, empty_like, is_collecting, launch
from cenet.kernels.layer import (
    Gradients,
    Saved,
    apply_gradient,
    dense,
    empty_state,
    like,
    map_of,
    measure_batch,
    parameter_gradients,
    passes_over,
    run_recorded,
    settle,
    unpack,
    windows_of,
)
from cenet.kernels.moments import (
    Chunks,
    Merged,
    Statistics,
    group_channels,
    group_constants,
    store_gram,
    sum_of_rows,
)
from cenet.kernels.norm import (
    gradient_of_s,
    instance_means,
    mean_of_chunks,
    variance_gradient,
    variance_of_chunks,
)
from cenet.kernels.tiles import CENTER, GAMMA, ORIGIN, RSTD, SCALE, ceil_div, load_value
from cenet.messages import Layout, all_gather, sum_of_own_part

SAMPLES = 64  # samples per program of `join`
# parts of a message after its counts, in the order of the arguments of kernels
PLACES = ("window_mean", "cov", "mean", "var", "instance_var")
# places of the counts in a message
IMAGES = tl.constexpr(0)
PIXELS = tl.constexpr(1)
WINDOWS = tl.constexpr(2)


@triton.jit
def _triangle(i, j, K: tl.constexpr):
    """Where the entries of a symmetric matrix are in its upper triangle, read by rows."""
    low, high = tl.minimum(i, j), tl.maximum(i, j)
    return low * (2 * K - 1 - low) // 2 + high


@triton.jit
def _load_matrix(message_ptr, group, i, j, inside, K: tl.constexpr):
    """A group's matrix, from its triangle."""
    begin = group * (K * (K + 1) // 2)
    return tl.load(message_ptr + begin + _triangle(i, j, K), mask=inside, other=0.0)


@triton.jit
def _store_triangle(message_ptr, group, i, j, values, K: tl.constexpr):
    begin = group * (K * (K + 1) // 2)
    tl.store(message_ptr + begin + _triangle(i, j, K), values, mask=(i <= j) & (j < K))


@triton.jit
def _total(messages_ptr, count, ranks, size):
    """Images, pixels or windows of all ranks."""
    total = 0.0
    for rank in range(ranks):
        total += tl.load(messages_ptr + rank * size + count)
    return total


@triton.jit
def _share(messages_ptr, count, total, rank, size):
    """Share of a rank in them; zero, not NaN, if no rank has anything."""
    return tl.load(messages_ptr + rank * size + count) / tl.maximum(total, 1.0)


@triton.jit
def _average(messages_ptr, place, count, total, channel, valid, ranks, size, KP: tl.constexpr):
    """Average over ranks of one number per channel."""
    average = tl.zeros((KP,), tl.float32)
    for rank in range(ranks):
        values = tl.load(messages_ptr + rank * size + place + channel, mask=valid, other=0.0)
        average += _share(messages_ptr, count, total, rank, size) * values
    return average


@triton.jit(do_not_specialize=["N", "L", "G", "windows", "chunks", "samples", *PLACES])
def _pack_kernel(
    origin_ptr,  # (C,)
    mean_ptr,  # (S, C)
    square_ptr,  # (S, C)
    spread_ptr,  # (S, C), or None
    gram_ptr,  # (S, G, K, K), or None
    pooled_mean_ptr,  # (S, C), or None
    values_ptr,  # (10, C): keeps the origin
    message_ptr,  # (b,)
    N,
    C,
    L,
    G,
    windows,
    chunks,
    samples,
    window_mean,  # places in a message
    cov,
    mean,
    var,
    instance_var,
    NORM: tl.constexpr,  # there is a place for mean and variance
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
):
    """Statistics of this rank's images, one program per group."""
    group = tl.program_id(0)
    place, channel, valid = group_channels(group, C, K, KP)
    origin = tl.load(origin_ptr + channel, mask=valid, other=0.0)
    tl.store(values_ptr + C * ORIGIN + channel, origin, mask=valid)
    middle = mean_of_chunks(mean_ptr, channel, valid, N, C, chunks, samples, KP, BS)
    if group == 0:
        images = tl.cast(N, tl.float32)
        tl.store(message_ptr + IMAGES, images)
        tl.store(message_ptr + PIXELS, images * L)
        tl.store(message_ptr + WINDOWS, images * windows)
    if NORM:
        square = variance_of_chunks(
            mean_ptr, square_ptr, middle, channel, valid, N, C, L, chunks, samples, KP, BS
        )
        tl.store(message_ptr + mean + channel, origin + middle, mask=valid)
        tl.store(message_ptr + var + channel, square, mask=valid)
    if gram_ptr is not None:
        means_ptr = mean_ptr
        if pooled_mean_ptr is not None:
            means_ptr = pooled_mean_ptr
            middle = mean_of_chunks(pooled_mean_ptr, channel, valid, N, C, chunks, samples, KP, BS)
        matrix = covariance_of_chunks(
            group, means_ptr, gram_ptr, middle, N, C, windows, G, chunks, samples, K, KP, BR, BS
        )
        inside = valid[:, None] & valid[None, :]
        matrix = tl.where(inside, matrix, 0.0)
        tl.store(message_ptr + window_mean + channel, origin + middle, mask=valid)
        _store_triangle(message_ptr + cov, group, place[:, None], place[None, :], matrix, K)
    if spread_ptr is not None:
        spread = sum_of_rows(spread_ptr, channel, valid, chunks, C, KP, BS) / N
        tl.store(message_ptr + instance_var + channel, spread, mask=valid)


@triton.jit(do_not_specialize=["G", "ranks", "size", *PLACES])
def _merge_kernel(
    messages_ptr,  # (R, b)
    values_ptr,  # (10, C): the origin of this rank
    origin_ptr,  # (C,)
    mean_ptr,  # (1, C)
    square_ptr,  # (1, C)
    spread_ptr,  # (1, C), or None
    gram_ptr,  # (1, G, K, K), or None
    pooled_mean_ptr,  # (1, C), or None
    shift_ptr,  # (C,)
    correction_ptr,  # ()
    C,
    G,
    ranks,
    size,
    window_mean,  # places in a message
    cov,
    mean,
    var,
    instance_var,
    NORM: tl.constexpr,  # there is a place for mean and variance
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Statistics of the images of all ranks, one program per group; NaN without images."""
    group = tl.program_id(0)
    place, channel, valid = group_channels(group, C, K, KP)
    i, j = place[:, None], place[None, :]
    pixels = _total(messages_ptr, PIXELS, ranks, size)
    missing = tl.where(pixels > 0, 0.0, float("nan"))
    own_origin = load_value(values_ptr, ORIGIN, channel, valid, C)
    origin = own_origin
    square = tl.zeros((KP,), tl.float32)
    if gram_ptr is not None:
        windows = _total(messages_ptr, WINDOWS, ranks, size)
        origin = _average(
            messages_ptr, window_mean, WINDOWS, windows, channel, valid, ranks, size, KP
        )
        middle = origin
        matrix = tl.zeros((KP, KP), tl.float32)
        for rank in range(ranks):
            message = messages_ptr + rank * size
            own = tl.load(message + window_mean + channel, mask=valid, other=0.0)
            apart = tl.where(valid, own - middle, 0.0)
            inside = valid[:, None] & valid[None, :]
            own_matrix = _load_matrix(message + cov, group, i, j, inside, K)
            share = _share(messages_ptr, WINDOWS, windows, rank, size)
            matrix += share * (own_matrix + apart[:, None] * apart[None, :])
        square = tl.sum(tl.where(i == j, matrix, 0.0), 0)
        store_gram(gram_ptr, 0, group, G, place, matrix + missing, K)
        if NORM:
            origin = _average(messages_ptr, mean, PIXELS, pixels, channel, valid, ranks, size, KP)
        if pooled_mean_ptr is not None:
            tl.store(pooled_mean_ptr + channel, middle - origin, mask=valid)
    elif NORM:
        origin = _average(messages_ptr, mean, PIXELS, pixels, channel, valid, ranks, size, KP)
    if NORM:
        square = tl.zeros((KP,), tl.float32)
        for rank in range(ranks):
            message = messages_ptr + rank * size
            own = tl.load(message + mean + channel, mask=valid, other=0.0)
            own_square = tl.load(message + var + channel, mask=valid, other=0.0)
            share = _share(messages_ptr, PIXELS, pixels, rank, size)
            square += share * (own_square + (own - origin) * (own - origin))
    if spread_ptr is not None:
        images = _total(messages_ptr, IMAGES, ranks, size)
        spread = _average(
            messages_ptr, instance_var, IMAGES, images, channel, valid, ranks, size, KP
        )
        tl.store(spread_ptr + channel, spread + missing, mask=valid)
    tl.store(origin_ptr + channel, origin, mask=valid)
    tl.store(mean_ptr + channel, tl.zeros((KP,), tl.float32), mask=valid)
    tl.store(square_ptr + channel, square + missing, mask=valid)
    tl.store(shift_ptr + channel, own_origin - origin, mask=valid)
    if group == 0:
        tl.store(correction_ptr, tl.where(pixels > 1, pixels / (pixels - 1), float("nan")))


@triton.jit(do_not_specialize=["G", "ranks", "size", "blocks", *PLACES])
def _split_kernel(
    messages_ptr,  # (R, b)
    Q_ptr,  # (G, K, K), or None
    grad_gamma_ptr,  # (C,)
    grad_beta_ptr,  # (C,)
    gate_scalars_ptr,  # (blocks, 3), or None
    inv_std_ptr,  # (), or None
    mix_logit_ptr,  # (), or None
    blend_ptr,  # (), or None
    values_ptr,  # (10, C)
    gradients_ptr,  # (R, b)
    C,
    G,
    ranks,
    size,
    blocks,
    window_mean,  # places in a message
    cov,
    mean,
    var,
    instance_var,
    NORM: tl.constexpr,  # the norm's statistics are merged
    APART: tl.constexpr,  # there is a place for them
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Gradient of this rank's loss for the message of each rank, one program per group and rank."""
    group, rank = tl.program_id(0) % G, tl.program_id(0) // G
    place, channel, valid = group_channels(group, C, K, KP)
    message = messages_ptr + rank * size
    gradient = gradients_ptr + rank * size
    rstd = load_value(values_ptr, RSTD, channel, valid, C)
    grad_mean = tl.zeros((KP,), tl.float32)
    grad_var = tl.zeros((KP,), tl.float32)
    if NORM:
        gamma = load_value(values_ptr, GAMMA, channel, valid, C)
        grad_mean -= gamma * rstd * tl.load(grad_beta_ptr + channel, mask=valid, other=0.0)
        grad_gamma = tl.load(grad_gamma_ptr + channel, mask=valid, other=0.0)
        grad_var -= 0.5 * gamma * rstd * rstd * grad_gamma
    if group == 0:
        tl.store(gradient + IMAGES, 0.0)
        tl.store(gradient + PIXELS, 0.0)
        tl.store(gradient + WINDOWS, 0.0)
    if APART:
        pixels = _total(messages_ptr, PIXELS, ranks, size)
        share = _share(messages_ptr, PIXELS, pixels, rank, size)
        middle = _average(messages_ptr, mean, PIXELS, pixels, channel, valid, ranks, size, KP)
        apart = tl.load(message + mean + channel, mask=valid, other=0.0) - middle
        here = share * (grad_mean + 2 * grad_var * apart)
        tl.store(gradient + mean + channel, here, mask=valid)
        tl.store(gradient + var + channel, share * grad_var, mask=valid)
        grad_mean = tl.zeros((KP,), tl.float32)
        grad_var = tl.zeros((KP,), tl.float32)
    if Q_ptr is not None:
        windows = _total(messages_ptr, WINDOWS, ranks, size)
        share = _share(messages_ptr, WINDOWS, windows, rank, size)
        middle = _average(
            messages_ptr, window_mean, WINDOWS, windows, channel, valid, ranks, size, KP
        )
        apart = tl.load(message + window_mean + channel, mask=valid, other=0.0) - middle
        i, j = place[:, None], place[None, :]
        inside = valid[:, None] & valid[None, :]
        matrix = tl.load(Q_ptr + group.to(tl.int64) * K * K + i * K + j, mask=inside, other=0.0)
        matrix = matrix * rstd[:, None] * rstd[None, :]
        matrix += tl.where(i == j, 2 * grad_var[:, None], 0.0)  # gΣ + gΣᵀ
        grad_mean += tl.sum(matrix * apart[:, None], 0)
        tl.store(gradient + window_mean + channel, share * grad_mean, mask=valid)
        # an entry of the triangle stands for two, but on the diagonal for one
        matrix = share * tl.where(i == j, 0.5 * matrix, matrix)
        _store_triangle(gradient + cov, group, i, j, matrix, K)
    if gate_scalars_ptr is not None:
        images = _total(messages_ptr, IMAGES, ranks, size)
        share = _share(messages_ptr, IMAGES, images, rank, size)
        r = tl.load(inv_std_ptr)
        grad_s = gradient_of_s(r, gate_scalars_ptr, mix_logit_ptr, blend_ptr, blocks)
        scale = load_value(values_ptr, SCALE, channel, valid, C)
        here = share * grad_s / C * scale * scale
        tl.store(gradient + instance_var + channel, here, mask=valid)


@triton.jit(do_not_specialize=["N", "L", "G", "windows", *PLACES])
def _join_kernel(
    message_ptr,  # (b,), that of this rank
    gradient_ptr,  # (b,), summed over ranks
    grad_u_ptr,  # (N, C), or None
    inv_std_ptr,  # (), or None
    values_ptr,  # (10, C)
    instances_ptr,  # (2, N, C)
    Q_ptr,  # (G, K, K), or None
    e_ptr,  # (N, C)
    f_ptr,  # (N, C)
    pooled_offset_ptr,  # (C,), or None
    N,
    C,
    L,
    G,
    windows,
    window_mean,  # places in a message
    cov,
    mean,
    var,
    instance_var,
    APART: tl.constexpr,  # there is a place for mean and variance of the norm
    IR: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
):
    """Q, e and f of dx, from the gradient of this rank's message, for a group and BN samples."""
    group, chunk = tl.program_id(0) % G, tl.program_id(0) // G
    place, channel, valid = group_channels(group, C, K, KP)
    center = load_value(values_ptr, CENTER, channel, valid, C)
    rstd = load_value(values_ptr, RSTD, channel, valid, C)
    std = 1 / tl.where(valid, rstd, 1.0)  # from units of x to those of x̂
    images = tl.cast(N, tl.float32)
    slope = tl.zeros((KP,), tl.float32)
    offset = tl.zeros((KP,), tl.float32)
    if APART:
        own = (tl.load(message_ptr + mean + channel, mask=valid, other=0.0) - center) * rstd
        grad_mean = tl.load(gradient_ptr + mean + channel, mask=valid, other=0.0)
        grad_var = tl.load(gradient_ptr + var + channel, mask=valid, other=0.0)
        slope = 2 * grad_var * std * std / (images * L)
        offset = grad_mean * std / (images * L) - slope * own
    if Q_ptr is not None:
        i, j = place[:, None], place[None, :]
        inside = valid[:, None] & valid[None, :]
        own = (tl.load(message_ptr + window_mean + channel, mask=valid, other=0.0) - center) * rstd
        Q = _load_matrix(gradient_ptr + cov, group, i, j, inside, K)
        Q = tl.where(i == j, 2 * Q, Q) * std[:, None] * std[None, :] / (images * windows)
        through = tl.load(gradient_ptr + window_mean + channel, mask=valid, other=0.0)
        through = through * std / (images * windows) - tl.sum(Q * own[:, None], 0)
        if chunk == 0:
            store_gram(Q_ptr, 0, group, G, place, Q, K)
        if pooled_offset_ptr is None:
            offset += through
        elif chunk == 0:
            tl.store(pooled_offset_ptr + channel, through, mask=valid)
    n = chunk * BN + tl.arange(0, BN)
    r2 = 0.0
    gamma = load_value(values_ptr, GAMMA, channel, valid, C)
    if IR > 0:
        r = tl.load(inv_std_ptr)
        r2 = r * r
    e, mask = variance_gradient(grad_u_ptr, n, channel, valid, gamma, r2, 0.0, N, C, L, KP, BN, IR)
    f = offset[None, :] + tl.zeros_like(e)
    if IR > 0:
        spread = tl.load(gradient_ptr + instance_var + channel, mask=valid, other=0.0)
        e += (2 / L * spread * std * std / images)[None, :]
        f -= e * rstd[None, :] * instance_means(values_ptr, instances_ptr, n, channel, valid, N, C)
    rows = n[:, None].to(tl.int64) * C + channel[None, :]
    tl.store(e_ptr + rows, e + slope[None, :], mask=mask)
    tl.store(f_ptr + rows, f, mask=mask)


def layout_of(call: NormCECall) -> Layout:
    """The statistics that the ranks exchange for this call."""
    mode = call.mode
    group_size = call.group_size if mode.bd == BATCH else None
    norm, instance = mode.norm == BATCH, mode.ir == BATCH
    return Layout(call.x.shape[1], group_size, call.pool, norm, instance)


@cache
def message_size(layout: Layout) -> int:
    """`layout.size()`, which is asked for in every pass."""
    return layout.size()


def forward(call: NormCECall, ranks: int, group_name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and `state` as of `layer.forward`; this rank's message (b,) and those of all, (R·b,)."""
    x = dense(call.x)
    residual = None if call.residual is None else like(call.residual, x)
    y, state = empty_like(x), empty_state(call)
    call = _without_empty_images(call)
    message = empty(x.device, message_size(layout_of(call)))
    if call.x.shape[0]:
        touched = (x, state, message, call.weight)
        run_recorded("pack", x, touched, call, lambda: _pack(call, x, state, message))
    else:
        message.zero_()
        unpack(state, call).found.values[ORIGIN.value].zero_()
    if is_collecting():  # ranks may have different kernels to compile
        messages = message.new_zeros(ranks * len(message))
    else:
        messages = all_gather(message, ranks, group_name)
    run_recorded(
        ("merge", ranks, *call.momenta), x,
        (x, residual, y, state, messages, *call.small_tensors()), call,
        lambda: _merge_and_map(call, x, residual, y, state, messages, ranks),
    )  # fmt: skip
    return y, state, message, messages


def backward(
    call: NormCECall,
    grad: Tensor,
    y: Tensor | None,
    state: Tensor,
    message: Tensor,
    messages: Tensor,
    group_name: str,
) -> Gradients:
    """Gradients as of `layer.backward`; those of the parameters are of this rank's own loss."""
    x = dense(call.x)
    grad = like(grad, x)
    dx = empty_like(x)
    masked = None if y is None else empty_like(x)
    small = empty(x.device, sum(gradient_sizes(x.shape[1], call.parameters())))
    call = _without_empty_images(call)
    ranks = len(messages) // len(message)
    n, channels = call.x.shape[:2]
    grad_u = empty(x.device, n if call.units else 0, channels)
    split = empty(x.device, len(messages))
    if n:
        run_recorded(
            ("split", ranks), x,
            (x, grad, y, state, messages, masked, small, grad_u, split, *call.parameters()), call,
            lambda: _reduce_and_split(
                call, x, grad, y, state, messages, masked, small, grad_u, split
            ),
        )  # fmt: skip
    else:
        small.zero_()
        split.zero_()
    own = split[: len(message)] if is_collecting() else sum_of_own_part(split, ranks, group_name)
    g = grad if masked is None else masked
    if n:
        run_recorded(
            ("join", masked is not None), x,
            (x, g, state, message, own, grad_u, dx, *call.parameters()), call,
            lambda: _join_and_apply(
                call, x, g, state, message, own, grad_u, dx, masked=masked is not None
            ),
        )  # fmt: skip
    return Gradients(dx, g, small)


def _without_empty_images(call: NormCECall) -> NormCECall:
    """The call; images without pixels count as no images."""
    x = call.x
    return call if x.numel() else call._replace(x=x.new_empty(0, x.shape[1], 1, 1))


def _pack(call: NormCECall, x: Tensor, state: Tensor, message: Tensor) -> None:
    saved = unpack(state, call)
    chunks = measure_batch(call, x, saved)
    layout = layout_of(call)
    n, channels, height, width = x.shape
    constants = _constants(call)
    groups = ceil_div(channels, call.group_size)
    launch(
        _pack_kernel, (groups,),
        *chunks[:3], chunks.spread if layout.instance else None, *chunks[4:6], saved.found.values,
        message, n, channels, height * width, groups, windows_of(call), len(chunks.mean),
        chunks.samples, *_places(layout), NORM=_has_own_place(layout), **constants,
    )  # fmt: skip


def _merge_and_map(
    call: NormCECall,
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    state: Tensor,
    messages: Tensor,
    ranks: int,
) -> None:
    saved = unpack(state, call)
    settle(call, saved, merge(call, messages, ranks, saved.found.values))
    if call.x.shape[0]:
        passes_over(call).forward(x, y, map_of(call, saved), residual)


def merge(call: NormCECall, messages: Tensor, ranks: int, values: Tensor) -> Chunks:
    """Statistics of the images of all ranks; `values` has the origin of this rank's images."""
    layout = layout_of(call)
    device, channels = messages.device, layout.channels
    groups = ceil_div(channels, call.group_size)
    cov = layout.group_size is not None
    merged = Chunks(
        empty(device, channels),
        empty(device, 1, channels),
        empty(device, 1, channels),
        empty(device, 1, channels) if layout.instance else None,
        empty(device, 1, groups, call.group_size, call.group_size) if cov else None,
        empty(device, 1, channels) if cov and call.pool > 1 else None,
        1,
        Merged(empty(device, channels), empty(device)),
    )
    assert merged.merged is not None
    constants = _constants(call)
    del constants["BR"], constants["BS"]
    launch(
        _merge_kernel, (groups,),
        messages, values, *merged[:6], *merged.merged, channels, groups, ranks, layout.size(),
        *_places(layout), NORM=_has_own_place(layout), **constants,
    )  # fmt: skip
    return merged


def _reduce_and_split(
    call: NormCECall,
    x: Tensor,
    grad: Tensor,
    y: Tensor | None,
    state: Tensor,
    messages: Tensor,
    masked: Tensor | None,
    small: Tensor,
    grad_u: Tensor,
    split: Tensor,
) -> None:
    saved = unpack(state, call)
    mapping = map_of(call, saved)
    sums = passes_over(call).reduce(x, grad, mapping, y, masked)
    grads = parameter_gradients(call, small)
    branches = local_backward(call, sums, mapping, saved.found, saved.gate, grads, grad_u)
    split_gradient(call, branches, saved.found, saved.gate, grads, messages, split)


def split_gradient(
    call: NormCECall,
    branches: BranchGradients,
    found: Statistics,
    state: GateState | None,
    grads: dict[str, Tensor | None],
    messages: Tensor,
    split: Tensor,
) -> None:
    """Write the gradient of this rank's loss for every message to `split`, (R·b,)."""
    layout, gate = layout_of(call), branches.gate
    groups = ceil_div(layout.channels, call.group_size)
    ranks = len(messages) // layout.size()
    constants = _constants(call)
    del constants["BR"], constants["BS"]
    launch(
        _split_kernel, (groups * ranks,),
        messages, branches.Q, grads["weight"], grads["bias"], gate and gate.scalars,
        state and state.inv_std, call.mix_logit, call.blend, found.values, split,
        layout.channels, groups, ranks, layout.size(), 0 if gate is None else len(gate.scalars),
        *_places(layout), NORM=layout.norm, APART=_has_own_place(layout), **constants,
    )  # fmt: skip


def _join_and_apply(
    call: NormCECall,
    x: Tensor,
    grad: Tensor,
    state: Tensor,
    message: Tensor,
    own: Tensor,
    grad_u: Tensor,
    dx: Tensor,
    *,
    masked: bool,
) -> None:
    saved = unpack(state, call)
    through = join_gradient(call, saved, message, own, grad_u)
    apply_gradient(call, x, grad, dx, map_of(call, saved), through, masked=masked)


def join_gradient(
    call: NormCECall, saved: Saved, message: Tensor, gradient: Tensor, grad_u: Tensor
) -> mix.StatisticsGradient:
    """The part of dx that goes through the statistics, from the gradient of `message`."""
    layout, found = layout_of(call), saved.found
    n, channels, height, width = call.x.shape
    device, groups = message.device, ceil_div(channels, call.group_size)
    cov = layout.group_size is not None
    e, f = empty(device, 2, n, channels)
    through = mix.StatisticsGradient(
        empty(device, groups, call.group_size, call.group_size) if cov else None,
        e,
        f,
        empty(device, channels) if cov and call.pool > 1 else None,
    )
    constants = _constants(call)
    del constants["BR"], constants["BS"]
    launch(
        _join_kernel, (groups * ceil_div(n, SAMPLES),),
        message, gradient, grad_u if layout.instance else None,
        None if saved.gate is None else saved.gate.inv_std, found.values, found.instances,
        *through, n, channels, height * width, groups, windows_of(call), *_places(layout),
        APART=_has_own_place(layout), IR=call.mode.ir, BN=SAMPLES, **constants,
    )  # fmt: skip
    return through


def _has_own_place(layout: Layout) -> bool:
    """Whether messages have the norm's mean and variance beside those of the covariance."""
    return layout.norm and not layout.norm_is_in_cov()


def _places(layout: Layout) -> list[int]:
    """Where the parts of a message are; 0 for one that is not there."""
    places = layout.places()
    return [places.get(name, 0) for name in PLACES]


def _constants(call: NormCECall) -> dict[str, int]:
    constants = group_constants(call.group_size, call.mode)
    for name in ("NORM", "BD", "IR"):
        del constants[name]
    return constants
