"""Results of detectors, whose rows hold AP: Table 3, and 128 images of COCO."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cenet.run_folder import METRICS, read_metrics
from experiments.result import Built, Result, Rows
from experiments.runs import DetectorRun, Run
from experiments.selection import Grid, finals, next_runs
from experiments.uncertainty import difference, spread

# columns of the metrics, as COCO names them
COLUMNS = {
    "box_ap": "AP box", "box_ap50": "AP50 box", "box_ap75": "AP75 box",
    "mask_ap": "AP mask", "mask_ap50": "AP50 mask", "mask_ap75": "AP75 mask",
}  # fmt: skip
LOSS = "train_loss"
TABLE = "detections"
# columns of a comparison over seeds: name, text, factor, digits
COMPARED = (
    ("box_ap", "AP box", 100, 1), ("box_ap50", "AP50 box", 100, 1),
    ("mask_ap", "AP mask", 100, 1), ("mask_ap50", "AP50 mask", 100, 1),
    (LOSS, "training loss", 1, 3),
)  # fmt: skip


class Line(NamedTuple):
    """A backbone: label, detection recipe, recipe of its classifier, the paper's six numbers."""

    label: str
    recipe: str
    classifier: str
    paper: tuple[float, ...] = ()


def detection_table(name: str, title: str, claim: str, lines: tuple[Line, ...]) -> Result:
    """AP of boxes and masks beside the paper's."""
    found = tuple(
        (line, DetectorRun(line.recipe, begins_with=Run(line.classifier))) for line in lines
    )
    needs = tuple(run for line, run in found)
    return Result(name, title, claim, needs, partial(_build, found))


def _build(found: tuple[tuple[Line, DetectorRun], ...], rows: Rows) -> Built:
    table = []
    for line, run in found:
        own = rows.of(run, TABLE)
        cells = {"": line.label}
        for (column, text), paper in zip(COLUMNS.items(), line.paper, strict=True):
            cells[text] = f"{100 * float(own[0][column]):.1f}" if own else "not run"
            cells[f"paper's {text}"] = str(paper)
        table.append(cells)
    return Built(table)


def detection_comparison(
    name: str, title: str, claim: str, lines: tuple[Line, ...], grid: Grid, seeds: int
) -> Result:
    """AP and training loss over seeds, from classifiers at the settings that a grid chooses.

    The first line is what the others are compared with. A detector and the classifier that it
    begins with have the same seed.
    """
    classifiers = [line.classifier for line in lines]
    trials = tuple(run for recipe in classifiers for run in grid.trials(recipe))

    def then(rows: Rows) -> list[Run]:
        found = [run for line in lines for run in _detectors(line, grid, seeds, rows)]
        return [*next_runs(classifiers, grid, seeds, rows), *found]

    build = partial(_compare, lines, grid, seeds)
    return Result(name, title, claim, trials, build, then=then, later=2 * seeds * len(lines))


def _detectors(line: Line, grid: Grid, seeds: int, rows: Rows) -> list[DetectorRun]:
    """One for each classifier; none as long as a better setting may be found for these."""
    if grid.search(line.classifier, rows).missing:
        return []
    return [
        DetectorRun(line.recipe, first.seed, begins_with=first)
        for first in finals(line.classifier, grid, seeds, rows)
    ]


def _compare(lines: tuple[Line, ...], grid: Grid, seeds: int, rows: Rows) -> Built:
    table = []
    first = _detectors(lines[0], grid, seeds, rows)
    for line in lines:
        own = _detectors(line, grid, seeds, rows)
        there = [run for run in own if rows.of(run, TABLE)]
        cells = {"": line.label, "n": str(len(there))}
        for column, text, factor, digits in COMPARED:
            values = rows.values(there, column, TABLE)
            cells[text] = spread(values, factor, digits) if values else "not run"
        pairs = [
            (a, b)
            for a, b in zip(first, own, strict=False)
            if line is not lines[0] and rows.of(a, TABLE) and rows.of(b, TABLE)
        ]
        for column, text, factor, digits in COMPARED:
            sides = [rows.values(side, column, TABLE) for side in zip(*pairs, strict=True)]
            if column in ("box_ap", "mask_ap"):
                cells[f"{text} against the first (95 %)"] = (
                    difference(*sides, factor, digits) if pairs else ""
                )
        table.append(cells)
    return Built(table)


def last_row(folder: Path) -> dict[str, Any]:
    """AP and training loss of the last epoch of a run."""
    last = read_metrics(folder / METRICS)[-1]
    return {column: last.get(column, "") for column in (*COLUMNS, LOSS)}
