"""The block of the paper as a layer."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from cenet import functional as F
from cenet.nn.base import EquilibriumLayer
from cenet.nn.branches import BatchDecorrelation2d, InstanceReweighting2d
from cenet.nn.fused import Branches
from cenet.nn.statistics import Statistics


class ChannelEquilibrium2d(EquilibriumLayer):
    r"""Channel equilibrium, Eq. CE: p_n = λ · W·x + (1 − λ) · a_n ⊙ x, between a norm and its
    activation.

    W decorrelates the channels of a group over the batch (`BatchDecorrelation2d`), a_n reweights
    them for each image (`InstanceReweighting2d`), and λ = sigmoid(mix_logit) is learned, 0.5 at
    first.

    Args:
        num_features: channels C.
        eps: added to s, the mean instance variance. It bounds the instance gain by eps^{-1/2}.
        momentum: weight of the newest batch in the running averages of W and s^{-1/2}; the first
            1/momentum batches weigh alike, so the initial values leave no trace. None weighs all
            batches alike.
        group_size: channels decorrelated together, contiguous; the last group takes the remainder.
        newton_steps: T of Eq. Newtoniter, 1 to 9.
        rd_ratio: hidden width of the instance gate over C, in (0, 1].
        pool: side of the max-pool window before the covariance, 1 for none (the paper pools 2×2 in
            the stem).
        device, dtype: of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). Training needs H·W > 1; an empty batch passes through.

    Numerics: statistics in float32 (float64 for float64 input) under autocast too, biased
    variances; y has the dtype and memory format of x. A batch with non-finite statistics never
    enters the running averages.

    >>> ce = ChannelEquilibrium2d(64)
    >>> y = torch.relu(ce(nn.BatchNorm2d(64)(torch.randn(8, 64, 14, 14))))
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        group_size: int = 16,
        newton_steps: int = 3,
        rd_ratio: float = 0.25,
        pool: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the two branches and λ."""
        super().__init__(num_features)
        self.bd = BatchDecorrelation2d(
            num_features,
            momentum=momentum,
            group_size=group_size,
            newton_steps=newton_steps,
            pool=pool,
            device=device,
            dtype=dtype,
        )
        self.ir = InstanceReweighting2d(
            num_features,
            eps=eps,
            momentum=momentum,
            rd_ratio=rd_ratio,
            device=device,
            dtype=dtype,
        )
        # one value, but not a scalar: FSDP cannot shard those
        self.mix_logit = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    @property
    def mix(self) -> Tensor:
        """λ, the share of batch decorrelation."""
        return self.mix_logit.sigmoid().squeeze(0)

    def measure(self, x: Tensor, *, batch: bool, sign: Tensor | None = None) -> F.Moments | None:
        """Take instance variances, and with `batch` the covariance."""
        branch = self.bd if batch else self.ir
        return branch.measure(x, batch=batch, sign=sign)

    @override
    def coefficients(
        self,
        moments: F.Moments | None,
        scale: Tensor,
        shift: Tensor,
        statistics: Statistics | None,
    ) -> F.Coefficients:
        inv_sqrt = self.bd.inv_sqrt(scale, statistics)
        self.bd.track(inv_sqrt, statistics)
        inv_std = self.ir.inv_std(scale, statistics)
        self.ir.track(inv_std, statistics)
        return F.coefficients(
            scale,
            shift,
            inv_sqrt=inv_sqrt,
            gain=self.ir.gain(moments, scale, inv_std),
            lam=self.mix_logit.to(scale.dtype).sigmoid().squeeze(0),
            blend=self.blend,
        )

    @override
    def instance_var(self, moments: F.Moments | None) -> Tensor:
        return self.ir.instance_var(moments)

    @override
    def branches(self) -> Branches:
        return Branches(self.bd, self.ir, self.ir.gate, self.mix_logit, self.blend)

    def check_size(self, x: Tensor, *, alone: bool) -> None:
        """Raise ValueError unless both branches can take batch statistics of x."""
        self.ir.check_size(x, alone=alone)
        self.bd.check_size(x, alone=alone)

    def reset_running_stats(self) -> None:
        """Forget the running averages of both branches."""
        self.bd.reset_running_stats()
        self.ir.reset_running_stats()

    def reset_parameters(self) -> None:
        """Start over: fresh gate, λ = 0.5, no running statistics."""
        super().reset_parameters()
        self.ir.reset_parameters()
        nn.init.zeros_(self.mix_logit)

    def extra_repr(self) -> str:
        """Channels; the branches say the rest."""
        return f"{self.num_features}" + self.mode_repr()
