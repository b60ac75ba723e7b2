"""The two passes over x by themselves, each with its backward pass, for layers that merge ranks.

`measure_batch` is the twin of `functional.moments`, `mix` applies the map. What happens between
them, the merging of statistics among it, is plain PyTorch on small tensors. x̂ is x − origin here,
so rstd of the map is 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cenet.functional import grouped
from cenet.kernels import mix, small_maps
from cenet.kernels.launch import empty, empty_like
from cenet.kernels.layer import dense, like
from cenet.kernels.moments import Chunks, condense, measure
from cenet.kernels.tiles import ceil_div, is_small_map


class Measured(NamedTuple):
    """Moments of a batch, in float32. Means are distances from `origin`."""

    origin: Tensor  # (C,), a value near the mean of an image
    mean: Tensor  # (N, C)
    var: Tensor  # (N, C)
    cov: Tensor  # (G, K, K), of the pooled x if pooled; empty if nobody wants it
    window_mean: Tensor  # (C,), of what `cov` is taken of; empty without pooling


class MapGradients(NamedTuple):
    """Gradients of `mix.Map` and of what it was applied to."""

    x: Tensor
    residual: Tensor  # gradient of the activation's argument; empty if `y` was not given
    P: Tensor  # (G, K, K); empty without P
    d: Tensor  # (N, C), Σ g ⊙ x̂
    c: Tensor  # (N, C), Σ g


def measure_batch(
    x: Tensor, sign: Tensor | None, group_size: int, pool: int, *, gram: bool
) -> Measured:
    """Measure x; arguments as of `moments.measure`, `sign` for its `weight`."""
    x = dense(x)
    n, channels, height, width = x.shape
    if _is_small(x, pool):
        parts = small_maps.measure(x, group_size, gram=gram)
    else:
        parts = measure(x, group_size, gram=gram, pool=pool, weight=sign)
    high, wide = ceil_div(height, pool), ceil_div(width, pool)
    mean, var = instances = empty(x.device, 2, n, channels)
    chunks = condense(
        parts, instances, height * width, high * wide, ceil_div(high, parts.splits) * wide,
        group_size,
    )  # fmt: skip
    nothing = empty(x.device, 0)
    cov, window_mean = _covariance(chunks, n, high * wide) if gram else (nothing, nothing)
    pooled = gram and pool > 1
    return Measured(chunks.origin.clone(), mean, var, cov, window_mean if pooled else nothing)


def _covariance(chunks: Chunks, samples: int, windows: int) -> tuple[Tensor, Tensor]:
    """Covariance (G, K, K) and mean (C,) of the batch: what varies inside chunks and between."""
    assert chunks.gram is not None
    means = chunks.mean if chunks.pooled_mean is None else chunks.pooled_mean
    first = torch.arange(len(means), device=means.device) * chunks.samples
    share = (samples - first).clamp_max(chunks.samples)[:, None] / samples  # (S, 1)
    mean = (share * means).sum(0)
    spread = share.sqrt() * (means - mean)
    spread = grouped(spread, chunks.gram.shape[-1]).transpose(0, 1)  # (G, S, K)
    # products in full precision, whatever is allowed for float32 elsewhere
    between = (spread[..., :, None] * spread[..., None, :]).sum(1)
    return chunks.gram.sum(0) / (samples * windows) + between, mean


def measure_backward(
    x: Tensor,
    grad: Tensor,
    origin: Tensor,
    sign: Tensor | None,
    through: mix.StatisticsGradient,
    group_size: int,
    pool: int,
) -> Tensor:
    """grad + Q x̂ + e ⊙ x̂ + f, Q applied to the pooled x̂ if pooled: see `mix.backward`."""
    x = dense(x)
    grad, dx = like(grad, x), empty_like(x)
    one = torch.ones_like(origin) if sign is None else sign
    # pooling follows the sign of the map's γ; its square, γ ⊙ w, is 1
    values = torch.stack([origin, torch.ones_like(one), one, *origin.new_zeros(2, len(one))])
    w = one.expand(x.shape[:2]).contiguous()
    mapping = mix.Map(values, None, w, group_size, "none", 0.0)
    if _is_small(x, pool):
        small_maps.backward(x, grad, dx, mapping, through)
    else:
        mix.backward(x, grad, dx, mapping, through, pool=pool)
    return dx


def apply_map(x: Tensor, residual: Tensor | None, mapping: mix.Map) -> Tensor:
    """y = act(map(x) [+ residual]), in the dtype and layout of x."""
    x = dense(x)
    y = empty_like(x)
    added = None if residual is None else like(residual, x)
    (small_maps if is_small_map(x) else mix).forward(x, y, mapping, added)
    return y


def apply_map_backward(x: Tensor, grad: Tensor, y: Tensor | None, mapping: mix.Map) -> MapGradients:
    """Gradients of x and of the map. `y` is given if there was a residual and an activation."""
    x = dense(x)
    n, channels = x.shape[:2]
    grad, dx, nothing = like(grad, x), empty_like(x), empty(x.device, 0)
    masked = None if y is None else empty_like(x)
    kernels = small_maps if is_small_map(x) else mix
    sums = kernels.reduce(x, grad, mapping, y, masked)
    zeros = torch.zeros(n, channels, device=x.device)
    through = mix.StatisticsGradient(None, zeros, zeros, None)
    g = grad if masked is None else masked
    kernels.backward(x, g, dx, mapping, through, masked=masked is not None)
    d, c = (part.view(n, sums.splits, channels).sum(1) for part in (sums.d, sums.c))
    P = nothing
    if sums.P is not None:
        P = sums.P.sum(0)
        # the kernel writes nothing in the padding of a ragged group
        last = channels - (len(P) - 1) * mapping.group_size
        P[-1, last:], P[-1, :, last:] = 0, 0
    return MapGradients(dx, nothing.to(x.dtype) if masked is None else masked, P, d, c)


def _is_small(x: Tensor, pool: int) -> bool:
    return pool == 1 and is_small_map(x)
