"""λ, the share of batch decorrelation in CE: by layer after training, and while training."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from experiments.accuracy import Line
from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.selection import Grid, finals, next_runs
from experiments.uncertainty import spread

Curve = dict[int, list[float]]  # λ of the seeds, by epoch


def mixing(
    name: str, title: str, claim: str, fixed: Sequence[Line], chosen: Sequence[Line], grid: Grid,
    seeds: int,
) -> Result:  # fmt: skip
    """Of recipes as they stand, and of recipes at the settings that a grid chooses."""
    recipes = [line.recipe for line in chosen]
    needs = (
        *(run for line in fixed for run in runs(line.recipe, seeds)),
        *(run for recipe in recipes for run in grid.trials(recipe)),
    )

    def sides(rows: Rows) -> list[tuple[str, list[Run]]]:
        return [
            *((line.network, runs(line.recipe, seeds)) for line in fixed),
            *((line.network, finals(line.recipe, grid, seeds, rows)) for line in chosen),
        ]

    then = partial(next_runs, recipes, grid, seeds)
    build = partial(_build, sides)
    return Result(name, title, claim, needs, build, then=then, later=seeds * len(recipes))


def _build(sides: Any, rows: Rows) -> Built:
    found = [(network, [run for run in own if rows.of(run)]) for network, own in sides(rows)]
    table = []
    for network, own in found:
        cells = {"": network, "n": str(len(own)), "CE layers": "not run"}
        if own:
            by_layer = _after_training(rows, own)
            means = {layer: fmean(values) for layer, values in by_layer.items()}
            seeds = [fmean(values) for values in zip(*by_layer.values(), strict=True)]
            cells |= {"CE layers": str(len(by_layer)), "λ, mean of layers": spread(seeds, 1, 3)}
            for word, choose in (("smallest", min), ("largest", max)):
                layer = choose(means, key=lambda one: means[one])
                cells[f"{word} λ of a layer"] = f"{spread(by_layer[layer], 1, 3)} (`{layer}`)"
        table.append(cells)
    return Built(table, _figure([(network, own) for network, own in found if own], rows))


def _figure(networks: Sequence[tuple[str, list[Run]]], rows: Rows) -> Any:
    """Networks side by side: λ by layer after training, and below it while training, if known."""
    from experiments.drawing import plt

    if not networks:
        return None
    curves = [_while_training(rows, own) for _, own in networks]
    lines, columns = 1 + any(curves), len(networks)
    size = (3.6 * columns, 2.8 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for panel, (network, own) in zip(axes[0], networks, strict=True):
        for place, values in enumerate(_after_training(rows, own).values(), 1):
            panel.plot([place] * len(values), values, "o", ms=4, color="C1", alpha=0.6)
        panel.set(xlabel="CE layer, from the first to the last", ylim=(0, 1))
        panel.set_title(network, fontsize=10)
    axes[0][0].set_ylabel("λ after training")
    for panel, by_layer in zip(axes[-1] if any(curves) else (), curves, strict=False):
        for place, curve in enumerate(by_layer.values()):
            colour = plt.get_cmap("viridis")(place / max(1, len(by_layer) - 1))
            panel.plot([*curve], [fmean(values) for values in curve.values()], color=colour)
        panel.set_xlabel("epoch (a line for each layer, brighter with depth)")
    if any(curves):
        axes[-1][0].set_ylabel("λ while training")
    return figure


def _after_training(rows: Rows, own: Sequence[Run]) -> dict[str, list[float]]:
    """λ of the seeds, by layer."""
    found: dict[str, list[float]] = {}
    for run in own:
        for row in rows.of(run, "layers"):
            if row["lambda"]:
                found.setdefault(row["title"], []).append(float(row["lambda"]))
    return found


def _while_training(rows: Rows, own: Sequence[Run]) -> dict[str, Curve]:
    """λ of the seeds, by layer and epoch."""
    found: dict[str, Curve] = {}
    for run in own:
        for row in rows.of(run, "lambdas"):
            curve = found.setdefault(row["layer"], {})
            curve.setdefault(int(row["epoch"]), []).append(float(row["lambda"]))
    return found
