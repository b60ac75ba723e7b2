"""Which part of an image is shown, and how.

Chance depends on seed, epoch and number of the image alone. It is drawn as torchvision's transforms
of the same names draw it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.train.order import Item, seed_of
from cenet.train.recipes import Augment

PADDING = 4
TEST_CROP = 0.875  # share of the shorter side
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)
LOG_RATIOS = torch.tensor(RATIOS).log().tolist()
TRIES = 10


class View(NamedTuple):
    """A part of an image is scaled; a square window on the result is shown, flipped or not.

    Attributes:
        box: top, left, height and width of the part.
        scaled: height and width it is scaled to.
        corner: top and left of the window. What lies outside the scaled part is black.
        flip: left and right change places.
    """

    box: tuple[int, int, int, int]
    scaled: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    flip: bool = False


class Viewing(NamedTuple):
    """How images are shown.

    Attributes:
        augment: what chance does; None is for the test.
        size: height and width of what is shown.
        seed: of the run.
    """

    augment: Augment | None
    size: int
    seed: int = 0

    def view(self, item: Item, height: int, width: int) -> View:
        """What is shown of an image of this height and width."""
        if self.augment is None:
            return middle(self.size, height, width)
        square = (self.size, self.size)
        if self.augment == "none":
            return View((0, 0, height, width), square)
        chance = torch.Generator().manual_seed(seed_of("image", self.seed, *item))
        if self.augment == "imagenet":
            return View(_random_part(height, width, chance), square, flip=_coin(chance))
        top, left = (_below(2 * PADDING + 1, chance) - PADDING for _ in range(2))
        return View((0, 0, height, width), square, (top, left), _coin(chance))


def middle(size: int, height: int, width: int) -> View:
    """The middle, after the shorter side was scaled so that most of it is seen."""
    short, long = round(size / TEST_CROP), max(height, width)
    other = int(short * long / min(height, width))
    scaled = (other, short) if width <= height else (short, other)
    corner = tuple(round((side - size) / 2) for side in scaled)
    return View((0, 0, height, width), scaled, (corner[0], corner[1]))


def shown(image: Any, view: View, size: int) -> Tensor:
    """What is shown of a PIL image, (C, size, size) in uint8."""
    from torchvision.transforms.functional import pil_to_tensor

    found: Tensor = pil_to_tensor(shown_image(image, view, size))
    return found


def shown_image(image: Any, view: View, size: int) -> Any:
    """The same as a PIL image."""
    from PIL.Image import Resampling, Transpose

    top, left, height, width = view.box
    part = image.crop((left, top, left + width, top + height))
    scaled = part.resize(view.scaled[::-1], Resampling.BILINEAR)
    top, left = view.corner
    window = scaled.crop((left, top, left + size, top + size))
    return window.transpose(Transpose.FLIP_LEFT_RIGHT) if view.flip else window


def shown_in_test(image: Any, size: int) -> Tensor:
    """What the test shows of a PIL image."""
    return shown(image, middle(size, image.height, image.width), size)


def _random_part(height: int, width: int, chance: torch.Generator) -> tuple[int, int, int, int]:
    """A part of random area and ratio; the largest in the middle if none fits in a few tries."""
    drawn = torch.empty(1)
    for _ in range(TRIES):
        area = height * width * drawn.uniform_(*AREAS, generator=chance).item()
        ratio = drawn.uniform_(*LOG_RATIOS, generator=chance).exp().item()
        own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < own_width <= width and 0 < own_height <= height:
            top = _below(height - own_height + 1, chance)
            return top, _below(width - own_width + 1, chance), own_height, own_width
    least, most = RATIOS
    own_height = round(width / least) if width / height < least else height
    own_width = round(height * most) if width / height > most else width
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


def _below(end: int, chance: torch.Generator) -> int:
    return int(torch.randint(end, (1,), generator=chance))


def _coin(chance: torch.Generator) -> bool:
    return torch.rand(1, generator=chance).item() < 0.5
