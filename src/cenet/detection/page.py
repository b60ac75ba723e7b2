"""The page of a run: average precision, curves, predictions beside the ground truth, recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cenet.detection.evaluation import KINDS, MEASURES
from cenet.detection.recipes import DetectionRecipe
from cenet.formatting import Cell, count, show
from cenet.report.charts import Axis, Series, around, by_epoch, line_chart
from cenet.report.elements import Column, Figure, Page, Panel, Section, Table
from cenet.report.sources import Source, read_training
from cenet.report.tables import differing
from cenet.run_folder import WEIGHTS

Row = dict[str, Any]

DETECTORS = {"mask_rcnn": "Mask R-CNN", "faster_rcnn": "Faster R-CNN"}
# parts of the loss, by their names in metrics
PARTS = {
    "train_classifier": "classes",
    "train_box_reg": "boxes",
    "train_mask": "masks",
    "train_objectness": "objectness",
    "train_rpn_box_reg": "proposals",
}
PLURALS = {"box": "boxes", "mask": "masks"}
NAMES = dict(zip(MEASURES, ("AP", "AP50", "AP75"), strict=True))
COLUMNS = ("train_loss", *PARTS, *(f"{kind}_{m}" for kind in KINDS for m in MEASURES))
MEANING = (
    "AP is the mean over overlaps from 0.50 to 0.95 and over classes, as COCO defines it; AP50 and "
    "AP75 require an overlap of 0.50 and of 0.75."
)


def read_source(run: Path) -> Source:
    """The files of a run of `cenet detect train`; ValueError if no epoch has ended yet."""
    source = read_training(
        run, run.resolve().name, COLUMNS, counts=("epoch", "updates"),
        author=f"`{DetectionRecipe.command}`",
    )  # fmt: skip
    if not source.metrics:
        raise ValueError(f"{run} has no epoch yet; wait until the first one ends")
    return source


def build_page(
    source: Source, recipe: DetectionRecipe, predictions: Section | None, weights: str
) -> Page:
    """The page of a run.

    Args:
        source: the files of the run.
        recipe: its recipe.
        predictions: the section with drawn predictions, if there is one.
        weights: name of the file of the weights that predicted.
    """
    measured = next((row for row in reversed(source.metrics) if _kinds(row)), None)
    figures = (_losses(source.metrics), _precision(source.metrics))
    sections = [
        _headline(measured),
        Section("training", "Training", tuple(figure for figure in figures if figure)),
        *([predictions] if predictions else []),
        differing([source], "recipe"),
        differing([source], "environment"),
    ]
    newer = _newer(weights, measured) if predictions else None
    return Page(
        source.name,
        (source.name,),
        (_lead(recipe, source.metrics[-1]["epoch"], measured),),
        (),
        tuple(section for section in sections if section),
        notes=(newer,) if newer else (),
        kind="cenet detect",
    )


def _kinds(row: Row) -> list[str]:
    """Kinds of average precision that were measured after an epoch: box, mask."""
    return [kind for kind in KINDS if row.get(f"{kind}_ap") is not None]


def _lead(recipe: DetectionRecipe, epochs: int, measured: Row | None) -> str:
    trained = count(recipe.epochs, "epoch")
    if epochs < recipe.epochs:
        trained = f"{epochs} of {trained}"
    said = "no epoch was tested yet"
    if measured is not None:
        said = ", ".join(f"{kind} AP {measured[f'{kind}_ap']:.3f}" for kind in _kinds(measured))
    return (
        f"{DETECTORS[recipe.detector]} on {recipe.backbone}, setting {recipe.setting}, {trained} "
        f"on {recipe.dataset}: {said}"
    )


def _newer(weights: str, measured: Row | None) -> str | None:
    """A warning if the drawn predictions and the average precision are of different weights."""
    if weights == WEIGHTS or measured is None:
        return None
    updates = int(Path(weights).stem.rpartition("-")[2]) - measured["updates"]
    if updates == 0:
        return None
    word = "after" if updates > 0 else "before"
    return (
        f"The predictions are those of {weights}, {count(abs(updates), 'update')} {word} the end "
        f"of epoch {measured['epoch']}, the last epoch that was tested. The average precision is "
        "that of other weights."
    )


def _headline(measured: Row | None) -> Section:
    if measured is None:
        return Section("precision", "Average precision")
    columns = (Column(""), *(Column(name, "number") for name in NAMES.values()))
    rows = tuple(
        (PLURALS[kind], *(_three(measured.get(f"{kind}_{measure}")) for measure in MEASURES))
        for kind in _kinds(measured)
    )
    table = Table(columns, rows, "Average precision", foldable=False)
    words = f"After epoch {measured['epoch']}, on all test images. {MEANING}"
    return Section("precision", "Average precision", tables=(table,), words=words)


def _three(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _chart(title: str, rows: Sequence[Row], lines: dict[str, str], x: Axis, y: Axis) -> str:
    """Curves of columns of the metrics; `lines` maps their names to the labels of the curves."""
    series = []
    for number, name in enumerate(lines):
        known = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
        if known:
            epochs, values = zip(*known, strict=True)
            series.append(Series(number, epochs, values))
    label = f"{title} by epoch; the numbers are in the table below"
    return line_chart(label, series, list(lines.values()), x, y, marks=True)


def _known(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[float]]:
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: values for name, values in found.items() if values}


def _losses(rows: Sequence[Row]) -> Figure | None:
    """The training loss and its parts, in two panels with scales of their own."""
    whole, parts = _known(rows, ["train_loss"]), _known(rows, list(PARTS))
    x = by_epoch([row["epoch"] for row in rows])
    panels = []
    for title, known in (("all parts together", whole), ("parts", parts)):
        if known:
            values = [value for line in known.values() for value in line]
            lines = {name: PARTS.get(name, "loss") for name in known}
            y = around("loss", values, zero=True)
            panels.append(Panel(title, _chart(f"Training loss, {title},", rows, lines, x, y)))
    if not panels:
        return None
    shown = {**dict.fromkeys(whole, "all"), **{name: PARTS[name] for name in parts}}
    columns = (Column("epoch", "number"), *(Column(name, "number") for name in shown.values()))
    cells: list[tuple[Cell, ...]] = [
        (row["epoch"], *(row.get(name) for name in shown)) for row in rows
    ]
    return Figure(
        "losses", "Training loss by epoch", _loss_words(whole, parts), tuple(panels),
        Table(columns, tuple(cells)), columns=len(panels),
    )  # fmt: skip


def _loss_words(whole: dict[str, list[float]], parts: dict[str, list[float]]) -> str:
    said = []
    if whole:
        said.append(f"The sum of all parts {_course(whole['train_loss'])}.")
    if parts:
        last = {PARTS[name]: values[-1] for name, values in parts.items()}
        largest = max(last, key=lambda name: last[name])
        said.append(f"The largest part at the end is {largest}, {show(last[largest], brief=True)}.")
    return " ".join([*said, WHOSE])


WHOSE = (
    "Classes, boxes and masks are losses of the heads, objectness and proposals those of the "
    "proposal network. Each panel has its own scale."
)


def _course(values: Sequence[float]) -> str:
    """The change of a curve in words: `fell from 2.1 to 0.4`."""
    first, last = show(values[0], brief=True), show(values[-1], brief=True)
    if len(values) == 1:
        return f"is {last}"
    word = "fell" if values[-1] < values[0] else "rose" if values[-1] > values[0] else "went"
    return f"{word} from {first} to {last}"


def _precision(rows: Sequence[Row]) -> Figure | None:
    """Average precision by epoch, a panel for boxes and one for masks."""
    kinds = [kind for kind in KINDS if _known(rows, [f"{kind}_ap"])]
    if not kinds:
        return None
    x, y = by_epoch([row["epoch"] for row in rows]), Axis("average precision", 0, 1)
    panels = tuple(
        Panel(
            PLURALS[kind],
            _chart(
                f"Average precision of {PLURALS[kind]}", rows,
                {f"{kind}_{measure}": name for measure, name in NAMES.items()}, x, y,
            ),
        )
        for kind in kinds
    )  # fmt: skip
    columns = [Column("epoch", "number")]
    columns += [
        Column(f"{PLURALS[kind]}, {name}", "number") for kind in kinds for name in NAMES.values()
    ]
    names = [f"{kind}_{measure}" for kind in kinds for measure in MEASURES]
    tested = [row for row in rows if _kinds(row)]
    exact = tuple((row["epoch"], *(row.get(name) for name in names)) for row in tested)
    shown = tuple((row["epoch"], *(_three(row.get(name)) for name in names)) for row in tested)
    return Figure(
        "precision", "Average precision by epoch", _precision_words(tested, kinds), panels,
        Table(tuple(columns), shown), Table(tuple(columns), exact), columns=len(panels),
    )  # fmt: skip


def _precision_words(tested: Sequence[Row], kinds: Sequence[str]) -> str:
    """Where AP was highest, and whether that was at the end."""
    last = tested[-1]
    said = []
    for kind in kinds:
        name = f"{kind}_ap"
        known = [row for row in tested if row.get(name) is not None]
        best = max(known, key=lambda row: row[name])
        words = f"AP of {PLURALS[kind]} is {known[-1][name]:.3f} after epoch {last['epoch']}"
        if len(known) > 1:
            words += (
                ", the highest so far"
                if best is known[-1]
                else f"; it was highest after epoch {best['epoch']}, {best[name]:.3f}"
            )
        said.append(f"{words}.")
    return " ".join(said)
