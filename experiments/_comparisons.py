"""Comparisons that most figures and tables are: bars, ablation curves, accuracies."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib import pyplot as plt

from _experiment import Run, Study

Rows = list[dict[str, Any]]


def inhibited_and_error(found: Study, compared: Sequence[tuple[str, str]]) -> None:
    """Bars of inhibited channels and of test error, mean and range over seeds.

    Args:
        found: the study.
        compared: label and recipe of each row.
    """
    rows: Rows = []
    for label, recipe in compared:
        runs = found.repeats(recipe)
        row = {"row": label, "recipe": recipe, "n": len(runs)}
        row |= mean_and_range("inhibited", [run.inhibited for run in runs])
        row |= mean_and_range("error", [1 - run.top1 for run in runs])
        rows.append(row)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
    names = {"inhibited": "inhibited channels, first six layers", "error": "top-1 test error"}
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        values = [row[key] for row in rows]
        below = [row[key] - row[f"{key}_low"] for row in rows]
        above = [row[f"{key}_high"] - row[key] for row in rows]
        colours = ["C1" if "CE" in row["row"] else "C0" for row in rows]
        axes.bar(range(len(rows)), values, yerr=[below, above], color=colours, capsize=3, width=0.7)
        axes.set_xticks(range(len(rows)), [row["row"] for row in rows])
        axes.set_ylabel(label)
    found.write(rows, figure)


def ablation_curves(found: Study, compared: Sequence[tuple[str, str]]) -> None:
    """Accuracy while a growing share of channels is zero, mean and range over seeds and repeats.

    Args:
        found: the study.
        compared: label and recipe of each curve.
    """
    rows = [row for label, recipe in compared for row in _curve(label, found.repeats(recipe))]
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    for label, _ in compared:
        own = [row for row in rows if row["row"] == label]
        ratios = [row["ratio"] for row in own]
        (line,) = axes.plot(ratios, [row["top1"] for row in own], marker="o", ms=3, label=label)
        low, high = ([row[f"top1_{edge}"] for row in own] for edge in ("low", "high"))
        axes.fill_between(ratios, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(xlabel="share of channels set to zero", ylabel="top-1 accuracy")
    axes.legend()
    found.write(rows, figure)


def accuracies(found: Study, compared: Sequence[tuple[str, str, str, float]]) -> None:
    """A table of accuracies beside the paper's, mean and range over seeds.

    Args:
        found: the study.
        compared: network, label, recipe, and the paper's top-1 in percent.
    """
    rows: Rows = []
    for network, label, recipe, paper in compared:
        runs = found.repeats(recipe)
        row = {"network": network, "row": label, **mean_and_range("top1", [r.top1 for r in runs])}
        row |= {"top5": fmean(run.top5 for run in runs), "paper_top1": paper / 100, "n": len(runs)}
        rows.append(row)
    found.write(rows)


def mean_and_range(name: str, values: Sequence[float]) -> dict[str, float]:
    """Columns NAME, NAME_low and NAME_high."""
    return {name: fmean(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def _curve(label: str, runs: Sequence[Run]) -> Rows:
    curves = [run.diagnosis.ablation for run in runs]
    if curves[0] is None:
        raise SystemExit(f"{runs[0].folder} has no ablation curve: its images have no labels")
    rows: Rows = []
    for i, ratio in enumerate(curves[0].ratios):
        values = [value for curve in curves if curve for value in curve.top1[i]]
        rows.append({"row": label, "ratio": ratio, **mean_and_range("top1", values),
                     "n": len(values)})  # fmt: skip
    return rows
