"""VGG-16 for small images, of torchvision's layers, with the interface of timm."""

from itertools import pairwise

from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from cenet.models.interface import Staged


class VGG16(Staged):
    """Thirteen convolutions with batch norm, global pooling, one linear layer."""

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        """Build configuration D."""
        super().__init__()
        self.features = make_layers(cfgs["D"], batch_norm=True)
        if in_chans != 3:
            self.features[0] = nn.Conv2d(in_chans, 64, 3, padding=1)
        pools = [i for i, layer in enumerate(self.features) if isinstance(layer, nn.MaxPool2d)]
        starts = [0, *(i + 1 for i in pools)]
        # a feature map is what goes into a pooling
        ends = [f"features.{i - 1}" for i in pools]
        self.set_chain(
            [tuple(f"features.{i}" for i in range(a, b)) for a, b in pairwise(starts)],
            zip(ends, (64, 128, 256, 512, 512), (1, 2, 4, 8, 16), strict=True),
        )
        self.set_head(512, num_classes, global_pool, drop_rate)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
