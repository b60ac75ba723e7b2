"""The block of the paper as a layer, and its two branches as layers of their own.

An ablation with one branch then has no unused parameters.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from cenet import functional as F
from cenet.nn.base import (
    EquilibriumLayer,
    ce_layers,
    check,
    check_counts,
    check_momentum,
    is_integer,
    is_number,
)
from cenet.nn.fused import Branches
from cenet.nn.norms import average_
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
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). Training needs H·W > 1; an empty batch passes through.

    Numerics: statistics in float32 (float64 for float64 input) under autocast too, biased
    variances; y has the dtype and memory format of x. A batch with non-finite statistics does
    not enter the running averages.

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

    @override
    def arguments(self) -> dict[str, Any]:
        return {**self.bd.arguments(), **self.ir.arguments()}

    @property
    def mix(self) -> Tensor:
        """λ, the share of batch decorrelation."""
        return self.mix_logit.sigmoid().squeeze(0)

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
        """Channels; the branches show the other arguments."""
        return f"{self.num_features}" + self.mode_repr()


@torch.no_grad()
def mixing_ratios(network: nn.Module) -> dict[str, float]:
    """λ of every CE layer, by the name of the layer; copied from the device in one transfer."""
    layers = {
        name: layer for name, layer in ce_layers(network) if isinstance(layer, ChannelEquilibrium2d)
    }
    if not layers:
        return {}
    values = torch.stack([layer.mix for layer in layers.values()]).tolist()
    return dict(zip(layers, values, strict=True))


class BatchDecorrelation2d(EquilibriumLayer):
    r"""Batch decorrelation, the BD branch alone: p = W·x, W the Newton iterate for (Σ/trΣ)^{-1/2}
    per group.

    Args:
        num_features: channels C.
        momentum: weight of the newest batch in the running average of W; None weighs all batches
            alike.
        group_size: channels decorrelated together, contiguous; the last group takes the remainder.
        newton_steps: T of Eq. Newtoniter, 1 to 9. It defines the operator: 3 is far from converged,
            by design.
        pool: side of the max-pool window before the covariance, 1 for none.
        device: device of the buffers.
        dtype: dtype of the buffers.

    Shape: (N, C, H, W) -> (N, C, H, W).

    Numerics: biased covariance, float32 (float64 for float64 input). I ⪯ W ⪯ 1.5^T I, also for the
    average.

    >>> y = BatchDecorrelation2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_inv_sqrt: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        momentum: float | None = 0.1,
        group_size: int = 16,
        newton_steps: int = 3,
        pool: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Validate the arguments and register the buffers."""
        super().__init__(num_features)
        check_counts(group_size=group_size, pool=pool)
        check_momentum(momentum)
        check(
            is_integer(newton_steps) and 1 <= newton_steps <= 9,
            f"newton_steps={newton_steps!r} must be an integer in 1..9; the paper uses 3",
        )
        self.momentum = momentum
        self.group_size = min(group_size, num_features)
        self.newton_steps = newton_steps
        self.pool = pool
        self.num_groups = F.num_groups(num_features, self.group_size)
        eye = torch.eye(self.group_size, device=device, dtype=dtype)
        self.register_buffer("running_inv_sqrt", eye.repeat(self.num_groups, 1, 1))
        self.register_buffer(
            "num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device)
        )

    @override
    def arguments(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "group_size": int(self.group_size),
            "newton_steps": int(self.newton_steps),
            "pool": int(self.pool),
        }

    def inv_sqrt(self, scale: Tensor, statistics: Statistics | None) -> Tensor:
        """W of the batch with these statistics; its running average if they are None."""
        if statistics is None:
            # a copy: autograd may keep it, and a later training step changes the buffer in place
            return self.running_inv_sqrt.to(scale.dtype, copy=True)
        assert statistics.cov is not None
        return F.decorrelation(statistics.cov, scale, self.newton_steps)

    def track(self, inv_sqrt: Tensor, statistics: Statistics | None) -> None:
        """Move the running average towards W of a batch, in place; not if `statistics` is None."""
        if statistics is not None:
            averages = [(self.running_inv_sqrt, statistics.counted(inv_sqrt))]
            average_(averages, self.num_batches_tracked, self.momentum, debias=True)

    @override
    def coefficients(
        self,
        moments: F.Moments | None,
        scale: Tensor,
        shift: Tensor,
        statistics: Statistics | None,
    ) -> F.Coefficients:
        inv_sqrt = self.inv_sqrt(scale, statistics)
        self.track(inv_sqrt, statistics)
        return F.coefficients(scale, shift, inv_sqrt=inv_sqrt, blend=self.blend)

    @override
    def branches(self) -> Branches:
        return Branches(self, None, None, None, self.blend)

    def check_size(self, x: Tensor, *, alone: bool) -> None:
        """Raise ValueError unless the covariance has at least two values per channel."""
        n, _, height, width = x.shape
        if alone and -(-height // self.pool) * -(-width // self.pool) == 1:
            pooled = "" if self.pool == 1 else f" after {self.pool}×{self.pool} pooling"
            check(
                n > 1,
                f"expected more than 1 value per channel{pooled} when training, "
                f"got input size {tuple(x.shape)}",
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
            f"{self.num_features}, groups={groups}, newton_steps={self.newton_steps}, "
            f"momentum={self.momentum}"
            + (f", pool={self.pool}" if self.pool > 1 else "")
            + self.mode_repr()
        )


class InstanceReweighting2d(EquilibriumLayer):
    r"""Instance reweighting, the IR branch alone: p_n = sigmoid(W2 relu(LN(W1 σ̃²_n))) · s^{-1/2} ⊙
    x_n.

    Args:
        num_features: channels C.
        eps: added to s. It bounds the branch: the gain never exceeds eps^{-1/2}.
        momentum: weight of the newest batch in the running average of s^{-1/2}; None weighs all
            batches alike.
        rd_ratio: hidden width of the gate over C, in (0, 1]; at least 8 units are kept.
        device: device of parameters and buffers.
        dtype: dtype of parameters and buffers.

    Shape: (N, C, H, W) -> (N, C, H, W). H·W = 1 has no variance and is refused in training.

    Numerics: biased instance variance, float32 (float64 for float64 input).

    >>> y = InstanceReweighting2d(32)(torch.randn(8, 32, 7, 7))
    """

    running_inv_std: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        rd_ratio: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Validate the arguments, build the gate and register the buffers."""
        super().__init__(num_features)
        check(is_number(eps, 0, 1e30), f"eps={eps!r} must be positive; the default is 1e-5")
        check_momentum(momentum)
        check(
            is_number(rd_ratio, 0, 1),
            f"rd_ratio={rd_ratio!r} must be in (0, 1]; the paper uses 0.25",
        )
        self.eps = eps
        self.momentum = momentum
        self.rd_ratio = rd_ratio
        # set by the loader of released checkpoints: that code divides by L − 1, and its gate reads
        # σ̃², not σ̃²/s. Saved in the state dict
        self.released = False
        hidden = max(8, int(rd_ratio * num_features))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(num_features, hidden, bias=False, **factory)
        self.norm = nn.LayerNorm(hidden, eps=F.GATE_NORM_EPS, **factory)
        self.fc2 = nn.Linear(hidden, num_features, bias=False, **factory)
        self.register_buffer("running_inv_std", torch.ones((), **factory))
        self.register_buffer(
            "num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device)
        )

    @override
    def arguments(self) -> dict[str, Any]:
        return {"eps": self.eps, "momentum": self.momentum, "rd_ratio": self.rd_ratio}

    def parts(self) -> tuple[tuple[nn.Module, type[nn.Module]], ...]:
        """The modules of the gate, and the class of each unless it has been replaced."""
        return (self.fc1, nn.Linear), (self.norm, nn.LayerNorm), (self.fc2, nn.Linear)

    @property
    def gate(self) -> F.Gate:
        """The gate's weights."""
        return F.Gate(self.fc1.weight, self.norm.weight, self.norm.bias, self.fc2.weight)

    @override
    def instance_var(self, moments: F.Moments | None) -> Tensor:
        assert moments is not None
        if self.released:
            return moments.var * (moments.pixels / max(moments.pixels - 1, 1))
        return moments.var

    def inv_std(self, scale: Tensor, statistics: Statistics | None) -> Tensor:
        """s^{-1/2} of the batch with these statistics; its running average if they are None."""
        if statistics is None:
            return self.running_inv_std.to(scale.dtype, copy=True)
        assert statistics.instance_var is not None
        return F.inverse_std(statistics.instance_var, scale, self.eps)

    def track(self, inv_std: Tensor, statistics: Statistics | None) -> None:
        """Move the running average towards s^{-1/2}, in place; not if `statistics` is None."""
        if statistics is not None:
            # an overflowing s has the finite inverse root 0, which must not pass for a statistic
            finite = inv_std.where(inv_std > 0, torch.nan)
            averages = [(self.running_inv_std, statistics.counted(finite))]
            average_(averages, self.num_batches_tracked, self.momentum, debias=True)

    def gain(self, moments: F.Moments | None, scale: Tensor, inv_std: Tensor) -> Tensor:
        """a_n, (N, C): the gate of each image times s^{-1/2}."""
        variance = self.instance_var(moments) * scale.square()
        if not self.released:
            variance = variance * inv_std.square()
        return self.gated(variance) * inv_std

    def gated(self, variance: Tensor) -> Tensor:
        """`functional.instance_gate` by this layer's own modules, (N, C) -> (N, C).

        The modules are called, so that their hooks run and quantized modules can replace them.
        """
        return _gate(variance, self.fc1, self.norm, self.fc2)

    @override
    def coefficients(
        self,
        moments: F.Moments | None,
        scale: Tensor,
        shift: Tensor,
        statistics: Statistics | None,
    ) -> F.Coefficients:
        inv_std = self.inv_std(scale, statistics)
        self.track(inv_std, statistics)
        gain = self.gain(moments, scale, inv_std)
        return F.coefficients(scale, shift, gain=gain, blend=self.blend)

    @override
    def branches(self) -> Branches:
        return Branches(None, self, self.gate, None, self.blend)

    def get_extra_state(self) -> Tensor:
        """The variant of the gate, as a tensor, because files of weights hold nothing else."""
        # not on the default device, which may be meta and hold no values
        return torch.tensor(self.released, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the variant of the gate."""
        self.released = bool(state)

    @staticmethod
    def upgrade_state_(state: dict[str, Any], prefix: str) -> None:
        """Bring the entries of a layer into the layout of version 2, in place.

        Version 1 had the key `released`, and only in layers of the released variant. Entries of
        version 2 stay as they are.
        """
        released = state.pop(f"{prefix}released", torch.tensor(False, device="cpu"))
        if f"{prefix}fc1.weight" in state:
            state.setdefault(f"{prefix}_extra_state", released)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        # files of tensors have no version
        if local_metadata.get("version", 1) < 2:
            self.upgrade_state_(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def check_size(self, x: Tensor, *, alone: bool) -> None:
        """Raise ValueError unless every instance has at least two values per channel."""
        if x.shape[2] * x.shape[3] < 2:
            raise ValueError(
                "expected more than 1 spatial value per channel when training (one value has no "
                f"instance variance), got input size {tuple(x.shape)}; use larger images, or no CE "
                "here: insert_ce_(model, example_input=...) leaves out maps of one pixel"
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
            + (", released" if self.released else "")
            + self.mode_repr()
        )


@F.full_precision
def _gate(variance: Tensor, fc1: nn.Module, norm: nn.Module, fc2: nn.Module) -> Tensor:
    hidden = _in_dtype(norm, _in_dtype(fc1, F.gate_input(variance)))
    return _in_dtype(fc2, hidden.relu()).sigmoid()


def _in_dtype(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), computed in the dtype of x whatever that of the weights is."""
    weights = dict(module.named_parameters())
    if all(weight.dtype == x.dtype for weight in weights.values()):
        y: Tensor = module(x)
    else:
        cast = {name: weight.to(x.dtype) for name, weight in weights.items()}
        y = torch.func.functional_call(module, cast, (x,))
    return y
