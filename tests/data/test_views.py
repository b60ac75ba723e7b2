"""What is shown of an image: as torchvision's transforms show it under the same chance."""

import random

import numpy
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cenet.data.order import seed_of
from cenet.data.views import PADDING, Viewing, shown, shown_in_test


def transforms(augment, size):
    """The same in torchvision's words."""
    steps = {
        "imagenet": [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()],
        "crop_flip": [
            v2.Resize((size, size), antialias=True),
            v2.RandomCrop(size, PADDING),
            v2.RandomHorizontalFlip(),
        ],
        "none": [v2.Resize((size, size), antialias=True)],
        None: [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)],
    }
    return v2.Compose([*steps[augment], v2.PILToTensor()])


def image_of(height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def sizes(count):
    """Heights and widths, some so long that no part of a usual ratio fits."""
    chance = random.Random(0)
    yield from [(1, 1), (1, 300), (300, 1), (2, 90), (64, 64), (33, 97)]
    for _ in range(count):
        yield chance.randint(1, 120), chance.randint(1, 120)


@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none", None])
def test_pixels_are_those_of_torchvision(augment):
    transform, viewing = transforms(augment, 29), Viewing(augment, 29, seed=3)
    flips, parts = set(), set()
    for i, (height, width) in enumerate(sizes(60)):
        image = image_of(height, width, i)
        view = viewing.view((2, i), height, width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("image", 3, 2, i))
            expected = transform(image)
        assert torch.equal(shown(image, view, 29), expected), (height, width)
        flips.add(view.flip)
        parts.add((view.box, view.corner))
    if augment in ("imagenet", "crop_flip"):
        assert flips == {False, True}
        assert len(parts) > 30


# AlexNet's principal components of colours, one in each column, as fb.resnet.torch prints them, and
# the matrix of the released code, whose rows that code multiplies by the eigenvalues
EIGENVALUES = numpy.array([0.2175, 0.0188, 0.0045])
ALEXNET = numpy.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140],
                       [-0.5836, -0.6948, 0.4203]])  # fmt: skip
RELEASED = numpy.array([[0.4009, 0.7192, -0.5675], [-0.8140, -0.0045, -0.5808],
                        [0.4203, -0.6948, -0.5836]])  # fmt: skip
COLOURS = {"imagenet_colour": ALEXNET, "imagenet_colour_released": RELEASED.T}


@pytest.mark.parametrize("augment", COLOURS)
def test_colours_are_moved_after_part_and_flip(augment):
    """By numpy, from the numbers that come after those of torchvision's transforms."""
    transform, viewing = transforms("imagenet", 29), Viewing(augment, 29, seed=3)
    moved = []
    for i, (height, width) in enumerate(sizes(30)):
        image = image_of(height, width, i)
        view = viewing.view((2, i), height, width)
        assert view._replace(colour=None) == Viewing("imagenet", 29, seed=3).view(
            (2, i), height, width
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("image", 3, 2, i))
            pixels = transform(image).numpy().astype(numpy.float64) / 255
            factors = 0.1 * torch.normal(torch.zeros(1, 3))[0].double().numpy()
        colour = COLOURS[augment] @ (EIGENVALUES * factors)
        found = shown(image, view, 29)
        assert found.dtype == torch.float32
        expected = 255 * (pixels + colour[:, None, None])
        numpy.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-4)
        moved.append(255 * colour)
    assert numpy.abs(moved).max() > 5
    assert numpy.abs(moved).mean() > 1  # so 1e-4 says something


@pytest.mark.parametrize("augment", COLOURS)
def test_colours_have_the_covariance_of_the_components(augment):
    viewing = Viewing(augment, 8, seed=1)
    found = numpy.array([viewing.view((0, i), 20, 20).colour for i in range(4000)])
    matrix = COLOURS[augment] * (25.5 * EIGENVALUES)
    expected = matrix @ matrix.T
    error = numpy.abs(numpy.cov(found.T) - expected).max() / numpy.abs(expected).max()
    assert error < 0.12  # five deviations of a variance of 4000 numbers
    # AlexNet's noise is brighter or darker, the released code's is not
    along_grey = (found.sum(1) ** 2).mean() / 3 / (found**2).sum(1).mean()
    assert along_grey > 0.95 if augment == "imagenet_colour" else along_grey < 0.2


@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none", None])
def test_other_views_move_no_colours(augment):
    assert Viewing(augment, 8, seed=1).view((0, 1), 20, 20).colour is None


def test_thousands_of_random_parts_are_those_of_torchvision():
    transform = v2.RandomResizedCrop(8)
    chance = random.Random(1)
    for i in range(2000):
        longest = chance.choice((30, 500, 5000))
        height, width = chance.randint(1, longest), chance.randint(1, longest)
        view = Viewing("imagenet", 8, seed=0).view((0, i), height, width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("image", 0, 0, i))
            found = transform.make_params([torch.empty(1, height, width)])
            flip = bool(torch.rand(1) < 0.5)
        assert view.box == tuple(found[name] for name in ("top", "left", "height", "width"))
        assert view.flip == flip


@pytest.mark.parametrize("augment", ["imagenet", *COLOURS])
def test_chance_is_of_seed_epoch_and_image_and_leaves_the_global_one_alone(augment):
    def view(seed, epoch, index):
        return Viewing(augment, 8, seed).view((epoch, index), 90, 120)

    before = torch.get_rng_state()
    assert view(0, 1, 2) == view(0, 1, 2)
    others = {view(0, 1, 2), view(1, 1, 2), view(0, 2, 2), view(0, 1, 3)}
    assert len(others) == 4
    assert len({view.colour for view in others}) == (1 if augment == "imagenet" else 4)
    assert torch.equal(before, torch.get_rng_state())


def test_the_test_shows_grey_images_too():
    image = image_of(50, 40).convert("L")
    assert torch.equal(shown_in_test(image, 28), transforms(None, 28)(image))
