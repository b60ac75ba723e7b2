"""What is wrong with COCO annotations, found and counted before training."""

from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import Any

SMALLEST = 0.01  # pixels of a side; less is no box
Record = dict[str, Any]


def clean(coco: Record, fault_of: Callable[[Record], str | None]) -> tuple[Record, Counter[str]]:
    """Annotations that can be trained on and tested with, and how many were left out, and why.

    Boxes are cut at the edges of their image, and annotations get new ids.

    Args:
        coco: "images", "annotations" and "categories", as COCO has them. It is not changed.
        fault_of: says what is wrong with the file of an image, if anything is.

    Raises:
        ValueError: parts or keys are missing: this is not a file of COCO annotations.
    """
    faults: Counter[str] = Counter()
    try:
        images = _images(coco["images"], fault_of, faults)
        categories = {record["id"]: str(record["name"]) for record in coco["categories"]}
        kept: list[Record] = []
        for annotation in coco["annotations"]:
            fault, better = _checked(annotation, images, categories)
            if fault is not None:
                faults[fault] += 1
            if better is not None:
                kept.append({**better, "id": len(kept) + 1})
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are not annotations as COCO has them: {error!r}") from error
    names = [{"id": number, "name": name} for number, name in sorted(categories.items())]
    return {"images": list(images.values()), "annotations": kept, "categories": names}, faults


def _images(
    records: list[Record], fault_of: Callable[[Record], str | None], faults: Counter[str]
) -> dict[Any, Record]:
    images: dict[Any, Record] = {}
    for record in records:
        fault = "images listed twice" if record["id"] in images else fault_of(record)
        if fault is None:
            names = ("id", "file_name", "width", "height")
            images[record["id"]] = {name: record[name] for name in names}
        else:
            faults[fault] += 1
    return images


def _checked(
    annotation: Record, images: dict[Any, Record], categories: dict[Any, str]
) -> tuple[str | None, Record | None]:
    """What is wrong, if anything is, and what remains of the annotation, if anything does."""
    image = images.get(annotation["image_id"])
    if image is None:
        return "objects of images that are not there", None
    if annotation["category_id"] not in categories:
        return "objects of unknown categories", None
    box = _cut(annotation["bbox"], image["width"], image["height"])
    if box is None:
        return "objects with an empty box", None
    crowd = int(annotation.get("iscrowd", 0))
    fault, outline = None, annotation.get("segmentation")
    if isinstance(outline, list):
        whole = [polygon for polygon in outline if _area(polygon) > 0]
        if len(whole) < len(outline):
            fault = "objects with a degenerate polygon"
        outline = whole
    if not outline:
        return fault or "objects without a mask", None
    if isinstance(outline, dict) and list(outline["size"]) != [image["height"], image["width"]]:
        return "masks of another size than their image", None
    area = float(annotation.get("area", box[2] * box[3]))
    return fault, {
        "image_id": annotation["image_id"],
        "category_id": annotation["category_id"],
        "bbox": box,
        "segmentation": outline,
        "area": area,
        "iscrowd": crowd,
    }


def _cut(box: list[float], width: int, height: int) -> list[float] | None:
    """The part of a box inside the image, or None if there is none."""
    if len(box) != 4 or not all(isfinite(value) for value in box):
        return None
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[0] + box[2]), min(float(height), box[1] + box[3])
    if right - left < SMALLEST or bottom - top < SMALLEST:
        return None
    return [left, top, right - left, bottom - top]


def _area(polygon: list[float]) -> float:
    """Of x, y, x, y, …; 0 for what is not a polygon."""
    if len(polygon) < 6 or len(polygon) % 2 or not all(isfinite(value) for value in polygon):
        return 0.0
    across, down = polygon[::2], polygon[1::2]
    following = zip([*across[1:], across[0]], [*down[1:], down[0]], strict=True)
    corners = zip(across, down, following, strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, (next_x, next_y) in corners)) / 2
