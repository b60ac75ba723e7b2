"""Collects the rows of a finished and diagnosed run from its folder."""

import csv
import json
from dataclasses import asdict
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from cenet.analysis.diagnosis import COUNTED, FILE, Diagnosis, Layer
from cenet.run_folder import ABOUT, CHANNELS, LAMBDA, METRICS, read_metrics
from cenet.train.recipes import TrainingRecipe, read_run
from experiments.catalogue import RESULTS
from experiments.detection import last_row
from experiments.lasting import ABOUT as LASTING
from experiments.lasting import TASKS
from experiments.runs import DetectorRun, LastingRun, Run

LAMBDAS = 24  # epochs whose λ are kept
FIRST = 6  # layers of the paper's single figure
# of a trial whose loss became infinite: no setting is worse
WORST = {
    "top1": 0.0, "top5": 0.0, "train_loss": inf, "train_top1": 0.0, "test_loss": inf,
}  # fmt: skip
CURVES = ("train_loss", "train_top1", "test_loss", "test_top1", "test_top5", "seconds")

Rows = list[dict[str, Any]]


def collect(run: Run, folder: Path, command: str, commit: str = "") -> dict[str, Rows]:
    """Rows by table.

    Args:
        run: what was trained, to its end or, if it is a trial, until its loss was not finite.
        folder: of the run.
        command: that trained it.
        commit: of the code, where git is not at hand.

    Raises:
        ValueError: the folder holds another run, or a diagnosis of an earlier version.
    """
    if isinstance(run, LastingRun):
        return _tasks(run, folder, command, commit)
    recipe, _ = read_run(folder, type(run.made))
    check_same(run, recipe, folder)
    metrics = read_metrics(folder / METRICS)
    environment = json.loads((folder / ABOUT).read_text())["environment"]
    about: dict[str, Any] = {
        "name": run.name, "recipe": run.recipe,
        "changes": " ".join(f"{name}={value}" for name, value in run.changes),
        "seed": run.seed, "epochs": len(metrics), "precision": recipe.precision,
        "command": command, "commit": commit or environment["commit"],
        "device": environment["device"], "torch": environment["torch"],
        "seconds": sum(row["seconds"] for row in metrics),
    }  # fmt: skip
    if isinstance(run, DetectorRun):
        return {"detections": [about | last_row(folder)]}
    if run.is_trial:
        diverged = len(metrics) < recipe.epochs
        return {"trials": [about | (WORST if diverged else _accuracies(metrics))]}
    found = Diagnosis.read(folder / FILE)
    if found.batch_norms is None:
        raise ValueError(
            f"{folder / FILE} is of an earlier version and has no batch_norms and no "
            "magnitude_before; remove it, and the same command measures again"
        )
    parts = parts_of(run)
    name = {"name": run.name}
    return {
        "runs": [about | _accuracies(metrics) | _of_the_network(found)],
        "layers": [name | _of_a_layer(i, layer) for i, layer in enumerate(found.layers)],
        "epochs": [
            name | {"epoch": row["epoch"]} | {column: row[column] for column in CURVES}
            for row in metrics
        ],
        "lambdas": [name | row for row in _lambdas(metrics)],
        "ablation": [name | row for row in _ablation(found)],
        "looks": [name | row for row in _looks(folder)] if run.watched else [],
        "maps": [name | row for row in _map(found.layers[0])] if "maps" in parts else [],
        "cams": [name | row for row in _cams(found)] if "cams" in parts else [],
    }


@cache
def parts_of(run: Run) -> frozenset[str]:
    """Tables that the run fills because a figure or table shows them."""
    return frozenset(
        part
        for result in RESULTS.values()
        for part in result.parts
        if any(run in (own, own.smoke()) for own in result.needs)
    )


def check_same(run: Run, recipe: TrainingRecipe, folder: Path) -> None:
    """Raise ValueError if the folder holds a run of another recipe."""
    expected, found = run.made.as_dict(), recipe.as_dict()
    # what a recipe is known to reach moves nothing, and rows say their precision
    differ = [
        name
        for name in expected
        if name not in ("accuracy", "precision") and found[name] != expected[name]
    ]
    if differ:
        raise ValueError(f"{folder} is another run: {', '.join(differ)} differ; use another --runs")


def _tasks(run: LastingRun, folder: Path, command: str, commit: str) -> dict[str, Rows]:
    about = json.loads((folder / LASTING).read_text())
    if about["course"] != asdict(run.made):
        raise ValueError(f"{folder} is another run: its course differs; use another --runs")
    with (folder / TASKS).open(newline="") as file:
        tasks = list(csv.DictReader(file))
    environment = about["environment"]
    row = {
        "name": run.name, "row": run.recipe, **about["course"], "command": command,
        "commit": commit or environment["commit"], "device": environment["device"],
        "torch": environment["torch"], "seconds": float(tasks[-1]["seconds"]),
        "accuracy": fmean(float(task["accuracy"]) for task in tasks),
    }  # fmt: skip
    return {"lasting": [row], "tasks": [{"name": run.name} | task for task in tasks]}


def _accuracies(metrics: Rows) -> dict[str, Any]:
    """After the last epoch; of a run that holds training images out, on those."""
    last = metrics[-1]
    return {
        "top1": last["test_top1"], "top5": last["test_top5"], "train_loss": last["train_loss"],
        "train_top1": last["train_top1"], "test_loss": last["test_loss"],
    }  # fmt: skip


def _of_the_network(found: Diagnosis) -> dict[str, Any]:
    layers = found.layers
    channels = sum(layer.channels for layer in layers)
    row: dict[str, Any] = {}
    for name in COUNTED:
        first = fmean(len(getattr(layer, name)) / layer.channels for layer in layers[:FIRST])
        row[f"{name}_first_six"] = first
        row[name] = sum(len(getattr(layer, name)) for layer in layers) / channels
    row["weak_contribution"] = _weak(layers) / channels
    row["participation_share"] = fmean(layer.participation_share or 0.0 for layer in layers)
    row["correlation"] = fmean(layer.correlation or 0.0 for layer in layers)
    grouped = [layer.correlation_in_groups for layer in layers]
    known = [value for value in grouped if value is not None]
    row["correlation_in_groups"] = fmean(known) if known else ""
    row["mean_activation"] = fmean(fmean(layer.mean_abs) for layer in layers)
    mixes = [layer.mix for layer in layers if layer.mix is not None]
    row["lambda"] = fmean(mixes) if mixes else ""
    row["gini"] = "" if found.importance is None else found.importance.gini
    row["verdict"] = found.verdict.kind
    norms = found.batch_norms or ()
    before_relu = [norm for norm in norms if norm.activation == "relu"]
    for name, counted in (("betas", norms), ("relu_betas", before_relu)):
        row[name] = sum(norm.channels for norm in counted)
        row[f"{name}_nonpositive"] = sum(norm.nonpositive for norm in counted)
    return row


def _of_a_layer(number: int, layer: Layer) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": number, "title": layer.name, "channels": layer.channels}
    row |= {name: len(getattr(layer, name)) / layer.channels for name in COUNTED}
    row["weak_contribution"] = _weak([layer]) / layer.channels
    row["participation_share"] = layer.participation_share or 0.0
    for name in ("correlation", "correlation_in_groups"):
        value = getattr(layer, name)
        row[name] = "" if value is None else value
    row["mean_activation"] = fmean(layer.mean_abs)
    row["lambda"] = "" if layer.mix is None else layer.mix
    beta = None if layer.beta is None else layer.beta.share_nonpositive
    row["beta_nonpositive"] = "" if beta is None else beta
    return row


def _weak(layers: Any) -> int:
    """Channels with at most a tenth of their layer's mean contribution."""
    return sum(value <= 0.1 for layer in layers for value in layer.contribution or ())


def _lambdas(metrics: Rows) -> Rows:
    """λ of every CE layer after the first epoch, the last, and about 24 between them."""
    every = max(1, len(metrics) // LAMBDAS)
    return [
        {"epoch": row["epoch"], "layer": column.removeprefix(LAMBDA), "lambda": value}
        for row in metrics
        if row["epoch"] in (1, len(metrics)) or row["epoch"] % every == 0
        for column, value in row.items()
        if column.startswith(LAMBDA)
    ]


def _ablation(found: Diagnosis) -> Rows:
    """Accuracy while a growing share of the channels of one layer is set to zero."""
    curve = found.ablation
    if curve is None:
        return []
    return [
        {
            "layer": curve.layer, "images": curve.images, "ratio": ratio,
            "random": fmean(random), "random_low": min(random), "random_high": max(random),
            "least_important_first": ordered,
        }
        for ratio, random, ordered in zip(
            curve.ratios, curve.top1, curve.least_important_first, strict=True
        )
    ]  # fmt: skip


def _map(layer: Layer) -> Rows:
    """ℓ2 over channels at each location, before the activation."""
    return [
        {"layer": layer.name, "i": i, "j": j, "value": "" if value is None else value}
        for i, line in enumerate(layer.magnitude_before or ())
        for j, value in enumerate(line)
    ]


def _cams(found: Diagnosis) -> Rows:
    """Evidence for a class in each field of a few images."""
    return [
        {
            "image": number, "label": cam.label or "", "target": cam.target,
            "predicted": cam.predicted, "i": i, "j": j, "value": value,
        }
        for number, cam in enumerate(found.gradcam)
        for i, line in enumerate(cam.evidence or ())
        for j, value in enumerate(line)
    ]  # fmt: skip


def _looks(folder: Path) -> Rows:
    with (folder / CHANNELS).open(newline="") as file:
        return list(csv.DictReader(file))
