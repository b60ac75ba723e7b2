"""The main job in three minutes on a CPU: digits, batch norm without and with CE, and a page.

Strong weight decay puts channels of the plain network to sleep; table and page show what CE
changes. The setting was chosen to show the effect: of about ten tried on these digits, those at
learning rate 0.1 left CE with as many inhibited channels as batch norm, or more.
"""

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cenet.analysis.command import FILE, examine
from cenet.analysis.diagnosis import Diagnosis
from cenet.report import write_page
from cenet.train import RECIPES
from cenet.train.logbook import METRICS, read_metrics
from cenet.train.options import Options
from cenet.train.run import Job, train

WEIGHT_DECAY = 0.04
EPOCHS = 40
ROWS = {"BN": "digits_plain", "BN+CE": "digits_ce"}
HALF = 5  # place of the ratio 0.5 in an ablation curve
Number = Callable[[Diagnosis], float]


def run_demo(out: Path, epochs: int = EPOCHS, seeds: int = 3) -> dict[str, list[Diagnosis]]:
    """Train both networks once per seed, examine them, print a table and write a page.

    Args:
        out: folder of the runs and of the page; finished runs in it are not trained again.
        epochs: of training, per network.
        seeds: how many times, each with its own initial weights and order of the images.

    Raises:
        ValueError: an argument is no use, or `out` holds other runs.
    """
    for name, value in {"epochs": epochs, "seeds": seeds}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    jobs = {(row, seed): _job(out, row, seed, epochs) for seed in range(seeds) for row in ROWS}
    _train([job for job in jobs.values() if not _is_done(job)], epochs)
    found: dict[str, list[Diagnosis]] = {row: [] for row in ROWS}
    for (row, _), job in jobs.items():
        found[row].append(Diagnosis.read(job.options.out / FILE))
    page = write_page(
        [jobs[row, 0].options.out for row in ROWS], out / "report.html",
        title="What CE changes: a small VGG on digits", lead=_lead(found, epochs),
    )  # fmt: skip
    console = Console()
    console.print(_table(found, epochs))
    console.print(f"The page to look at (seed 0): {page.resolve()}", soft_wrap=True, markup=False)
    return found


def _job(out: Path, row: str, seed: int, epochs: int) -> Job:
    recipe = replace(
        RECIPES[ROWS[row]], weight_decay=WEIGHT_DECAY, warmup_epochs=epochs / 8,
        epochs=epochs, seed=seed, accuracy=None,
    )  # fmt: skip
    return Job(recipe, Options(out / f"{row}-seed{seed}", resume="auto"), device="cpu")


def _is_done(job: Job) -> bool:
    """Whether there is nothing to train; ValueError if the folder is of another recipe."""
    if not (job.options.out / FILE).is_file():
        return False
    with contextlib.redirect_stdout(io.StringIO()):
        return bool(train(job))


def _train(jobs: Sequence[Job], epochs: int) -> None:
    """Two at a time: each keeps one core busy."""
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
    )
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        futures: list[Future[None]] = [pool.submit(_train_and_examine, job) for job in jobs]
        tasks = [progress.add_task(job.options.out.name, total=epochs) for job in jobs]
        while not all(future.done() for future in futures):
            time.sleep(0.2)
            for job, task in zip(jobs, tasks, strict=True):
                progress.update(task, completed=_epochs_done(job))
        for future in futures:
            future.result()


def _epochs_done(job: Job) -> int:
    path = job.options.out / METRICS
    return len(read_metrics(path)) if path.is_file() else 0


def _train_and_examine(job: Job) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(job)
        examine(str(job.options.out), None, job.options.out, device="cpu")


def _lead(found: dict[str, list[Diagnosis]], epochs: int) -> list[str]:
    """What a newcomer should know before the figures."""
    seeds = len(found["BN"])
    inhibited = {row: _spread([one.first_six or 0.0 for one in runs], ".1%")
                 for row, runs in found.items()}  # fmt: skip
    accuracy = {row: _spread([_accuracy(one) for one in runs], ".1%")
                for row, runs in found.items()}  # fmt: skip
    lines = [
        "The same network was trained twice on scikit-learn's 8×8 digits: with batch norm and "
        f"ReLU, and with CE between them. Weight decay is strong ({WEIGHT_DECAY}), which puts "
        "channels to sleep: they hardly respond to any image, and the network pays for them all "
        f"the same. The figures below are of seed 0; numbers here are means over {seeds} seeds, "
        "lowest to highest.",
        f"Inhibited channels: {inhibited['BN']} with batch norm, {inhibited['BN+CE']} with CE. "
        f"Test accuracy: {accuracy['BN']} and {accuracy['BN+CE']}.",
        "The setting was chosen to show this effect. Not everything moves the same way: look at "
        "the ablation curves and at the correlations too.",
    ]
    if epochs < EPOCHS:
        lines.append(f"This run has {epochs} epochs; what there is to see takes {EPOCHS}.")
    return lines


def _table(found: dict[str, list[Diagnosis]], epochs: int) -> Table:
    seeds = len(found["BN"])
    table = Table(
        title=f"small VGG on scikit-learn's digits, weight decay {WEIGHT_DECAY}",
        caption=f"{epochs} epochs, seeds 0 to {seeds - 1}: mean (lowest to highest). A channel is "
        "inhibited when its mean activation over the test images is below 0.01.",
    )
    table.add_column("")
    for row in found:
        table.add_column(row, justify="right")

    def add_row(title: str, number: Number, form: str = ".1%") -> None:
        values = ([number(one) for one in diagnoses] for diagnoses in found.values())
        table.add_row(title, *(_spread(each, form) for each in values))

    add_row("test accuracy", _accuracy)
    add_row("  without half of layer 3", _accuracy_without_half)
    table.add_section()
    for place in range(len(found["BN"][0].layers)):
        add_row(
            f"inhibited, layer {place + 1}",
            lambda one, place=place: one.layers[place].inhibited_ratio,  # type: ignore[misc]
        )
    add_row("inhibited, mean of all", lambda one: one.first_six or 0.0)
    table.add_section()
    add_row(
        "mean |correlation|",
        lambda one: fmean(layer.correlation or 0.0 for layer in one.layers),
        ".2f",
    )
    return table


def _accuracy(found: Diagnosis) -> float:
    return found.accuracy.top1 if found.accuracy else float("nan")


def _accuracy_without_half(found: Diagnosis) -> float:
    return fmean(found.ablation.top1[HALF]) if found.ablation else float("nan")


def _spread(values: list[float], form: str) -> str:
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"
