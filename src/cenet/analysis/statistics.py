"""What is kept of a layer while images stream by: sums of fixed size that can be merged.

Sums are kept in float64; only those over the pixels of one image are taken in float32, unless the
network itself is in float64. The covariance is merged by Chan's formula, so a mean that is large
beside the deviation costs no digits, and batches of any size in any order give the same but for
rounding.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from cenet.analysis.channels import WIDEST, channel_magnitude

GRID = 32  # largest side of the map of magnitudes
CHUNK = 2**23  # values that are turned into float64 at a time
# sums over images and pixels after the activation, one value per channel
AFTER = ("sum", "abs_sum", "square_sum", "image_sum", "image_square_sum", "fired")
MAPS = ("magnitude_sum", "magnitude_before_sum")  # sums over images, one value per location


@dataclass
class LayerStatistics:
    """Sums over the images and pixels that one layer has seen.

    Attributes:
        size: height and width of the newest map.
        images: how many.
        outputs: pixels after the activation.
        sum: of the value after the activation, (C,).
        abs_sum: of its absolute value, (C,).
        square_sum: of its square, (C,).
        image_sum: sum over images of an image's mean absolute value, (C,).
        image_square_sum: sum over images of its square, (C,).
        fired: images in which the channel is positive at one pixel or more, (C,).
        magnitude_sum: over images, ℓ2 over channels after the activation, (H', W').
        magnitude_before_sum: the same before the activation.
        pixels: before the activation.
        mean: before the activation, of the channels `shown`, (S,).
        scatter: sum of outer products of the deviations from `mean`, (S, S).
    """

    size: tuple[int, int]
    images: int
    outputs: int
    sum: Tensor
    abs_sum: Tensor
    square_sum: Tensor
    image_sum: Tensor
    image_square_sum: Tensor
    fired: Tensor
    magnitude_sum: Tensor
    magnitude_before_sum: Tensor
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

        return cls(
            size=size,
            images=0,
            outputs=0,
            magnitude_sum=zeros(*grid),
            magnitude_before_sum=zeros(*grid),
            pixels=0,
            mean=zeros(shown),
            scatter=zeros(shown, shown),
            **{name: zeros(channels) for name in AFTER},
        )

    @property
    def channels(self) -> int:
        """How many the layer has."""
        return len(self.abs_sum)

    @property
    def mean_abs(self) -> Tensor:
        """Mean absolute value after the activation, over images and pixels, (C,)."""
        return self.abs_sum / max(self.outputs, 1)

    @property
    def mean_abs_error(self) -> Tensor:
        """Standard error of `mean_abs`, from the spread between images, (C,); infinite for one."""
        if self.images < 2:
            return torch.full_like(self.abs_sum, torch.inf)
        mean = self.image_sum / self.images
        variance = (self.image_square_sum / self.images - mean.square()).clamp_min(0)
        return (variance / (self.images - 1)).sqrt()

    @property
    def root_mean_square(self) -> Tensor:
        """Root mean square after the activation, over images and pixels, (C,)."""
        return (self.square_sum / max(self.outputs, 1)).sqrt()

    @property
    def deviation(self) -> Tensor:
        """Standard deviation after the activation, over images and pixels, (C,)."""
        count = max(self.outputs, 1)
        return (self.square_sum / count - (self.sum / count).square()).clamp_min(0).sqrt()

    @property
    def firing(self) -> Tensor:
        """Share of images in which the channel is positive at one pixel or more, (C,)."""
        return self.fired / max(self.images, 1)

    @property
    def magnitude(self) -> Tensor:
        """ℓ2 over channels after the activation, mean over images, (H', W')."""
        return self.magnitude_sum / max(self.images, 1)

    @property
    def magnitude_before(self) -> Tensor:
        """ℓ2 over channels before the activation, mean over images, (H', W')."""
        return self.magnitude_before_sum / max(self.images, 1)

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
            self._add_lengths("magnitude_before_sum", part)

    def see_after(self, y: Tensor) -> None:
        """Take in a batch after its activation, (N, C, H, W)."""
        self.size = (y.shape[2], y.shape[3])
        self.images += len(y)
        self.outputs += y.numel() // y.shape[1]
        values = y if y.dtype == torch.float64 else y.float()
        by_image = {
            "sum": values.sum((2, 3)),
            "abs_sum": torch.linalg.vector_norm(values, 1, (2, 3)),
            "square_sum": torch.linalg.vector_norm(values, 2, (2, 3)).double().square(),
            "fired": values.amax((2, 3)) > 0,
        }
        for name, value in by_image.items():
            getattr(self, name).add_(value.sum(0, dtype=torch.float64))
        mean = by_image["abs_sum"].double() / (y.shape[2] * y.shape[3])
        self.image_sum += mean.sum(0)
        self.image_square_sum += mean.square().sum(0)
        self._add_lengths("magnitude_sum", values)

    def merge(self, other: "LayerStatistics") -> None:
        """Take in what another has seen."""
        self.size = other.size
        self.images += other.images
        self.outputs += other.outputs
        for name in AFTER:
            getattr(self, name).add_(getattr(other, name))
        for name in MAPS:
            own = getattr(self, name)
            own += pooled(getattr(other, name)[None], own)[0]
        self._add(other.pixels, other.mean, other.scatter)

    def to(self, device: torch.device | str) -> "LayerStatistics":
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def _add_lengths(self, name: str, x: Tensor) -> None:
        """Add the length of the vector of channels at each location, (N, C, H, W)."""
        values = x if x.dtype == torch.float64 else x.float()
        own = getattr(self, name)
        own += pooled(channel_magnitude(values).double(), own).sum(0)

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
