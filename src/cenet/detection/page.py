"""One self-contained page of a run: curves, average precision, predictions beside the truth."""

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from cenet.detection.annotations import Record
from cenet.detection.data import Scenes, outline_mask
from cenet.train.saving import replace_file

LEAST = 256  # pixels of the shorter side of what is drawn
CERTAIN = 0.5  # predictions with less are not drawn
COLOURS = ("#e4572e", "#17bebb", "#ffc914", "#76b041", "#9b5de5", "#2e86ab", "#f15bb5", "#8d99ae")
WIDTH, HEIGHT = 640, 200  # of a curve
TEMPLATE = "page.html.j2"


class Drawing(NamedTuple):
    """An image twice, as data URLs."""

    name: str
    truth: str
    found: str


class Curve(NamedTuple):
    """A line of a chart."""

    name: str
    colour: str
    points: str
    last: float


def draw(scenes: Scenes, index: int, found: list[Record]) -> Drawing:
    """An image with what is on it, and with what was found on it."""
    image, record = scenes.read(index), scenes.images[index]
    own = [each for each in found if each["image_id"] == record["id"] and each["score"] >= CERTAIN]
    return Drawing(
        str(record["file_name"]),
        _url(_drawn(image, scenes.objects[index], scenes)),
        _url(_drawn(image, own, scenes)),
    )


def _drawn(image: Tensor, objects: list[Record], scenes: Scenes) -> Tensor:
    factor = max(1, LEAST // min(image.shape[1:]))
    image = image.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    if not objects:
        return image
    height, width = image.shape[1:]
    labels = [scenes.labels[record["category_id"]] for record in objects]
    colours: Any = [COLOURS[label % len(COLOURS)] for label in labels]
    boxes = factor * torch.tensor([record["bbox"] for record in objects])
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    outlines = [record.get("segmentation") for record in objects]
    if all(outlines):
        scale = (float(factor), float(factor))
        masks = torch.stack([outline_mask(each, height, width, scale) for each in outlines])
        image = draw_segmentation_masks(image, masks.bool(), alpha=0.45, colors=colours)
    names = [
        scenes.classes[label - 1] + (f" {record['score']:.2f}" if "score" in record else "")
        for label, record in zip(labels, objects, strict=True)
    ]
    drawn: Tensor = draw_bounding_boxes(image, boxes, names, colours, width=2)
    return drawn


def _url(image: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def curves(rows: list[dict[str, Any]], names: list[str]) -> list[Curve]:
    """Polylines over epochs, all on the scale from 0 to their largest value."""
    values = {name: [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
              for name in names}  # fmt: skip
    values = {name: line for name, line in values.items() if line}
    largest = max((value for line in values.values() for _, value in line), default=0.0) or 1.0
    epochs = max((row["epoch"] for row in rows), default=1)
    found = []
    for place, (name, line) in enumerate(values.items()):
        points = " ".join(
            f"{WIDTH * epoch / epochs:.1f},{HEIGHT * (1 - value / largest):.1f}"
            for epoch, value in line
        )
        found.append(Curve(name, COLOURS[place % len(COLOURS)], points, line[-1][1]))
    return found


def write_page(path: Path, title: str, rows: list[dict[str, Any]], drawings: list[Drawing]) -> Path:
    """Write the page, and return its path."""
    from jinja2 import Environment, PackageLoader

    if not rows:
        raise ValueError(f"{path.parent} has no epoch yet that a page could show")
    measures = [name for name in rows[0] if "_ap" in name]
    charts = {
        "training loss": curves(rows, [name for name in rows[0] if name.startswith("train_")]),
        "average precision": curves(rows, measures),
    }
    last = {name: next((row[name] for row in reversed(rows) if row[name] is not None), None)
            for name in measures}  # fmt: skip
    page = Environment(loader=PackageLoader("cenet.detection", ""), autoescape=True)
    text = page.get_template(TEMPLATE).render(
        title=title, rows=rows, last=last, charts=charts, drawings=drawings,
        width=WIDTH, height=HEIGHT, certain=CERTAIN,
    )  # fmt: skip
    replace_file(path, text.encode())
    return path
