"""Figures of measures: bars over recipes, ablation curves, sweeps of a field, curves by epoch."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import spread

Labelled = Sequence[tuple[str, Any]]
ONE: Mapping[str, int] = {}  # seed for each recipe


def bars(
    name: str, title: str, claim: str, compared: Labelled, seeds: Mapping[str, int] = ONE
) -> Result:
    """The paper's inhibited channels, dormant channels and test error of labelled recipes."""
    found = labelled(compared, seeds)
    return Result(name, title, claim, all_of(found), partial(_bars, found))


def _bars(compared: Sequence[tuple[str, tuple[Run, ...]]], rows: Rows) -> Built:
    from experiments.drawing import drawn, plt

    panels = (
        ("inhibited_first_six", "inhibited, first six layers"),
        ("dormant", "dormant, all layers"),
        ("error", "top-1 test error"),
    )
    there = [(label, [run for run in own if rows.of(run)]) for label, own in compared]
    table = []
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for label, own in there:
        columns = {key: _values(rows, own, key) for key, _ in panels}
        cells = {"": label, "n": str(len(own))}
        for key, text in panels:
            cells[text] = spread(columns[key], 100, 2, "%") if own else "not run"
        table.append(cells)
    for panel, (key, text) in zip(axes, panels, strict=True):
        for place, (label, own) in enumerate(there):
            values = [100 * value for value in _values(rows, own, key)]
            if values:
                mean = fmean(values)
                reach = [[mean - min(values)], [max(values) - mean]]
                colour = "C1" if "CE" in label else "C0"
                panel.bar(place, mean, yerr=reach, color=colour, capsize=3, width=0.7)
        panel.set_xticks(range(len(there)), [label for label, _ in there])
        panel.set_ylabel(f"{text} (%)")
    return Built(table, drawn(figure))


def _values(rows: Rows, own: Sequence[Run], key: str) -> list[float]:
    if key == "error":
        return [1 - value for value in rows.values(own, "top1")]
    return rows.values(own, key)


def ablation(
    name: str, title: str, claim: str, compared: Labelled, seeds: Mapping[str, int] = ONE
) -> Result:
    """Accuracy while channels of one layer are set to zero, at random and by importance."""
    found = labelled(compared, seeds)
    build = partial(_ablation, found)
    return Result(name, title, claim, all_of(found), build, parts=("ablation",))


def _ablation(compared: Sequence[tuple[str, tuple[Run, ...]]], rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.4), sharey=True)
    kinds = (("random", "channels at random"), ("least_important_first", "least important first"))
    table = []
    for label, own in compared:
        cells = {"": label, "n": str(sum(bool(rows.of(run, "ablation")) for run in own))}
        for panel, (key, text) in zip(axes, kinds, strict=True):
            curves: dict[float, list[float]] = {}
            for run in own:
                for row in rows.of(run, "ablation"):
                    curves.setdefault(float(row["ratio"]), []).append(float(row[key]))
            ratios = sorted(curves)
            if len(ratios) > 1:
                means = [100 * fmean(curves[ratio]) for ratio in ratios]
                panel.plot(ratios, means, marker="o", ms=3, label=label)
            half = curves.get(0.5)
            cells[f"top-1 without half, {text}"] = spread(half, 100, 1, "%") if half else "not run"
            panel.set(title=text, xlabel="share of channels set to zero")
        table.append(cells)
    axes[0].set_ylabel("top-1 accuracy (%)")
    legend(axes[0])
    return Built(table, drawn(figure))


def sweep(
    name: str, title: str, claim: str, compared: Labelled, field: str, values: Sequence[Any],
    columns: Labelled, seeds: int = 1, **fixed: Any,
) -> Result:  # fmt: skip
    """Columns of the rows against a field of the recipe, of which others may be fixed."""
    found = tuple(
        (label, tuple((value, tuple(runs(recipe, seeds, **fixed, **{field: value})))
                      for value in values))
        for label, recipe in compared
    )  # fmt: skip
    needs = tuple(run for _, points in found for _, own in points for run in own)
    return Result(name, title, claim, needs, partial(_sweep, found, field, columns))


def _sweep(compared: Any, field: str, columns: Labelled, rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, len(columns), figsize=(4 * len(columns), 3.2), squeeze=False)
    table = []
    for label, points in compared:
        for panel, (text, column) in zip(axes[0], columns, strict=True):
            known = [(value, rows.values(own, column)) for value, own in points]
            known = [(value, found) for value, found in known if found]
            xs, ys = [x for x, _ in known], [100 * fmean(y) for _, y in known]
            if len(known) > 1:
                panel.plot(xs, ys, marker="o", ms=3, label=label)
            panel.set(xlabel=field.replace("_", " "), ylabel=f"{text} (%)")
        for value, own in points:
            there = [run for run in own if rows.of(run)]
            cells = {"": label, field.replace("_", " "): str(value), "n": str(len(there))}
            for text, column in columns:
                cells[text] = (
                    spread(rows.values(there, column), 100, 2, "%") if there else "not run"
                )
            table.append(cells)
    legend(axes[0][0])
    return Built(table, drawn(figure))


def curves(
    name: str, title: str, claim: str, compared: Labelled, seeds: Mapping[str, int] = ONE
) -> Result:
    """Error of training and test by epoch."""
    found = labelled(compared, seeds)
    return Result(name, title, claim, all_of(found), partial(_curves, found))


def _curves(compared: Sequence[tuple[str, tuple[Run, ...]]], rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    table = []
    for number, (label, own) in enumerate(compared):
        there = [run for run in own if rows.of(run, "epochs")]
        cells = {"": label, "n": str(len(there))}
        for part, column, style in (("training", "train_top1", "--"), ("test", "test_top1", "-")):
            by_epoch = [
                [100 * (1 - float(row[column])) for row in rows.of(run, "epochs")] for run in there
            ]
            means = [fmean(values) for values in zip(*by_epoch, strict=False)]
            if means:
                axes.plot(
                    range(1, len(means) + 1), means, style, color=f"C{number}",
                    label=f"{label}, {part}",
                )  # fmt: skip
            last = [values[-1] / 100 for values in by_epoch]
            cells[f"{part} error"] = spread(last, 100, 2, "%") if last else "not run"
        table.append(cells)
    axes.set(xlabel="epoch", ylabel="top-1 error (%)")
    legend(axes, ncols=2, fontsize=8)
    return Built(table, drawn(figure))


def labelled(compared: Labelled, seeds: Mapping[str, int]) -> Any:
    """The runs of each recipe: as many as `seeds` has for it, else one."""
    return tuple((label, tuple(runs(recipe, seeds.get(recipe, 1)))) for label, recipe in compared)


def all_of(compared: Sequence[tuple[str, tuple[Run, ...]]]) -> tuple[Run, ...]:
    """The runs of all labels."""
    return tuple(run for _, own in compared for run in own)
