"""`IterNorm2d`: iterative normalization (Huang et al., CVPR 2019)."""

import torch
from torch import Tensor
from typing_extensions import override

from cenet import functional as F
from cenet.baselines.base import BaselineNorm2d, running_value
from cenet.baselines.whitening import groups_repr, whiten, whitening_matrix
from cenet.nn.base import check_counts


class IterNorm2d(BaselineNorm2d):
    """Iterative normalization: y = γ ⊙ Σ^{-1/2}(x − μ) + β per group of channels.

    μ and Σ are the mean and the covariance over batch and pixels, Σ with eps·I added. Σ^{-1/2} is
    the Newton iterate for (Σ/tr Σ)^{-1/2}, divided by √tr Σ.

    Args:
        num_features: channels C.
        group_size: channels whitened together, contiguous; the last group takes the remainder.
        newton_steps: steps of the iteration. They are part of the definition: at 5 directions of
            small variance are not fully whitened.
        eps: added to the diagonal of Σ.
        momentum: weight of the newest batch in the running values of μ and Σ^{-1/2}; None weighs
            all batches alike.
        affine: learn γ and β.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W).

    Numerics: biased covariance, float32 (float64 for float64 input).

    >>> y = IterNorm2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_inv_sqrt: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        group_size: int = 64,
        newton_steps: int = 5,
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
        self.group_size = min(group_size, num_features)
        self.newton_steps = newton_steps
        groups = F.num_groups(num_features, self.group_size)
        eye = torch.eye(self.group_size, device=device, dtype=dtype)
        self.register_buffer("running_inv_sqrt", eye.repeat(groups, 1, 1))

    @override
    def normalize(self, x: Tensor, *, batch: bool) -> Tensor:
        if batch:
            moments = F.moments(x, self.group_size)
            assert moments.cov is not None
            mean = moments.mean.mean(0)
            inv_sqrt = whitening_matrix(moments.cov, self.num_features, self.eps, self.newton_steps)
            self.track([(self.running_mean, mean), (self.running_inv_sqrt, inv_sqrt)])
        else:
            mean = running_value(self.running_mean, x)
            inv_sqrt = running_value(self.running_inv_sqrt, x)
        return whiten(x, mean, inv_sqrt, *self.affine_values(x))

    def reset_running_stats(self) -> None:
        """Forget the running values: μ = 0, Σ^{-1/2} = I, no batches seen."""
        super().reset_running_stats()
        eye = torch.eye(self.group_size, device=self.running_inv_sqrt.device)
        self.running_inv_sqrt.copy_(eye)

    def extra_repr(self) -> str:
        """Channels, groups, steps and constants."""
        groups = groups_repr(self.num_features, self.group_size)
        return f"{super().extra_repr()}, groups={groups}, newton_steps={self.newton_steps}"
