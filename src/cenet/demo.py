"""`cenet demo`: train a small VGG without and with CE on digits, on a CPU, and write a page.

Both networks are trained by the recipes `digits_plain` and `digits_ce` as they stand, which differ
only in CE; no setting was tuned. Table and page show what CE changes here and what it
does not, by measures that do not depend on the scale of a layer.
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
from typing import Any, NamedTuple

from cenet.extras import require

require("demo")

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table
from torch import nn

from cenet.analysis.channels import RARE
from cenet.analysis.diagnosis import FILE, Diagnosis
from cenet.arguments import progress_bar
from cenet.diagnosing.command import diagnose_loaded, diagnose_named
from cenet.diagnosing.network import find_network
from cenet.formatting import count, percent
from cenet.report import write_page
from cenet.run_folder import METRICS, read_metrics
from cenet.train import RECIPES
from cenet.train.job import Job, train
from cenet.train.options import Options

ROWS = {"BN": "digits_plain", "BN+CE": "digits_ce"}
RESCALED = "BN, rescaled"
FACTOR = 0.01
RECIPE = RECIPES[ROWS["BN"]]
HALF = 5  # place of the ratio 0.5 in an ablation curve


class Finished(NamedTuple):
    """Metrics and diagnosis of a trained network."""

    metrics: list[dict[str, Any]]  # a row per epoch
    diagnosis: Diagnosis


class Measure(NamedTuple):
    """A row of the table."""

    title: str
    value: Callable[[Finished], float]
    text: Callable[[float], str] = percent


Runs = dict[str, list[Finished]]  # by row of the comparison, one per seed


def run_demo(out: Path, epochs: int = RECIPE.epochs, seeds: int = 3) -> Runs:
    """Train both networks once per seed, diagnose them, print a table and write a page.

    Args:
        out: folder of the runs and of the page; finished runs in it are not trained again.
        epochs: epochs of training per network.
        seeds: number of trainings per network, each with its own seed.

    Raises:
        ValueError: an argument is out of range, or `out` holds other runs.
    """
    for name, value in {"epochs": epochs, "seeds": seeds}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    jobs = {(row, seed): _job(out, row, seed, epochs) for seed in range(seeds) for row in ROWS}
    _train([job for job in jobs.values() if not _is_done(job)], epochs)
    found: Runs = {row: [] for row in (*ROWS, RESCALED)}
    for (row, _), job in jobs.items():
        found[row].append(_read(job.options.out, job.options.out))
        if row == "BN":
            found[RESCALED].append(_read(job.options.out, _rescaled_folder(job)))
    lead = [*headline(found), about_scale(found), "Figures and tables below are of seed 0."]
    page = write_page(
        [jobs[row, 0].options.out for row in ROWS], out / "report.html",
        title="What CE changes: a small VGG on digits", lead=lead,
    )  # fmt: skip
    console = Console()
    console.print(_table(found))
    for line in lead[:-1]:
        console.print(line, highlight=False, markup=False)
    console.print(f"The page (seed 0): {page.resolve()}", soft_wrap=True, markup=False)
    return found


def _read(run: Path, measured: Path) -> Finished:
    return Finished(read_metrics(run / METRICS), Diagnosis.read(measured / FILE))


def _rescaled_folder(job: Job) -> Path:
    return job.options.out / "rescaled"


def _job(out: Path, row: str, seed: int, epochs: int) -> Job:
    recipe = RECIPES[ROWS[row]]
    warmup = min(recipe.warmup_epochs, epochs / 4)  # a shorter run has a shorter warm-up
    recipe = replace(recipe, epochs=epochs, warmup_epochs=warmup, seed=seed, accuracy=None)
    return Job(recipe, Options(out / f"{row}-seed{seed}", resume="auto"), device="cpu")


def _is_done(job: Job) -> bool:
    """Whether there is nothing to train; ValueError if the folder is of another recipe."""
    folders = [job.options.out]
    if job.recipe.block == "plain":
        folders.append(_rescaled_folder(job))
    if not all((folder / FILE).is_file() for folder in folders):
        return False
    with contextlib.redirect_stdout(io.StringIO()):
        return bool(train(job))


def _train(jobs: Sequence[Job], epochs: int) -> None:
    """Run the jobs, two at a time: each keeps one core busy."""
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
    )
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        progress_bar(*columns, shown=True) as progress,
    ):
        futures: list[Future[None]] = [pool.submit(_train_and_diagnose, job) for job in jobs]
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


def _train_and_diagnose(job: Job) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(job)
        found, _ = diagnose_named(str(job.options.out), None, device="cpu")
        found.write(job.options.out / FILE)
        if job.recipe.block == "plain":
            loaded = find_network(str(job.options.out))
            rescale_(loaded.network, FACTOR)
            found, _ = diagnose_loaded(loaded, None, device="cpu")
            found.write(_rescaled_folder(job) / FILE)


@torch.no_grad()
def rescale_(network: nn.Module, factor: float) -> None:
    """Multiply every layer of a plain VGG by a factor; the weights that read it undo that."""
    readers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm, reader in zip(norms, readers[1:], strict=True):
        norm.weight.mul_(factor)
        norm.bias.mul_(factor)
        reader.weight.div_(factor)


def headline(found: Runs) -> list[str]:
    """The paragraphs above the figures: what CE changed, and what it did not."""
    seeds, epochs = len(found["BN"]), len(found["BN"][0].metrics)
    apart = [measure for measure in MEASURES if _is_apart(measure, found)]
    same = [measure for measure in MEASURES if measure not in apart]
    lines = [
        "The same network was trained with batch norm and ReLU, and with CE between them, on "
        f"scikit-learn's 8×8 digits: {count(epochs, 'epoch')}, {count(seeds, 'seed')}, by the "
        "recipes digits_plain and digits_ce as they stand. No setting was chosen for its result.",
        _sentence("CE changed (no overlap between seeds)", apart, found),
        _sentence(
            "No clear difference (the seeds overlap)" if seeds > 1 else "One seed", same, found
        ),
        "By construction, CE decorrelates channels, so that they vary in more dimensions. "
        "Digits are too easy to show whether that helps; docs/results.md has larger networks.",
    ]
    if epochs < RECIPE.epochs:
        lines.append(f"Only {epochs} of the recipe's {RECIPE.epochs} epochs were run.")
    return [line for line in lines if line]


def about_scale(found: Runs) -> str:
    """A paragraph on how rescaling the layers moves the paper's figure."""
    means = (fmean(PAPER.value(run) for run in found[row]) for row in ("BN", RESCALED))
    before, after = map(percent, means)
    return (
        f"The paper counts channels as inhibited by an absolute threshold: {before} of the "
        f"batch norm network's, but {after} of the same network with every layer multiplied "
        f"by {FACTOR:g} and the weights that read it by {1 / FACTOR:g}, which computes the same "
        "function. The measures above do not move."
    )


def _sentence(start: str, measures: Sequence[Measure], found: Runs) -> str:
    if not measures:
        return ""
    parts = []
    for title, value, text in measures:
        before, after = (text(fmean(value(one) for one in found[row])) for row in ROWS)
        both = f"{title} {before} in both"
        parts.append(f"{title} {before} → {after}" if before != after else both)
    return f"{start}: {'; '.join(parts)}."


def _is_apart(measure: Measure, found: Runs) -> bool:
    """Whether the values of all seeds of one network lie above all of the other."""
    one, other = ([measure.value(run) for run in found[row]] for row in ROWS)
    return len(one) > 1 and (max(one) < min(other) or max(other) < min(one))


def _table(found: Runs) -> Table:
    seeds, epochs = len(found["BN"]), len(found["BN"][0].metrics)
    table = Table(
        title="small VGG on scikit-learn's digits, batch norm without and with CE",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=f"{count(epochs, 'epoch')}, {count(seeds, 'seed')}: mean (lowest to highest). "
        "dormant: at most 0.1 of the mean activation of its layer. effective dimensions: the "
        f"participation ratio. {RESCALED}: the same network, every layer × "
        f"{FACTOR:g} and the weights that read it × {1 / FACTOR:g}. inhibited: the paper's figure, "
        "mean activation < 0.01.",
    )
    table.add_column("", overflow="fold")
    for row in found:
        table.add_column(row, justify="right", no_wrap=True)
    for title, value, text in (*MEASURES, PAPER):
        spreads = (_spread([value(one) for one in found[row]], text) for row in ROWS)
        table.add_row(title, *spreads, text(fmean(value(one) for one in found[RESCALED])))
    return table


def _accuracy(run: Finished) -> float:
    return run.diagnosis.accuracy.top1 if run.diagnosis.accuracy else float("nan")


def _first_epoch(run: Finished) -> float:
    """The first epoch with the test accuracy of the recipe; one more than all epochs if none."""
    assert RECIPE.accuracy is not None
    reached = (row["epoch"] for row in run.metrics if row["test_top1"] >= RECIPE.accuracy)
    return float(next(reached, len(run.metrics) + 1))


def _without_half(run: Finished) -> float:
    curve = run.diagnosis.ablation
    return fmean(curve.top1[HALF]) if curve else float("nan")


def _without_least_half(run: Finished) -> float:
    curve = run.diagnosis.ablation
    return curve.least_important_first[HALF] if curve else float("nan")


def _share(name: str) -> Callable[[Finished], float]:
    def share(run: Finished) -> float:
        layers = run.diagnosis.layers
        found: int = sum(len(getattr(layer, name)) for layer in layers)
        return found / sum(layer.channels for layer in layers)

    return share


def _dimensions(run: Finished) -> float:
    return fmean(layer.participation_share or 0.0 for layer in run.diagnosis.layers)


MEASURES = (
    Measure("test accuracy", _accuracy),
    Measure(
        f"epochs until {percent(RECIPE.accuracy or 0, '.0f')} accuracy",
        _first_epoch,
        "{:.1f}".format,
    ),
    Measure("accuracy, random half of layer 3 off", _without_half),
    Measure("accuracy, least important half off", _without_least_half),
    Measure("dormant channels", _share("dormant")),
    Measure(f"fire in < {percent(RARE, 'g')} of images", _share("rare")),
    Measure("effective dimensions / channels", _dimensions),
    Measure(
        "mean |correlation|",
        lambda run: fmean(layer.correlation or 0.0 for layer in run.diagnosis.layers),
        "{:.2f}".format,
    ),
)
PAPER = Measure("inhibited, first six layers", lambda run: run.diagnosis.first_six or 0.0)


def _spread(values: list[float], text: Callable[[float], str]) -> str:
    mean, low, high = map(text, (fmean(values), min(values), max(values)))
    return f"{mean} ({low.removesuffix(' %')}–{high})"
