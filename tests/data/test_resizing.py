"""Resizing many images at once, against torchvision's tensors and Pillow.

Both round to whole numbers after each of two passes, which ours does not: 1 of 255 is as close as
can be.
"""

import random

import pytest
import torch
from torchvision.transforms.functional import to_pil_image
from torchvision.transforms.v2 import functional

import cenet.data.resizing as resizing
from cenet.data.views import View, Viewing, shown

SIZE = 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# in halves on a GPU, weights and the first product are rounded to 11 bits
MOST = {"cpu": 1.001, "cuda": 1.3}
MEAN = {"cpu": 0.3, "cuda": 0.32}


def noise(height, width, seed):
    """The hardest image: neighbours have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator)


def expected(image, view):
    """By torchvision's tensors; corners are not for them."""
    found = functional.resized_crop(image, *view.box, list(view.scaled), antialias=True)
    return found.flip(2) if view.flip else found


def in_pillow(image, view):
    return shown(to_pil_image(image), view, SIZE)


def assert_close(found, reference, device):
    """Within the tolerance, and not off on average."""
    difference = found.float().cpu() - torch.stack(reference).float()
    assert difference.abs().max() < MOST[device]
    assert difference.abs().mean() < MEAN[device]
    assert abs(difference.mean()) < 0.1  # both round halves up


def ragged(count):
    """Parts of every kind, of images of many sizes."""
    chance = random.Random(0)
    images, views = [], []
    for i in range(count):
        height, width = chance.randint(1, 130), chance.randint(1, 130)
        tall, wide = chance.randint(1, height), chance.randint(1, width)
        if i % 8 == 0:
            tall = 1
        if i % 8 == 4:
            wide = 1
        box = (chance.randint(0, height - tall), chance.randint(0, width - wide), tall, wide)
        whole = noise(height + 3, width + 2, i)  # images may be parts of other tensors
        images.append(whole[:, 1:-2, 2:] if i % 3 else whole[:, 1:-2, 2:].contiguous())
        views.append(View(box, (SIZE, SIZE), flip=i % 2 == 1))
    return images, views


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_all_sizes(device):
    images, views = ragged(160)
    found = resizing.resized([image.to(device) for image in images], views, SIZE)
    pairs = list(zip(images, views, strict=True))
    assert found.dtype == (torch.float16 if device == "cuda" else torch.float32)
    assert_close(found, [expected(*pair) for pair in pairs], device)
    assert_close(found, [in_pillow(*pair) for pair in pairs], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none", None])
def test_every_way_to_show_an_image(augment, device):
    viewing = Viewing(augment, SIZE, seed=1)
    shapes = [(40, 60), (75, 50), (24, 24), (21, 33), (28, 27), (200, 31)]
    images = [noise(*shape, i) for i, shape in enumerate(shapes * 4)]
    views = [viewing.view((0, i), *image.shape[1:]) for i, image in enumerate(images)]
    found = resizing.resized([image.to(device) for image in images], views, SIZE)
    reference = [in_pillow(*pair) for pair in zip(images, views, strict=True)]
    assert_close(found, reference, device)
    if augment == "crop_flip":  # what lies outside is black
        black = torch.stack(reference) == 0
        assert black.float().mean() > 0.1
        assert found.float().cpu()[black].abs().max() < 1


def test_an_edge_is_where_it_was():
    """A ramp stays a ramp in the middle of every pixel; half a pixel more or less would show."""
    image = torch.arange(96, dtype=torch.uint8).expand(3, 96, 96).contiguous()
    views = [
        View((0, 0, 96, 96), (SIZE, SIZE)),
        View((0, 0, 96, 96), (SIZE, SIZE), flip=True),
        View((10, 20, 12, 12), (SIZE, SIZE)),
    ]
    shrunk, flipped, grown = resizing.resized([image] * 3, views, SIZE)
    centres = (torch.arange(SIZE) + 0.5) * 4 - 0.5
    torch.testing.assert_close(shrunk[0, 5, 2:-2], centres[2:-2])
    torch.testing.assert_close(flipped, shrunk.flip(2))
    torch.testing.assert_close(grown[0, 5, 1:-1], (20 + (torch.arange(SIZE) - 0.5) / 2)[1:-1])


def test_a_white_image_stays_white():
    """Also at the border, where weights are missing."""
    images = [torch.full((3, *shape), 255, dtype=torch.uint8) for shape in ((7, 90), (90, 7))]
    views = [View((0, 0, *image.shape[1:]), (SIZE, SIZE)) for image in images]
    found = resizing.resized(images, views, SIZE)
    torch.testing.assert_close(found, torch.full_like(found, 255))


def test_large_images_are_worked_on_in_chunks(monkeypatch):
    images, views = ragged(40)
    whole = resizing.resized(images, views, SIZE)
    monkeypatch.setattr(resizing, "PIXELS", 40_000)
    chunks = list(resizing._chunks(views))
    assert sorted(i for chunk in chunks for i in chunk) == list(range(40))
    assert len(chunks) > 3
    for chunk in chunks:
        high, wide = (max(views[i].box[axis] for i in chunk) for axis in (2, 3))
        assert len(chunk) * high * wide <= 40_000
    torch.testing.assert_close(resizing.resized(images, views, SIZE), whole, rtol=0, atol=1e-3)


def test_one_image_larger_than_a_chunk_is_still_shown(monkeypatch):
    monkeypatch.setattr(resizing, "PIXELS", 100)
    images, views = ragged(3)
    found = resizing.resized(images, views, SIZE)
    assert_close(found, [expected(*pair) for pair in zip(images, views, strict=True)], "cpu")
