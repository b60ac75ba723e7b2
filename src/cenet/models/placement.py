"""Where the paper puts CE, network by network."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from timm.layers.squeeze_excite import SEModule
from timm.models.efficientnet import mobilenetv2_100
from timm.models.resnet import ResNet
from torch import nn

from cenet.models.blocks import EquilibriumBasicBlock, EquilibriumBottleneck
from cenet.models.staged import VGG6, VGG16, ShuffleNetV2

STEM_POOL = 2  # side of the max-pool window before the covariance of the stem (Appendix E)


class Network(NamedTuple):
    """A network, and where blocks go in it. Places are patterns of names of norms."""

    build: Callable[..., nn.Module]
    places: str
    stem: str | None = None  # the norm of the stem, if CE goes there too
    squeeze: Callable[[nn.Module], None] | None = None  # puts squeeze-excite in, if not `build`
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
        """Whether a block goes behind the norm of this name."""
        pattern = self.places
        if position is not None:
            pattern = re.sub(r"bn\d", f"bn{position}", pattern)
        return re.fullmatch(rf"(?:{pattern})(?:\.norm)?", name) is not None


def _resnet(block: Any, layers: tuple[int, ...], **kwargs: Any) -> nn.Module:
    # CE needs a weight to work on, so the last norm of a block does not start at zero
    network: nn.Module = ResNet(block, layers, **{"zero_init_last": False, **kwargs})
    return network


def _squeeze_mobilenet(model: nn.Module) -> None:
    """After the activation of every depthwise convolution, as MobileNetV3 does."""
    module: Any
    for module in model.modules():
        if hasattr(module, "conv_dw") and hasattr(module, "se"):
            module.se = SEModule(module.conv_dw.out_channels)


def _squeeze_shufflenet(model: nn.Module) -> None:
    """At the end of the branch that convolves."""
    module: Any
    for name, module in model.named_modules():
        if name.endswith("branch2"):
            module.append(SEModule(module[5].out_channels))


def _squeeze_vgg(model: nn.Module) -> None:
    """After every activation."""
    layers: Any = model.features
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            layers[i + 2] = nn.Sequential(layers[i + 2], SEModule(layer.out_channels))


def _published(norm: str) -> dict[str, str]:
    """Where IterNorm and switchable whitening stand in ResNets by their authors' own code.

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
    # all blocks but those with 2048 channels
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
# not of the paper: for small experiments
SMALL_NETWORKS = {"vgg6": Network(VGG6, r"features\.\d+", squeeze=_squeeze_vgg, input_size=8)}
