"""Residual blocks that hand shortcut and activation to their last norm, if it takes them."""

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn


def _takes_residual(norm: nn.Module, block: Any) -> bool:
    """Whether nothing stands between the norm and the addition."""
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
