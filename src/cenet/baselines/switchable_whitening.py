"""`SwitchableWhitening2d`: switchable whitening (Pan et al., ICCV 2019)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from cenet import functional as F
from cenet.baselines.base import BaselineNorm2d, running_value, unbiased
from cenet.baselines.switchable_norm import merged
from cenet.baselines.whitening import (
    InstanceMoments,
    diagonal_part,
    groups_repr,
    identity,
    instance_moments,
    whiten,
    whitening_matrix,
)
from cenet.nn.base import check, check_counts

STATISTICS = ("bw", "iw", "bn", "in", "ln")


class SwitchableWhitening2d(BaselineNorm2d):
    """Switchable whitening: y = γ ⊙ Σ^{-1/2}(x − μ) + β per group of channels, μ and Σ mixed.

    μ = Σ_k w_k μ_k and Σ = Σ_k v_k Σ_k + eps·I run over the chosen statistics. The weights w and v
    are softmaxes of the learned `mean_logits` and `cov_logits`, one of each for all channels, and
    start alike. Σ^{-1/2} is the Newton iterate for (Σ/tr Σ)^{-1/2}, divided by √tr Σ.

    Args:
        num_features: channels C.
        group_size: channels whitened together, contiguous; the last group takes the remainder.
        newton_steps: steps of the iteration.
        statistics: names of the statistics to mix. "bw" and "iw" are mean and covariance of the
            batch and of each instance; "bn" and "in" the same with the diagonal of the covariance
            only; "ln" is mean and variance of each instance over all channels. ("bw", "iw") is SW^a
            of the paper, all five are SW^b. At least one must be of the batch.
        eps: added to the diagonal of Σ.
        momentum: weight of the newest batch in the running values of the mean and covariance of the
            batch; None weighs all batches alike.
        affine: learn γ and β.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). Maps of one pixel are valid: their instance
    covariance is 0.

    Numerics: biased covariances, float32 (float64 for float64 input). The running covariance is
    unbiased, as the running variance of torch's batch norm, and whitened anew for each input.

    >>> y = SwitchableWhitening2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_cov: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        group_size: int = 16,
        newton_steps: int = 5,
        statistics: Sequence[str] = ("bw", "iw"),
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Validate the arguments and register parameters and buffers."""
        super().__init__(
            num_features, eps=eps, momentum=momentum, affine=affine, device=device, dtype=dtype
        )
        check_counts(group_size=group_size, newton_steps=newton_steps)
        _check_statistics(statistics)
        self.group_size = min(group_size, num_features)
        self.newton_steps = newton_steps
        self.statistics = tuple(statistics)
        count = len(self.statistics)
        self.mean_logits = nn.Parameter(torch.zeros(count, device=device, dtype=dtype))
        self.cov_logits = nn.Parameter(torch.zeros(count, device=device, dtype=dtype))
        eye = identity(num_features, self.group_size, self.running_mean)
        self.register_buffer("running_cov", eye)

    @override
    def normalize(self, x: Tensor, *, batch: bool) -> Tensor:
        instance = instance_moments(x, self.group_size)
        if batch:
            mean, cov = self._of_batch(instance)
            self.track([(self.running_mean, mean), (self.running_cov, cov * unbiased(x))])
        else:
            mean = running_value(self.running_mean, x)
            cov = running_value(self.running_cov, x)
        mean, cov = self._mixed(mean, cov, instance)
        matrix = whitening_matrix(cov, self.num_features, self.eps, self.newton_steps)
        return whiten(x, mean, matrix, *self.affine_values(x))

    def _of_batch(self, instance: InstanceMoments) -> tuple[Tensor, Tensor]:
        """Mean (C,) and covariance (G, K, K) of the batch: inside the instances and between."""
        mean = instance.mean.mean(0)
        apart = F.grouped(instance.mean - mean, self.group_size)
        # not a matrix product, which autocast would round
        between = apart[..., :, None] * apart[..., None, :]
        return mean, (instance.cov + between).mean(0)

    def _mixed(
        self, batch_mean: Tensor, batch_cov: Tensor, instance: InstanceMoments
    ) -> tuple[Tensor, Tensor]:
        """Mix the chosen statistics into μ (N, C) and Σ (N, G, K, K)."""
        layer_mean, layer_var = merged(instance.mean, instance.var, 1)
        eye = identity(self.num_features, self.group_size, batch_cov)
        means = {
            "bw": batch_mean.expand_as(instance.mean),
            "iw": instance.mean,
            "bn": batch_mean.expand_as(instance.mean),
            "in": instance.mean,
            "ln": layer_mean.expand_as(instance.mean),
        }
        covs = {
            "bw": batch_cov.expand_as(instance.cov),
            "iw": instance.cov,
            "bn": diagonal_part(batch_cov).expand_as(instance.cov),
            "in": diagonal_part(instance.cov),
            "ln": layer_var[..., None, None] * eye,
        }
        w = self.mean_logits.to(batch_mean.dtype).softmax(0)
        v = self.cov_logits.to(batch_cov.dtype).softmax(0)
        mean = sum(w[i] * means[name] for i, name in enumerate(self.statistics))
        cov = sum(v[i] * covs[name] for i, name in enumerate(self.statistics))
        assert isinstance(mean, Tensor)
        assert isinstance(cov, Tensor)
        return mean, cov

    def reset_running_stats(self) -> None:
        """Forget the running values: mean 0, covariance I, no batches seen."""
        super().reset_running_stats()
        self.running_cov.copy_(identity(self.num_features, self.group_size, self.running_mean))

    def reset_parameters(self) -> None:
        """Start over: equal weights, γ = 1, β = 0, no running values."""
        super().reset_parameters()
        nn.init.zeros_(self.mean_logits)
        nn.init.zeros_(self.cov_logits)

    def extra_repr(self) -> str:
        """Channels, groups, steps, statistics and constants."""
        groups = groups_repr(self.num_features, self.group_size)
        return (
            f"{super().extra_repr()}, groups={groups}, newton_steps={self.newton_steps}, "
            f"statistics={'+'.join(self.statistics)}"
        )


def _check_statistics(statistics: Sequence[str]) -> None:
    """Raise ValueError unless these are different known statistics, one of the batch among them."""
    known = isinstance(statistics, (tuple, list)) and all(n in STATISTICS for n in statistics)
    check(
        known and len(set(statistics)) == len(statistics) and bool({"bw", "bn"} & {*statistics}),
        f"statistics={statistics!r} must be different names out of {STATISTICS}, "
        'with "bw" or "bn" among them; the paper uses ("bw", "iw") or all five',
    )
