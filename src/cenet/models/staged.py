"""VGG for small images and torchvision's ShuffleNetV2: chains of modules with timm's interface."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torchvision
from timm.layers.classifier import create_classifier
from timm.models import checkpoint
from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers

# activations that the kernels can apply
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU)


class Staged(nn.Module):
    """A network that is a chain of modules, a pooling and a classifier `fc`.

    Attributes:
        steps: names of the modules of the chain, in order, in groups that are recomputed together.
        feature_info: which of them end in a feature map that users ask for.
    """

    steps: tuple[tuple[str, ...], ...]
    feature_info: list[dict[str, Any]]
    num_features: int
    num_classes: int

    def set_chain(
        self, steps: Iterable[tuple[str, ...]], features: Iterable[tuple[str, int, int]]
    ) -> None:
        """Set the chain, and of each feature map its module, channels and reduction."""
        self.steps = tuple(steps)
        self.feature_info = [
            {"module": module, "num_chs": channels, "reduction": reduction}
            for module, channels, reduction in features
        ]
        self.grad_checkpointing = False

    def set_head(self, num_features: int, num_classes: int, global_pool: str, drop: float) -> None:
        """Set pooling and classifier."""
        self.num_features = self.head_hidden_size = num_features
        self.drop_rate = drop
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """Replace the classifier; 0 classes leave the pooled features."""
        if num_classes > 0 and not global_pool:
            raise ValueError(f"global_pool={global_pool!r} leaves a map, which has no classes")
        self.num_classes = num_classes
        pool, fc = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        self.global_pool, self.fc = pool.train(self.training), fc.train(self.training)

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.get_submodule("fc")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the chain in backward instead of keeping its activations."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """Images to the last feature map."""
        for step in self.steps:
            run = self._run(step)
            x = checkpoint(run, x) if self.grad_checkpointing else run(x)
        return x

    def _run(self, step: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for _, call in self._calls(step):
                x = call(x)
            return x

        return run

    def _calls(self, names: Iterable[str]) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
        """Calls of modules one after the other, each with the name of the last module it runs.

        A norm that can apply the activation after it is called together with the activation.
        """
        calls: list[tuple[str, Callable[[Tensor], Tensor]]] = []
        for name in names:
            module = self.get_submodule(name)
            if calls and isinstance(module, ACTIVATIONS) and _takes_activation(calls[-1][1]):
                calls[-1] = name, _with_activation(calls[-1][1], module)
            else:
                calls.append((name, module))
        return calls

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Last feature map to logits, or to the features before the classifier."""
        x = self.global_pool(x)
        if self.drop_rate > 0:
            x = torch.nn.functional.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps, as in timm: all, the last `indices`, or those with these indices."""
        if output_fmt != "NCHW":
            raise ValueError(f'output_fmt={output_fmt!r} must be "NCHW"')
        taken = _taken(indices, len(self.feature_info))
        wanted = {self.feature_info[index]["module"] for index in taken}
        end = self.feature_info[max(taken)]["module"]
        found = []
        for name, call in self._calls(name for step in self.steps for name in step):
            x = call(x)
            if name in wanted:
                found.append(x)
            if name == end and (stop_early or intermediates_only):
                break
        return found if intermediates_only else (x, found)


def _taken(indices: int | Sequence[int] | None, count: int) -> list[int]:
    """Indices of the feature maps that are returned: all, the last `indices`, or those listed."""
    indices = count if indices is None else indices
    listed = range(-indices, 0) if isinstance(indices, int) else indices
    if not listed or not all(-count <= index < count for index in listed):
        raise ValueError(
            f"indices={indices} must be a number of feature maps from 1 to {count}, or a list of "
            f"indices from {-count} to {count - 1}"
        )
    return [index % count for index in listed]


def _takes_activation(module: Any) -> bool:
    return getattr(module, "takes_residual", False) and getattr(module, "act", None) is None


def _with_activation(norm: Any, act: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        y: Tensor = norm(x, None, act)
        return y

    return call


class VGG(Staged):
    """Convolutions with batch norm and ReLU, global pooling, one linear layer."""

    # widths of the convolutions, and "M" for a pooling
    configuration: Sequence[int | str]

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        """Build the configuration."""
        super().__init__()
        self.in_chans = in_chans
        self.features = make_layers(list(self.configuration), batch_norm=True)
        if in_chans != 3:
            width = self.features[0].out_channels
            self.features[0] = nn.Conv2d(in_chans, width, 3, padding=1)
        layers = list(self.features)
        after_pools = [i + 1 for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
        stages = list(pairwise(sorted({0, *after_pools, len(layers)})))
        # a feature map is what goes into a pooling, or into the head
        ends = [end - 2 if end in after_pools else end - 1 for _, end in stages]
        widths = [layers[end - 2].out_channels for end in ends]
        self.set_chain(
            [tuple(f"features.{i}" for i in range(start, end)) for start, end in stages],
            [(f"features.{end}", widths[i], 2**i) for i, end in enumerate(ends)],
        )
        self.set_head(widths[-1], num_classes, global_pool, drop_rate)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)


class VGG16(VGG):
    """Thirteen convolutions (configuration D), for 32×32 images."""

    configuration = cfgs["D"]


class VGG6(VGG):
    """Six convolutions, for images of 8×8 pixels and more."""

    configuration = (32, 32, "M", 64, 64, "M", 128, 128)


CHANNELS = {"x0_5": [24, 48, 96, 192, 1024], "x1_0": [24, 116, 232, 464, 1024]}


class ShuffleNetV2(Staged, torchvision.models.ShuffleNetV2):  # type: ignore[misc]
    """ShuffleNetV2 as torchvision builds it; its feature maps are those of stem and stages."""

    conv1: nn.Sequential

    def __init__(
        self,
        width: str,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        """Build the network of a width: "x0_5" or "x1_0"."""
        channels = CHANNELS[width]
        torchvision.models.ShuffleNetV2.__init__(self, [4, 8, 4], channels)
        self.in_chans = in_chans
        if in_chans != 3:
            self.conv1[0] = nn.Conv2d(in_chans, channels[0], 3, 2, 1, bias=False)
        stages = ("conv1", "stage2", "stage3", "stage4")
        self.set_chain(
            [("conv1", "maxpool"), ("stage2",), ("stage3",), ("stage4",), ("conv5",)],
            zip(stages, channels, (2, 8, 16, 32), strict=False),
        )
        self.set_head(channels[-1], num_classes, global_pool, drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return Staged.forward(self, x)
