"""The base class of CE layers: forward pass, freezing, tracing and argument checks."""

from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

import cenet.nn.fused as fused
from cenet import functional as F
from cenet.messages import Layout
from cenet.nn.ranks import Ranks, SyncGroup, gather
from cenet.nn.statistics import Statistics, merge, message, of_rank

# names of λ and α, which the paper does not decay
UNDECAYED = ("mix_logit", "blend")


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of any library, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number in (low, high]."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(low < value <= high)


def check_counts(**counts: int) -> None:
    """Raise ValueError for an argument that is not a positive integer."""
    for name, value in counts.items():
        check(is_integer(value) and value >= 1, f"{name}={value!r} must be an integer, at least 1")


def check_momentum(momentum: float | None) -> None:
    """Raise ValueError for a momentum that is neither None nor in (0, 1]."""
    check(
        momentum is None or is_number(momentum, 0, 1),
        f"momentum={momentum!r} must be in (0, 1], or None to weigh all batches alike; "
        "use freeze() to stop the averages",
    )


def check_images(x: Tensor, channels: int) -> None:
    """Raise TypeError or ValueError unless x is (N, channels, H, W) in floating point."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(
            f"expected a floating-point input, got {x.dtype}; convert it with x.float()"
        )
    if x.dim() != 4:
        raise ValueError(
            f"expected a 4-D input (N, C, H, W), got {x.dim()}-D of shape {tuple(x.shape)}"
        )
    if x.shape[1] != channels:
        raise ValueError(
            f"expected {channels} channels, got {x.shape[1]} in shape {tuple(x.shape)}"
        )


def refuse_script(module: nn.Module) -> None:
    """Raise RuntimeError; called when torch.jit.script asks for a form it can compile."""
    raise RuntimeError(
        f"torch.jit.script cannot compile {type(module).__name__}; use torch.export, or "
        "torch.jit.trace(model.eval(), images), which then takes batches of any size"
    )


class EquilibriumLayer(nn.Module):
    """Base class of the three CE layers: measure x, compute coefficients from it, mix.

    Attributes:
        frozen: use the running statistics in training mode too. Set by `freeze`, which `.train()`
            does not undo.
        sync: the ranks whose batches are measured as one. Set by `convert_sync_ce`.
        blend: learned α of an identity start (`NormCE2d(..., start="identity")`), or None.
    """

    # version of the layout of state dicts
    _version = 2
    __prepare_scriptable__ = refuse_script

    blend: nn.Parameter | None

    def __init__(self, num_features: int) -> None:
        """Validate the channel count."""
        super().__init__()
        check_counts(num_features=num_features)
        self.num_features = num_features
        self.frozen = False
        self.sync: SyncGroup | None = None
        self.trained: list[str] = []
        self.register_parameter("blend", None)

    def forward(self, x: Tensor) -> Tensor:
        """Equilibrate x, the output of a norm: (N, C, H, W) -> (N, C, H, W)."""
        if is_proxy(x):
            return call_as_leaf(self, x)
        self.check_input(x)
        return self.equilibrate(x, None, None)

    def equilibrate(self, x: Tensor, act: nn.Module | None, residual: Tensor | None) -> Tensor:
        """act(CE(x) + residual) for a checked x, in one operator where the kernels can."""
        batch = self.uses_batch(x)
        branches, ranks = self.branches(), self.ranks()
        if fused.can_fuse(x, None, branches, synchronized=ranks is not None):
            return fused.run(x, None, branches, act, residual, batch=batch, ranks=ranks)
        # cast once: the two gradients of x are then added before they are rounded
        values = x.to(F.statistics_dtype(x))
        scale = values.new_ones(self.num_features)
        shift, moments, images = torch.zeros_like(scale), None, F.Centered(values)
        if batch and x.numel() > 0:
            moments, images = self.measure(values, batch=True)
            shift = images.offset + images.center  # type: ignore[operator]
        elif branches.ir is not None:
            moments = F.moments(values, None)
        statistics = self.summarize(values, moments, images.center, norm=False) if batch else None
        coefficients = self.coefficients(moments, scale, shift, statistics)
        y = F.mix(images.values, *coefficients, images.less, images.meeting)
        return finish(F.in_layout_of(x, y.to(x.dtype)), act, residual)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that build this layer again, except device and dtype."""
        raise NotImplementedError

    def branches(self) -> fused.Branches:
        """The parts of this layer, for the kernels."""
        raise NotImplementedError

    def measure(
        self, x: Tensor, *, batch: bool, sign: Tensor | None = None
    ) -> tuple[F.Moments, F.Centered]:
        """Center the images x, and take the moments that `coefficients` needs.

        Args:
            x: the images, at least one.
            batch: this layer takes the statistics of the batch; if not, only the norm does.
            sign: of the norm's scale, where the covariance is taken after pooling.
        """
        bd = self.branches().bd
        if bd is None or not batch:
            return F.centered_moments(x, None)
        return F.centered_moments(x, bd.group_size, bd.pool, sign)

    def instance_var(self, moments: F.Moments | None) -> Tensor | None:
        """The variances (N, C) that instance reweighting works with, or None without it."""
        return None

    def coefficients(
        self,
        moments: F.Moments | None,
        scale: Tensor,
        shift: Tensor,
        statistics: Statistics | None,
    ) -> F.Coefficients:
        """Compute the coefficients of norm and layer together.

        They come from the statistics of the batch, which enter the running averages; if
        `statistics` is None, from the running averages.
        """
        raise NotImplementedError

    def summarize(
        self, x: Tensor, moments: F.Moments | None, center: Tensor | None, *, norm: bool
    ) -> Statistics:
        """Statistics of the batch, over all ranks if the layer is synchronized.

        Args:
            x: the images of this rank.
            moments: their moments; None without images.
            center: (C,), what the means of `moments` are relative to; None for zero.
            norm: whether to include the statistics of a batch norm.
        """
        instance_var = self.instance_var(moments)
        ranks = self.ranks()
        if ranks is None:
            assert moments is not None
            bd = self.branches().bd
            pooled = bd is not None and bd.pool > 1
            return of_rank(moments, center, instance_var, norm=norm, pooled=pooled)
        layout = self.layout(norm=norm)
        told = message(x, moments, center, instance_var, layout)
        return merge(gather(told, ranks), layout, center)

    def layout(self, *, norm: bool) -> Layout:
        """The statistics that this layer, and the batch norm joined with it, take of a batch."""
        bd, ir, *_ = self.branches()
        group_size, pool = (None, 1) if bd is None else (bd.group_size, bd.pool)
        return Layout(self.num_features, group_size, pool, norm, instance=ir is not None)

    def ranks(self) -> Ranks | None:
        """The ranks this forward pass is synchronized with, or None if the layer works alone."""
        if self.sync is None or not self.training or self.frozen:
            return None
        return self.sync.ranks()

    def uses_batch(self, x: Tensor) -> bool:
        """Whether the statistics of x itself are used; ValueError if x is too small for them.

        An empty batch has no statistics and is passed through on the running ones, unless other
        ranks may have images.
        """
        if not self.training or self.frozen:
            return False
        alone = self.ranks() is None
        if x.numel() == 0:
            return not alone
        self.check_size(x, alone=alone)
        return True

    def check_size(self, x: Tensor, *, alone: bool) -> None:
        """Raise ValueError if x is too small for batch statistics.

        If the layer is not `alone`, other ranks add values to the statistics of the batch, but not
        to those of an image.
        """
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Raise a clear error for an input of the wrong dtype or shape."""
        check_images(x, self.num_features)

    def freeze(self) -> None:
        """Fix parameters and statistics until `unfreeze`."""
        if not self.frozen:
            self.trained = [name for name, p in self.named_parameters() if p.requires_grad]
        self.frozen = True
        self.requires_grad_(False)

    def unfreeze(self) -> None:
        """Let the parameters that `freeze` stopped train and statistics follow batches again."""
        self.frozen = False
        for name in self.trained:
            self.get_parameter(name).requires_grad_()
        self.trained = []

    def mode_repr(self) -> str:
        """Identity start, frozen and synchronized, where they apply, for `extra_repr`."""
        modes = {
            "identity start": self.blend is not None,
            "frozen": self.frozen,
            "synchronized": self.sync is not None,
        }
        return "".join(f", {mode}" for mode, on in modes.items() if on)

    def reset_running_stats(self) -> None:
        """Forget the running statistics."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start over: fresh parameters, no running statistics."""
        self.reset_running_stats()
        if self.blend is not None:
            nn.init.zeros_(self.blend)


def finish(y: Tensor, act: nn.Module | None, residual: Tensor | None) -> Tensor:
    """act(y + residual)."""
    y = y if residual is None else y + residual
    return y if act is None else act(y)


def ce_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, EquilibriumLayer]]:
    """Every CE layer under `module` with its name, but not the branches inside one."""
    if isinstance(module, EquilibriumLayer):
        yield prefix, module
    if isinstance(module, EquilibriumLayer) or getattr(module, "is_deploy_form", False):
        return
    for name, child in module.named_children():
        yield from ce_layers(child, f"{prefix}.{name}" if prefix else name)


def param_groups(
    model: nn.Module, weight_decay: float, *, decay_norms: bool = True
) -> list[dict[str, Any]]:
    """Parameters for an optimizer: λ and α of CE without weight decay, all others with it.

    The paper does not decay λ: decay would pull the mix of both branches back to one half, and the
    α of an identity start back to zero.

    Args:
        model: a network, with CE or without; parameters that require no gradient are left out.
        weight_decay: weight decay of the other parameters.
        decay_norms: False leaves norms and biases (parameters of one dimension) without decay, too.

    Returns:
        One or two groups with `params` and `weight_decay`, for any optimizer of torch or timm.

    Raises:
        ValueError: no parameter requires a gradient, or `weight_decay` is not a number from 0 on.

    Examples:
        >>> import cenet
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), cenet.ChannelEquilibrium2d(8))
        >>> optimizer = torch.optim.SGD(cenet.param_groups(model, 1e-4), lr=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(6, 0.0001), (1, 0.0)]
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay={weight_decay!r} must be at least 0, and finite")
    own = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, EquilibriumLayer)
        for name, parameter in module.named_parameters(recurse=False)
        if name in UNDECAYED
    }
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            spare = id(parameter) in own or (not decay_norms and parameter.dim() <= 1)
            (spared if spare else decayed).append(parameter)
    if not decayed and not spared:
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient: there is nothing to train"
        )
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def is_proxy(x: Any) -> bool:
    """Whether x stands for a tensor while torch.fx traces a graph."""
    return isinstance(x, Proxy)


def call_as_leaf(module: nn.Module, x: Any, residual: Any = None, act: Any = None) -> Tensor:
    """Record `module` as one node of a traced graph, and after it the activation of the caller.

    The forward pass of a CE layer depends on shapes and modes, which a proxy does not have.
    """
    name = x.tracer.path_of_module(module)
    args = (x,) if residual is None else (x, residual)
    y: Tensor = x.tracer.create_proxy("call_module", name, args, {})
    return y if act is None else act(y)
