"""Tables of accuracies, compared with the paper's."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import difference, spread


class Line(NamedTuple):
    """A network that is compared.

    Attributes:
        network: the group it belongs to; the first of a group is what the others are compared with.
        label: of the line.
        recipe: its name.
        top1: of the paper, in percent.
        top5: the same.
        extra: other columns.
    """

    network: str
    label: str
    recipe: str
    top1: float | None = None
    top5: float | None = None
    extra: tuple[tuple[str, str], ...] = ()


def accuracy_table(
    name: str, title: str, claim: str, lines: Sequence[Line], seeds: int = 1
) -> Result:
    """Top-1 and top-5 over seeds, and top-1 against the first line of the group."""
    found = tuple((line, tuple(runs(line.recipe, seeds))) for line in lines)
    needs = tuple(run for _, own in found for run in own)
    return Result(name, title, claim, needs, partial(_build, found))


def _build(lines: Sequence[tuple[Line, tuple[Run, ...]]], rows: Rows) -> Built:
    table = []
    firsts: dict[str, tuple[Run, ...]] = {}
    for line, own in lines:
        first = firsts.setdefault(line.network, own)
        there = [run for run in own if rows.of(run)]
        cells = {"network": line.network, "": line.label, "n": str(len(there))}
        for column, paper in (("top1", line.top1), ("top5", line.top5)):
            title = f"top-{column[-1]}"
            cells[title] = spread(rows.values(there, column), 100, 2, "%") if there else "not run"
            cells[f"paper's {title}"] = "" if paper is None else f"{paper} %"
        pairs = [
            (a, b) for a, b in zip(first, own, strict=True) if rows.of(a) and rows.of(b)
        ] if own != first else []  # fmt: skip
        columns = [rows.values(side, "top1") for side in zip(*pairs, strict=True)]
        cells["difference (95 %)"] = difference(*columns, 100, 2) if pairs else ""
        table.append(cells | dict(line.extra))
    return Built(table)
