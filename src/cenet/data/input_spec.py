"""What a network was trained to take: its classes, and how pixels are normalized."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.data.datasets import Encoded, Resident

# ImageNet's, on a scale to 255
FILES_MEAN = (123.675, 116.28, 103.53)
FILES_STD = (58.395, 57.12, 57.375)


class InputSpec(NamedTuple):
    """Classes in the order of the logits; mean and standard deviation of channels, 0 to 255."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Of an image."""
        return len(self.mean)

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as tensors."""
        return torch.tensor(self.mean, device=device), torch.tensor(self.std, device=device)

    def as_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {name: list(values) for name, values in self._asdict().items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputSpec":
        """Undo `as_dict`; TypeError if the values are of other kinds."""
        found = cls(*(tuple(values[name]) for name in cls._fields))
        numbers = all(type(value) is float for value in (*found.mean, *found.std))
        if not numbers or not all(type(name) is str for name in found.classes):
            raise TypeError("classes are names, and mean and std are numbers")
        return found


class Normalization:
    """From pixels on a device to what a network takes."""

    def __init__(self, inputs: InputSpec, device: torch.device, *, channels_last: bool) -> None:
        """Move mean and standard deviation to the device, once."""
        mean, std = inputs.statistics(device)
        self.mean, self.std = mean[:, None, None], std[:, None, None]
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """(N, C, H, W) of values from 0 to 255, in the layout."""
        return ((images.float() - self.mean) / self.std).contiguous(memory_format=self.layout)


def input_spec_of(train: Resident | Encoded, device: torch.device | None = None) -> InputSpec:
    """What a network trained on these images takes.

    Images in memory are normalized by their own statistics, which are counted on the device; files
    by ImageNet's.
    """
    if isinstance(train, Encoded):
        return InputSpec(train.classes, FILES_MEAN, FILES_STD)
    # integers, so that the sums are exact
    values = train.images.to(device).transpose(0, 1).flatten(1)
    count = values.shape[1]
    counts = [torch.bincount(channel.int(), minlength=256) for channel in values]
    histogram = torch.stack(counts).cpu()
    levels = torch.arange(256, dtype=torch.float64)
    mean = (histogram @ levels.to(histogram.dtype)).double() / count
    square = (histogram.double() * (levels - mean[:, None]).square()).sum(1) / count
    std = square.sqrt().clamp_min(1)
    return InputSpec(train.classes, tuple(mean.float().tolist()), tuple(std.float().tolist()))
