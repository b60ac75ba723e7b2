"""The main comparison: top-1 of plain networks, with SE and with CE, and the differences."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.result import Built, Result, Rows
from experiments.runs import Run
from experiments.uncertainty import difference, paired, spread

Sides = dict[str, list[Run]]  # runs by label, seed by seed
PLAIN, SE, CE = "plain", "SE", "CE"
AGAINST = (PLAIN, SE)
MEASURES = (
    ("top1", "top-1 (points)", 100), ("train_loss", "training loss", 1),
    ("test_loss", "test loss", 1),
)  # fmt: skip


class Comparison(NamedTuple):
    """Networks that differ in what follows their norms: a title, and their runs given the rows."""

    title: str
    sides: Callable[[Rows], Sides]


def summary(name: str, title: str, claim: str, compared: Sequence[Comparison]) -> Result:
    """What other results have run; it needs no run of its own."""
    return Result(name, title, claim, (), partial(_build, compared))


def _build(compared: Sequence[Comparison], rows: Rows) -> Built:
    table = []
    for one in compared:
        sides = one.sides(rows)
        cells = {"": one.title}
        for label in (PLAIN, SE, CE):
            values = rows.values(sides.get(label, []), "top1")
            found = f"{spread(values, 100, 2, '%')} (n = {len(values)})" if values else "not run"
            cells[f"top-1, {label}"] = found if label in sides else "–"
        for label in AGAINST:
            pair = _pairs(rows, sides, label, "top1")
            cells[f"CE − {label}, 95 % interval"] = difference(*pair, 100, 2) if pair else ""
        table.append(cells)
    return Built(table, _figure(compared, rows))


def _pairs(rows: Rows, sides: Sides, label: str, column: str) -> list[list[float]]:
    """A column of the runs of this label and of those with CE, where a seed has both."""
    both = zip(sides.get(label, []), sides.get(CE, []), strict=False)
    seeds = [pair for pair in both if all(rows.of(run) for run in pair)]
    return [rows.values(side, column) for side in zip(*seeds, strict=True)]


def _figure(compared: Sequence[Comparison], rows: Rows) -> Any:
    """Differences with their intervals; only of what several seeds have."""
    from experiments.drawing import legend, plt

    known = [one for one in compared if _several(rows, one)]
    if not known:
        return None
    size = (9.5, 1.2 + 0.5 * len(known))
    figure, axes = plt.subplots(1, len(MEASURES), figsize=size, sharey=True)
    for panel, (column, text, factor) in zip(axes, MEASURES, strict=True):
        panel.axvline(0, color="#999999", lw=1)
        for number, label in enumerate(AGAINST):
            places, means, reach = [], [], []
            for place, one in enumerate(known):
                pair = _pairs(rows, one.sides(rows), label, column)
                if pair and len(pair[0]) > 1:
                    found = paired(*([factor * value for value in side] for side in pair))
                    places.append(place + 0.16 * (2 * number - 1))
                    means.append(found.mean)
                    reach.append(found.mean - (found.low or 0.0))
            if places:
                panel.errorbar(means, places, xerr=reach, fmt="o", ms=4, capsize=3,
                               color=f"C{number}", label=f"CE − {label}")  # fmt: skip
        panel.set(xlabel=text)
    axes[0].set_yticks(range(len(known)), [one.title for one in known])
    axes[0].set_ylim(len(known) - 0.5, -0.5)
    legend(axes[-1], fontsize=8)
    return figure


def _several(rows: Rows, one: Comparison) -> bool:
    return any(len(pair[0]) > 1 for label in AGAINST
               if (pair := _pairs(rows, one.sides(rows), label, "top1")))  # fmt: skip
