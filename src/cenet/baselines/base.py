"""The base class of the baseline norms: affine parameters, running mean, modes and checks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cenet import functional as F
from cenet.nn.base import call_as_leaf, check, check_counts, check_images, is_number, is_proxy
from cenet.nn.norms import average_


class BaselineNorm2d(nn.Module):
    """A norm over (N, C, H, W) that uses its batch in training and running values in evaluation.

    Running values follow the rule of the papers: the newest batch has the weight `momentum`, also
    at the start. A batch with a non-finite value changes none of them.
    """

    # CE may follow it
    is_channel_norm = True

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        momentum: float | None,
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Validate the arguments, register the affine parameters and the running mean."""
        super().__init__()
        check_counts(num_features=num_features)
        check(is_number(eps, 0, 1e30), f"eps={eps!r} must be positive; the default is 1e-5")
        check(
            momentum is None or is_number(momentum, 0, 1),
            f"momentum={momentum!r} must be in (0, 1], or None to weigh all batches alike",
        )
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, fill in (("weight", torch.ones), ("bias", torch.zeros)):
            values = nn.Parameter(fill(num_features, **factory)) if affine else None
            self.register_parameter(name, values)
        self.register_buffer("running_mean", torch.zeros(num_features, **factory))
        self.register_buffer(
            "num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x: (N, C, H, W) -> (N, C, H, W), in the dtype and memory format of x."""
        if is_proxy(x):
            return call_as_leaf(self, x)
        check_images(x, self.num_features)
        # an empty batch has no statistics
        batch = self.training and x.numel() > 0
        if batch:
            check(
                x.shape[0] * x.shape[2] * x.shape[3] > 1,
                "expected more than 1 value per channel when training, "
                f"got input size {tuple(x.shape)}",
            )
        return self.normalize(x.to(F.statistics_dtype(x)), batch=batch).to(x.dtype)

    def normalize(self, x: Tensor, *, batch: bool) -> Tensor:
        """Normalize x, in float32 or float64.

        With `batch`, by the statistics of this batch, which enter the running values; else by
        those values.
        """
        raise NotImplementedError

    def affine_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """γ and β, (C,) each, in the dtype of x."""
        if self.weight is None or self.bias is None:
            return x.new_ones(self.num_features), x.new_zeros(self.num_features)
        return self.weight.to(x.dtype), self.bias.to(x.dtype)

    def track(self, averages: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Move each running value towards its value in this batch."""
        average_(averages, self.num_batches_tracked, self.momentum, debias=False)

    def reset_running_stats(self) -> None:
        """Forget the running values: no batches seen."""
        self.running_mean.zero_()
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Start over: γ = 1, β = 0, no running values."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Channels and constants."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        )


def running_value(buffer: Tensor, x: Tensor) -> Tensor:
    """The value of a buffer in the dtype of x.

    It is a copy: autograd may keep it, and a later training step changes the buffer in place.
    """
    return buffer.to(x.dtype, copy=True)


def unbiased(x: Tensor) -> float:
    """Factor from a biased to an unbiased (co)variance over batch and pixels of x."""
    count = x.shape[0] * x.shape[2] * x.shape[3]
    return count / (count - 1)
