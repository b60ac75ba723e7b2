"""Batches of images with targets, resized and mirrored.

The augmentation of an image depends only on seed, epoch and image, as it does for classifiers.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cenet.data.order import Shard, epoch_order, seed_of
from cenet.data.workers import loaded
from cenet.detection.data import Scenes, outline_mask
from cenet.detection.recipes import DetectionRecipe

Target = dict[str, Tensor]
Sample = tuple[Tensor, Target]


def scaled_size(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Height and width with a shorter side of `least`, unless the longer would exceed `most`."""
    short, long = min(height, width), max(height, width)
    # in integers, because rounding could make the shorter side one pixel less
    new, old = (least, short) if least * long <= most * short else (most, long)
    return max(1, height * new // old), max(1, width * new // old)


def sample(scenes: Scenes, index: int, size: tuple[int, int], *, flip: bool, masks: bool) -> Sample:
    """An image resized to `size` with values in [0, 1], and its boxes, labels and masks."""
    image = scenes.read(index)
    height, width = size
    scale = (width / image.shape[2], height / image.shape[1])
    objects = scenes.objects[index]
    corners = [_corners(record["bbox"]) for record in objects]
    boxes = torch.tensor(corners).reshape(-1, 4) * torch.tensor([*scale, *scale])
    target = {
        "boxes": boxes,
        "labels": torch.tensor(
            [scenes.labels[record["category_id"]] for record in objects], dtype=torch.long
        ),
    }
    if masks:
        drawn = [outline_mask(o["segmentation"], height, width, scale) for o in objects]
        empty = torch.zeros(0, height, width, dtype=torch.uint8)
        target["masks"] = torch.stack(drawn) if drawn else empty
    pixels = torch.nn.functional.interpolate(
        image[None].float() / 255, size=size, mode="bilinear", align_corners=False
    )[0]
    if not flip:
        return pixels, target
    return pixels.flip(2), _mirrored(target, width)


def _corners(box: list[float]) -> list[float]:
    left, top, width, height = box
    return [left, top, left + width, top + height]


def _mirrored(target: Target, width: int) -> Target:
    left, top, right, bottom = target["boxes"].unbind(1)
    turned = {**target, "boxes": torch.stack([width - right, top, width - left, bottom], 1)}
    if "masks" in target:
        turned["masks"] = target["masks"].flip(2)
    return turned


class _Training(Dataset[Sample]):
    def __init__(self, scenes: Scenes, recipe: DetectionRecipe, epoch: int) -> None:
        self.scenes, self.recipe, self.epoch = scenes, recipe, epoch

    def __getitem__(self, index: int) -> Sample:
        recipe = self.recipe
        rng = random.Random(seed_of("image", recipe.seed, self.epoch, index))
        record = self.scenes.images[index]
        least = rng.choice(recipe.min_sizes)
        size = scaled_size(record["height"], record["width"], least, recipe.max_size)
        flip = recipe.flip and rng.random() < 0.5
        masks = recipe.detector == "mask_rcnn"
        return sample(self.scenes, index, size, flip=flip, masks=masks)


class _Testing(Dataset[Tensor]):
    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes

    def __getitem__(self, index: int) -> Tensor:
        return self.scenes.read(index)


def training_batches(
    scenes: Scenes,
    recipe: DetectionRecipe,
    shard: Shard,
    *,
    epoch: int,
    start: int,
    device: torch.device,
    workers: int,
) -> Iterator[tuple[list[Tensor], list[Target]]]:
    """Images and targets on the device, from step `start` of an epoch on."""
    order = epoch_order(shard.count, recipe.seed, epoch).tolist()
    batches = [order[shard.places(step)] for step in range(start, shard.steps)]
    for batch in loaded(_Training(scenes, recipe, epoch), batches, workers, recipe.seed, list):
        images = [image.to(device, non_blocking=True) for image, _ in batch]
        yield images, [_on(device, target) for _, target in batch]


def test_batches(
    scenes: Scenes, indices: list[int], batch: int, *, device: torch.device, workers: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Indices and images with values in [0, 1], in their original size."""
    batches = [indices[start : start + batch] for start in range(0, len(indices), batch)]
    for chosen, images in zip(
        batches, loaded(_Testing(scenes), batches, workers, 0, list), strict=True
    ):
        yield chosen, [image.to(device).float() / 255 for image in images]


def _on(device: torch.device, target: Target) -> Target:
    return {name: value.to(device, non_blocking=True) for name, value in target.items()}
