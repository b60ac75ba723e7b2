"""A synthetic detection data set: ellipses, rectangles and triangles on noise."""

import math
import random
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

SHAPES = ("ellipse", "rectangle", "triangle")
SIDES = (96, 128)  # smallest and largest side of an image
SIZES = (20, 52)  # smallest and largest side of a shape
MOST = 4  # largest number of shapes on an image
EMPTY = 0.1  # share of images without shapes
CORNERS = 24  # corners of the polygon that approximates an ellipse
TRIES = 20
Point = tuple[float, float]


def draw_shapes(count: int, seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Images (3, H, W) in uint8 of several sizes, and their annotations in the format of COCO."""
    images: list[Tensor] = []
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        rng = random.Random(f"shapes {seed} {index}")
        image, objects = _scene(rng)
        images.append(image)
        height, width = image.shape[1:]
        records.append(
            {"id": index + 1, "file_name": f"{index}.png", "width": width, "height": height}
        )
        for category, corners in objects:
            annotations.append(
                {"id": len(annotations) + 1, "image_id": index + 1, "category_id": category}
                | _outline(corners)
            )
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(SHAPES)]
    return images, {"images": records, "annotations": annotations, "categories": categories}


def _scene(rng: random.Random) -> tuple[Tensor, list[tuple[int, list[Point]]]]:
    width, height = rng.randint(*SIDES), rng.randint(*SIDES)
    canvas = Image.new("RGB", (width, height), _colour(rng))
    draw = ImageDraw.Draw(canvas)
    objects: list[tuple[int, list[Point]]] = []
    count = 0 if rng.random() < EMPTY else rng.randint(1, MOST)
    for _ in range(count):
        for _ in range(TRIES):
            kind = rng.randrange(len(SHAPES))
            corners = _corners(kind, width, height, rng)
            if not any(_touch(corners, other) for _, other in objects):
                objects.append((kind + 1, corners))
                draw.polygon(corners, fill=_colour(rng))
                break
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    noise = 12 * torch.randn(3, height, width, generator=generator)
    return (pil_to_tensor(canvas) + noise).round().clamp(0, 255).to(torch.uint8), objects


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _corners(kind: int, width: int, height: int, rng: random.Random) -> list[Point]:
    w, h = rng.randint(*SIZES), rng.randint(*SIZES)
    left, top = rng.randint(0, width - w - 1), rng.randint(0, height - h - 1)
    unit: list[Point]
    if SHAPES[kind] == "ellipse":
        angles = [2 * math.pi * corner / CORNERS for corner in range(CORNERS)]
        unit = [(0.5 + 0.5 * math.cos(a), 0.5 + 0.5 * math.sin(a)) for a in angles]
    elif SHAPES[kind] == "rectangle":
        unit = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    else:
        unit = [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)]
    return [(left + w * x, top + h * y) for x, y in unit]


def _box(corners: list[Point]) -> tuple[float, float, float, float]:
    across, down = zip(*corners, strict=True)
    return min(across), min(down), max(across), max(down)


def _touch(one: list[Point], other: list[Point]) -> bool:
    a, b = _box(one), _box(other)
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


def _outline(corners: list[Point]) -> dict[str, Any]:
    left, top, right, bottom = _box(corners)
    following = [*corners[1:], corners[0]]
    doubled = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(corners, following, strict=True))
    return {
        "segmentation": [[value for corner in corners for value in corner]],
        "bbox": [left, top, right - left, bottom - top],
        "area": abs(doubled) / 2,
        "iscrowd": 0,
    }
