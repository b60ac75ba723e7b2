"""The networks of the paper by name, with CE at the paper's places or with a variant of it."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from typing import Any, Literal, NamedTuple

from timm.layers.squeeze_excite import SEModule
from timm.models import get_pretrained_cfg
from timm.models.efficientnet import mobilenetv2_100
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d
from cenet.models.staged import VGG6, VGG16, ShuffleNetV2
from cenet.nn.base import is_integer
from cenet.nn.norm_ce import check_start
from cenet.nn.norms import inner_activation
from cenet.surgery import LAYERS, insert_ce_

STEM_POOL = 2  # side of the max-pool window before the covariance of the stem (Appendix E)
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


def _takes_residual(norm: nn.Module, block: Any) -> bool:
    """Whether the addition directly follows the norm."""
    return getattr(norm, "takes_residual", False) and block.se is None and block.drop_path is None


class EquilibriumBasicBlock(BasicBlock):
    """timm's `BasicBlock`, ending in one call if its second norm is a `NormCE2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and the shortcut."""
        if not _takes_residual(self.bn2, self):
            y: Tensor = super().forward(x)
            return y
        y = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        y = self.get_submodule("aa")(y)
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(y), shortcut, self.act2)
        return y


class EquilibriumBottleneck(Bottleneck):
    """timm's `Bottleneck`, ending in one call if its third norm is a `NormCE2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Three convolutions and the shortcut."""
        if not _takes_residual(self.bn3, self):
            y: Tensor = super().forward(x)
            return y
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.drop_block(self.bn2(self.conv2(y))))
        y = self.get_submodule("aa")(y)
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn3(self.conv3(y), shortcut, self.act3)
        return y


class Network(NamedTuple):
    """A network, and where blocks go in it. Places are patterns of names of norms."""

    build: Callable[..., nn.Module]
    places: str
    stem: str | None = None  # the norm of the stem, if CE goes there too
    squeeze: Callable[[nn.Module], None] | None = None  # adds squeeze-excite, if not `build`
    input_size: int = 224
    norm_places: Mapping[str, str] = {}  # by norm: the norms that its own authors replaced

    @property
    def positions(self) -> tuple[int, ...]:
        """Convolutions of a residual block that CE can follow; the last is where the paper has it.

        The first of three is not among them.
        """
        found = re.search(r"bn(\d)", self.places)
        return () if found is None or self.stem is None else (int(found[1]) - 1, int(found[1]))

    def is_place(self, name: str, position: int | None = None) -> bool:
        """Whether a block follows the norm of this name."""
        pattern = self.places
        if position is not None:
            pattern = re.sub(r"bn\d", f"bn{position}", pattern)
        return re.fullmatch(rf"(?:{pattern})(?:\.norm)?", name) is not None


def _resnet(block: Any, layers: tuple[int, ...], **kwargs: Any) -> nn.Module:
    # CE needs a weight to work on, so the last norm of a block does not start at zero
    network: nn.Module = ResNet(block, layers, **{"zero_init_last": False, **kwargs})
    return network


def _squeeze_mobilenet(model: nn.Module) -> None:
    """Put squeeze-excite after the activation of every depthwise convolution, as MobileNetV3."""
    module: Any
    for module in model.modules():
        if hasattr(module, "conv_dw") and hasattr(module, "se"):
            module.se = SEModule(module.conv_dw.out_channels)


def _squeeze_shufflenet(model: nn.Module) -> None:
    """Put squeeze-excite at the end of the branch with convolutions."""
    module: Any
    for name, module in model.named_modules():
        if name.endswith("branch2"):
            module.append(SEModule(module[5].out_channels))


def _squeeze_vgg(model: nn.Module) -> None:
    """Put squeeze-excite after every activation."""
    layers: Any = model.features
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            layers[i + 2] = nn.Sequential(layers[i + 2], SEModule(layer.out_channels))


def _published(norm: str) -> dict[str, str]:
    """Norms of ResNets that the authors of IterNorm and switchable whitening replace.

    IterNorm (github.com/huangleiBuaa/IterNorm-pytorch, ImageNet/models/resnet.py): the stem's norm
    alone. Switchable whitening (github.com/XingangPan/Switchable-Whitening,
    models/backbones/resnet.py): the stem's norm, and `norm` in every second block of the first
    three stages. That makes 4, 7 and 15 places in ResNet-18, 50 and 101.
    """
    return {"iternorm": "bn1", "sw": rf"bn1|layer[123]\.\d*[13579]\.{norm}"}


NETWORKS = {
    "resnet18": Network(
        partial(_resnet, EquilibriumBasicBlock, (2, 2, 2, 2)),
        r"layer\d\.\d+\.bn2",
        "bn1",
        norm_places=_published("bn1"),
    ),
    # all blocks except those with 2048 channels
    "resnet50": Network(
        partial(_resnet, EquilibriumBottleneck, (3, 4, 6, 3)),
        r"layer[123]\.\d+\.bn3",
        "bn1",
        norm_places=_published("bn2"),
    ),
    # the first seven blocks
    "resnet101": Network(
        partial(_resnet, EquilibriumBottleneck, (3, 4, 23, 3)),
        r"layer[12]\.\d+\.bn3",
        "bn1",
        norm_places=_published("bn2"),
    ),
    # the norm of every depthwise convolution; the first block has no expansion before it
    "mobilenetv2_100": Network(
        mobilenetv2_100,
        r"blocks\.0\.0\.bn1|blocks\.[1-6]\.\d+\.bn2",
        squeeze=_squeeze_mobilenet,
    ),
    **{
        f"shufflenetv2_{width}": Network(
            partial(ShuffleNetV2, width),
            r"stage\d\.\d+\.branch2\.6",
            squeeze=_squeeze_shufflenet,
        )
        for width in ("x0_5", "x1_0")
    },
    "vgg16": Network(VGG16, r"features\.\d+", squeeze=_squeeze_vgg, input_size=32),
}
# not in the paper: for small experiments
SMALL_NETWORKS = {"vgg6": Network(VGG6, r"features\.\d+", squeeze=_squeeze_vgg, input_size=8)}


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
        stem: in ResNets, put CE after the norm of the stem, too.
        ce_position: in ResNets, which convolution of a residual block CE follows (after its
            norm): 2 or 3 in ResNet-50 and ResNet-101, 1 or 2 in ResNet-18. By default the last.
        start: "identity" lets CE change nothing at first (see `NormCE2d`).
        layer_args: arguments of the CE layers, e.g. {"group_size": 32}.
        **kwargs: arguments of the network, as in timm: num_classes, in_chans, drop_rate, ...
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
    """Store name and arguments in the network, so that it can be built again from a file.

    Its name in timm's registry and these arguments are what timm's `save_for_hf` writes.
    """
    args = {name: value for name, value in options.items() if value is not None}
    config: Any = get_pretrained_cfg(f"ce{name}")
    model.network_name, model.model_args, model._model_args = name, args, dict(args)
    model.pretrained_cfg = model.default_cfg = config.to_dict()


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
