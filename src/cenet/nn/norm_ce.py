"""`NormCE2d`: norm → CE → activation as one module, which replaces a norm."""

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import cenet.nn.fused as fused
from cenet import functional as F
from cenet.internals import is_exporting, is_tracing
from cenet.nn.base import EquilibriumLayer, call_as_leaf, finish, is_proxy, refuse_script
from cenet.nn.norms import (
    affine,
    inner_activation,
    is_batch_norm,
    is_hooked,
    norm_channels,
    ranks_of,
    synchronizes,
    uses_batch_statistics,
    weight_sign,
)

# attributes of a batch norm that tools read to merge it into a convolution
NORM_VALUES = frozenset({"running_mean", "running_var", "weight", "bias", "eps"})


class NormCE2d(nn.Module):
    """A norm followed by channel equilibrium and, if given, the activation.

    After a batch norm, norm and CE are one affine map per sample: x is measured once, mapped once,
    and the norm's running statistics move as they would in the norm. Any other norm runs
    first as it is; so does a SyncBatchNorm, unless CE is synchronized with the same ranks
    (`convert_sync_ce`). A checkpoint of the bare norm loads: its keys go to `norm.*`, and only
    `ce.*` keys are missing.

    Args:
        norm: BatchNorm2d, SyncBatchNorm, a frozen batch norm, GroupNorm, InstanceNorm2d, a
            LayerNorm2d over channels, or None for no norm.
        ce: `ChannelEquilibrium2d`, `BatchDecorrelation2d` or `InstanceReweighting2d`.
        act: activation module applied to the result.
        start: "paper", or "identity" to blend CE in from zero: y = x̃ + α·(CE(x̃) − x̃), with a
            learned scalar α = 0 at first, which leaves the output of a trained network as it was.

    Shape: (N, C, H, W) -> (N, C, H, W).

    >>> from cenet import ChannelEquilibrium2d, NormCE2d
    >>> layer = NormCE2d(nn.BatchNorm2d(64), ChannelEquilibrium2d(64), nn.ReLU())
    >>> y = layer(torch.randn(8, 64, 14, 14))
    """

    # a residual block may pass its shortcut and its activation: forward(x, residual, act)
    takes_residual = True
    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        norm: nn.Module | None,
        ce: EquilibriumLayer,
        act: nn.Module | None = None,
        *,
        start: Literal["paper", "identity"] = "paper",
    ) -> None:
        """Check that the parts fit together."""
        super().__init__()
        if not isinstance(ce, EquilibriumLayer):
            raise TypeError(f"ce={ce!r} is not a CE layer; use ChannelEquilibrium2d(num_features)")
        if act is not None and not isinstance(act, nn.Module):
            raise TypeError(f"act={act!r} is not a module; use an instance such as nn.ReLU()")
        check_start(start)
        if norm is not None and not isinstance(norm, nn.Identity):
            _check_norm(norm, ce)
        self.norm = nn.Identity() if norm is None else norm
        self.ce = ce
        self.act = act
        # set by insert_ce_ when it replaced a zero-initialised weight of the norm by ones
        self.had_zero_weight = False
        # names of the parts of the norm that insert_ce_ moved into `act`
        self.moved: tuple[str, ...] = ()
        if start == "identity":
            ce.blend = nn.Parameter(torch.zeros_like(next(ce.buffers()).sum()[None]))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, act: nn.Module | None = None
    ) -> Tensor:
        """Normalize, equilibrate, add the residual if there is one, activate.

        On CUDA all of it is one operator (`cenet.ops`) if the norm is a batch norm and the
        activation is ReLU, LeakyReLU, ELU or none, also at the end of a residual block.

        Args:
            x: (N, C, H, W).
            residual: added before the activation.
            act: activation that belongs to the caller, used instead of this layer's own.
        """
        if is_proxy(x):
            return call_as_leaf(self, x, residual, act)
        act = self.act if act is None else act
        self.ce.check_input(x)
        if residual is not None and residual.shape != x.shape:
            raise ValueError(
                f"residual of shape {tuple(residual.shape)} cannot be added to an output of shape "
                f"{tuple(x.shape)}; they must be equal"
            )
        if self._is_one_map():
            return self._as_one_map(x, residual, act)
        normalized = self.norm(x) if x.numel() > 0 else x  # not every norm takes an empty batch
        if is_hooked(self.ce):
            return finish(self.ce(normalized), act, residual)
        return self.ce.equilibrate(normalized, act, residual)

    def _is_one_map(self) -> bool:
        norm, ce = self.norm, self.ce
        ranks = ce.ranks()
        if synchronizes(norm) and (ranks is None or ranks_of(norm) != ranks):
            return False
        if is_batch_norm(norm) and not is_hooked(norm) and not is_hooked(ce):
            return True
        if ranks is None or synchronizes(norm) or not is_batch_norm(norm):
            return False
        if uses_batch_statistics(norm):
            raise RuntimeError(
                "norm or ce has hooks, which would not run: a synchronized NormCE2d merges the "
                "statistics of both without calling them; remove the hooks, or apply "
                "nn.SyncBatchNorm.convert_sync_batchnorm too"
            )
        return False

    def _as_one_map(self, x: Tensor, residual: Tensor | None, act: nn.Module | None) -> Tensor:
        norm, ce = self.norm, self.ce
        ce_batch = ce.uses_batch(x)
        ranks = ce.ranks()
        alone = ranks is None
        norm_batch = uses_batch_statistics(norm) and (x.numel() > 0 or not alone)
        if norm_batch and alone and x.shape[2] * x.shape[3] == 1 and x.shape[0] == 1:
            raise ValueError(
                "expected more than 1 value per channel when training, "
                f"got input size {tuple(x.shape)}"
            )
        branches = ce.branches()
        if fused.can_fuse(x, norm, branches, synchronized=not alone):
            return fused.run(x, norm, branches, act, residual, batch=ce_batch, ranks=ranks)
        # cast once: the two gradients of x are then added before they are rounded
        values = x.to(F.statistics_dtype(x))
        moments, images = None, F.Centered(values)
        if (norm_batch or ce_batch) and x.numel() > 0:
            pooled = ce_batch and branches.bd is not None and branches.bd.pool > 1
            sign = weight_sign(norm, values) if pooled else None
            moments, images = ce.measure(values, batch=ce_batch, sign=sign)
        else:
            if torch.is_grad_enabled() and x.numel() > 0 and not (is_exporting() or is_tracing()):
                # uncentered, gradients of the parameters lose digits if this mean is large
                mean = cast(Tensor, norm.running_mean).to(values.dtype, copy=True)
                images = F.subtracted(values, mean)
            if branches.ir is not None:
                moments = F.moments(images.values, None)
        statistics = None
        if norm_batch or ce_batch:
            statistics = ce.summarize(values, moments, images.center, norm=norm_batch)
        scale, shift = affine(norm, values, statistics if norm_batch else None, images.center)
        if images.offset is not None:
            shift = shift + images.offset * scale
        coefficients = ce.coefficients(moments, scale, shift, statistics if ce_batch else None)
        y = F.mix(images.values, *coefficients, images.less, images.meeting)
        return finish(F.in_layout_of(x, y.to(x.dtype)), act, residual)

    def __getattr__(self, name: str) -> Any:
        """Look up a part by its name; for attributes of a norm, explain why there are none.

        Tools that merge a norm into a convolution ask for them: timm's `reparameterize_model`,
        torch's `fuse_conv_bn_eval`.
        """
        if name in NORM_VALUES:
            raise AttributeError(
                f"NormCE2d has no {name}: merging its norm into a convolution would lose CE; use "
                "cenet.fold_ce(model), or take CE out first with cenet.remove_ce_(model)"
            )
        return super().__getattr__(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # a checkpoint written before the norm was wrapped: bn1.weight -> bn1.norm.weight
        for old in [key for key in state_dict if key.startswith(prefix)]:
            name = old.removeprefix(prefix)
            if "." not in name and f"{prefix}norm.{name}" not in state_dict:
                state_dict[f"{prefix}norm.{name}"] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_start(start: str) -> None:
    """Raise ValueError for an unknown start."""
    if start not in ("paper", "identity"):
        raise ValueError(f'start={start!r} must be "paper" or "identity"')


def _check_norm(norm: nn.Module, ce: EquilibriumLayer) -> None:
    channels = norm_channels(norm)
    if channels is None:
        raise TypeError(
            f"norm={norm!r} is not a norm over (N, C, H, W) that CE can follow; use BatchNorm2d, "
            "GroupNorm, InstanceNorm2d, a LayerNorm2d over channels, or None"
        )
    if channels != ce.num_features:
        raise ValueError(f"norm has {channels} channels but ce has {ce.num_features}")
    if inner_activation(norm) is not None:
        raise ValueError(
            f"{type(norm).__name__} applies its activation itself, so CE would come after it; use "
            "cenet.insert_ce_, which separates the two, or pass a norm without activation"
        )
