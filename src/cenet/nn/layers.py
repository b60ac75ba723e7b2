"""The block and its branches as layers: state and policy around `functional`.

`ChannelEquilibrium2d` is the block of the paper; `BatchDecorrelation2d` and `InstanceReweighting2d` are its
branches as layers of their own, so that an ablation has no unused parameters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cenet import functional as F
from cenet.nn.running import average_


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        _check(isinstance(value, int) and value >= 1, f"{name}={value!r} must be an integer of at least 1")


def _check_momentum(momentum: float | None) -> None:
    _check(
        momentum is None or 0 < momentum <= 1,
        f"momentum={momentum!r} must be in (0, 1], or None to weigh all batches alike; "
        "use freeze() to stop the averages",
    )


class EquilibriumLayer(nn.Module):
    """What the three layers share: measure x, turn the measurements into coefficients, mix.

    Attributes:
        frozen: use the running statistics in training mode too. Set by `freeze`, which `.train()` does not undo.
        blend: learned α of an identity start (`NormCE2d(..., start="identity")`), or None.
    """

    blend: nn.Parameter | None

    def __init__(self, num_features: int) -> None:
        """Validate the channel count."""
        super().__init__()
        _check_counts(num_features=num_features)
        self.num_features = num_features
        self.frozen = False
        self.register_parameter("blend", None)

    def forward(self, x: Tensor) -> Tensor:
        """Equilibrate x, the output of a norm: (N, C, H, W) -> (N, C, H, W)."""
        self.check_input(x)
        batch = self.uses_batch(x)
        scale = x.new_ones(self.num_features, dtype=F.statistics_dtype(x))
        moments = self.measure(x, batch=batch)
        return F.mix(x, *self.coefficients(moments, scale, torch.zeros_like(scale), batch=batch))

    def measure(self, x: Tensor, *, batch: bool, sign: Tensor | None = None) -> F.Moments | None:
        """Take the moments of x that `coefficients` will ask for, or None if it needs none."""
        raise NotImplementedError

    def coefficients(
        self, moments: F.Moments | None, scale: Tensor, shift: Tensor, *, batch: bool
    ) -> F.Coefficients:
        """Compute the coefficients of norm and layer together.

        With `batch`, from the statistics of this batch, which enter the running averages; else from those averages.
        """
        raise NotImplementedError

    def uses_batch(self, x: Tensor) -> bool:
        """Whether x will be judged by its own batch statistics; ValueError if it is too small for that.

        An empty batch has no statistics and is passed through on the running ones.
        """
        if not self.training or self.frozen or x.numel() == 0:
            return False
        self.check_size(x)
        return True

    def check_size(self, x: Tensor) -> None:
        """Raise ValueError if x is too small to take batch statistics of."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Raise a clear error for an input of the wrong dtype or shape."""
        if not x.is_floating_point():
            raise TypeError(f"expected a floating-point input, got {x.dtype}; convert it with x.float()")
        _check(x.dim() == 4, f"expected a 4-D input (N, C, H, W), got {x.dim()}-D of shape {tuple(x.shape)}")
        _check(
            x.shape[1] == self.num_features,
            f"expected {self.num_features} channels, got {x.shape[1]} in input of shape {tuple(x.shape)}",
        )

    def freeze(self) -> None:
        """Fix parameters and statistics until `unfreeze`."""
        self.frozen = True
        self.requires_grad_(False)

    def unfreeze(self) -> None:
        """Let parameters train and statistics follow the batches again."""
        self.frozen = False
        self.requires_grad_(True)

    def reset_running_stats(self) -> None:
        """Forget the running statistics."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start over: fresh parameters, no running statistics."""
        self.reset_running_stats()
        if self.blend is not None:
            nn.init.zeros_(self.blend)


class BatchDecorrelation2d(EquilibriumLayer):
    r"""Batch decorrelation, the BD branch alone: p = W·x, W the Newton iterate for (Σ/trΣ)^{-1/2} per group.

    Args:
        num_features: channels C.
        momentum: weight of the newest batch in the running average of W; None weighs all batches alike.
        group_size: channels decorrelated together, contiguous; the last group takes the remainder.
        newton_steps: T of Eq. Newtoniter, 1 to 9. It defines the operator: 3 is far from converged, by design.
        pool: side of the max-pool window before the covariance, 1 for none.
        device, dtype: of the buffers.

    Shape: (N, C, H, W) -> (N, C, H, W).

    Numerics: biased covariance, float32 (float64 for float64 input). I ⪯ W ⪯ 1.5^T I, also for the average.

    >>> y = BatchDecorrelation2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_inv_sqrt: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.1,
        *,
        group_size: int = 16,
        newton_steps: int = 3,
        pool: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Validate the arguments and register the buffers."""
        super().__init__(num_features)
        _check_counts(group_size=group_size, pool=pool)
        _check_momentum(momentum)
        _check(
            isinstance(newton_steps, int) and 1 <= newton_steps <= 9,
            f"newton_steps={newton_steps!r} must be an integer in 1..9; the paper uses 3",
        )
        self.momentum = momentum
        self.group_size = min(group_size, num_features)
        self.newton_steps = newton_steps
        self.pool = pool
        self.num_groups = F.num_groups(num_features, self.group_size)
        eye = torch.eye(self.group_size, device=device, dtype=dtype)
        self.register_buffer("running_inv_sqrt", eye.repeat(self.num_groups, 1, 1))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device))

    def measure(self, x: Tensor, *, batch: bool, sign: Tensor | None = None) -> F.Moments | None:
        """Take the covariance with `batch`, nothing otherwise."""
        return F.moments(x, self.group_size, self.pool, sign) if batch else None

    def inv_sqrt(self, moments: F.Moments | None, scale: Tensor, *, batch: bool) -> Tensor:
        """W of this batch, which enters the running average, or the running average."""
        if not batch:
            # a copy: autograd may keep it, and a later training step changes the buffer in place
            return self.running_inv_sqrt.to(scale.dtype, copy=True)
        assert moments is not None and moments.cov is not None
        inv_sqrt = F.decorrelation(moments.cov, scale, self.newton_steps)
        averages = [(self.running_inv_sqrt, inv_sqrt)]
        average_(averages, self.num_batches_tracked, self.momentum, debias=True)
        return inv_sqrt

    def coefficients(
        self, moments: F.Moments | None, scale: Tensor, shift: Tensor, *, batch: bool
    ) -> F.Coefficients:
        """See `EquilibriumLayer.coefficients`."""
        inv_sqrt = self.inv_sqrt(moments, scale, batch=batch)
        return F.coefficients(scale, shift, inv_sqrt=inv_sqrt, blend=self.blend)

    def check_size(self, x: Tensor) -> None:
        """Raise ValueError unless the covariance has at least two values per channel to work with."""
        n, _, height, width = x.shape
        if -(-height // self.pool) * -(-width // self.pool) == 1:
            pooled = "" if self.pool == 1 else f" after {self.pool}×{self.pool} pooling"
            _check(
                n > 1,
                f"expected more than 1 value per channel{pooled} when training, got input size {tuple(x.shape)}",
            )

    def reset_running_stats(self) -> None:
        """Forget the running average: W = I, no batches seen."""
        eye = torch.eye(self.group_size, device=self.running_inv_sqrt.device)
        self.running_inv_sqrt.copy_(eye)
        self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        """Channels, groups and steps."""
        full, rest = divmod(self.num_features, self.group_size)
        groups = f"{full}x{self.group_size}" + (f"+{rest}" if rest else "")
        return (
            f"{self.num_features}, groups={groups}, newton_steps={self.newton_steps}, momentum={self.momentum}"
            + (f", pool={self.pool}" if self.pool > 1 else "")
            + (", frozen" if self.frozen else "")
        )


class InstanceReweighting2d(EquilibriumLayer):
    r"""Instance reweighting, the IR branch alone: p_n = sigmoid(W2 relu(LN(W1 σ̃²_n))) · s^{-1/2} ⊙ x_n.

    Args:
        num_features: channels C.
        eps: added to s. It bounds the branch: the gain never exceeds eps^{-1/2}.
        momentum: weight of the newest batch in the running average of s^{-1/2}; None weighs all batches alike.
        rd_ratio: hidden width of the gate over C, in (0, 1]; at least 8 units are kept.
        device, dtype: of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). H·W = 1 has no variance and is refused in training.

    Numerics: biased instance variance, float32 (float64 for float64 input).

    >>> y = InstanceReweighting2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_inv_std: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
        rd_ratio: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Validate the arguments, build the gate and register the buffers."""
        super().__init__(num_features)
        _check(eps > 0, f"eps={eps!r} must be positive; the default is 1e-5")
        _check_momentum(momentum)
        _check(0 < rd_ratio <= 1, f"rd_ratio={rd_ratio!r} must be in (0, 1]; the paper uses 0.25")
        self.eps = eps
        self.momentum = momentum
        # set by the loader of released checkpoints, whose code divides by L − 1
        self.unbiased = False
        hidden = max(8, int(rd_ratio * num_features))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(num_features, hidden, bias=False, **factory)
        self.norm = nn.LayerNorm(hidden, eps=F.GATE_NORM_EPS, **factory)
        self.fc2 = nn.Linear(hidden, num_features, bias=False, **factory)
        self.register_buffer("running_inv_std", torch.ones((), **factory))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device))

    @property
    def gate(self) -> F.Gate:
        """The gate's weights."""
        return F.Gate(self.fc1.weight, self.norm.weight, self.norm.bias, self.fc2.weight)

    def measure(self, x: Tensor, *, batch: bool, sign: Tensor | None = None) -> F.Moments | None:
        """Take the instance variances."""
        return F.moments(x, group_size=None)

    def gain(self, moments: F.Moments | None, scale: Tensor, *, batch: bool) -> Tensor:
        """a_n with s^{-1/2} of this batch, which enters the running average, or with that average."""
        assert moments is not None
        var = moments.var
        if self.unbiased:
            var = var * (moments.pixels / max(moments.pixels - 1, 1))
        if batch:
            inv_std = F.inverse_std(var, scale, self.eps)
            averages = [(self.running_inv_std, inv_std)]
            average_(averages, self.num_batches_tracked, self.momentum, debias=True)
        else:
            inv_std = self.running_inv_std.to(scale.dtype, copy=True)
        return F.instance_gain(var, scale, inv_std, self.gate)

    def coefficients(
        self, moments: F.Moments | None, scale: Tensor, shift: Tensor, *, batch: bool
    ) -> F.Coefficients:
        """See `EquilibriumLayer.coefficients`."""
        gain = self.gain(moments, scale, batch=batch)
        return F.coefficients(scale, shift, gain=gain, blend=self.blend)

    def check_size(self, x: Tensor) -> None:
        """Raise ValueError unless every instance has at least two values per channel."""
        _check(
            x.shape[2] * x.shape[3] > 1,
            "expected more than 1 spatial value per channel when training (the instance variance of one value is "
            f"zero), got input size {tuple(x.shape)}",
        )

    def reset_running_stats(self) -> None:
        """Forget the running average: s = 1, no batches seen."""
        self.running_inv_std.fill_(1)
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Start over: fresh gate, no running statistics."""
        super().reset_parameters()
        for layer in (self.fc1, self.norm, self.fc2):
            layer.reset_parameters()

    def extra_repr(self) -> str:
        """Channels, constants and variant."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"
            + (", unbiased" if self.unbiased else "")
            + (", frozen" if self.frozen else "")
        )


class ChannelEquilibrium2d(EquilibriumLayer):
    r"""Channel equilibrium, Eq. CE: p_n = λ · W·x + (1 − λ) · a_n ⊙ x, between a norm and its activation.

    W decorrelates the channels of a group over the batch (`BatchDecorrelation2d`), a_n reweights them for
    each image (`InstanceReweighting2d`), and λ = sigmoid(mix_logit) is learned, 0.5 at first.

    Args:
        num_features: channels C.
        eps: added to s, the mean instance variance. It bounds the instance gain by eps^{-1/2}.
        momentum: weight of the newest batch in the running averages of W and s^{-1/2}; the first 1/momentum
            batches weigh alike, so the initial values leave no trace. None weighs all batches alike.
        group_size: channels decorrelated together, contiguous; the last group takes the remainder.
        newton_steps: T of Eq. Newtoniter, 1 to 9.
        rd_ratio: hidden width of the instance gate over C, in (0, 1].
        pool: side of the max-pool window before the covariance, 1 for none (the paper pools 2×2 in the stem).
        device, dtype: of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). Training needs H·W > 1; an empty batch passes through.

    Numerics: statistics in float32 (float64 for float64 input) under autocast too, biased variances; y has the
    dtype and memory format of x. A batch with non-finite statistics never enters the running averages.

    >>> ce = ChannelEquilibrium2d(64)
    >>> y = torch.relu(ce(nn.BatchNorm2d(64)(torch.randn(8, 64, 14, 14))))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
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
            momentum,
            group_size=group_size,
            newton_steps=newton_steps,
            pool=pool,
            device=device,
            dtype=dtype,
        )
        self.ir = InstanceReweighting2d(
            num_features, eps, momentum, rd_ratio=rd_ratio, device=device, dtype=dtype
        )
        self.mix_logit = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    @property
    def mix(self) -> Tensor:
        """λ, the share of batch decorrelation."""
        return self.mix_logit.sigmoid()

    def measure(self, x: Tensor, *, batch: bool, sign: Tensor | None = None) -> F.Moments | None:
        """Take instance variances, and with `batch` the covariance."""
        branch = self.bd if batch else self.ir
        return branch.measure(x, batch=batch, sign=sign)

    def coefficients(
        self, moments: F.Moments | None, scale: Tensor, shift: Tensor, *, batch: bool
    ) -> F.Coefficients:
        """See `EquilibriumLayer.coefficients`."""
        return F.coefficients(
            scale,
            shift,
            inv_sqrt=self.bd.inv_sqrt(moments, scale, batch=batch),
            gain=self.ir.gain(moments, scale, batch=batch),
            lam=self.mix_logit.to(scale.dtype).sigmoid(),
            blend=self.blend,
        )

    def check_size(self, x: Tensor) -> None:
        """Raise ValueError unless both branches can take batch statistics of x."""
        self.ir.check_size(x)
        self.bd.check_size(x)

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
        return f"{self.num_features}" + (", frozen" if self.frozen else "")


def ce_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, EquilibriumLayer]]:
    """Every CE layer under `module` with its name; branches inside a `ChannelEquilibrium2d` are not listed."""
    if isinstance(module, EquilibriumLayer):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from ce_layers(child, f"{prefix}.{name}" if prefix else name)
