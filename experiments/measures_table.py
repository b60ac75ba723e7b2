"""Every measure of two recipes, over seeds, with the difference and its uncertainty."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import difference, spread

# column, its name, factor and unit, digits
LINES = (
    ("top1", "top-1", 100, "%", 2),
    ("train_loss", "training loss", 1, "", 4),
    ("test_loss", "test loss", 1, "", 3),
    ("dormant_first_six", "dormant (≤ 0.1 of the layer's mean), first six layers", 100, "%", 2),
    ("dormant", "dormant, all layers", 100, "%", 2),
    ("dormant_strict", "dormant, strictly (≤ 0.025), all layers", 100, "%", 2),
    ("rare", "fire in < 1 % of the images", 100, "%", 2),
    ("weak_contribution", "contribution ≤ 0.1 of the layer's mean", 100, "%", 2),
    ("prunable", "prunable", 100, "%", 2),
    ("duplicates", "duplicates of another channel", 100, "%", 2),
    ("participation_share", "participation ratio / channels, mean of layers", 100, "%", 2),
    ("correlation", "mean absolute correlation", 1, "", 4),
    ("gini", "Gini coefficient of importance, the layer of the ablation", 1, "", 3),
    ("random", "top-1 without half of that layer, at random", 100, "%", 1),
    ("least_important_first", "top-1 without its least important half", 100, "%", 1),
    ("inhibited_first_six", "inhibited (the paper's figure), first six layers", 100, "%", 2),
    ("inhibited", "inhibited, all layers", 100, "%", 2),
    ("mean_activation", "mean activation", 1, "", 4),
)


def measures(
    name: str, title: str, claim: str, compared: tuple[tuple[str, str], tuple[str, str]],
    seeds: int, quoted: Mapping[str, str] | None = None,
) -> Result:  # fmt: skip
    """Of two labelled recipes; with `quoted`, these columns by these names, without differences."""
    lines = LINES
    if quoted is not None:
        by_column = {line[0]: line[2:] for line in LINES}
        lines = tuple((column, text, *by_column[column]) for column, text in quoted.items())
    sides = tuple(tuple(runs(recipe, seeds)) for _, recipe in compared)
    labels = tuple(label for label, _ in compared)
    needs = tuple(run for side in sides for run in side)
    build = partial(_build, lines, labels, sides, quoted is None)
    return Result(name, title, claim, needs, build, parts=("ablation",))


def _build(
    lines: Any, labels: tuple[str, ...], sides: tuple[tuple[Run, ...], ...], compares: bool,
    rows: Rows,
) -> Built:  # fmt: skip
    pairs = [pair for pair in zip(*sides, strict=True) if all(rows.of(run) for run in pair)]
    if not pairs:
        return Built([{"": "not run"}])
    table = []
    for column, name, factor, unit, digits in lines:
        values = [[_value(rows, run, column) for run in side] for side in zip(*pairs, strict=True)]
        cells = {f"n = {len(pairs)} seeds": name}
        for label, own in zip(labels, values, strict=True):
            cells[label] = spread(own, factor, digits, unit)
        if compares:
            cells["difference, 95 % interval"] = difference(*values, factor, digits)
        table.append(cells)
    return Built(table)


def _value(rows: Rows, run: Run, column: str) -> float:
    if column in ("random", "least_important_first"):
        (half,) = (row for row in rows.of(run, "ablation") if float(row["ratio"]) == 0.5)
        return float(half[column])
    return float(rows.of(run)[0][column])
