"""Statistics of a batch: of the images of this rank, or of the images of several ranks together.

Ranks are merged by Chan's formula: the second moments inside the ranks plus those between their
means. Images weigh by their pixels in the norm's statistics and in the covariance, and alike in s.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cenet import functional as F
from cenet.messages import Layout


class Statistics(NamedTuple):
    """Statistics of a batch for a training step; None where the layer does not need them."""

    mean: Tensor | None  # (C,), for the norm, the same on all ranks
    centered_mean: Tensor | None  # (C,), less the center of this rank's images
    var: Tensor | None  # (C,), biased, for the norm
    cov: Tensor | None  # (G, K, K)
    instance_var: Tensor | None  # (N, C), or its mean over images (C,)
    pixels: int | Tensor  # values of a channel; a tensor if ranks were merged

    def unbiased_var(self) -> Tensor:
        """The variance as batch norms store it; NaN of one value, which averages leave out."""
        assert self.var is not None
        return self.var * (self.pixels / (self.pixels - 1))

    def counted(self, value: Tensor) -> Tensor:
        """`value` for a running average: NaN, which averages leave out, if no rank had a pixel."""
        if isinstance(self.pixels, Tensor):
            return value.detach().where(self.pixels > 0, torch.nan)
        return value


def of_rank(
    moments: F.Moments,
    center: Tensor | None,
    instance_var: Tensor | None,
    *,
    norm: bool,
    pooled: bool,
) -> Statistics:
    """Statistics of the images that were measured; `pooled`: the covariance is that of windows."""
    mean = var = None
    if norm and moments.cov is not None and not pooled:
        mean = moments.mean.mean(0)
        var = _diagonal(moments.cov, moments.mean.shape[1])
    elif norm:
        mean, var = _mean_and_var(moments)
    whole = mean if mean is None or center is None else mean + center
    pixels = moments.mean.shape[0] * moments.pixels
    return Statistics(whole, mean, var, moments.cov, instance_var, pixels)


def message(
    x: Tensor,
    moments: F.Moments | None,
    center: Tensor | None,
    instance_var: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The statistics of this rank's images x as one vector, `layout.size()` long.

    Its means are not relative to `center`, of which every rank has its own.
    """
    if x.numel() == 0:
        # zeros that depend on x, so that a rank without images joins the backward pass, too
        return x.new_zeros(layout.size()) + x.sum()
    assert moments is not None
    center = moments.mean.new_zeros(()) if center is None else center
    n, _, height, width = x.shape
    windows = -(-height // layout.pool) * -(-width // layout.pool)
    counts = [x.new_full((), count) for count in (n, n * height * width, n * windows)]
    parts = {"counts": torch.stack(counts)}
    if layout.group_size is not None:
        assert moments.cov is not None
        assert moments.window_mean is not None
        rows, columns = torch.triu_indices(layout.group_size, layout.group_size, device=x.device)
        parts["window_mean"] = moments.window_mean.mean(0) + center
        parts["cov"] = moments.cov[:, rows, columns]
    if layout.norm and not layout.norm_is_in_cov():
        mean, parts["var"] = _mean_and_var(moments)
        parts["mean"] = mean + center
    if instance_var is not None:
        parts["instance_var"] = instance_var.mean(0)
    return torch.cat([parts[name].flatten() for name in layout.shapes()])


@F.full_precision
def merge(messages: Tensor, layout: Layout, center: Tensor | None = None) -> Statistics:
    """Statistics of the images of all ranks together, from their messages (R, b).

    `center` is that of the images of this rank.
    """
    shapes = layout.shapes()
    sizes = [prod(shape) for shape in shapes.values()]
    parts = dict(zip(shapes, messages.split_with_sizes(sizes, dim=1), strict=True))
    samples, pixels, windows = parts["counts"].detach().unbind(1)
    mean = var = cov = instance_var = None
    if layout.group_size is not None:
        mean, spread = _mean_and_spread(parts["window_mean"], windows)
        inside = _average(parts["cov"], windows).view(shapes["cov"])
        spread = F.grouped(spread, layout.group_size).transpose(0, 1)  # (G, R, K)
        cov = inside[:, _triangle(layout.group_size, messages.device)] + spread.mT @ spread
        var = _diagonal(cov, layout.channels)
    if layout.norm and not layout.norm_is_in_cov():
        mean, spread = _mean_and_spread(parts["mean"], pixels)
        var = _average(parts["var"], pixels) + spread.square().sum(0)
    if layout.instance:
        instance_var = _average(parts["instance_var"], samples)
    centered_mean = mean if mean is None or center is None else mean - center
    return Statistics(mean, centered_mean, var, cov, instance_var, pixels.sum())


def _mean_and_var(moments: F.Moments) -> tuple[Tensor, Tensor]:
    """Eq. BN of Appendix B: μ = E[μ_IN], σ² = E[σ²_IN] + D[μ_IN], over images of one size."""
    mean = moments.mean.mean(0)
    return mean, moments.var.mean(0) + (moments.mean - mean).square().mean(0)


def _diagonal(cov: Tensor, channels: int) -> Tensor:
    """The variances in the covariances of the groups, (C,)."""
    return cov.diagonal(dim1=-2, dim2=-1).flatten()[:channels]


def _weights(counts: Tensor) -> Tensor:
    """Share of each rank, (R, 1); zero, not NaN, if no rank has anything."""
    return (counts / counts.sum().clamp_min(1))[:, None]


def _average(values: Tensor, counts: Tensor) -> Tensor:
    """(R, …) -> (…)."""
    return (_weights(counts) * values).sum(0)


def _mean_and_spread(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Common mean (C,), and each rank's distance from it times the root of its share, (R, C)."""
    mean = _average(means, counts)
    return mean, _weights(counts).sqrt() * (means - mean)


def _triangle(size: int, device: torch.device) -> Tensor:
    """Where the entries of a symmetric matrix are in its upper triangle, read by rows."""
    index = torch.arange(size, device=device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    return low * (2 * size - 1 - low) // 2 + high
