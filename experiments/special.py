"""Results beyond a comparison of recipes: wrong labels, correlation by depth, β."""

from functools import partial
from statistics import fmean
from typing import Any

from cenet.formatting import percent
from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.tables import Row
from experiments.uncertainty import spread


def label_corruption(
    name: str, title: str, claim: str, shares: tuple[float, ...], seeds: int = 1
) -> Result:
    """Test error after equal epochs, and where CE's training error is nearest to BN's last."""
    found = tuple(
        (
            share,
            tuple(
                tuple(runs(recipe, seeds, **_corrupted(share)))
                for recipe in ("vgg16_plain", "vgg16_ce")
            ),
        )
        for share in shares
    )
    needs = tuple(run for _, pair in found for own in pair for run in own)
    return Result(name, title, claim, needs, partial(_corruption, found))


def _corrupted(share: float) -> dict[str, Any]:
    """Labels drawn from all classes, the usual protocol; nothing if there are none to draw."""
    return {"label_corruption": share, "label_corruption_to": "any"} if share else {}


def _corruption(found: Any, rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    labels = ("BN", "CE", "CE, as BN in training")
    table: list[dict[str, str]] = []
    curves: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    for share, (plain, ce) in found:
        errors: dict[str, list[float]] = {label: [] for label in labels}
        for one, other in zip(plain, ce, strict=True):
            a, b = rows.of(one, "epochs"), rows.of(other, "epochs")
            if not a or not b:
                continue
            reached = float(a[-1]["train_top1"])
            matched = min(b, key=lambda row: abs(float(row["train_top1"]) - reached))
            for label, row in zip(labels, (a[-1], b[-1], matched), strict=True):
                errors[label].append(1 - float(row["test_top1"]))
        cells = {"wrong labels": percent(share, ".0f"), "n": str(len(errors["BN"]))}
        for label in labels:
            values = errors[label]
            cells[f"test error, {label}"] = spread(values, 100, 2, "%") if values else "not run"
            if values:
                curves[label].append((share, 100 * fmean(values)))
        table.append(cells)
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    for label, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
    axes.set(xlabel="share of training labels that were drawn anew", ylabel="top-1 test error (%)")
    legend(axes)
    return Built(table, drawn(figure))


def correlation(name: str, title: str, claim: str, compared: tuple[tuple[str, str], ...]) -> Result:
    """Mean absolute correlation: in two layers during training, and by layer afterwards.

    Over all pairs of channels; by layer also over the pairs inside groups.
    """
    found = tuple((label, runs(recipe, watched=True)[0]) for label, recipe in compared)
    return Result(name, title, claim, tuple(run for _, run in found), partial(_correlation, found))


def _correlation(compared: tuple[tuple[str, Run], ...], rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3))
    table = []
    for label, run in compared:
        looks = rows.of(run, "looks")
        if not looks:
            table.append({"": label, "all layers, all pairs": "not run"})
            continue
        names = list(dict.fromkeys(look["layer"] for look in looks))
        for panel, depth in ((axes[0], 1), (axes[1], len(names) - 2)):
            own = [look for look in looks if look["layer"] == names[depth]]
            steps = [int(look["step"]) for look in own]
            panel.plot(steps, [float(look["correlation"] or "nan") for look in own], label=label)
            panel.set(title=f"layer {depth + 1}", xlabel="update", ylabel="mean |correlation|")
        cells = {"": label}
        colour = axes[0].lines[-1].get_color()
        for column, pairs, style in (
            ("correlation", "all pairs", "-"), ("correlation_in_groups", "inside groups", "--"),
        ):  # fmt: skip
            final = [float(row[column] or "nan") for row in rows.of(run, "layers")]
            axes[2].plot(
                range(1, len(final) + 1), final, style, color=colour, marker="o", ms=3,
                label=f"{label}, {pairs}",
            )  # fmt: skip
            cells[f"shallow (layer 2), {pairs}"] = f"{final[1]:.3f}"
            cells[f"deep (last but one), {pairs}"] = f"{final[-2]:.3f}"
            cells[f"all layers, {pairs}"] = f"{fmean(final):.3f}"
        table.append(cells)
    axes[2].set(title="after training", xlabel="layer", ylabel="mean |correlation|")
    legend(axes[2], fontsize=8)
    return Built(table, drawn(figure))


def betas(
    name: str, title: str, claim: str, compared: tuple[tuple[str, str, float], ...]
) -> Result:
    """Share of β ≤ 0 in all batch norms of plain networks, and in those right before a ReLU."""
    found = tuple((label, runs(recipe)[0], paper) for label, recipe, paper in compared)
    return Result(name, title, claim, tuple(run for _, run, _ in found), partial(_betas, found))


def _betas(compared: tuple[tuple[str, Run, float], ...], rows: Rows) -> Built:
    table = []
    for label, run, paper in compared:
        cells = {"": label}
        for places, text in (("betas", "all batch norms"), ("relu_betas", "directly before ReLU")):
            found = [row for row in rows.of(run) if row[places]]
            cells[f"β ≤ 0, {text}"] = _share(found[0], places) if found else "not run"
        table.append(cells | {"paper": f"{paper} %"})
    return Built(table)


def _share(row: Row, places: str) -> str:
    count = int(row[places])
    share = int(row[f"{places}_nonpositive"]) / max(count, 1)
    return f"{percent(share)} of {count:,}" if count else "none"
