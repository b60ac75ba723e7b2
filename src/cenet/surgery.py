"""Put CE into any network and take it out again, in place.

Placement follows the paper where the network has residual blocks: the last norm of each block.
Elsewhere every norm that feeds an activation is taken. A predicate `filter_fn(module, name)` over
the norms overrides both.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cenet.dataflow import Call, trace
from cenet.internals import sequence_number
from cenet.nn import ChannelEquilibrium2d, EquilibriumLayer, NormCE2d, ce_layers
from cenet.nn.norm_ce import check_start
from cenet.nn.norms import inner_activation, inner_parts, norm_channels

FilterFn = Callable[[nn.Module, str], bool]


class CESite(NamedTuple):
    """A norm that CE can follow."""

    name: str
    norm: str
    num_features: int
    default: bool  # insert_ce_ without filter_fn chooses it


def ce_sites(model: nn.Module, example_input: Tensor | None = None) -> list[CESite]:
    """List the norms of `model` that CE could follow, and whether `insert_ce_` chooses them by
    default.

    Args:
        model: any network whose norms are modules. It is not changed.
        example_input: a batch the model accepts. Norms whose map has a single pixel at this size
            are not chosen; by default 224×224, or the first usual size that the model takes.
    """
    norms = _bare_norms(model)
    chosen = _default_norms(model, norms, example_input) if norms else set()
    return [
        CESite(name, type(norm).__name__, norm_channels(norm) or 0, norm in chosen)
        for name, norm in norms.items()
    ]


def insert_ce_(
    model: nn.Module,
    filter_fn: FilterFn | None = None,
    *,
    layer: type[EquilibriumLayer] = ChannelEquilibrium2d,
    start: Literal["paper", "identity"] = "paper",
    example_input: Tensor | None = None,
    **layer_kwargs: Any,
) -> list[str]:
    """Put a CE layer behind norms of `model`, in place, and return their names.

    The weights stay, and a checkpoint of the original network still loads: only `.ce.` keys are
    missing. Build the optimizer afterwards, so that it sees the new parameters. A norm whose weight
    is all zero (zero-initialised residual branches) leaves CE nothing to work
    on: its weight is set to one, with a warning, unless `start="identity"`.

    Args:
        model: a network whose norms are modules over (N, C, H, W).
        filter_fn: `filter_fn(norm, name)` decides about each norm; by default the last norm of each
            residual block, or without such blocks every norm that feeds an activation (see
            `ce_sites`).
        layer: `ChannelEquilibrium2d`, `BatchDecorrelation2d` or `InstanceReweighting2d`.
        start: "identity" leaves the output of the network unchanged until it is trained (see
            `NormCE2d`).
        example_input: a batch the model accepts. Norms whose map has a single pixel at this size
            are not chosen; by default 224×224, or the first usual size that the model takes.
        **layer_kwargs: passed to `layer`, e.g. `group_size=32`.

    Raises:
        ValueError: nothing matched; the message lists the candidates.
    """
    check_start(start)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn={filter_fn!r} must be a function of (norm, name)")
    if not (isinstance(layer, type) and issubclass(layer, EquilibriumLayer)):
        raise TypeError(
            f"layer={layer!r} must be a class: ChannelEquilibrium2d, BatchDecorrelation2d or "
            "InstanceReweighting2d"
        )
    norms = _bare_norms(model)
    if filter_fn is None:
        chosen = _default_norms(model, norms, example_input) if norms else set()
        sites = {name: norm for name, norm in norms.items() if norm in chosen}
    else:
        sites = {name: norm for name, norm in norms.items() if filter_fn(norm, name)}
    if not sites:
        raise ValueError(_nothing_matched(model, norms, by_default=filter_fn is None))
    # all layers are built before the first edit, so that a bad argument leaves the model as it was
    layers = {
        norm: layer(norm_channels(norm) or 0, **_factory(norm, model), **layer_kwargs)
        for norm in sites.values()
    }
    wrappers = {norm: _wrap(norm, ce, start) for norm, ce in layers.items()}
    for name, norm in sites.items():
        model.set_submodule(name, wrappers[norm])
    if start == "paper":
        _fill_zero_weights({name: wrappers[norm] for name, norm in sites.items()})
    return list(sites)


def remove_ce_(model: nn.Module) -> list[str]:
    """Take every `NormCE2d` out of `model`, in place, put its norm back and return the names.

    A weight that `insert_ce_` raised from zero to one goes back to zero if training has not moved
    it.
    """
    sites = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, NormCE2d)
    }
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no NormCE2d to remove; insert_ce_ puts them in"
        )
    if "" in sites:
        raise ValueError(
            "the model is itself a NormCE2d and cannot be replaced in place; use model.norm"
        )
    bare = {wrapper: _unwrap(wrapper) for wrapper in sites.values()}
    for name, wrapper in sites.items():
        model.set_submodule(name, bare[wrapper])
    return list(sites)


def freeze_ce_(model: nn.Module) -> list[str]:
    """Fix parameters and statistics of every CE layer, in place, and return the names.

    `.train()` does not undo it.
    """
    layers = _layers(model)
    for layer in layers.values():
        layer.freeze()
    return list(layers)


def unfreeze_ce_(model: nn.Module) -> list[str]:
    """Undo `freeze_ce_`: parameters train and statistics follow the batches again."""
    layers = _layers(model)
    for layer in layers.values():
        layer.unfreeze()
    return list(layers)


def _layers(model: nn.Module) -> dict[str, EquilibriumLayer]:
    layers = dict(ce_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no CE layer; insert_ce_ puts them in")
    return layers


def _bare_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Norms CE can follow and does not yet. A shared norm appears under each of its names."""
    taken = {
        id(part)
        for module in model.modules()
        if isinstance(module, NormCE2d)
        for part in module.modules()
    }
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and norm_channels(module) is not None and id(module) not in taken
    }


def _default_norms(
    model: nn.Module, norms: dict[str, nn.Module], example_input: Tensor | None
) -> set[nn.Module]:
    bare = set(norms.values())
    with_ce = (NormCE2d, EquilibriumLayer)
    flow = trace(model, lambda module: module in bare or isinstance(module, with_ce), example_input)

    def is_feature_map(call: Call) -> bool:
        return len(call.shape) == 4 and call.shape[2] * call.shape[3] > 1

    # by the operation that made the output of norm or CE, if that reaches the network's output
    made = {
        call.output: call.module
        for call in flow.calls
        if call.output is not None and call.output in flow.consumers and is_feature_map(call)
    }
    followed = {call.source for call in flow.calls if isinstance(call.module, with_ce)}
    last = set()
    for branch in flow.residual_branches():
        inside = [node for node in branch if node in made]
        if inside:
            last.add(made[max(inside, key=sequence_number)])
    if last:
        return last & bare
    return {
        norm
        for node, norm in made.items()
        if norm in bare
        and node not in followed
        and (flow.feeds_activation(node) or inner_activation(norm) is not None)
    }


def _nothing_matched(model: nn.Module, norms: dict[str, nn.Module], *, by_default: bool) -> str:
    name = type(model).__name__
    if norm_channels(model) is not None:
        return f"the model is itself a norm; use NormCE2d({name}(...), ChannelEquilibrium2d(...))"
    if not norms:
        return (
            f"{name} has no norm that CE could follow and does not follow already "
            "(BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm2d)"
        )
    candidates = ", ".join(f"{key} ({type(norm).__name__})" for key, norm in norms.items())
    if by_default:
        return (
            f"no norm of {name} without CE is the last of a residual block or feeds an "
            f"activation; choose with filter_fn among the candidates: {candidates}"
        )
    return f"filter_fn matched no norm of {name}; candidates: {candidates}"


def _factory(norm: nn.Module, model: nn.Module) -> dict[str, Any]:
    own = next(iter([*norm.parameters(), *norm.buffers(), *model.parameters()]), torch.empty(0))
    return {"device": own.device, "dtype": own.dtype if own.is_floating_point() else None}


def _wrap(norm: nn.Module, ce: EquilibriumLayer, start: Literal["paper", "identity"]) -> NormCE2d:
    # norm and activation in one module (timm's BatchNormAct2d): CE goes between them, so the
    # wrapper takes over the activation and hands it back in _unwrap
    act = inner_activation(norm)
    moved = inner_parts(norm)
    for name in moved:
        setattr(norm, name, nn.Identity())
    wrapper = NormCE2d(norm, ce, act, start=start).train(norm.training)
    wrapper.moved = moved
    return wrapper


def _unwrap(wrapper: NormCE2d) -> nn.Module:
    norm, act = wrapper.norm, wrapper.act
    if wrapper.had_zero_weight:
        weight = norm.get_parameter("weight")
        if bool(weight.eq(1).all()):
            nn.init.zeros_(weight)
    if act is None:
        return norm
    # torch's conversion to SyncBatchNorm leaves a norm that would not apply the activation
    if not wrapper.moved or type(norm).__module__.startswith("torch.nn."):
        return nn.Sequential(norm, act)
    parts = list(act.children()) if len(wrapper.moved) > 1 else [act]
    for name, part in zip(wrapper.moved, parts, strict=True):
        setattr(norm, name, part)
    return norm


def _fill_zero_weights(wrappers: dict[str, NormCE2d]) -> None:
    zero = []
    for name, wrapper in wrappers.items():
        weight = getattr(wrapper.norm, "weight", None)
        if weight is not None and not weight.is_meta and not bool(weight.any()):
            with torch.no_grad():
                weight.fill_(1)
            wrapper.had_zero_weight = True
            zero.append(name)
    if zero:
        warnings.warn(
            f"the weight of {len(zero)} norms was all zero, which leaves CE nothing to "
            f"equilibrate; it is now one ({', '.join(zero)}). remove_ce_ restores it; "
            'start="identity" would have left it',
            stacklevel=3,
        )
