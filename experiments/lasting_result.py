"""Results of learning over many tasks: the accuracy reached in each, and the channels."""

from functools import partial
from statistics import fmean
from typing import NamedTuple

from experiments.lasting import Course
from experiments.result import Built, Result, Rows
from experiments.runs import LASTING, LastingRun
from experiments.uncertainty import spread

RATES = (0.005, 0.02, 0.1)
DECAYS = (0.0, 2e-3)
LATE = 5  # tasks at the end
LABELS = {"bn": "BN", "ln": "LN", "bd": "BN + BD", "ir": "BN + IR", "ce": "BN + CE"}


class Case(NamedTuple):
    """What is compared: a row of `LASTING`, with a weight decay, in a network."""

    row: str
    decay: float
    network: str

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
        changes = {"lr": rate, "weight_decay": self.decay}
        if self.network != Course.network:
            changes["network"] = self.network
        return LastingRun(self.row, seed, tuple(sorted(changes.items())))


def lasting(name: str, title: str, claim: str, network: str, seeds: int) -> Result:
    """All rows, without and with weight decay."""
    cases = cases_of(network)
    trials = tuple(run for case in cases for run in case.trials)
    return Result(
        name, title, claim, trials, partial(_build, cases, seeds),
        then=partial(_finals, cases, seeds), later=seeds * len(cases),
    )  # fmt: skip


def cases_of(network: str) -> list[Case]:
    """Everything that is compared in a network."""
    return [Case(row, decay, network) for decay in DECAYS for row in LASTING]


def _finals(cases: list[Case], seeds: int, rows: Rows) -> list[LastingRun]:
    return [run for case in cases for run in case.finals(seeds, rows)]


def _build(cases: list[Case], seeds: int, rows: Rows) -> Built:
    from experiments.drawing import drawn, legend, plt

    figure, axes = plt.subplots(1, len(DECAYS), figsize=(9.5, 3.4), sharey=True)
    table = []
    for case in cases:
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
