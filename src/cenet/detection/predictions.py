"""Choose test images, match predictions with annotated objects, and draw them side by side."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from cenet.analysis.diagnosis import data_uri
from cenet.detection.boxes_svg import Box, colour, draw_boxes
from cenet.detection.coco import Record
from cenet.detection.data import Scenes, outline_mask
from cenet.formatting import Cell, count
from cenet.report.elements import Column, Figure, Panel, Section, Table
from cenet.report.sources import printable

SIDE = 640  # length of the longer side of a drawing, in pixels
CERTAIN = 0.5  # lowest score of a prediction that is drawn
OVERLAP = 0.5  # least overlap of a prediction with its object
FILL, EDGE = 0.3, 5  # opacity of a mask, and twice the width of its edge
QUALITY = 85


class Pair(NamedTuple):
    """An object with its prediction, if there is one; or a prediction without an object."""

    truth: Record | None
    found: Record | None
    overlap: float | None = None


def choose(scenes: Scenes, count: int) -> list[int]:
    """Indices of `count` images, evenly spaced; images without objects only if needed."""
    full = [index for index, objects in enumerate(scenes.objects) if objects]
    empty = [index for index, objects in enumerate(scenes.objects) if not objects]
    return sorted(_spread(full, count) + _spread(empty, count - len(full)))


def _spread(indices: list[int], count: int) -> list[int]:
    count = max(0, min(count, len(indices)))
    return [indices[(2 * place + 1) * len(indices) // (2 * count)] for place in range(count)]


def match(objects: list[Record], found: list[Record]) -> list[Pair]:
    """All objects with their predictions, and then the predictions without an object.

    Predictions are taken in the order of their scores. Each belongs to the object of its class that
    its box overlaps most, among the objects that have no prediction yet.
    """
    overlaps = box_iou(_corners(found), _corners(objects)).tolist()
    by_object: dict[int, tuple[Record, float]] = {}
    others: list[Record] = []
    for row, record in sorted(zip(overlaps, found, strict=True), key=lambda p: -p[1]["score"]):
        free = [
            (value, -place)
            for place, (value, one) in enumerate(zip(row, objects, strict=True))
            if place not in by_object
            and value >= OVERLAP
            and one["category_id"] == record["category_id"]
        ]
        if free:
            value, place = max(free)
            by_object[-place] = (record, value)
        else:
            others.append(record)
    pairs = [Pair(one, *by_object.get(place, (None, None))) for place, one in enumerate(objects)]
    return pairs + [Pair(None, record) for record in others]


def _corners(records: list[Record]) -> Tensor:
    sides = torch.tensor([record["bbox"] for record in records]).reshape(-1, 4)
    return torch.cat([sides[:, :2], sides[:, :2] + sides[:, 2:]], 1)


def predictions_section(
    scenes: Scenes, indices: list[int], found: list[Record], *, masks: bool, weights: str
) -> Section:
    """A section that draws images twice: with their objects, and with the predictions.

    Args:
        scenes: all images.
        indices: indices of the images to draw.
        found: predictions on these images, and perhaps on others, in the format of COCO's results.
        masks: whether masks are drawn.
        weights: name of the file of the weights.
    """
    figures, pairs = [], []
    for number, index in enumerate(indices, start=1):
        own = [
            record
            for record in found
            if record["image_id"] == scenes.images[index]["id"] and record["score"] >= CERTAIN
        ]
        matched = match(scenes.objects[index], own)
        figures.append(_figure(scenes, index, matched, number, masks=masks))
        pairs += matched
    return Section(
        "predictions", "Predictions and ground truth", tuple(figures),
        words=_words(scenes, indices, pairs, weights),
    )  # fmt: skip


def _words(scenes: Scenes, indices: list[int], pairs: list[Pair], weights: str) -> str:
    full, every = sum(map(bool, scenes.objects)), count(len(scenes.images), "test image")
    chosen = f"All {every}" if len(indices) == len(scenes.images) else f"{len(indices)} of {every}"
    if len(indices) < full:
        chosen += f", evenly spread over the {full} that have objects"
    elif len(indices) < len(scenes.images):
        chosen += f", with all {full} that have objects"
    return (
        f"{chosen}. On these together: {_summary(pairs)} Predictions with a score of at least "
        f"{CERTAIN} are drawn. An object is found if a prediction has its class and overlaps its "
        f"box by at least {OVERLAP}; both have one colour. The weights are those of {weights}."
    )


def _summary(pairs: list[Pair]) -> str:
    objects = sum(pair.truth is not None for pair in pairs)
    met = sum(pair.overlap is not None for pair in pairs)
    extra = len(pairs) - objects
    said = f"{met} of {count(objects, 'object')} found" if objects else "No object"
    if extra:
        said += f", {count(extra, 'prediction')} without an object"
    return f"{said}."


def _figure(scenes: Scenes, index: int, pairs: list[Pair], number: int, *, masks: bool) -> Figure:
    image, name = scenes.read(index), printable(str(scenes.images[index]["file_name"]))
    truth = [(place, pair.truth) for place, pair in enumerate(pairs) if pair.truth is not None]
    found = [(place, pair.found) for place, pair in enumerate(pairs) if pair.found is not None]
    panels = []
    for title, objects, words in (
        ("truth", truth, "no object here"),
        ("found", found, f"nothing found above {CERTAIN}"),
    ):
        names = [_name(scenes, record) for _, record in objects]
        label = f"{title} on {name}: {', '.join(names) or words}"
        picture = _enlarged(image)
        factors = picture.shape[2] / image.shape[2], picture.shape[1] / image.shape[1]
        if masks:
            picture = _masked(picture, objects, factors)
        boxes = [
            Box(_place(record, factors), text, place)
            for (place, record), text in zip(objects, names, strict=True)
        ]
        size = (picture.shape[2], picture.shape[1])
        svg = draw_boxes(label, _uri(picture), size, boxes, "" if boxes else words)
        panels.append(Panel(title, svg))
    return Figure(
        f"image-{number}", name, _summary(pairs), tuple(panels), _table(scenes, pairs), columns=2
    )


def _class(scenes: Scenes, record: Record) -> str:
    return printable(scenes.classes[scenes.labels[record["category_id"]] - 1])


def _name(scenes: Scenes, record: Record) -> str:
    score = f" {record['score']:.2f}" if "score" in record else ""
    return _class(scenes, record) + score


def _place(record: Record, factors: tuple[float, float]) -> tuple[float, float, float, float]:
    left, top, width, height = record["bbox"]
    return left * factors[0], top * factors[1], width * factors[0], height * factors[1]


def _table(scenes: Scenes, pairs: list[Pair]) -> Table:
    heads = ("score", "overlap", "left", "top", "width", "height")
    columns = (Column("class"), Column(""), *(Column(name, "number") for name in heads))
    rows: list[tuple[Cell, ...]] = []
    for truth, found, overlap in pairs:
        word = "found" if overlap is not None else "missed" if truth else "without an object"
        record = truth or found
        assert record is not None
        score = None if found is None else float(found["score"])
        box = (float(value) for value in record["bbox"])
        rows.append((_class(scenes, record), word, score, overlap, *box))
    return Table(columns, tuple(rows))


def _enlarged(image: Tensor) -> Tensor:
    """The image with a longer side of `SIDE`."""
    height, width = image.shape[1:]
    factor = SIDE / max(height, width)
    size = [max(1, round(height * factor)), max(1, round(width * factor))]
    resized: Tensor = resize(image, size, InterpolationMode.BICUBIC, antialias=True)
    return resized


def _masked(
    picture: Tensor, objects: Sequence[tuple[int, Record]], factors: tuple[float, float]
) -> Tensor:
    """The picture with masks in their colours, small ones above large ones, and their edges."""
    height, width = picture.shape[1:]
    painted = picture.float()
    largest = sorted(objects, key=lambda one: -one[1]["bbox"][2] * one[1]["bbox"][3])
    for place, record in largest:
        mask = outline_mask(record["segmentation"], height, width, factors).bool()
        around = torch.nn.functional.max_pool2d(
            (~mask)[None].float(), EDGE, stride=1, padding=EDGE // 2
        )[0]
        edge = mask & (around > 0)
        paint = torch.tensor([*bytes.fromhex(colour(place)[1:])], dtype=torch.float)[:, None]
        painted[:, mask] = (1 - FILL) * painted[:, mask] + FILL * paint
        painted[:, edge] = paint
    return painted.round().to(torch.uint8)


def _uri(picture: Tensor) -> str:
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    return data_uri(image, "jpeg", quality=QUALITY, subsampling=0)
