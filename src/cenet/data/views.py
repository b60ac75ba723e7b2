"""Which part of an image is shown, and how.

Chance depends on seed, epoch and number of the image alone. It is drawn as torchvision's transforms
of the same names draw it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.data.datasets import Augment, is_for_files
from cenet.data.order import Item, seed_of

PADDING = 4
TEST_CROP = 0.875  # share of the shorter side
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)
LOG_RATIOS = torch.tensor(RATIOS).log().tolist()
TRIES = 10
# AlexNet's colour noise: principal components of the colours of ImageNet, the shares of their
# variances that are used (for values from 0 to 1), and the deviation of the random factors
EIGENVALUES = (0.2175, 0.0188, 0.0045)
COLOUR_NOISE = 0.1
COMPONENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "imagenet_colour": (
        (-0.5675, -0.5808, -0.5836),
        (0.7192, -0.0045, -0.6948),
        (0.4009, -0.8140, 0.4203),
    ),
    # the released code of the paper takes rows of that matrix for its columns, in another order:
    # most of its noise changes the hue, where AlexNet's changes the brightness
    "imagenet_colour_released": (
        (0.4009, 0.7192, -0.5675),
        (-0.8140, -0.0045, -0.5808),
        (0.4203, -0.6948, -0.5836),
    ),
}


class View(NamedTuple):
    """A part of an image is scaled; a square window on the result is shown, flipped or not.

    Attributes:
        box: top, left, height and width of the part.
        scaled: height and width it is scaled to.
        corner: top and left of the window. What lies outside the scaled part is black.
        flip: left and right change places.
        colour: added to red, green and blue of every pixel shown, on a scale to 255; None adds
            nothing.
    """

    box: tuple[int, int, int, int]
    scaled: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    flip: bool = False
    colour: tuple[float, float, float] | None = None


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
        if is_for_files(self.augment):
            found = View(_random_part(height, width, chance), square, flip=_coin(chance))
            components = COMPONENTS.get(self.augment)
            # drawn last, so that part and flip are those without colours
            return found._replace(colour=_colour(components, chance)) if components else found
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
    """What is shown of a PIL image, (C, size, size) in uint8, or in float32 if its colour is moved.

    Values that leave 0 to 255 are not clipped.
    """
    from torchvision.transforms.functional import pil_to_tensor

    found: Tensor = pil_to_tensor(shown_image(image, view, size))
    return found if view.colour is None else found + torch.tensor(view.colour)[:, None, None]


def shown_image(image: Any, view: View, size: int) -> Any:
    """The same as a PIL image, its colour not moved."""
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


def _colour(
    components: tuple[tuple[float, float, float], ...], chance: torch.Generator
) -> tuple[float, float, float]:
    """A sum of the components by random factors, on a scale to 255."""
    factors = torch.randn(len(components), generator=chance).tolist()
    lengths = [
        255 * COLOUR_NOISE * factor * value
        for factor, value in zip(factors, EIGENVALUES, strict=True)
    ]
    red, green, blue = (
        sum(length * component[i] for length, component in zip(lengths, components, strict=True))
        for i in range(3)
    )
    return red, green, blue


def _below(end: int, chance: torch.Generator) -> int:
    return int(torch.randint(end, (1,), generator=chance))


def _coin(chance: torch.Generator) -> bool:
    return torch.rand(1, generator=chance).item() < 0.5
