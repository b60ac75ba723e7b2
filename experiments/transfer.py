"""CE inserted into a trained network, which is trained further with and without CE."""

from functools import partial
from typing import Any

from experiments.result import Built, Result, Rows
from experiments.runs import Run, runs
from experiments.uncertainty import difference, spread

EPOCHS = 8
RATES = (0.005, 0.02, 0.05)
# rows of the family, and what differs from their recipes
SIDES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("plain", "plain", {}),
    ("with CE", "ce", {"ce_start": "identity"}),
)


def transfer(
    name: str, title: str, claim: str, family: str, seeds: int, dataset: str | None = None
) -> Result:
    """Both sides at every learning rate: none is chosen.

    Args:
        name: of the result.
        title: of the result.
        claim: of the result.
        family: of the recipes.
        seeds: trained networks, each of which both sides begin with.
        dataset: what they are trained on then; None for the images that they know.
    """
    trained = tuple(runs(f"{family}_plain", seeds))
    tuned = tuple(
        (rate, tuple(tuple(_tuned(family, side, rate, first, dataset) for first in trained)
                     for side in SIDES))
        for rate in RATES
    )  # fmt: skip
    needs = (*trained, *(run for _, sides in tuned for side in sides for run in side))
    # an accuracy on other images is not where the training goes on from
    before = trained if dataset is None else ()
    return Result(name, title, claim, needs, partial(_build, before, tuned))


def _tuned(
    family: str, side: tuple[str, str, dict[str, Any]], rate: float, first: Run, dataset: str | None
) -> Run:
    _, row, changes = side
    own = {"epochs": EPOCHS, "lr": rate, **changes}
    if dataset is not None:
        own["dataset"] = dataset
    return Run(f"{family}_{row}", first.seed, tuple(own.items()), begins_with=first)


def _build(trained: tuple[Run, ...], tuned: Any, rows: Rows) -> Built:
    table = []
    before = rows.values(trained, "top1")
    for rate, sides in tuned:
        pairs = [pair for pair in zip(*sides, strict=True) if all(rows.of(run) for run in pair)]
        cells = {"learning rate": f"{rate:g}", "n": str(len(pairs))}
        if trained:
            cells["before"] = spread(before, 100, 2, "%") if before else "not run"
        values = [rows.values(side, "top1") for side in zip(*pairs, strict=True)]
        for number, (label, _, _) in enumerate(SIDES):
            cells[f"fine-tuned, {label}"] = (
                spread(values[number], 100, 2, "%") if pairs else "not run"
            )
        cells["difference (95 %)"] = difference(values[0], values[1], 100, 2) if pairs else ""
        table.append(cells)
    return Built(table)
