"""Any network of the paper and any row it is compared with, by name."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from cenet.models.conversion import ACTIVATIONS, NORMS, replace_activations_, replace_norms_
from cenet.models.placement import NETWORKS, STEM_POOL, Network
from cenet.nn import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    EquilibriumLayer,
    InstanceReweighting2d,
)
from cenet.surgery import insert_ce_

LAYERS: dict[str, type[EquilibriumLayer]] = {
    "ce": ChannelEquilibrium2d,
    "bd": BatchDecorrelation2d,
    "ir": InstanceReweighting2d,
}
BLOCKS = (None, "se", *LAYERS)


def create_model(
    name: str,
    block: Literal["ce", "bd", "ir", "se"] | None = "ce",
    *,
    norm: str = "bn",
    act: str | None = None,
    stem: bool = True,
    ce_position: int | None = None,
    start: Literal["paper", "identity"] = "paper",
    layer_args: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a network of the paper.

    Args:
        name: resnet18, resnet50, resnet101, mobilenetv2_100, shufflenetv2_x0_5, shufflenetv2_x1_0
            or vgg16 (for 32×32 images).
        block: "ce", one of its branches alone ("bd", "ir"), "se", or None for the plain network.
        norm: bn, gn, in, ln, sn (switchable norm), iternorm or sw (switchable whitening),
            everywhere.
        act: relu, elu or leaky_relu, everywhere; by default the network's own.
        stem: CE behind the stem of ResNets too.
        ce_position: 2 or 3 puts CE behind the second or third convolution of ResNet-50's and
            ResNet-101's blocks; the paper's CE-ResNet is 3.
        start: "identity" lets CE change nothing at first (see `NormCE2d`).
        layer_args: arguments of the CE layers, e.g. {"group_size": 32}.
        **kwargs: of the network, as in timm: num_classes, in_chans, drop_rate, ...
    """
    network = NETWORKS.get(name) if isinstance(name, str) else None
    if network is None:
        raise ValueError(
            f"{name!r} is not a network of the paper; use one of {', '.join(NETWORKS)}"
        )
    _check("block", block, BLOCKS)
    _check("norm", norm, NORMS)
    _check("act", act, (None, *ACTIVATIONS))
    _check_position(ce_position, network, block)
    if block == "se" and network.squeeze is None:
        squeezed = {"block_args": {**kwargs.get("block_args", {}), "attn_layer": "se"}}
        model = network.build(**{**kwargs, **squeezed})
    else:
        model = network.build(**kwargs)
    if block == "se" and network.squeeze is not None:
        network.squeeze(model)
    replace_norms_(model, norm)
    if act is not None:
        replace_activations_(model, act)
    if block in LAYERS:
        args = {"layer": LAYERS[block], "start": start, **(layer_args or {})}
        insert_ce_(model, lambda _, site: network.is_place(site, ce_position), **args)
        if stem and network.stem is not None:
            pooled = {} if block == "ir" else {"pool": STEM_POOL}
            insert_ce_(model, lambda _, site: site == network.stem, **{**pooled, **args})
    _remember(
        model, block=block, norm=norm, act=act, stem=stem, ce_position=ce_position, start=start,
        layer_args=layer_args, **kwargs,
    )  # fmt: skip
    return model


def _remember(model: Any, *, block: str | None, **options: Any) -> None:
    """Keep what a file must say to have the network built again."""
    model.model_args = {"block": block, **{k: v for k, v in options.items() if v is not None}}


def _check(argument: str, value: Any, choices: Any) -> None:
    if value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} must be one of {names}")


def _check_position(position: int | None, network: Network, block: str | None) -> None:
    if position is None:
        return
    if "bn3" not in network.places or block not in LAYERS:
        raise ValueError(
            f"ce_position={position!r} is for CE in resnet50 and resnet101, whose blocks have "
            "three convolutions"
        )
    _check("ce_position", position, (2, 3))
