"""What is shown of an image: as torchvision's transforms show it under the same chance."""

import random

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cenet.train.order import seed_of
from cenet.train.views import PADDING, Viewing, shown, shown_in_test


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


def test_chance_is_of_seed_epoch_and_image_and_leaves_the_global_one_alone():
    def view(seed, epoch, index):
        return Viewing("imagenet", 8, seed).view((epoch, index), 90, 120)

    before = torch.get_rng_state()
    assert view(0, 1, 2) == view(0, 1, 2)
    others = {view(0, 1, 2), view(1, 1, 2), view(0, 2, 2), view(0, 1, 3)}
    assert len(others) == 4
    assert torch.equal(before, torch.get_rng_state())


def test_the_test_shows_grey_images_too():
    image = image_of(50, 40).convert("L")
    assert torch.equal(shown_in_test(image, 28), transforms(None, 28)(image))
