"""The input spec of a network: its classes, and the normalization of pixels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.data.datasets import Encoded, Resident

# statistics of ImageNet, for values from 0 to 255
FILES_MEAN = (123.675, 116.28, 103.53)
FILES_STD = (58.395, 57.12, 57.375)


class InputSpec(NamedTuple):
    """Classes and normalization that a network was trained with.

    Attributes:
        classes: names of the classes in the order of the logits.
        mean: mean of each channel, for values from 0 to 255.
        std: standard deviation of each channel.
    """

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return len(self.mean)

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as tensors."""
        return torch.tensor(self.mean, device=device), torch.tensor(self.std, device=device)

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types of JSON."""
        return {name: list(values) for name, values in self._asdict().items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputSpec":
        """The input spec that `as_dict` wrote; TypeError if values have other types."""
        found = cls(*(tuple(values[name]) for name in cls._fields))
        numbers = all(type(value) is float for value in (*found.mean, *found.std))
        if not numbers or not all(type(name) is str for name in found.classes):
            raise TypeError("classes are names, and mean and std are numbers")
        return found


class Normalization:
    """Turns pixels on a device into normalized images in a memory layout."""

    def __init__(self, inputs: InputSpec, device: torch.device, *, channels_last: bool) -> None:
        """Move mean and standard deviation to the device."""
        mean, std = inputs.statistics(device)
        self.mean, self.std = mean[:, None, None], std[:, None, None]
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize images (N, C, H, W) with values from 0 to 255."""
        return ((images.float() - self.mean) / self.std).contiguous(memory_format=self.layout)


def input_spec_of(train: Resident | Encoded, device: torch.device | None = None) -> InputSpec:
    """The input spec of a network that is trained on these images.

    Images in memory are normalized by their own statistics, computed on the device; image files by
    the statistics of ImageNet.
    """
    if isinstance(train, Encoded):
        return InputSpec(train.classes, FILES_MEAN, FILES_STD)
    # histograms of integers, so that the sums are exact
    values = train.images.to(device).transpose(0, 1).flatten(1)
    count = values.shape[1]
    counts = [torch.bincount(channel.int(), minlength=256) for channel in values]
    histogram = torch.stack(counts).cpu()
    levels = torch.arange(256, dtype=torch.float64)
    mean = (histogram @ levels.to(histogram.dtype)).double() / count
    square = (histogram.double() * (levels - mean[:, None]).square()).sum(1) / count
    std = square.sqrt().clamp_min(1)
    return InputSpec(train.classes, tuple(mean.float().tolist()), tuple(std.float().tolist()))
