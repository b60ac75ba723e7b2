"""Networks of the paper with any norm, block and activation they are compared with, by name."""

import re
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, Literal

from torch import Tensor, nn

from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d
from cenet.models.placement import NETWORKS, SMALL_NETWORKS, STEM_POOL, Network
from cenet.nn import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    EquilibriumLayer,
    InstanceReweighting2d,
)
from cenet.nn.base import is_integer
from cenet.nn.norm_ce import check_start
from cenet.nn.norms import inner_activation
from cenet.surgery import insert_ce_

LAYERS: dict[str, type[EquilibriumLayer]] = {
    "ce": ChannelEquilibrium2d,
    "bd": BatchDecorrelation2d,
    "ir": InstanceReweighting2d,
}
BLOCKS = ("plain", "se", *LAYERS)
# constructors of norms by name; None keeps batch norm
NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "bn": None,
    "gn": lambda channels: nn.GroupNorm(gcd(32, channels), channels),
    "in": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "ln": lambda channels: nn.GroupNorm(1, channels),
    "sn": SwitchableNorm2d,
    "iternorm": IterNorm2d,
    "sw": SwitchableWhitening2d,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(inplace=True),
}


def create_model(
    name: str,
    block: Literal["ce", "bd", "ir", "se", "plain"] | None = "ce",
    *,
    norm: str = "bn",
    act: str | None = None,
    norm_places: Literal["all", "published"] = "all",
    stem: bool = True,
    ce_position: int | None = None,
    start: Literal["paper", "identity"] = "paper",
    layer_args: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a network of the paper.

    Args:
        name: resnet18, resnet50, resnet101, mobilenetv2_100, shufflenetv2_x0_5, shufflenetv2_x1_0
            or vgg16 (for 32×32 images); or vgg6, a small VGG for 8×8 images and more.
        block: "ce", one of its branches alone ("bd", "ir"), "se", or "plain" (or None) for
            the network without any.
        norm: bn, gn, in, ln, sn (switchable norm), iternorm or sw (switchable whitening).
        norm_places: "all" norms of the network, or, for iternorm and sw in ResNets, those that
            were replaced by the "published" code of the norm's own authors (the others stay bn).
        act: relu, elu or leaky_relu, everywhere; by default the network's own.
        stem: CE behind the stem of ResNets too.
        ce_position: in ResNets, which convolution of a residual block CE follows (behind its
            norm): 2 or 3 in ResNet-50 and ResNet-101, 1 or 2 in ResNet-18. By default the last.
        start: "identity" lets CE change nothing at first (see `NormCE2d`).
        layer_args: arguments of the CE layers, e.g. {"group_size": 32}.
        **kwargs: of the network, as in timm: num_classes, in_chans, drop_rate, ...
    """
    network = {**NETWORKS, **SMALL_NETWORKS}.get(name) if isinstance(name, str) else None
    if network is None:
        raise ValueError(
            f"{name!r} is not a network of the paper; use one of {', '.join(NETWORKS)}"
            + (' (without "ce": that is the block)' if str(name).startswith("ce") else "")
        )
    block = "plain" if block is None else block
    _check("block", block, BLOCKS)
    _check("norm", norm, NORMS)
    _check_norm_places(norm_places, norm, network)
    check_start(start)
    _check_arguments(stem, layer_args, kwargs)
    _check("act", act, (None, *ACTIVATIONS))
    _check_position(ce_position, network, block)
    if block == "se" and network.squeeze is None:
        squeezed = {"block_args": {**kwargs.get("block_args", {}), "attn_layer": "se"}}
        model = network.build(**{**kwargs, **squeezed})
    else:
        model = network.build(**kwargs)
    if block == "se" and network.squeeze is not None:
        network.squeeze(model)
    replace_norms_(model, norm, ".*" if norm_places == "all" else network.norm_places[norm])
    if act is not None:
        replace_activations_(model, act)
    if block in LAYERS:
        args = {"layer": LAYERS[block], "start": start, **(layer_args or {})}
        insert_ce_(model, lambda _, site: network.is_place(site, ce_position), **args)
        if stem and network.stem is not None:
            pooled = {} if block == "ir" else {"pool": STEM_POOL}
            insert_ce_(model, lambda _, site: site == network.stem, **{**pooled, **args})
    _remember(
        model, name, block=block, norm=norm, act=act, stem=stem, ce_position=ce_position,
        norm_places=norm_places, start=start, layer_args=layer_args, **kwargs,
    )  # fmt: skip
    return model


def _remember(model: Any, name: str, **options: Any) -> None:
    """Keep what a file must say to have the network built again."""
    model.network_name = name
    model.model_args = {name: value for name, value in options.items() if value is not None}


def _check_arguments(stem: Any, layer_args: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(stem, bool):
        raise ValueError(f"stem={stem!r} must be True or False")
    if layer_args is not None and not isinstance(layer_args, Mapping):
        raise ValueError(f'layer_args={layer_args!r} must be a dict such as {{"group_size": 32}}')
    for name, least in (("num_classes", 0), ("in_chans", 1)):
        value = kwargs.get(name, least)
        if not is_integer(value) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer, at least {least}")


def _check(argument: str, value: Any, choices: Any) -> None:
    if not isinstance(value, str | int | None) or value not in list(choices):
        names = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} must be one of {names}")


def _check_position(position: int | None, network: Network, block: str | None) -> None:
    if position is None:
        return
    if not network.positions or block not in LAYERS:
        raise ValueError(
            f"ce_position={position!r} is for CE in the residual blocks of resnet18, resnet50 and "
            "resnet101"
        )
    _check("ce_position", position, network.positions)


def _check_norm_places(places: str, norm: str, network: Network) -> None:
    _check("norm_places", places, ("all", "published"))
    if places == "published" and norm not in network.norm_places:
        raise ValueError(
            "norm_places='published' is for norm='iternorm' and norm='sw' in resnet18, resnet50 "
            "and resnet101"
        )


class NormAct2d(nn.Module):
    """A norm and its activation, where a network has both in one module."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        """Hold both."""
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: Tensor) -> Tensor:
        """act(norm(x))."""
        y: Tensor = self.act(self.norm(x))
        return y


def replace_norms_(model: nn.Module, norm: str, places: str = ".*") -> None:
    """Replace every batch norm whose name matches `places` by the norm of this name, in place."""
    make = NORMS[norm]
    if make is None:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and re.fullmatch(places, name):
            new = make(module.num_features)
            act = inner_activation(module)
            model.set_submodule(name, new if act is None else NormAct2d(new, act))


def replace_activations_(model: nn.Module, act: str) -> None:
    """Replace every ReLU and ReLU6 by the activation of this name, in place."""
    for name, module in list(model.named_modules()):
        if type(module) in (nn.ReLU, nn.ReLU6):
            model.set_submodule(name, ACTIVATIONS[act]())
