"""Table 3: detectors, whose rows are AP instead of measures of channels."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cenet.run_folder import METRICS, read_metrics
from experiments.result import Built, Result, Rows
from experiments.runs import DetectorRun, Run

# columns of the metrics, as COCO names them
COLUMNS = {
    "box_ap": "AP box", "box_ap50": "AP50 box", "box_ap75": "AP75 box",
    "mask_ap": "AP mask", "mask_ap50": "AP50 mask", "mask_ap75": "AP75 mask",
}  # fmt: skip


class Line(NamedTuple):
    """A backbone: its label, detection recipe, classifier, and the paper's six numbers."""

    label: str
    recipe: str
    classifier: str
    paper: tuple[float, ...]


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
        own = rows.of(run, "detections")
        cells = {"": line.label}
        for (column, text), paper in zip(COLUMNS.items(), line.paper, strict=True):
            cells[text] = f"{100 * float(own[0][column]):.1f}" if own else "not run"
            cells[f"paper's {text}"] = str(paper)
        table.append(cells)
    return Built(table)


def last_row(folder: Path) -> dict[str, Any]:
    """AP after the last epoch of a run."""
    last = read_metrics(folder / METRICS)[-1]
    return {column: last.get(column, "") for column in COLUMNS}
