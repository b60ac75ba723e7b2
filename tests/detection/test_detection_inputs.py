"""Images and targets stay together, and chance depends on seed, epoch and image alone."""

from dataclasses import replace

import pytest
import torch

import cenet.detection.loaders as loaders
from _checks import assert_close
from _detection import TINY, annotation, coco, few_shapes
from cenet.data.order import Shard
from cenet.detection.coco import clean
from cenet.detection.command import parse
from cenet.detection.data import load, outline_mask, scenes
from cenet.detection.loaders import sample, scaled_size, training_batches
from cenet.detection.synthetic import draw_shapes

pytestmark = pytest.mark.usefixtures("quick_weights")

CPU = torch.device("cpu")


def test_shapes_are_what_their_annotations_say():
    pixels, truth = draw_shapes(30, 0)
    again, _ = draw_shapes(30, 0)
    assert all(torch.equal(a, b) for a, b in zip(pixels, again, strict=True))
    assert {record["category_id"] for record in truth["annotations"]} == {1, 2, 3}
    found, faults = clean(truth, lambda record: None)
    assert not faults
    for record in found["annotations"]:
        image = pixels[record["image_id"] - 1].float()
        mask = outline_mask(record["segmentation"], *image.shape[1:], (1.0, 1.0)).bool()
        assert abs(mask.sum() - record["area"]) < 0.12 * record["area"] + 8
        # one colour and noise of a standard deviation of 12; the outline may be half a pixel off
        spread = (image[:, mask] - image[:, mask].median(1, keepdim=True).values).abs().median()
        assert spread < 14


def test_boxes_and_masks_follow_the_image():
    """A white square on black, stretched and mirrored: the target is where the white is."""
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    image[:, 10:30, 10:30] = 255
    data = scenes("one", coco(annotation()), pixels=[image])
    for size in ((40, 60), (80, 120), (60, 60)):
        for flip in (False, True):
            pixels, target = sample(data, 0, size, flip=flip, masks=True)
            assert pixels.shape == (3, *size)
            white = pixels[0] > 0.5
            assert torch.equal(target["masks"][0].bool(), white)
            rows, columns = white.any(1).nonzero(), white.any(0).nonzero()
            box = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).flatten()
            assert torch.equal(target["boxes"][0], box.float())
            assert target["labels"].tolist() == [1]


def test_run_length_codes_are_masks_too():
    # columns first: 3 off, 2 on, 1 off of a 3×2 image
    code = {"counts": [3, 2, 1], "size": [3, 2]}
    expected = torch.tensor([[0, 1], [0, 1], [0, 0]], dtype=torch.uint8)
    assert torch.equal(outline_mask(code, 3, 2, (1.0, 1.0)), expected)
    assert outline_mask(code, 6, 4, (2.0, 2.0)).sum() == 8


def test_sizes():
    assert scaled_size(480, 640, 800, 1333) == (800, 1066)
    assert scaled_size(300, 900, 800, 1333) == (444, 1333)
    assert scaled_size(1, 20, 800, 13) == (1, 13)


def test_batches_depend_on_seed_epoch_and_image_alone():
    data = few_shapes().train
    shared = {"epoch": 1, "device": CPU, "workers": 0}
    whole = list(training_batches(data, TINY, Shard(12, 4), start=0, **shared))
    rest = list(training_batches(data, TINY, Shard(12, 4), start=1, **shared))
    halves = [
        list(training_batches(data, TINY, Shard(12, 2, rank=rank, world=2), start=0, **shared))
        for rank in (0, 1)
    ]
    for (images, targets), (others, other_targets) in zip(whole[1:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(images, others, strict=True))
        assert all(
            torch.equal(a[name], b[name])
            for a, b in zip(targets, other_targets, strict=True)
            for name in a
        )
    for step, (images, _) in enumerate(whole):
        split = halves[0][step][0] + halves[1][step][0]
        assert all(torch.equal(a, b) for a, b in zip(images, split, strict=True))
    # both lengths of the shorter side come, and an image without objects
    assert {min(image.shape[1:]) for images, _ in whole for image in images} == {48, 64}
    assert any(len(target["boxes"]) == 0 for _, targets in whole for target in targets)


def test_images_of_the_test_are_the_pictures():
    data = few_shapes(2, 5).test
    order = [3, 0, 4]
    found = list(loaders.test_batches(data, order, 2, device=CPU, workers=0))
    assert [chosen for chosen, _ in found] == [[3, 0], [4]]
    images = [image for _, images in found for image in images]
    for index, image in zip(order, images, strict=True):
        assert torch.equal(image, data.pixels[index] / 255)
        assert 0.5 < image.max() <= 1


def stretch(old: int, new: int) -> torch.Tensor:
    """Weights (new, old) of linear interpolation between the centres of pixels."""
    places = ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
    distances = places[:, None] - torch.arange(old)
    return (1 - distances.abs()).clamp_min(0)


@pytest.mark.parametrize("size", [(40, 60), (70, 90), (24, 36), (33, 100)])
def test_training_images_are_resized_linearly(size):
    """As torchvision's detectors do it: centres of pixels, and no smoothing."""
    image = torch.randint(256, (3, 40, 60), generator=torch.Generator().manual_seed(0))
    data = scenes("one", squares(1), pixels=[image.to(torch.uint8)])
    expected = stretch(40, size[0]) @ (image.double() / 255) @ stretch(60, size[1]).T
    pixels, _ = sample(data, 0, size, flip=False, masks=True)
    assert_close("pixels", pixels, expected, 1e-5)
    pixels, _ = sample(data, 0, size, flip=True, masks=True)
    assert_close("mirrored", pixels, expected.flip(2), 1e-5)


COUNT = 60


def squares(count, width=60, height=40):
    """Annotations of images with one square each."""
    square = {"bbox": [5, 5, 10, 10], "segmentation": [[5, 5, 15, 5, 15, 15, 5, 15]], "area": 100}
    sizes = {"width": width, "height": height}
    return {
        "images": [{"id": i, "file_name": f"{i}.png", **sizes} for i in range(count)],
        "annotations": [{**square, "image_id": i, "category_id": 1} for i in range(count)],
        "categories": [{"id": 1, "name": "square"}],
    }


@pytest.fixture(scope="module")
def sided():
    """Images whose left half has the colour of their number, and whose right half is white."""
    pixels = []
    for index in range(COUNT):
        pixels.append(torch.full((3, 40, 60), index, dtype=torch.uint8))
        pixels[-1][:, :, 30:] = 255
    return scenes("sided", squares(COUNT), pixels=pixels)


def seen(data, epoch, **changes):
    """Number of every image of an epoch, with its shorter side and whether it was mirrored."""
    recipe = replace(TINY, min_sizes=(32, 36, 40), detector="faster_rcnn", **changes)
    shard = Shard(COUNT, 6)
    found = {}
    for images, _ in training_batches(
        data, recipe, shard, epoch=epoch, start=0, device=CPU, workers=0
    ):
        for image in images:
            left, right = (round(255 * float(image[0, 0, side])) for side in (0, -1))
            found[min(left, right)] = (min(image.shape[1:]), left > right)
    assert len(found) == COUNT
    return found


EPOCHS = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]


def test_chance_depends_on_seed_and_epoch(sided):
    first, again = ([seen(sided, epoch, seed=seed) for seed, epoch in EPOCHS] for _ in range(2))
    assert [list(found.items()) for found in first] == [list(found.items()) for found in again]
    for place, one in enumerate(first):
        for other in first[:place]:
            assert list(one) != list(other), "another order"
            for what in (0, 1):  # sizes, mirrors
                same = sum(one[i][what] == other[i][what] for i in range(COUNT))
                assert same < 0.8 * COUNT


def test_half_are_mirrored_and_all_sizes_come(sided):
    found = [values for seed, epoch in EPOCHS for values in seen(sided, epoch, seed=seed).values()]
    for size in (32, 36, 40):
        flips = [flip for side, flip in found if side == size]
        assert 0.2 < len(flips) / len(found) < 0.5
        assert 0.3 < sum(flips) / len(flips) < 0.7


def test_mirroring_can_be_left_away(sided):
    assert parse(["shapes"]).recipe.flip
    recipe = parse(["shapes", "--no-flip"]).recipe
    assert not recipe.flip
    assert not any(flip for _, flip in seen(sided, 0, flip=recipe.flip).values())


@pytest.mark.usefixtures("few_drawn")
def test_shapes_to_test_with_are_others():
    split = load(TINY, None)
    assert [len(part.images) for part in split] == [6, 3]
    for image in split.test.pixels:
        assert not any(image.equal(other) for other in split.train.pixels)


# corners, and the share of the box that is covered
KINDS = {"ellipse": (24, 3.1416 / 4), "rectangle": (4, 1.0), "triangle": (3, 0.5)}


def test_shapes_have_the_names_of_what_is_drawn():
    pixels, truth = draw_shapes(40, 0)
    data = scenes("shapes", truth, pixels=pixels)
    assert data.classes == tuple(KINDS)
    for record, objects in zip(data.images, data.objects, strict=True):
        for one in objects:
            corners, share = KINDS[data.classes[data.labels[one["category_id"]] - 1]]
            assert len(one["segmentation"][0]) == 2 * corners
            size = record["height"], record["width"]
            drawn = outline_mask(one["segmentation"], *size, (1.0, 1.0)).sum()
            assert float(drawn) == pytest.approx(share * one["bbox"][2] * one["bbox"][3], rel=0.1)
