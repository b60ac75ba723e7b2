"""torchvision's ShuffleNetV2 with the interface of timm."""

import torchvision
from torch import Tensor, nn

from cenet.models.staged import Staged

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
