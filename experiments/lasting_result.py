"""What becomes of learning over many tasks: accuracy reached in each, and the channels."""

from functools import partial
from statistics import fmean
from typing import NamedTuple

from experiments.result import Built, Result, Rows
from experiments.runs import LASTING, LastingRun
from experiments.uncertainty import spread

RATES = (0.005, 0.02, 0.1)
DECAYS = (0.0, 2e-3)
LATE = 5  # tasks at the end
LABELS = {"bn": "BN", "ln": "LN", "bd": "BN + BD", "ir": "BN + IR", "ce": "BN + CE"}


class Case(NamedTuple):
    """What is compared: a row of `LASTING`, with a weight decay."""

    row: str
    decay: float

    @property
    def trials(self) -> list[LastingRun]:
        """A run for each learning rate, whose seed no other run has."""
        return [self._run(rate, 0) for rate in RATES]

    def finals(self, seeds: int, rows: Rows) -> list[LastingRun]:
        """Runs at the rate at which tasks were learned best on average; none until it is known."""
        found = [rows.values([trial], "accuracy", "lasting") for trial in self.trials]
        if not all(found):
            return []
        rate = RATES[max(range(len(RATES)), key=lambda i: found[i][0])]
        return [self._run(rate, seed) for seed in range(1, seeds + 1)]

    def _run(self, rate: float, seed: int) -> LastingRun:
        return LastingRun(self.row, seed, (("lr", rate), ("weight_decay", self.decay)))


CASES = tuple(Case(row, decay) for decay in DECAYS for row in LASTING)


def lasting(name: str, title: str, claim: str, seeds: int) -> Result:
    """All rows, without and with weight decay."""
    trials = tuple(run for case in CASES for run in case.trials)
    return Result(
        name, title, claim, trials, partial(_build, seeds),
        then=partial(_finals, seeds), later=seeds * len(CASES),
    )  # fmt: skip


def _finals(seeds: int, rows: Rows) -> list[LastingRun]:
    return [run for case in CASES for run in case.finals(seeds, rows)]


def _build(seeds: int, rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, len(DECAYS), figsize=(9.5, 3.4), sharey=True)
    table = []
    for case in CASES:
        runs = case.finals(seeds, rows)
        tasks = [found for run in runs if (found := rows.of(run, "tasks"))]
        cells = {"": LABELS[case.row], "weight decay": f"{case.decay:g}"}
        cells["learning rate"] = f"{dict(runs[0].changes)['lr']:g}" if runs else "not chosen"
        cells["n"] = str(len(tasks))
        for column, text in (
            ("accuracy", "accuracy"), ("dormant_ratio", "dormant"),
            ("participation_share", "effective dimensions / channels"),
        ):  # fmt: skip
            ends = [
                [float(own[0][column]) for own in tasks],
                [fmean(float(row[column]) for row in own[-LATE:]) for own in tasks],
            ]
            for end, values in zip(("task 1", f"last {LATE} tasks"), ends, strict=True):
                cells[f"{text}, {end}"] = spread(values, 100, 1, "%") if values else "not run"
        table.append(cells)
        if tasks:
            by_run = [[100 * float(row["accuracy"]) for row in own] for own in tasks]
            curve = [fmean(values) for values in zip(*by_run, strict=True)]
            panel = axes[DECAYS.index(case.decay)]
            panel.plot(range(1, len(curve) + 1), curve, label=LABELS[case.row])
    for panel, decay in zip(axes, DECAYS, strict=True):
        panel.set(title=f"weight decay {decay:g}", xlabel="task")
    axes[0].set_ylabel("accuracy in the last epoch of a task (%)")
    legend(axes[-1])
    return Built(table, drawn(figure))
