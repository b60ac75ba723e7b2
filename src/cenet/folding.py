"""Deploy form: batch norm, and the part of CE that is fixed in evaluation, become weights of the
convolution before them.

Batch decorrelation alone disappears. Full CE cannot: the instance branch needs the normalized map
itself, so what remains is one fixed matrix per group and the gate, `FoldedCE2d`.
"""

import warnings
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cenet.dataflow import IMAGE_SIZES, Call, Dataflow, example_images, trace
from cenet.internals import tree_leaves
from cenet.nn import (
    BatchDecorrelation2d,
    NormCE2d,
    ce_layers,
)
from cenet.nn.folded import Finish, FoldedCE2d, fixed_matrix, mix_rows
from cenet.nn.norms import (
    BATCH_NORMS,
    affine,
    inner_activation,
    is_batch_norm,
    is_hooked,
    uses_batch_statistics,
)


class ConvWeights(NamedTuple):
    """Weight, bias and groups of a folded convolution."""

    weight: Tensor  # (C, inputs per group, height, width)
    bias: Tensor  # (C,)
    groups: int


def fold_conv_weights(
    conv: ConvWeights, scale: Tensor, shift: Tensor, matrix: Tensor | None = None
) -> ConvWeights | None:
    """Weights of the convolution that does conv → scale, shift → matrix in one step.

    Args:
        conv: the convolution.
        scale, shift: the norm, (C,) each.
        matrix: applied within each group of K channels, (G, K, K).

    Returns:
        The merged convolution, or None if the matrix joins channels of different convolution groups
        and these cannot be merged into fewer groups that hold whole matrix groups.
    """
    weight = conv.weight * scale[:, None, None, None]
    bias = conv.bias * scale + shift
    if matrix is None:
        return ConvWeights(weight, bias, conv.groups)
    groups = _merged_groups(len(weight), conv.groups, matrix.shape[-1])
    if groups is None:
        return None
    weight = _merge_groups(weight, conv.groups, groups)
    return ConvWeights(mix_rows(weight, matrix), mix_rows(bias, matrix), groups)


@torch.no_grad()
def fold_ce(
    model: nn.Module, example_input: Tensor | None = None, *, strict: bool = True
) -> nn.Module:
    """Copy `model` into its deploy form: same outputs in evaluation, no batch norm before a CE.

    Batch norms are merged into the convolutions before them, also those without CE where their
    input allows it. Batch decorrelation alone is merged too; full CE leaves a `FoldedCE2d`.

    Args:
        model: a network with CE, in evaluation mode. It is not changed.
        example_input: a batch the model accepts; needed only if it does not take (N, C, H, W)
            images of a usual size.
        strict: refuse a network with a CE layer that cannot be folded. If False, such layers stay
            as they are, with a warning.

    Returns:
        The folded copy. Its attribute `not_folded` says which CE layers stayed as they were, and
        why: a dictionary from their names to reasons, empty if `strict`.

    Raises:
        ValueError: the model is in training mode or has no CE, or a CE layer (without `strict`:
            every CE layer) cannot be folded. Reasons are a norm that is no batch norm, no
            convolution right before the norm (pre-activation order), and a convolution whose output
            or weights are used elsewhere too.
    """
    not_folded = _check_model(model)
    if strict:
        _refuse(model, not_folded)
    folded = deepcopy(model)
    watched = (NormCE2d, nn.Conv2d)
    flow = trace(folded, lambda m: isinstance(m, watched) or _is_bare_norm(m), example_input)
    calls: dict[nn.Module, list[Call]] = {}
    for call in flow.calls:
        calls.setdefault(call.module, []).append(call)
    inside = {part for m in folded.modules() if isinstance(m, NormCE2d) for part in m.modules()}
    left: dict[nn.Module, nn.Module] = {}
    names = list(folded.named_modules(remove_duplicate=False))
    for name, module in names:
        if module in left:
            continue
        if isinstance(module, NormCE2d):
            conv = _convolution_before(flow, calls, module)
            if isinstance(conv, str):
                not_folded[name] = conv
                if strict:
                    _refuse(model, not_folded)
            else:
                left[module] = _fold_norm_ce(conv, module)
        elif _is_bare_norm(module) and module not in inside and module in calls:
            conv = _convolution_before(flow, calls, module)
            if isinstance(conv, nn.Conv2d):
                _fold_norm(conv, module)
                left[module] = inner_activation(module) or nn.Identity()
    for name, module in names:
        if module in left:
            folded.set_submodule(name, left[module])
    if not any(isinstance(module, NormCE2d) for module in left):
        _refuse(model, not_folded)
    folded.eval()
    _verify(model, folded, example_input)
    result: Any = folded
    result.not_folded = not_folded
    if not_folded:
        _warn(model, not_folded)
    return folded


@torch.no_grad()
def fold_conv_norm_ce(conv: nn.Conv2d, norm_ce: NormCE2d) -> tuple[nn.Conv2d, nn.Module]:
    """Fold one convolution and the `NormCE2d` after it, for networks that `fold_ce` cannot take.

    Only `norm_ce` may read the output of `conv`; that cannot be checked from these two modules.

    Args:
        conv: the convolution. It is not changed.
        norm_ce: a batch norm and CE, in evaluation mode. It is not changed.

    Returns:
        A convolution, and the module to call after it: with x, or like `norm_ce` with a residual
        and an activation.

    Raises:
        TypeError: `conv` is no Conv2d, or `norm_ce` no `NormCE2d`.
        ValueError: they do not fit together, or cannot be folded; the message says why.

    >>> from cenet import ChannelEquilibrium2d
    >>> conv = nn.Conv2d(3, 16, 3)
    >>> layer = NormCE2d(nn.BatchNorm2d(16), ChannelEquilibrium2d(16), nn.ReLU()).eval()
    >>> folded, rest = fold_conv_norm_ce(conv, layer)
    >>> x = torch.randn(2, 3, 8, 8)
    >>> torch.allclose(rest(folded(x)), layer(conv(x)), atol=1e-5)
    True
    """
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f"conv is a {type(conv).__name__}; pass the Conv2d before the norm")
    if not isinstance(norm_ce, NormCE2d):
        raise TypeError(f"norm_ce is a {type(norm_ce).__name__}; build it as NormCE2d(norm, ce)")
    if any(module.training for module in norm_ce.modules()):
        raise ValueError("norm_ce must be in evaluation mode; call norm_ce.eval() first")
    if conv.out_channels != norm_ce.ce.num_features:
        raise ValueError(
            f"conv has {conv.out_channels} output channels, but norm_ce has "
            f"{norm_ce.ce.num_features}; they must be equal"
        )
    reason = _why_not_norm(norm_ce) or _why_not_conv(conv)
    if reason is not None:
        raise ValueError(f"cannot fold norm_ce: {reason}")
    folded = deepcopy(conv).eval()
    return folded, _fold_norm_ce(folded, deepcopy(norm_ce))


def _refuse(model: nn.Module, not_folded: dict[str, str]) -> None:
    for name, reason in not_folded.items():
        raise ValueError(f"cannot fold {name} of {type(model).__name__}: {reason}")


def _warn(model: nn.Module, not_folded: dict[str, str]) -> None:
    names: dict[str, list[str]] = {}
    for name, reason in not_folded.items():
        names.setdefault(reason, []).append(name)
    reasons = [f"{reason} ({', '.join(own)})" for reason, own in names.items()]
    warnings.warn(
        f"{len(not_folded)} CE layers of {type(model).__name__} stay as they are: "
        + "; ".join(reasons),
        stacklevel=4,
    )


def _verify(model: nn.Module, folded: nn.Module, example_input: Tensor | None) -> None:
    """Compare the outputs once: a network may use its tensors in ways that autograd does not see.

    In float64 if the network runs in it, because rounding may be amplified by an untrained network;
    the folded weights are still those of its own dtype.
    """
    inputs = example_images(model, (64, *IMAGE_SIZES)) if example_input is None else [example_input]
    for dtype, tolerance in ((torch.float64, 1e-4), (None, 1e-3)):
        pair = [deepcopy(network).to(dtype=dtype) for network in (model, folded)]
        for example in inputs:
            x = torch.randn(example.shape, dtype=dtype or example.dtype, device=example.device)
            try:
                expected = _tensors(pair[0](x))
            except Exception:  # whatever the model raises on an input it does not take
                continue
            actual = _tensors(pair[1](x))
            for ours, theirs in zip(actual, expected, strict=True):
                error = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()
                if not error <= tolerance:  # NaN too
                    raise ValueError(
                        f"cannot fold {type(model).__name__}: its outputs would change by "
                        f"{error:.1e}, so it uses a convolution or norm in a way not traced here"
                    )
            return


def _tensors(outputs: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _check_model(model: nn.Module) -> dict[str, str]:
    """Check that there is something to fold; return CE layers without a norm, and a reason."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ValueError("fold before compiling: torch.compile(fold_ce(model._orig_mod))")
    if any(isinstance(module, FoldedCE2d) for module in model.modules()):
        raise ValueError(f"{name} is folded already")
    if any(module.training for module in model.modules()):
        raise ValueError(f"fold_ce needs {name} in evaluation mode; call model.eval() first")
    if isinstance(model, NormCE2d):
        raise ValueError(
            "fold_ce folds into the convolution before a norm; pass the network that holds both"
        )
    layers = dict(ce_layers(model))
    if not layers:
        raise ValueError(f"{name} has no CE layer to fold")
    wrapped = {module.ce for module in model.modules() if isinstance(module, NormCE2d)}
    reason = "it does not follow a norm in a NormCE2d; build it as NormCE2d(norm, ce)"
    return {key: reason for key, layer in layers.items() if layer not in wrapped}


def _is_bare_norm(module: nn.Module) -> bool:
    fused = isinstance(module, BATCH_NORMS) and inner_activation(module) is not None
    if fused and type(module).__module__.startswith("timm."):
        return not uses_batch_statistics(module)
    return is_batch_norm(module) and not uses_batch_statistics(module)


def _convolution_before(
    flow: Dataflow, calls: dict[nn.Module, list[Call]], module: nn.Module
) -> nn.Conv2d | str:
    """The convolution whose only reader is `module`, or the reason why there is none."""
    reason = _why_not_norm(module)
    if reason is not None:
        return reason
    if len(calls.get(module, [])) != 1:
        return f"it runs {len(calls.get(module, []))} times in a forward pass, not once"
    source = flow.sole_source(calls[module][0])
    if source is None:
        return (
            "its input is not the output of a convolution that nothing else reads "
            "(pre-activation order, or a shared feature map)"
        )
    conv = source.module
    if not isinstance(conv, nn.Conv2d):
        return f"its input comes from {type(conv).__name__}, not from a convolution"
    reason = _why_not_conv(conv)
    if reason is not None:
        return reason
    if len(calls[conv]) != 1:
        return f"its convolution runs {len(calls[conv])} times in a forward pass: it is shared"
    return conv


def _why_not_norm(module: nn.Module) -> str | None:
    """Why a norm, or the norm of a `NormCE2d`, cannot go into a convolution; None if it can."""
    norm = module.norm if isinstance(module, NormCE2d) else module
    if isinstance(module, NormCE2d) and not (
        is_batch_norm(norm) and not uses_batch_statistics(norm)
    ):
        return f"its norm is {type(norm).__name__}; CE is folded after batch norms only"
    parts = (module, norm, *([module.ce] if isinstance(module, NormCE2d) else []))
    if any(is_hooked(part) for part in parts):
        return "it has hooks, which would be lost"
    return None


def _why_not_conv(conv: nn.Conv2d) -> str | None:
    """Why a convolution cannot take up a norm; None if it can."""
    if type(conv) is not nn.Conv2d and type(conv).__name__ != "Conv2dSame":
        return (
            f"{type(conv).__name__} may change its weight before using it, unlike Conv2d; "
            "remove a parametrization first"
        )
    if is_hooked(conv):
        return "its convolution has hooks, which would see other values"
    return None


def _conv_weights(conv: nn.Conv2d) -> ConvWeights:
    bias = conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias
    return ConvWeights(conv.weight, bias, conv.groups)


def _set_weights(conv: nn.Conv2d, new: ConvWeights) -> None:
    conv.weight = nn.Parameter(new.weight.to(conv.weight.dtype), requires_grad=False)
    conv.bias = nn.Parameter(new.bias.to(conv.weight.dtype), requires_grad=False)
    conv.groups = new.groups


def _norm_affine(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    example = conv.weight.new_empty(1, conv.out_channels, 1, 1)
    return affine(norm, example, None)


def _fold_norm(conv: nn.Conv2d, norm: nn.Module) -> None:
    new = fold_conv_weights(_conv_weights(conv), *_norm_affine(conv, norm))
    assert new is not None
    _set_weights(conv, new)


def _fold_norm_ce(conv: nn.Conv2d, module: NormCE2d) -> nn.Module:
    """Fold the norm, and CE as far as it goes, into `conv`; return the module that remains."""
    scale, shift = _norm_affine(conv, module.norm)
    if isinstance(module.ce, BatchDecorrelation2d):
        new = fold_conv_weights(_conv_weights(conv), scale, shift, fixed_matrix(module.ce))
        if new is not None:
            _set_weights(conv, new)
            return Finish(module.act)
    new = fold_conv_weights(_conv_weights(conv), scale, shift)
    assert new is not None
    _set_weights(conv, new)
    conv.bias = None
    remaining = FoldedCE2d(module.ce, new.bias, module.act).eval()
    remaining.owns_input = True
    return remaining


def _merged_groups(channels: int, groups: int, group_size: int) -> int | None:
    """Most convolution groups, merged from `groups`, that each hold whole matrix groups."""
    if groups == 1:
        return 1
    for merged in range(groups, 1, -1):
        if groups % merged == 0 and channels // merged % group_size == 0:
            return merged
    return 1 if channels <= group_size else None


def _merge_groups(weight: Tensor, groups: int, merged: int) -> Tensor:
    """Weights of a grouped convolution written with fewer groups, the new connections zero."""
    joined = groups // merged
    outputs, inputs, *kernel = weight.shape
    blocks = weight.reshape(merged, joined, outputs // groups, inputs, *kernel)
    wide = weight.new_zeros(merged, joined, outputs // groups, joined, inputs, *kernel)
    for position in range(joined):
        wide[:, position, :, position] = blocks[:, position]
    return wide.reshape(outputs, joined * inputs, *kernel)
