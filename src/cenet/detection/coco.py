"""Check COCO annotations before training: keep usable ones, list the faults of the others."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

SMALLEST = 0.01  # smallest side of a box in pixels
LARGEST = 2**53  # largest number that the evaluation, in float64, can count to
Record = dict[str, Any]
Faults = dict[str, list[str]]  # names of images and objects, by their fault


class _Fault(Exception):
    """Why an annotation cannot be used."""


def clean(
    coco: Any, fault_of: Callable[[Record], str | None], *, masks: bool = True
) -> tuple[Record, Faults]:
    """Split annotations into those that can be used and the faults of all others.

    Boxes are clipped to their image; images and annotations get new ids.

    Args:
        coco: "images", "annotations" and "categories" in the format of COCO. It is not changed.
        fault_of: returns the fault of an image file, or None.
        masks: True drops objects without a mask; False drops the masks of all objects.

    Raises:
        ValueError: these are not COCO annotations: a part is missing or has another type.
    """
    faults: Faults = defaultdict(list)
    for part in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(part), list):
            raise ValueError(f"these are not COCO annotations: there is no list {part!r}")
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
        if not _is_whole(number) or not isinstance(name, str):
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
        shown = name.encode(
            errors="backslashreplace"
        ).decode()  # names may hold characters that are not valid Unicode
        sizes = [record.get(side) for side in ("width", "height")] if whole else []
        if not whole or _id(record) is None or not all(_is_whole(s) and s > 0 for s in sizes):
            faults["images without an id, a file name or a size"].append(shown)
            continue
        width, height = map(int, sizes)
        image = {"id": len(images) + 1, "file_name": name, "width": width, "height": height}
        fault = "images whose id was used before" if record["id"] in images else fault_of(image)
        if fault is None:
            images[record["id"]] = image
        else:
            faults[fault].append(shown)
    return images


def _checked(
    annotation: Any,
    images: dict[Any, Record],
    listed: set[Any],
    categories: dict[int, str],
    masks: bool,
) -> tuple[Record, bool]:
    """The usable part of an annotation, and whether a polygon was dropped; _Fault if no part is."""
    if not isinstance(annotation, dict):
        raise _Fault("objects that are not JSON objects")
    number, category = annotation.get("image_id"), annotation.get("category_id")
    image = images.get(number) if isinstance(number, int | str) else None
    if image is None:
        known = isinstance(number, int | str) and number in listed
        raise _Fault(f"objects of {'images that were left out' if known else 'unknown images'}")
    if not _is_whole(category) or category not in categories:
        raise _Fault("objects of unknown categories")
    box = _cut(annotation.get("bbox"), image["width"], image["height"])
    crowd, area = annotation.get("iscrowd", 0), annotation.get("area", box[2] * box[3])
    if crowd not in (0, 1) or not _are_numbers([area], 1) or area < 0:
        raise _Fault("objects with an invalid area or iscrowd")
    record = {
        "image_id": image["id"],
        "category_id": int(category),
        "bbox": box,
        "area": float(area),
        "iscrowd": int(crowd),
    }
    if not masks:
        return record, False
    outline, spoiled = _outline(annotation.get("segmentation"), image)
    return {**record, "segmentation": outline}, spoiled


def _cut(box: Any, width: int, height: int) -> list[float]:
    """The box clipped to the image."""
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
    """The usable polygons or the run-length code, and whether a polygon was dropped."""
    if not outline:
        raise _Fault("objects without a mask")
    if isinstance(outline, list):
        whole = [polygon for polygon in outline if _has_area(polygon, image)]
        if not whole:
            raise _Fault("objects whose polygons have no area in the image")
        return whole, len(whole) < len(outline)
    size = outline.get("size") if isinstance(outline, dict) else None
    if size != [image["height"], image["width"]]:
        raise _Fault("objects whose mask has another size than their image")
    counts = outline.get("counts")
    runs = _run_lengths(counts) if isinstance(counts, str) else counts
    fine = isinstance(runs, list) and all(type(run) is int and run >= 0 for run in runs)
    if not fine or sum(runs) != size[0] * size[1]:
        # the decoder would leave the rest of the mask uninitialized
        raise _Fault("objects whose run lengths do not fill their mask")
    return {"size": [image["height"], image["width"]], "counts": counts}, False


def _run_lengths(code: str) -> list[int]:
    """Undo COCO's compression of run lengths.

    Each letter holds five bits, the lowest first; a number is the difference to the one two before.
    """
    runs: list[int] = []
    value = shift = 0
    for letter in code:
        bits = ord(letter) - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return runs


def _has_area(polygon: Any, image: Record) -> bool:
    """Whether a polygon x, y, x, y, … encloses a part of the image.

    Polygons that reach farther outside than the image is large are refused: drawing them would take
    too long.
    """
    if not _are_numbers(polygon, 6) or len(polygon) % 2:
        return False
    for values, side in ((polygon[::2], image["width"]), (polygon[1::2], image["height"])):
        if min(values) < -side or max(values) > 2 * side or max(values) <= 0 or min(values) >= side:
            return False
    across, down = polygon[::2], polygon[1::2]
    following = zip([*across[1:], across[0]], [*down[1:], down[0]], strict=True)
    corners = zip(across, down, following, strict=True)
    twice: float = sum(x * next_y - next_x * y for x, y, (next_x, next_y) in corners)
    return twice != 0


def _are_numbers(values: Any, least: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) >= least
        and all(type(value) in (int, float) and abs(value) < LARGEST for value in values)
    )


def _is_whole(value: Any) -> bool:
    return _are_numbers([value], 1) and value == int(value)
