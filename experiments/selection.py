"""Comparisons in which every network has the best settings of the same grid.

Settings are chosen on training images that are held out, by one run each; the runs of the table
then train on all training images, and the test images are looked at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from experiments.accuracy import Line
from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import difference, spread

HOLDOUT = 0.1
Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Grid:
    """Values of fields of a recipe, all of which are tried with each other."""

    fields: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def settings(self) -> list[Setting]:
        """Each a value for each field."""
        names = [name for name, _ in self.fields]
        return [
            tuple(zip(names, values, strict=True))
            for values in product(*(values for _, values in self.fields))
        ]

    def trials(self, recipe: str) -> list[Run]:
        """The runs by which a recipe chooses."""
        return [runs(recipe, holdout=HOLDOUT, **dict(setting))[0] for setting in self.settings]

    def chosen(self, recipe: str, rows: Rows) -> Setting | None:
        """The setting with the highest accuracy on held-out images; None until all were tried."""
        found = [rows.values([trial], "top1", "trials") for trial in self.trials(recipe)]
        if not all(found):
            return None
        best = max(range(len(found)), key=lambda i: found[i][0])
        return self.settings[best]

    def cells(self, recipe: str, rows: Rows) -> dict[str, str]:
        """The chosen values, for a table."""
        setting = dict(self.chosen(recipe, rows) or ())
        names = {"lr": "learning rate"}
        return {
            names.get(name, name.replace("_", " ")):
                f"{setting[name]:g}" if setting else "not chosen"
            for name, _ in self.fields
        }  # fmt: skip


def selection(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int,
    build: Callable[[Rows], Built],
) -> Result:  # fmt: skip
    """What is built of runs whose settings the trials of a grid choose."""
    trials = tuple(run for line in lines for run in grid.trials(line.recipe))
    then = partial(_finals, lines, grid, seeds)
    return Result(name, title, claim, trials, build, then=then, later=seeds * len(lines))


def selected_table(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int
) -> Result:
    """Accuracies over seeds, each network with its own settings of the grid."""
    return selection(name, title, claim, lines, grid, seeds, partial(_build, lines, grid, seeds))


def finals(recipe: str, grid: Grid, seeds: int, rows: Rows) -> list[Run]:
    """The runs of a recipe with its chosen settings; none until they are."""
    setting = grid.chosen(recipe, rows)
    return [] if setting is None else runs(recipe, seeds, **dict(setting))


def _finals(lines: Sequence[Line], grid: Grid, seeds: int, rows: Rows) -> list[Run]:
    return [run for line in lines for run in finals(line.recipe, grid, seeds, rows)]


def _build(lines: Sequence[Line], grid: Grid, seeds: int, rows: Rows) -> Built:
    table = []
    firsts: dict[str, list[Run]] = {}
    for line in lines:
        own = finals(line.recipe, grid, seeds, rows)
        first = firsts.setdefault(line.network, own)
        there = [run for run in own if rows.of(run)]
        cells = {"network": line.network, "": line.label}
        cells |= {**grid.cells(line.recipe, rows), "n": str(len(there))}
        for column, text, factor, unit in (
            ("top1", "top-1", 100, "%"), ("top5", "top-5", 100, "%"),
            ("train_loss", "training loss", 1, ""), ("test_loss", "test loss", 1, ""),
        ):  # fmt: skip
            digits = 2 if factor == 100 else 3
            values = rows.values(there, column)
            cells[text] = spread(values, factor, digits, unit) if values else "not run"
        pairs = [
            (a, b) for a, b in zip(first, own, strict=False) if rows.of(a) and rows.of(b)
        ] if own is not first else []  # fmt: skip
        sides = [rows.values(side, "top1") for side in zip(*pairs, strict=True)]
        cells["top-1 against the first (95 %)"] = difference(*sides, 100, 2) if pairs else ""
        table.append(cells)
    return Built(table)
