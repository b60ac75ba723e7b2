"""Measures of a layer's channels, computed from recorded statistics, and of its norm and CE."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cenet import functional as F
from cenet.nn import BatchDecorrelation2d, ChannelEquilibrium2d
from cenet.nn.base import EquilibriumLayer

FIRST_LAYERS = 6
WIDEST = 2048  # channels among which covariances are kept
# relative activity up to which a channel is dormant, loosely and strictly
DORMANT, DORMANT_STRICT = 0.1, 0.025
RARE = 0.01  # share of images below which a channel fires rarely
STUCK = 0.01  # deviation / mean up to which a channel is saturated
DUPLICATE = 0.02  # squared distance up to which two channels are the same except for their scale
# a channel whose deviation is below this share of its mean is constant: float32 has no more digits
RESOLUTION = 1e-6


class Correlation(NamedTuple):
    """How redundant the channels of a layer are."""

    mean: float | None  # absolute, off the diagonal; None with fewer than two channels that vary
    constant: int  # channels that were left out because they do not vary


class WeightStatistics(NamedTuple):
    """γ of a norm."""

    mean: float
    std: float
    share_small: float  # |γ| < 1e-2


class BiasStatistics(NamedTuple):
    """β of a norm."""

    mean: float
    std: float
    share_nonpositive: float  # the paper's table of β ≤ 0


def inhibited_ratio(mean_abs: Tensor, threshold: float = 1e-2) -> float:
    """Share of inhibited channels, as the paper defines them: mean |activation| < `threshold`.

    The threshold is absolute, so this number depends on the scale of the layer, which a following
    convolution or norm undoes. `relative_activity` does not.

    Args:
        mean_abs: mean over images and pixels of the absolute post-activation value, (C,).
        threshold: the paper uses 1e-2.
    """
    _expect_channels(mean_abs=mean_abs)
    return (mean_abs < threshold).float().mean().item()


def relative_activity(mean_abs: Tensor) -> Tensor:
    """Each channel's mean |activation| divided by the mean over the layer, (C,) -> (C,).

    A channel is dormant at τ when this is at most τ (0.1 and 0.025 here). All channels of a layer
    that is zero everywhere have 0.
    """
    _expect_channels(mean_abs=mean_abs)
    return _relative(mean_abs)


def contribution(mean_abs: Tensor, squared_reads: Tensor) -> Tensor:
    """How much each channel contributes to its readers, relative to the layer, (C,) -> (C,).

    For each reader it is the product of mean |activation| and the norm of the weights by which it
    reads the channel, divided by the mean over the layer; the result is the largest of all readers.
    Unlike `relative_activity` it does not change when one channel alone is scaled and the weights
    that read it are scaled back.

    Args:
        mean_abs: mean over images and pixels of the absolute post-activation value, (C,).
        squared_reads: squared norm of the weights by which each reader reads each channel
            (`Recorder.reads`), (readers, C).
    """
    _expect_channels(mean_abs=mean_abs)
    if squared_reads.dim() != 2 or squared_reads.shape[1] != len(mean_abs):
        raise ValueError(
            f"squared_reads must be (readers, {len(mean_abs)}), got {tuple(squared_reads.shape)}"
        )
    each = [_relative(mean_abs * reads.sqrt()) for reads in squared_reads.to(mean_abs)]
    return torch.stack(each).amax(0)


def saturated(mean_abs: Tensor, deviation: Tensor) -> Tensor:
    """Channels that are active but stuck at one value: deviation at most 1 % of mean |activation|.

    Shape: two (C,), after the activation -> (C,) of bool.
    """
    _expect_channels(mean_abs=mean_abs, deviation=deviation)
    return (mean_abs > 0) & (deviation <= STUCK * mean_abs)


def duplicates(mean: Tensor, covariance: Tensor) -> Tensor:
    """Channels that repeat one with a lower number, up to a positive factor; bool.

    Two channels are the same when the mean squared difference of their values before the
    activation, each divided by its own deviation, is at most 0.02. It is 2 − 2ρ plus the squared
    difference of mean / deviation, so ρ is at least 0.99. Constant channels repeat none.

    Shape: mean (C,), covariance (C, C) -> (C,).
    """
    matrix = correlation_matrix(mean, covariance)
    offset = mean / covariance.diagonal().clamp_min(0).sqrt()
    distance = 2 - 2 * matrix + (offset[:, None] - offset).square()
    near = (distance <= DUPLICATE).tril(-1).cpu()  # False where NaN
    found = torch.zeros(len(mean), dtype=torch.bool)
    for channel in near.any(1).nonzero().flatten().tolist():
        # in a chain of near channels, only those count that repeat a channel that is kept
        found[channel] = bool((near[channel] & ~found).any())
    return found


def participation_ratio(covariance: Tensor) -> float | None:
    """Effective number of dimensions in which the channels vary: (tr Σ)² / tr Σ².

    C when all directions vary alike, 1 when there is one direction; None when nothing varies.

    Shape: covariance (C, C).
    """
    total = covariance.square().sum().item()
    return covariance.trace().item() ** 2 / total if total > 0 else None


def first_layers_ratio(ratios: Sequence[float], count: int = FIRST_LAYERS) -> float | None:
    """The paper's single figure: the mean inhibited ratio of the first six layers, None for none.

    A network with fewer layers is judged by those it has.
    """
    first = list(ratios)[:count]
    return sum(first) / len(first) if first else None


def channel_magnitude(x: Tensor) -> Tensor:
    """ℓ2 over channels at each location: (N, C, H, W) -> (N, H, W)."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1)
    return lengths


def correlation_matrix(mean: Tensor, covariance: Tensor) -> Tensor:
    """Pearson's correlation of each pair; rows and columns of constant channels are NaN.

    Shape: mean (C,), covariance (C, C) -> (C, C).
    """
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    deviation = torch.where(deviation > RESOLUTION * mean.abs(), deviation, torch.nan)
    return (covariance / deviation[:, None] / deviation).clamp(-1, 1)


def channel_correlation(mean: Tensor, covariance: Tensor) -> Correlation:
    """Mean absolute correlation over all pairs of two channels that vary.

    Shape: mean (C,), covariance (C, C).
    """
    matrix = correlation_matrix(mean, covariance).abs()
    varies = ~matrix.diagonal().isnan()
    count = int(varies.sum())
    constant = len(varies) - count
    if count < 2:
        return Correlation(None, constant)
    inside = matrix[varies][:, varies]
    total = inside.sum() - inside.diagonal().sum()
    return Correlation((total / (count * (count - 1))).item(), constant)


def group_correlation(
    mean: Tensor, covariance: Tensor, numbers: Sequence[int], group_size: int
) -> float | None:
    """Mean absolute correlation over the pairs of two channels of one group that vary.

    Args:
        mean: (C,).
        covariance: (C, C).
        numbers: numbers of these C channels in their layer; group g begins at g * group_size.
        group_size: channels of a group.

    Returns:
        None if no group has two channels that vary.
    """
    matrix = correlation_matrix(mean, covariance).abs()
    groups = torch.tensor(numbers, device=matrix.device) // group_size
    same = (groups[:, None] == groups).tril(-1)
    pairs = matrix[same & ~matrix.isnan()]
    return pairs.mean().item() if len(pairs) else None


def weight_statistics(weight: Tensor) -> WeightStatistics:
    """Mean, deviation and share of small values of γ, (C,)."""
    values = weight.detach().double()
    small = (values.abs() < 1e-2).double().mean()
    return WeightStatistics(values.mean().item(), _deviation(values), small.item())


def bias_statistics(bias: Tensor) -> BiasStatistics:
    """Mean, deviation and share of β ≤ 0, (C,)."""
    values = bias.detach().double()
    nonpositive = (values <= 0).double().mean()
    return BiasStatistics(values.mean().item(), _deviation(values), nonpositive.item())


def equivalent_gamma(
    weight: Tensor, covariance: Tensor, *, group_size: int = 16, newton_steps: int = 3
) -> Tensor:
    """γ̂ = Σ^{-1/2} γ of Proposition 1, by the T Newton steps that the layer takes, group by group.

    Args:
        weight: γ of the norm, (C,).
        covariance: Σ of the norm's output, (C, C).
        group_size: channels decorrelated together.
        newton_steps: T.

    Shape: -> (C,).
    """
    channels = len(weight)
    if covariance.shape != (channels, channels):
        raise ValueError(
            f"covariance must be ({channels}, {channels}) for {channels} weights, got "
            f"{tuple(covariance.shape)}"
        )
    weight = weight.detach().to(covariance.dtype)
    parts = []
    for start in range(0, channels, group_size):
        group = slice(start, min(start + group_size, channels))
        sigma = covariance[group, group][None]
        inv_sqrt = F.decorrelation(sigma, torch.ones_like(weight[group]), newton_steps)[0]
        parts.append(inv_sqrt @ weight[group])
    return torch.cat(parts)


def mixing_ratio(ce: EquilibriumLayer) -> float | None:
    """λ, the share of batch decorrelation; None for a layer of one branch, which has none."""
    return ce.mix.item() if isinstance(ce, ChannelEquilibrium2d) else None


@torch.no_grad()
def decorrelation_spectrum(ce: EquilibriumLayer) -> Tensor | None:
    """Eigenvalues of the running W, all groups together, ascending, (C,); None without W.

    They are between 1 and 1.5ᵀ; all equal to 1 means that nothing has been decorrelated yet.
    """
    bd = ce.bd if isinstance(ce, ChannelEquilibrium2d) else ce
    if not isinstance(bd, BatchDecorrelation2d):
        return None
    values = []
    for group, matrix in enumerate(bd.running_inv_sqrt.double()):
        # the last group may be padded
        size = min(bd.group_size, bd.num_features - group * bd.group_size)
        values.append(torch.linalg.eigvalsh(matrix[:size, :size]))
    return torch.cat(values).sort().values


def gini(values: Tensor) -> float:
    """Gini coefficient of nonnegative values: 0 if all are equal, 1 − 1/n if one has everything.

    Negative values count as zero (a channel whose removal helps carries nothing).
    """
    ordered = values.double().clamp_min(0).sort().values
    count, total = len(ordered), ordered.sum()
    if count == 0 or total == 0:
        return 0.0
    ranks = torch.arange(1, count + 1, dtype=torch.float64, device=ordered.device)
    return (2 * (ranks * ordered).sum() / (count * total) - (count + 1) / count).item()


def _relative(values: Tensor) -> Tensor:
    mean = values.mean()
    return values / mean if mean > 0 else torch.zeros_like(values)


def _expect_channels(**vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if vector.dim() != 1:
            raise ValueError(f"{name} must be one value per channel, got {tuple(vector.shape)}")


def _deviation(values: Tensor) -> float:
    return values.std(correction=0).item()
