"""VGG for small images, of torchvision's layers, with the interface of timm."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from cenet.models.staged import Staged


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
