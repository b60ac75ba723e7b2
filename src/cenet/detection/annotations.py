"""What is wrong with COCO annotations, found and named before training."""

from collections import defaultdict
from collections.abc import Callable
from math import isfinite
from typing import Any

SMALLEST = 0.01  # pixels of a side; less is no box
Record = dict[str, Any]
Faults = dict[str, list[str]]  # what is wrong, and with which


class _Fault(Exception):
    """Why an annotation is of no use."""


def clean(
    coco: Any, fault_of: Callable[[Record], str | None], *, masks: bool = True
) -> tuple[Record, Faults]:
    """Annotations that can be trained on and tested with, and what was left out, and why.

    Boxes are cut at the edges of their image, and annotations get new ids.

    Args:
        coco: "images", "annotations" and "categories", as COCO has them. It is not changed.
        fault_of: says what is wrong with the file of an image, if anything is.
        masks: objects need one; otherwise none is kept.

    Raises:
        ValueError: a part is missing or of another kind: this is not a file of COCO annotations.
    """
    faults: Faults = defaultdict(list)
    for part in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(part), list):
            raise ValueError(f"these are not annotations as COCO has them: no list {part!r}")
    categories = _categories(coco["categories"])
    images = _images(coco["images"], fault_of, faults)
    listed = {_id(record) for record in coco["images"]}
    kept: list[Record] = []
    for place, annotation in enumerate(coco["annotations"]):
        name = str(_id(annotation, f"the one at place {place}"))
        try:
            better, spoiled = _checked(annotation, images, listed, categories, masks)
        except _Fault as fault:
            faults[str(fault)].append(name)
            continue
        if spoiled:
            faults["polygons without an area, of objects with others"].append(name)
        kept.append({**better, "id": len(kept) + 1})
    names = [{"id": number, "name": name} for number, name in sorted(categories.items())]
    parts = {"images": list(images.values()), "annotations": kept, "categories": names}
    return parts, dict(faults)


def _id(record: Any, otherwise: Any = None) -> Any:
    found = record.get("id") if isinstance(record, dict) else None
    return found if isinstance(found, int | str) else otherwise


def _categories(records: list[Any]) -> dict[int, str]:
    categories: dict[int, str] = {}
    for record in records:
        number, name = _id(record), record.get("name") if isinstance(record, dict) else None
        if not isinstance(number, int) or not isinstance(name, str):
            raise ValueError(f"a category needs a whole number as id and a name, got {record!r}")
        if number in categories:
            raise ValueError(f"two categories have the id {number}: {categories[number]}, {name}")
        categories[number] = name
    return categories


def _images(
    records: list[Any], fault_of: Callable[[Record], str | None], faults: Faults
) -> dict[Any, Record]:
    images: dict[Any, Record] = {}
    for place, record in enumerate(records):
        whole = isinstance(record, dict) and isinstance(record.get("file_name"), str)
        name = record["file_name"] if whole else f"the one at place {place}"
        sizes = [record.get(side) for side in ("width", "height")] if whole else []
        if not whole or _id(record) is None or not all(isinstance(s, int) and s > 0 for s in sizes):
            fault: str | None = "images without an id, a file name or a size"
        elif record["id"] in images:
            fault = "images whose id was used before"
        else:
            fault = fault_of(record)
        if fault is None:
            keys = ("id", "file_name", "width", "height")
            images[record["id"]] = {key: record[key] for key in keys}
        else:
            faults[fault].append(name)
    return images


def _checked(
    annotation: Any,
    images: dict[Any, Record],
    listed: set[Any],
    categories: dict[int, str],
    masks: bool,
) -> tuple[Record, bool]:
    """What remains of an annotation, and whether it has lost a polygon; _Fault if nothing does."""
    if not isinstance(annotation, dict):
        raise _Fault("objects that are no records")
    number, category = annotation.get("image_id"), annotation.get("category_id")
    image = images.get(number) if isinstance(number, int | str) else None
    if image is None:
        known = isinstance(number, int | str) and number in listed
        raise _Fault(f"objects of {'images that were left out' if known else 'unknown images'}")
    if not isinstance(category, int) or category not in categories:
        raise _Fault("objects of unknown categories")
    box = _cut(annotation.get("bbox"), image["width"], image["height"])
    crowd, area = annotation.get("iscrowd", 0), annotation.get("area", box[2] * box[3])
    if crowd not in (0, 1) or not _are_numbers([area], 1):
        raise _Fault("objects whose area or iscrowd is no number")
    record = {
        "image_id": number,
        "category_id": category,
        "bbox": box,
        "area": float(area),
        "iscrowd": int(crowd),
    }
    if not masks:
        return record, False
    outline, spoiled = _outline(annotation.get("segmentation"), image)
    return {**record, "segmentation": outline}, spoiled


def _cut(box: Any, width: int, height: int) -> list[float]:
    """The part of a box inside the image."""
    if not _are_numbers(box, 4) or len(box) != 4:
        raise _Fault("objects whose box is not four numbers")
    if box[2] < SMALLEST or box[3] < SMALLEST:
        raise _Fault("objects with an empty box")
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(width), box[0] + box[2]), min(float(height), box[1] + box[3])
    if right - left < SMALLEST or bottom - top < SMALLEST:
        raise _Fault("objects whose box is outside of the image")
    return [left, top, right - left, bottom - top]


def _outline(outline: Any, image: Record) -> tuple[Any, bool]:
    """Polygons or a run-length code, and whether a polygon was left out."""
    if not outline:
        raise _Fault("objects without a mask")
    if isinstance(outline, list):
        whole = [polygon for polygon in outline if _area(polygon) > 0]
        if not whole:
            raise _Fault("objects whose polygons have no area")
        return whole, len(whole) < len(outline)
    size = outline.get("size") if isinstance(outline, dict) else None
    if size != [image["height"], image["width"]]:
        raise _Fault("objects whose mask has another size than their image")
    counts = outline.get("counts")
    if isinstance(counts, list):
        runs = all(type(run) is int and run >= 0 for run in counts)
        if not runs or sum(counts) != size[0] * size[1]:
            raise _Fault("objects whose run lengths do not fill their mask")
    elif not isinstance(counts, str):
        raise _Fault("objects without a mask")
    return outline, False


def _area(polygon: Any) -> float:
    """Of x, y, x, y, …; 0 for what is not a polygon."""
    if not _are_numbers(polygon, 6) or len(polygon) % 2:
        return 0.0
    across, down = polygon[::2], polygon[1::2]
    following = zip([*across[1:], across[0]], [*down[1:], down[0]], strict=True)
    corners = zip(across, down, following, strict=True)
    twice: float = sum(x * next_y - next_x * y for x, y, (next_x, next_y) in corners)
    return abs(twice) / 2


def _are_numbers(values: Any, least: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) >= least
        and all(type(value) in (int, float) and isfinite(value) for value in values)
    )
