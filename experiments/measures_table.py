"""Tables of all measures of a few recipes, over seeds, with differences and their uncertainty."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from experiments.accuracy import Line
from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.selection import Grid, finals, selection
from experiments.uncertainty import difference, spread


class Measure(NamedTuple):
    """A column of the rows: its name, its text, by what it is multiplied, unit, digits."""

    column: str
    text: str
    factor: int
    unit: str
    digits: int


MEASURES = (
    Measure("top1", "top-1", 100, "%", 2),
    Measure("train_loss", "training loss", 1, "", 4),
    Measure("test_loss", "test loss", 1, "", 3),
    Measure(
        "dormant_first_six", "dormant (≤ 0.1 of the layer's mean), first six layers", 100, "%", 2
    ),
    Measure("dormant", "dormant, all layers", 100, "%", 2),
    Measure("dormant_strict", "dormant, strictly (≤ 0.025), all layers", 100, "%", 2),
    Measure("rare", "fire in < 1 % of the images", 100, "%", 2),
    Measure("weak_contribution", "contribution ≤ 0.1 of the layer's mean", 100, "%", 2),
    Measure("prunable", "prunable", 100, "%", 2),
    Measure("duplicates", "duplicates of another channel", 100, "%", 2),
    Measure("participation_share", "participation ratio / channels, mean of layers", 100, "%", 2),
    Measure("correlation", "mean absolute correlation", 1, "", 4),
    Measure("correlation_in_groups", "the same, pairs inside groups of 16", 1, "", 4),
    Measure("gini", "Gini coefficient of importance, the layer of the ablation", 1, "", 3),
    Measure("random", "top-1 without half of that layer, at random", 100, "%", 1),
    Measure("least_important_first", "top-1 without its least important half", 100, "%", 1),
    Measure("inhibited_first_six", "inhibited (the paper's figure), first six layers", 100, "%", 2),
    Measure("inhibited", "inhibited, all layers", 100, "%", 2),
    Measure("mean_activation", "mean activation", 1, "", 4),
)
ABLATION = ("random", "least_important_first")
Sides = Sequence[Sequence[Run]]  # runs of each recipe, by seed


def measures(
    name: str, title: str, claim: str, compared: Sequence[tuple[str, str]], seeds: int,
    quoted: Mapping[str, str] | None = None,
) -> Result:  # fmt: skip
    """Of labelled recipes; with `quoted`, these columns by these names, without differences."""
    shown: Sequence[Measure] = MEASURES
    if quoted is not None:
        by_column = {measure.column: measure for measure in MEASURES}
        shown = [by_column[column]._replace(text=text) for column, text in quoted.items()]
    sides = [runs(recipe, seeds) for _, recipe in compared]
    labels = [label for label, _ in compared]
    needs = tuple(run for side in sides for run in side)
    build = partial(_build, shown, labels, lambda rows: sides, quoted is None)
    return Result(name, title, claim, needs, build, parts=("ablation",))


def selected_measures(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int
) -> Result:
    """Of recipes at the settings that a grid chooses for each."""

    def sides(rows: Rows) -> Sides:
        return [finals(line.recipe, grid, seeds, rows) for line in lines]

    labels = [line.label for line in lines]

    def build(rows: Rows) -> Built:
        made = _build(MEASURES, labels, sides, True, rows)
        complete = all(any(rows.of(run) for run in side) for side in sides(rows))
        return Built(made.table, _by_layer(labels, sides(rows), rows) if complete else None)

    return selection(name, title, claim, lines, grid, seeds, build)


def _by_layer(labels: Sequence[str], sides: Sides, rows: Rows) -> Any:
    """Correlation and effective dimensions by depth; the mean over seeds."""
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4))
    for number, (label, own) in enumerate(zip(labels, sides, strict=True)):
        for panel, column, text, style in (
            (axes[0], "correlation", f"{label}, all pairs", "-"),
            (axes[0], "correlation_in_groups", f"{label}, inside groups", "--"),
            (axes[1], "participation_share", label, "-"),
        ):
            layers = [
                [float(row[column] or "nan") for row in rows.of(run, "layers")] for run in own
            ]
            means = [fmean(values) for values in zip(*filter(None, layers), strict=True)]
            if means:
                places = range(1, len(means) + 1)
                panel.plot(places, means, style, color=f"C{number}", marker="o", ms=3, label=text)
    axes[0].set(xlabel="layer", ylabel="mean |correlation|")
    axes[1].set(xlabel="layer", ylabel="participation ratio / channels", ylim=(0, None))
    for panel in axes:
        legend(panel, fontsize=8)
    return drawn(figure)


def _build(
    shown: Sequence[Measure], labels: Sequence[str], sides: Callable[[Rows], Sides], compares: bool,
    rows: Rows,
) -> Built:  # fmt: skip
    """Of the seeds that all sides have; a measure that a run has not is left out."""
    seeds = [own for own in zip(*sides(rows), strict=False) if all(rows.of(run) for run in own)]
    if not seeds:
        return Built([{"": "not run"}])
    table = []
    for measure in shown:
        found = [
            [_value(rows, run, measure.column) for run in side] for side in zip(*seeds, strict=True)
        ]
        values = [[value for value in side if value is not None] for side in found]
        if any(len(side) < len(seeds) for side in values):
            continue
        cells = {f"n = {len(seeds)} seeds": measure.text}
        for label, own in zip(labels, values, strict=True):
            cells[label] = spread(own, measure.factor, measure.digits, measure.unit)
        for label, own in list(zip(labels, values, strict=True))[1:] if compares else ():
            several = f"{label} − {labels[0]}, 95 % interval"
            head = "difference, 95 % interval" if len(labels) == 2 else several
            cells[head] = difference(values[0], own, measure.factor, measure.digits)
        table.append(cells)
    return Built(table)


def _value(rows: Rows, run: Run, column: str) -> float | None:
    found = rows.of(run)
    if column in ABLATION:
        found = [row for row in rows.of(run, "ablation") if float(row["ratio"]) == 0.5]
    return float(found[0][column]) if found and found[0][column] else None
