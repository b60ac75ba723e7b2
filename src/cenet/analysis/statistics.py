"""What is kept of a layer while images stream by: sums of fixed size that can be merged.

Everything is in float64. The covariance is merged by Chan's formula, so a mean that is large beside
the deviation costs no digits, and batches of any size in any order give the same to rounding.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from cenet.analysis.channels import channel_magnitude

GRID = 32  # largest side of the map of magnitudes
WIDEST = 2048  # channels among which covariances are kept
CHUNK = 2**23  # values that are turned into float64 at a time


@dataclass
class LayerStatistics:
    """Sums over the images and pixels that one layer has seen.

    Attributes:
        size: height and width of the newest map.
        images: how many.
        outputs: pixels after the activation.
        abs_sum: of the absolute value after the activation, (C,).
        magnitude_sum: over images, ℓ2 over channels after the activation, (H', W').
        pixels: before the activation.
        mean: before the activation, of the channels `shown`, (S,).
        scatter: sum of outer products of the deviations from `mean`, (S, S).
    """

    size: tuple[int, int]
    images: int
    outputs: int
    abs_sum: Tensor
    magnitude_sum: Tensor
    pixels: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(
        cls, channels: int, size: tuple[int, int], device: torch.device | str = "cpu"
    ) -> "LayerStatistics":
        """Nothing seen yet."""
        shown = len(shown_channels(channels))
        grid = (min(size[0], GRID), min(size[1], GRID))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(size, 0, 0, zeros(channels), zeros(*grid), 0, zeros(shown), zeros(shown, shown))

    @property
    def channels(self) -> int:
        """How many the layer has."""
        return len(self.abs_sum)

    @property
    def mean_abs(self) -> Tensor:
        """Mean absolute value after the activation, over images and pixels, (C,)."""
        return self.abs_sum / max(self.outputs, 1)

    @property
    def magnitude(self) -> Tensor:
        """ℓ2 over channels after the activation, mean over images, (H', W')."""
        return self.magnitude_sum / max(self.images, 1)

    @property
    def covariance(self) -> Tensor:
        """Biased covariance before the activation, of the channels shown, (S, S)."""
        return self.scatter / max(self.pixels, 1)

    def see_before(self, x: Tensor) -> None:
        """Take in a batch before its activation, (N, C, H, W)."""
        shown = shown_channels(self.channels)
        for part in _parts(x):
            values = part if len(shown) == self.channels else part[:, shown]
            rows = values.double().transpose(0, 1).flatten(1)
            mean = rows.mean(1)
            rows = rows - mean[:, None]  # not in place: it may be the activation itself
            self._add(rows.shape[1], mean, rows @ rows.T)

    def see_after(self, y: Tensor) -> None:
        """Take in a batch after its activation, (N, C, H, W)."""
        self.size = (y.shape[2], y.shape[3])
        self.images += len(y)
        self.outputs += y.numel() // y.shape[1]
        for part in _parts(y):
            values = part.double()
            self.abs_sum += values.abs().sum((0, 2, 3))
            self.magnitude_sum += pooled(channel_magnitude(values), self.magnitude_sum).sum(0)

    def merge(self, other: "LayerStatistics") -> None:
        """Take in what another has seen."""
        self.size = other.size
        self.images += other.images
        self.outputs += other.outputs
        self.abs_sum += other.abs_sum
        self.magnitude_sum += pooled(other.magnitude_sum[None], self.magnitude_sum)[0]
        self._add(other.pixels, other.mean, other.scatter)

    def to(self, device: torch.device | str) -> "LayerStatistics":
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def _add(self, pixels: int, mean: Tensor, scatter: Tensor) -> None:
        """Chan's formula."""
        total = self.pixels + pixels
        if total == 0:
            return
        step = mean - self.mean
        self.scatter += scatter
        self.scatter.addr_(step, step, alpha=self.pixels * pixels / total)
        self.mean += step * (pixels / total)
        self.pixels = total


def pooled(maps: Tensor, grid: Tensor) -> Tensor:
    """Maps (N, H, W), averaged to the height and width of `grid`."""
    return adaptive_avg_pool2d(maps, (grid.shape[0], grid.shape[1]))


def shown_channels(channels: int) -> list[int]:
    """The channels among which covariances are kept: all, or WIDEST of them evenly spaced."""
    count = min(channels, WIDEST)
    return [place * channels // count for place in range(count)]


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """x in pieces of images that are cheap to turn into float64."""
    images = max(1, CHUNK // max(1, x[0].numel())) if len(x) else 1
    return torch.split(x, images)
