"""Networks whose channels are known by construction."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Planted(nn.Module):
    """A 1×1 convolution whose channels are chosen, an activation, and a head.

    `weight` is (channels, 3): channel c is weight[c] · pixel + bias[c].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, classes: int = 2) -> None:
        super().__init__()
        channels = len(weight)
        self.conv = nn.Conv2d(3, channels, 1)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(channels, classes)
        with torch.no_grad():
            self.conv.weight.copy_(weight[:, :, None, None])
            self.conv.bias.copy_(torch.zeros(channels) if bias is None else bias)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.conv(x)).mean((2, 3)))


class Tangled(nn.Module):
    """What hooks on modules miss: shared and in-place activations, functions, gates, sums."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.short = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1)
        )
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.head = nn.Linear(3 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += self.short(x)
        y = self.relu(y)
        y = y * torch.sigmoid(self.gate(y))
        y = functional.elu(y, inplace=True)
        y = y.clamp(min=0)
        y = self.wide(self.norm(y.permute(0, 2, 3, 1)))
        return self.head(functional.gelu(y).mean((1, 2)))


def images(count: int = 6, size: int = 8, seed: int = 0, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator)
