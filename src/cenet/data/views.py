"""Views of images: which part is cropped, how it is scaled, flipped and coloured.

Random views depend only on seed, epoch and number of the image. Their distributions are those of
torchvision's transforms of the same names.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.data.datasets import Augment, is_for_files
from cenet.data.order import Item, seed_of

PADDING = 4
TEST_CROP = 0.875  # side of the test crop, as a share of the shorter side
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)
LOG_RATIOS = torch.tensor(RATIOS).log().tolist()
TRIES = 10
# AlexNet's colour noise: principal components of the colours of ImageNet, their eigenvalues for
# values from 0 to 1, and the standard deviation of the random factors
EIGENVALUES = (0.2175, 0.0188, 0.0045)
COLOUR_NOISE = 0.1
COMPONENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "imagenet_colour": (
        (-0.5675, -0.5808, -0.5836),
        (0.7192, -0.0045, -0.6948),
        (0.4009, -0.8140, 0.4203),
    ),
    # the released code of the paper swaps rows and columns of that matrix, in another order: most
    # of its noise changes the hue, while AlexNet's changes the brightness
    "imagenet_colour_released": (
        (0.4009, 0.7192, -0.5675),
        (-0.8140, -0.0045, -0.5808),
        (0.4203, -0.6948, -0.5836),
    ),
}


class View(NamedTuple):
    """A part of an image, scaled, and a square window on the result.

    Attributes:
        box: top, left, height and width of the part.
        scaled: height and width that it is scaled to.
        corner: top and left of the window; pixels outside of the scaled part are black.
        flip: mirror the window horizontally.
        colour: values added to red, green and blue of every pixel (0 to 255); None adds nothing.
    """

    box: tuple[int, int, int, int]
    scaled: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    flip: bool = False
    colour: tuple[float, float, float] | None = None


class Viewing(NamedTuple):
    """How views of images are chosen.

    Attributes:
        augment: kind of augmentation; None chooses the view of a test.
        size: height and width of a view.
        seed: seed of the run.
    """

    augment: Augment | None
    size: int
    seed: int = 0

    def view(self, item: Item, height: int, width: int) -> View:
        """The view of an image of this height and width."""
        if self.augment is None:
            return middle(self.size, height, width)
        square = (self.size, self.size)
        if self.augment == "none":
            return View((0, 0, height, width), square)
        generator = torch.Generator().manual_seed(seed_of("image", self.seed, *item))
        if is_for_files(self.augment):
            found = View(_random_part(height, width, generator), square, flip=_coin(generator))
            components = COMPONENTS.get(self.augment)
            # drawn last, so that part and flip are the same with and without colour
            return found._replace(colour=_colour(components, generator)) if components else found
        top, left = (_below(2 * PADDING + 1, generator) - PADDING for _ in range(2))
        return View((0, 0, height, width), square, (top, left), _coin(generator))


def middle(size: int, height: int, width: int) -> View:
    """The view of a test: the shorter side is scaled to size / 0.875, and the center is shown."""
    short, long = round(size / TEST_CROP), max(height, width)
    other = int(short * long / min(height, width))
    scaled = (other, short) if width <= height else (short, other)
    corner = tuple(round((side - size) / 2) for side in scaled)
    return View((0, 0, height, width), scaled, (corner[0], corner[1]))


def shown(image: Any, view: View, size: int) -> Tensor:
    """The view of a PIL image, (C, size, size) in uint8, or in float32 if its colour is changed.

    Values outside of 0 to 255 are not clipped.
    """
    from torchvision.transforms.functional import pil_to_tensor

    found: Tensor = pil_to_tensor(shown_image(image, view, size))
    return found if view.colour is None else found + torch.tensor(view.colour)[:, None, None]


def shown_image(image: Any, view: View, size: int) -> Any:
    """The view as a PIL image, without its change of colour."""
    from PIL.Image import Resampling, Transpose

    top, left, height, width = view.box
    part = image.crop((left, top, left + width, top + height))
    scaled = part.resize(view.scaled[::-1], Resampling.BILINEAR)
    top, left = view.corner
    window = scaled.crop((left, top, left + size, top + size))
    return window.transpose(Transpose.FLIP_LEFT_RIGHT) if view.flip else window


def shown_in_test(image: Any, size: int) -> Tensor:
    """The test view of a PIL image, (C, size, size) in uint8."""
    return shown(image, middle(size, image.height, image.width), size)


def _random_part(height: int, width: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """A part of random area and aspect ratio; the largest central one if ten tries do not fit."""
    drawn = torch.empty(1)
    for _ in range(TRIES):
        area = height * width * drawn.uniform_(*AREAS, generator=generator).item()
        ratio = drawn.uniform_(*LOG_RATIOS, generator=generator).exp().item()
        own_width, own_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < own_width <= width and 0 < own_height <= height:
            top = _below(height - own_height + 1, generator)
            return top, _below(width - own_width + 1, generator), own_height, own_width
    least, most = RATIOS
    own_height = round(width / least) if width / height < least else height
    own_width = round(height * most) if width / height > most else width
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


def _colour(
    components: tuple[tuple[float, float, float], ...], generator: torch.Generator
) -> tuple[float, float, float]:
    """The components weighted by random factors and added up, for values from 0 to 255."""
    factors = torch.randn(len(components), generator=generator).tolist()
    lengths = [
        255 * COLOUR_NOISE * factor * value
        for factor, value in zip(factors, EIGENVALUES, strict=True)
    ]
    red, green, blue = (
        sum(length * component[i] for length, component in zip(lengths, components, strict=True))
        for i in range(3)
    )
    return red, green, blue


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (1,), generator=generator))


def _coin(generator: torch.Generator) -> bool:
    return torch.rand(1, generator=generator).item() < 0.5
