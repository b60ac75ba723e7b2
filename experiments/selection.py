"""Comparisons in which every network has the best settings of the same grid.

Settings are chosen on held-out training images, with one run for each setting. The runs of the
table then train on all training images, and the test images are used once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import isclose
from typing import Any, NamedTuple

from experiments.accuracy import Line
from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import difference, spread

HOLDOUT = 0.1
Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Grid:
    """Values of fields of a recipe, all of which are tried with each other.

    Where the best setting lies on an edge of the grid, the search goes on beyond it: every setting
    one step away from the best is tried, until none of them is better. A step beyond the edge of a
    field is the ratio of its two outermost values.

    Attributes:
        fields: their names, each with at least two values, ascending and in one ratio.
        fixed: further fields, each with the one value that all settings have.
    """

    fields: tuple[tuple[str, tuple[float, ...]], ...]
    fixed: Setting = ()

    def __post_init__(self) -> None:
        """Refuse values in several ratios: a step there and back would not return."""
        for name, values in self.fields:
            ratios = [after / before for before, after in pairwise(values)]
            if not ratios or min(ratios) <= 1 or not isclose(min(ratios), max(ratios)):
                raise ValueError(f"{name}: {values} must ascend in one ratio, as 0.05, 0.1, 0.2 do")

    @property
    def settings(self) -> list[Setting]:
        """Each a value for each field."""
        names = [name for name, _ in self.fields]
        return [
            (*zip(names, values, strict=True), *self.fixed)
            for values in product(*(values for _, values in self.fields))
        ]

    def trials(self, recipe: str) -> list[Run]:
        """The runs of the grid itself."""
        return [_trial(recipe, setting) for setting in self.settings]

    def search(self, recipe: str, rows: Rows) -> "Search":
        """How far the choice for a recipe is."""
        tried = self.settings
        while True:
            accuracies = {}
            for setting in tried:
                for top1 in rows.values([_trial(recipe, setting)], "top1", "trials"):
                    accuracies[setting] = top1
            best = None
            if all(setting in accuracies for setting in self.settings):
                best = max(accuracies, key=lambda setting: accuracies[setting])
            missing = [setting for setting in tried if setting not in accuracies]
            if missing or best is None:
                trials = tuple(_trial(recipe, setting) for setting in missing)
                return Search(best, trials, accuracies)
            further = [near for near in self._near(best) if near not in tried]
            if not further:
                return Search(best, (), accuracies)
            tried = [*tried, *further]

    def _near(self, setting: Setting) -> list[Setting]:
        """The settings one step away: one field is larger or smaller, the others are the same."""
        found = []
        for place, (name, values) in enumerate(self.fields):
            value = setting[place][1]
            for ordered in (values, values[::-1]):
                step = ((name, _after(value, ordered)),)
                found.append((*setting[:place], *step, *setting[place + 1 :]))
        return found

    def cells(self, recipe: str, rows: Rows) -> dict[str, str]:
        """The chosen values, for a table; those that may change are marked."""
        best, missing, _ = self.search(recipe, rows)
        setting = dict(best or ())
        mark = " (search goes on)" if missing else ""
        return {
            _text(name): f"{setting[name]:g}{mark}" if setting else "not chosen"
            for name, _ in self.fields
        }


class Search(NamedTuple):
    """How far the choice of a setting is."""

    best: Setting | None  # of those that were tried; None until the grid was
    missing: tuple[Run, ...]  # trials that may still find a better one
    accuracies: dict[Setting, float]  # of those that were tried, on held-out images


def _text(field: str) -> str:
    return {"lr": "learning rate"}.get(field, field.replace("_", " "))


def _after(value: float, ordered: tuple[float, ...]) -> float:
    """The value that follows in an ordered list, or the next one beyond its end."""
    if value in ordered[:-1]:
        return ordered[ordered.index(value) + 1]
    return float(f"{value * ordered[-1] / ordered[-2]:.6g}")


def _trial(recipe: str, setting: Setting) -> Run:
    return runs(recipe, holdout=HOLDOUT, **dict(setting))[0]


def selection(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int,
    build: Callable[[Rows], Built],
) -> Result:  # fmt: skip
    """What is built of runs whose settings the trials of a grid choose."""
    trials = tuple(run for line in lines for run in grid.trials(line.recipe))
    then = partial(next_runs, [line.recipe for line in lines], grid, seeds)
    return Result(name, title, claim, trials, build, then=then, later=seeds * len(lines))


def selected_table(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int
) -> Result:
    """Accuracies over seeds, each network with its own settings of the grid."""
    return selection(name, title, claim, lines, grid, seeds, partial(_build, lines, grid, seeds))


def finals(recipe: str, grid: Grid, seeds: int, rows: Rows) -> list[Run]:
    """The runs of a recipe with the best known settings; none before the grid was tried."""
    best = grid.search(recipe, rows).best
    return [] if best is None else runs(recipe, seeds, **dict(best))


def next_runs(recipes: Sequence[str], grid: Grid, seeds: int, rows: Rows) -> list[Run]:
    """Of each recipe, the trials beyond the grid, or the runs of the table once there are none."""
    found: list[Run] = []
    for recipe in recipes:
        best, missing, _ = grid.search(recipe, rows)
        if best is not None:
            found += missing or finals(recipe, grid, seeds, rows)
    return found


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
        cells["top-1, difference from plain (95 %)"] = difference(*sides, 100, 2) if pairs else ""
        table.append(cells)
    return Built(table)


def settings_table(name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid) -> Result:
    """Accuracy on held-out training images for every setting that was tried, one run each."""
    trials = tuple(run for line in lines for run in grid.trials(line.recipe))
    return Result(name, title, claim, trials, partial(_settings, lines, grid))


def _settings(lines: Sequence[Line], grid: Grid, rows: Rows) -> Built:
    searches = {line: grid.search(line.recipe, rows) for line in lines}
    table = []
    for network in dict.fromkeys(line.network for line in lines):
        own = {line: found for line, found in searches.items() if line.network == network}
        tried = {setting for found in own.values() for setting in found.accuracies}
        for setting in sorted({*grid.settings, *tried}):
            cells = {"network": network}
            cells |= {_text(field): f"{value:g}" for field, value in setting}
            for line, found in own.items():
                top1 = rows.values([_trial(line.recipe, setting)], "top1", "trials")
                text = f"{100 * top1[0]:.2f} %" if top1 else "not run"
                column = f"held-out top-1, {line.label}"
                cells[column] = f"**{text}**" if setting == found.best else text
            table.append(cells)
    return Built(table)
