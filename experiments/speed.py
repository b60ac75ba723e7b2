"""Epochs until a network reaches the result of the plain one, each with its best settings."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from experiments.accuracy import Line
from experiments.result import Built, Result, Rows
from experiments.selection import Grid, finals, selection
from experiments.tables import Row
from experiments.uncertainty import spread

# column, what it is, and by which factor less of it is better
REACHED = (("train_loss", "last training loss", 1), ("test_top1", "last test accuracy", -1))


def learning_speed(
    name: str, title: str, claim: str, lines: Sequence[Line], grid: Grid, seeds: int
) -> Result:
    """Epochs until the last training loss and test accuracy of the first line, seed by seed."""
    return selection(name, title, claim, lines, grid, seeds, partial(_build, lines, grid, seeds))


def epochs_until(rows: Sequence[Row], column: str, target: float, sign: int) -> float | None:
    """After how many epochs a curve is at or below a target; None if it never is.

    Between the ends of two epochs the curve is a straight line; before the end of the first it is
    not known, and a target that is reached there counts as reached at its end.

    Args:
        rows: of a run, epoch by epoch.
        column: of the curve.
        target: in the column's units.
        sign: -1 for a curve that rises to its target.
    """
    before: float | None = None
    for number, row in enumerate(rows, 1):
        value = sign * float(row[column])
        if value <= sign * target:
            if before is None:
                return 1.0
            return number - 1 + (before - sign * target) / (before - value)
        before = value
    return None


def _build(lines: Sequence[Line], grid: Grid, seeds: int, rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    plain = finals(lines[0].recipe, grid, seeds, rows)
    table = []
    for line in lines:
        own = finals(line.recipe, grid, seeds, rows)
        pairs = [
            (first, found)
            for a, b in zip(plain, own, strict=False)
            if (first := rows.of(a, "epochs")) and (found := rows.of(b, "epochs"))
        ]
        cells = {"": line.label, **grid.cells(line.recipe, rows), "n": str(len(pairs))}
        for column, text, sign in REACHED:
            found = [
                (epochs_until(curve, column, float(first[-1][column]), sign), len(first))
                for first, curve in pairs
            ]
            cells[f"share of plain's updates until its {text}"] = _shares(found)
        table.append(cells)
        if pairs:
            losses = [[float(row["train_loss"]) for row in curve] for _, curve in pairs]
            means = [fmean(values) for values in zip(*losses, strict=True)]
            axes.plot(range(1, len(means) + 1), means, label=line.label)
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
    legend(axes)
    return Built(table, drawn(figure))


def _shares(found: Sequence[tuple[float | None, int]]) -> str:
    """Mean share of those that got there, and how many did not."""
    if not found:
        return "not run"
    shares = [epochs / of for epochs, of in found if epochs is not None]
    missed = len(found) - len(shares)
    text = spread(shares, 1, 3) if shares else "never"
    return f"{text} ({missed} of {len(found)} never)" if shares and missed else text
