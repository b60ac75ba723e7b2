"""`SwitchableNorm2d`: switchable normalization (Luo et al., ICLR 2019)."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from cenet import functional as F
from cenet.baselines.base import BaselineNorm2d, running_value, unbiased


def merged(mean: Tensor, var: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of equally large parts taken together along `dim`, which is kept as 1.

    The variance is what varies inside the parts plus what varies between their means.
    """
    whole = mean.mean(dim, keepdim=True)
    return whole, var.mean(dim, keepdim=True) + (mean - whole).square().mean(dim, keepdim=True)


class SwitchableNorm2d(BaselineNorm2d):
    """Switchable normalization: y = γ ⊙ (x − Σ_k w_k μ_k) / √(Σ_k v_k σ²_k + eps) + β.

    k runs over the statistics of instance, layer and batch norm, in this order. The weights w and v
    are softmaxes of the learned `mean_logits` and `var_logits`, one of each for all channels, and
    start alike.

    Args:
        num_features: channels C.
        eps: added to the mixed variance.
        momentum: weight of the newest batch in the running values of the batch norm part; None
            weighs all batches alike.
        affine: learn γ and β.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). Maps of one pixel are valid: their instance
    variance is 0.

    Numerics: biased variances, float32 (float64 for float64 input). The running variance is
    unbiased, as that of torch's batch norm.

    >>> y = SwitchableNorm2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        *,
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
        self.mean_logits = nn.Parameter(torch.zeros(3, device=device, dtype=dtype))
        self.var_logits = nn.Parameter(torch.zeros(3, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(num_features, device=device, dtype=dtype))

    @override
    def normalize(self, x: Tensor, *, batch: bool) -> Tensor:
        mean, var, *_ = F.moments(x, group_size=None)
        layer_mean, layer_var = merged(mean, var, 1)
        if batch:
            batch_mean, batch_var = merged(mean, var, 0)
            self.track(
                [
                    (self.running_mean, batch_mean[0]),
                    (self.running_var, batch_var[0] * unbiased(x)),
                ]
            )
        else:
            batch_mean = running_value(self.running_mean, x)[None]
            batch_var = running_value(self.running_var, x)[None]
        w = self.mean_logits.to(x.dtype).softmax(0)
        v = self.var_logits.to(x.dtype).softmax(0)
        mixed_mean = w[0] * mean + w[1] * layer_mean + w[2] * batch_mean
        mixed_var = v[0] * var + v[1] * layer_var + v[2] * batch_var
        weight, bias = self.affine_values(x)
        scale = weight * (mixed_var + self.eps).rsqrt()
        return F.mix(x, None, scale, bias - mixed_mean * scale)

    def reset_running_stats(self) -> None:
        """Forget the running values: mean 0, variance 1, no batches seen."""
        super().reset_running_stats()
        self.running_var.fill_(1)

    def reset_parameters(self) -> None:
        """Start over: equal weights, γ = 1, β = 0, no running values."""
        super().reset_parameters()
        nn.init.zeros_(self.mean_logits)
        nn.init.zeros_(self.var_logits)
