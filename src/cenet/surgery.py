"""Put CE into any network and take it out again, in place.

Placement follows the paper where the network has residual blocks: the last norm of each block.
Where these hold few of its norms, or there are none, every norm outside of them that feeds an
activation is chosen. Parallel branches that become one convolution in deployment are left alone. A
predicate `filter_fn(module, name)` over the norms overrides all of it. `ce_settings` returns
sites and settings of CE as JSON, and `restore_ce_` restores them.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from cenet.dataflow import Call, trace
from cenet.internals import sequence_number
from cenet.nn import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    EquilibriumLayer,
    InstanceReweighting2d,
    NormCE2d,
    ce_layers,
)
from cenet.nn.norm_ce import check_start
from cenet.nn.norms import INPUTS, inner_activation, inner_parts, norm_channels, why_no_site

FilterFn = Callable[[nn.Module, str], bool]
Settings = dict[str, Any]
LAYERS: dict[str, type[EquilibriumLayer]] = {
    "ce": ChannelEquilibrium2d,
    "bd": BatchDecorrelation2d,
    "ir": InstanceReweighting2d,
}
# name under which timm's registry has any network with CE inserted (`cenet.models.inserted`)
WITH_CE = "with_ce"


# residual blocks that hold less than this share of the norms are not the whole of a network, and
# places that reach less than this share are worth a warning
FEW = 1 / 3

PRESENT = "CE is already there"
PARALLEL = "re-parameterizable branches"


class CESite(NamedTuple):
    """A norm that CE can follow, or follows."""

    name: str
    norm: str
    num_features: int
    default: bool  # insert_ce_ without filter_fn chooses it
    note: str = ""  # that CE is there already, or why the norm is not considered


class Placement(NamedTuple):
    """Where CE can go in a network, and how much of it the default places reach.

    Norms of feature maps are those that see maps of more than one pixel and are not in parallel
    branches.
    """

    sites: list[CESite]
    blocks: int = 0  # residual blocks
    in_blocks: int = 0  # norms of feature maps in them
    on_maps: int = 0  # norms of feature maps
    reached: int = 0  # norms of feature maps that have CE, or are in a block that has
    stages: Mapping[tuple[int, int], bool] = MappingProxyType({})  # size of maps: is CE there?
    left_out: Mapping[str, int] = MappingProxyType({})  # norms by class and reason

    @property
    def is_mixed(self) -> bool:
        """Whether norms outside of residual blocks are chosen, too."""
        return self.blocks > 0 and self.in_blocks < FEW * self.on_maps

    def summary(self) -> list[str]:
        """Which rule chose the default sites, and how much of the network they reach."""
        lines = [self._rule()]
        if self.stages:
            without = [f"{h}×{w}" for (h, w), there in self.stages.items() if not there]
            sizes = f"{len(self.stages) - len(without)} of {len(self.stages)} sizes of feature maps"
            lines.append(
                f"{self.reached} of {self.on_maps} norms of feature maps then have CE or are in a "
                f"block with CE; there is CE at {sizes}"
                + (f" (none at {', '.join(without)})." if without else ".")
            )
        if self.left_out:
            lines.append(f"Norms that CE does not follow: {_listed(self.left_out)}.")
        return lines

    def _rule(self) -> str:
        if not self.reached:
            return "CE has no default place here."
        if not self.blocks:
            return (
                "There are no residual blocks: CE goes after every norm that feeds an activation."
            )
        blocks = f"{self.blocks} residual block{'s' * (self.blocks > 1)}"
        if not self.is_mixed:
            each = "each of the" if self.blocks > 1 else "the"
            return f"CE goes after the last norm of {each} {blocks}."
        return (
            f"Only {self.in_blocks} of {self.on_maps} norms are in the {blocks}: CE goes after "
            "the last norm of each block, and elsewhere after every norm that feeds an activation."
        )


def ce_sites(model: nn.Module, example_input: Tensor | None = None) -> list[CESite]:
    """List the norms of `model` that CE could follow or follows, and whether `insert_ce_` chooses
    them by default.

    Args:
        model: any network whose norms are modules. It is not changed.
        example_input: a batch the model accepts. Norms whose map has a single pixel at this size
            are not chosen. By default the size is 224×224, or the first common size that the model
            accepts.
    """
    return find_placement(model, example_input).sites


def find_placement(model: nn.Module, example_input: Tensor | None = None) -> Placement:
    """Find the sites of `ce_sites`, and how much of the network the default ones reach."""
    norms = _bare_norms(model)
    flow = _Norms(model, norms, example_input) if norms else None
    chosen, notes = (set(), {}) if flow is None else (flow.chosen, flow.notes())
    sites = [
        CESite(name, type(module.norm).__name__, module.ce.num_features, False, PRESENT)
        if isinstance(module, NormCE2d)
        else CESite(
            name,
            type(module).__name__,
            norm_channels(module) or 0,
            module in chosen,
            notes.get(module, ""),
        )
        for name, module in model.named_modules(remove_duplicate=False)
        if name in norms or isinstance(module, NormCE2d)
    ]
    left_out = _left_out(model, notes)
    if flow is None:
        return Placement(sites, left_out=left_out)
    return Placement(
        sites,
        len(flow.blocks),
        len(flow.in_blocks),
        len(flow.maps),
        len(flow.reached),
        flow.stages(),
        left_out,
    )


def insert_ce_(
    model: nn.Module,
    filter_fn: FilterFn | None = None,
    *,
    layer: type[EquilibriumLayer] = ChannelEquilibrium2d,
    start: Literal["paper", "identity"] = "paper",
    example_input: Tensor | None = None,
    **layer_kwargs: Any,
) -> list[str]:
    """Put a CE layer after norms of `model`, in place, and return their names.

    The weights stay, and a checkpoint of the original network still loads: only `.ce.` keys are
    missing. Build the optimizer afterwards, so that it sees the new parameters. A norm whose weight
    is all zero (zero-initialised residual branches) leaves CE nothing to work on: its weight is set
    to one, with a warning, unless `start="identity"`. In a network of timm,
    `pretrained_cfg["architecture"]` becomes "with_ce", so that timm saves it with CE.

    Args:
        model: a network whose norms are modules over (N, C, H, W).
        filter_fn: `filter_fn(norm, name)` decides about each norm; by default the last norm of each
            residual block and, where these hold less than a third of the norms, every norm outside
            of them that feeds an activation. Norms in parallel branches that deployment merges into
            one convolution are left out (see `ce_sites`).
        layer: `ChannelEquilibrium2d`, `BatchDecorrelation2d` or `InstanceReweighting2d`.
        start: "identity" leaves the output of the network unchanged until it is trained (see
            `NormCE2d`).
        example_input: a batch the model accepts. Norms whose map has a single pixel at this size
            are not chosen. By default the size is 224×224, or the first common size that the model
            accepts.
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
        found = find_placement(model, example_input)
        sites = {site.name: norms[site.name] for site in found.sites if site.default}
    else:
        found = None
        sites = {name: norm for name, norm in norms.items() if filter_fn(norm, name)}
    if not sites:
        raise ValueError(_nothing_matched(model, norms, found))
    if found is not None:
        _warn_if_few(model, found)
    wrappers = _insert_(model, sites, layer, start, layer_kwargs)
    if start == "paper":
        _fill_zero_weights(wrappers)
    _describe_(model)
    return list(sites)


def remove_ce_(model: nn.Module) -> list[str]:
    """Take every `NormCE2d` out of `model`, in place, put its norm back and return the names.

    A weight that `insert_ce_` raised from zero to one goes back to zero if training has not moved
    it.
    """
    sites = dict(_wrappers(model))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no NormCE2d to remove; insert_ce_ puts them in"
        )
    if "" in sites:
        raise ValueError(
            "the model is itself a NormCE2d and cannot be replaced in place; use model.norm"
        )
    _take_out_(model, sites)
    _describe_(model)
    return list(sites)


def ce_settings(model: nn.Module) -> list[Settings]:
    """Return the sites of CE in `model` and its settings, in types of JSON.

    Sites with the same settings share an entry: their names (`sites`), the kind of `layer` ("ce",
    "bd" or "ir"), its arguments (`args`), the `start`, and whether `insert_ce_` replaced a zero
    weight of the norm (`had_zero_weight`).

    Raises:
        ValueError: a layer is of a class that cenet does not have.
    """
    by_site = _settings_by_site(model)
    distinct = [
        own for i, own in enumerate(by_site.values()) if own not in list(by_site.values())[:i]
    ]
    return [
        {"sites": [name for name, other in by_site.items() if other == own], **own}
        for own in distinct
    ]


def restore_ce_(model: nn.Module, settings: Sequence[Settings]) -> None:
    """Give `model` CE as `ce_settings` returned it: insert these layers, remove others, in place.

    Weights are those of new layers; load a state dict for the old ones.

    Raises:
        ValueError: the settings are damaged, or of another network.
    """
    try:
        wanted = {
            str(name): {key: value for key, value in entry.items() if key != "sites"}
            for entry in settings
            for name in entry["sites"]
        }
        layers = {name: LAYERS[own["layer"]] for name, own in wanted.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"these settings of CE cannot be read: {error!r}") from error
    present = _settings_by_site(model)
    _take_out_(model, {n: m for n, m in _wrappers(model) if present[n] != wanted.get(n)})
    kept = {name for name, _ in _wrappers(model)}
    norms = _bare_norms(model)
    absent = [name for name in wanted if name not in kept and name not in norms]
    if absent:
        raise ValueError(f"{type(model).__name__} has no norm {', '.join(absent[:3])} to put CE at")
    for entry in settings:
        sites = {name: norms[name] for name in entry["sites"] if name not in kept}
        layer = layers[entry["sites"][0]] if sites else ChannelEquilibrium2d
        wrappers = _insert_(model, sites, layer, entry["start"], entry["args"])
        for wrapper in wrappers.values():
            wrapper.had_zero_weight = bool(entry["had_zero_weight"])
    _describe_(model)


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


class _Norms:
    """The norms of a network and its CE layers, seen in one run of it."""

    def __init__(
        self, model: nn.Module, norms: dict[str, nn.Module], example_input: Tensor | None
    ) -> None:
        """Run the network, and choose among the norms without CE."""
        self.bare = set(norms.values())
        wrappers = {wrapper for _, wrapper in _wrappers(model)}
        alone = {layer for _, layer in ce_layers(model)} - {wrapper.ce for wrapper in wrappers}
        watched = self.bare | wrappers | alone
        self.flow = trace(model, lambda module: module in watched, example_input)
        self.followed = {c.source for c in self.flow.calls if c.module not in self.bare}
        longer, self.parallel = self.flow.branches()
        # by the operation that made the output of norm or CE
        self.maps = {
            call.output: call
            for call in self.flow.calls
            if call.output is not None and self._why_not(call) is None
        }
        # a block that ends in parallel branches is left alone as a whole
        norms_and_ce = self.maps.keys() | {call.output for call in self.flow.calls} & self.parallel
        within = (branch & norms_and_ce for branch in longer)
        ends = ((block, max(block, key=sequence_number)) for block in within if block)
        self.blocks = [block & self.maps.keys() for block, end in ends if end in self.maps]
        self.in_blocks = {node for block in self.blocks for node in block}
        outside = self.maps.keys() - self.in_blocks
        last = {max(block, key=sequence_number) for block in self.blocks}
        if len(self.in_blocks) < FEW * len(self.maps):
            last |= {node for node in outside if self._is_activated(node)}
        self.chosen = {self.maps[node].module for node in last}
        has_ce = {node for node, call in self.maps.items() if call.module not in self.bare}
        self.reached = self.in_blocks | last | has_ce

    def stages(self) -> dict[tuple[int, int], bool]:
        """Height and width of the feature maps, and whether norms of this size are reached."""
        found: dict[tuple[int, int], bool] = {}
        for node, call in self.maps.items():
            size = (call.shape[2], call.shape[3])
            found[size] = found.get(size, False) or node in self.reached
        return dict(sorted(found.items(), reverse=True))

    def notes(self) -> dict[nn.Module, str]:
        """Why norms without CE are not considered."""
        notes = dict.fromkeys(self.bare, "not run in evaluation")
        for call in self.flow.calls:
            notes[call.module] = self._why_not(call) or ""
            if call.output in self.followed:
                notes[call.module] = PRESENT
        return {norm: notes[norm] for norm in self.bare if notes[norm]}

    def _why_not(self, call: Call) -> str | None:
        """Why CE is not put after a norm, or None."""
        if len(call.shape) != 4:
            return INPUTS.get(len(call.shape), f"tensors of {len(call.shape)} dimensions")
        if call.shape[2] * call.shape[3] == 1:
            return "maps of one pixel"
        if call.output not in self.flow.consumers:
            return "not on the way to the output"
        return PARALLEL if call.output in self.parallel else None

    def _is_activated(self, node: Node) -> bool:
        """Whether an activation reads the output of a norm, and no CE does."""
        activated = self.flow.feeds_activation(node)
        activated |= inner_activation(self.maps[node].module) is not None
        return activated and node not in self.followed


def _warn_if_few(model: nn.Module, found: Placement) -> None:
    norms = found.on_maps + sum(found.left_out.values())
    if found.reached < FEW * norms:
        left_out = f" (left out: {_listed(found.left_out)})" if found.left_out else ""
        warnings.warn(
            f"CE reaches {found.reached} of {norms} norms of {type(model).__name__}{left_out}; "
            "ce_sites lists the sites, and filter_fn chooses others",
            stacklevel=3,
        )


def _nothing_matched(model: nn.Module, norms: dict[str, nn.Module], found: Placement | None) -> str:
    """Why no norm was chosen, by default as it was `found`, or by a `filter_fn`."""
    name = type(model).__name__
    if norm_channels(model) is not None:
        return f"the model is itself a norm; use NormCE2d({name}(...), ChannelEquilibrium2d(...))"
    present = any(isinstance(module, EquilibriumLayer) for module in model.modules())
    if not norms and present:
        return f"CE is already there, after every norm of {name} that it could follow"
    left_out = _left_out(model) if found is None else found.left_out
    reasons = f"; left out: {_listed(left_out)}" if left_out else ""
    if not norms:
        return (
            f"{name} has no norm that CE could follow (BatchNorm2d, GroupNorm, InstanceNorm2d, "
            f"LayerNorm2d){reasons}"
        )
    shown = [f"{key} ({type(norm).__name__})" for key, norm in norms.items()]
    more = f" and {len(shown) - 8} more, see ce_sites" if len(shown) > 8 else ""
    candidates = f"{', '.join(shown[:8])}{more}"
    if found is None:
        return f"filter_fn matched no norm of {name}; candidates: {candidates}"
    if present:
        return (
            f"CE is already there, at every default site of {name}; choose others with filter_fn: "
            f"{candidates}"
        )
    return (
        f"no norm of {name} is the last of a residual block or feeds an activation{reasons}; "
        f"choose with filter_fn among the candidates: {candidates}"
    )


def _left_out(model: nn.Module, notes: Mapping[nn.Module, str] | None = None) -> dict[str, int]:
    """Number of norms that are not considered, by class and reason."""
    inside = {part for _, layer in ce_layers(model) for part in layer.modules()}
    reasons = {m: why_no_site(m) for m in model.modules() if m not in inside} | dict(notes or {})
    return dict(
        Counter(
            f"{type(m).__name__} ({why})"
            for m, why in reasons.items()
            if why not in (None, PRESENT)
        )
    )


def _listed(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {norm}" for norm, count in left_out.items())


def _wrappers(model: nn.Module) -> Iterable[tuple[str, NormCE2d]]:
    """Every `NormCE2d` with its name; a shared one under each of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, NormCE2d):
            yield name, module


def _settings_by_site(model: nn.Module) -> dict[str, Settings]:
    found = {}
    for name, wrapper in _wrappers(model):
        kinds = [kind for kind, layer in LAYERS.items() if layer is type(wrapper.ce)]
        if not kinds:
            raise ValueError(
                f"{name} has a layer of the class {type(wrapper.ce).__name__}, which a file cannot "
                f"name; it knows {', '.join(layer.__name__ for layer in LAYERS.values())}"
            )
        found[name] = {
            "layer": kinds[0],
            "args": wrapper.ce.arguments(),
            "start": "paper" if wrapper.ce.blend is None else "identity",
            "had_zero_weight": wrapper.had_zero_weight,
        }
    return found


def _insert_(
    model: nn.Module,
    sites: dict[str, nn.Module],
    layer: type[EquilibriumLayer],
    start: Literal["paper", "identity"],
    args: dict[str, Any],
) -> dict[str, NormCE2d]:
    """Wrap the norms at these sites, and return the wrappers by site."""
    # all layers are built before the first edit, so that a bad argument leaves the model as it was
    layers = {
        norm: layer(norm_channels(norm) or 0, **_factory(norm, model), **args)
        for norm in sites.values()
    }
    wrappers = {norm: _wrap(norm, ce, start) for norm, ce in layers.items()}
    for name, norm in sites.items():
        model.set_submodule(name, wrappers[norm])
    return {name: wrappers[norm] for name, norm in sites.items()}


def _take_out_(model: nn.Module, sites: dict[str, NormCE2d]) -> None:
    bare = {wrapper: _unwrap(wrapper) for wrapper in sites.values()}
    for name, wrapper in sites.items():
        model.set_submodule(name, bare[wrapper])


def _describe_(model: Any) -> None:
    """Update what a network of timm says about itself after CE was inserted or removed.

    Its `pretrained_cfg` and `_model_args` are what timm's `save_for_hf` and `push_to_hf_hub` write,
    and they would name the network without CE.
    """
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not hasattr(model, "num_classes"):
        return
    name, args = config.get("architecture"), dict(getattr(model, "_model_args", {}))
    if name == WITH_CE:
        name, args = args.get("network"), dict(args.get("network_args", {}))
    try:
        settings = ce_settings(model)
    except ValueError:  # of a class that timm could not build again
        return
    # networks of torchvision are not in timm's registry, and those of the paper have CE by name
    is_timms = "/" not in str(name) and not hasattr(model, "network_name")
    if settings or not is_timms:
        args = {"network": name, "network_args": args, "ce": settings}
        name = WITH_CE
    model.pretrained_cfg = model.default_cfg = {**config, "architecture": name}
    model._model_args = args


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
