"""Accuracy and every measure of channels, for recipes and seeds, several runs at a time.

    python experiments/measures.py vgg16_plain vgg16_ce --seeds 0 1 2 3 4 --data CIFAR10 --jobs 5

Each run is `cenet train RECIPE --seed S` and then `cenet diagnose`. A finished run adds a row to
OUT/measures.csv and a row per layer to OUT/measures_layers.csv; one that has its row is not run
again, and one that was interrupted goes on. With --minutes, runs that are not finished by then
save and stop, so that a later call takes them up.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from cenet.analysis.command import FILE
from cenet.analysis.diagnosis import Diagnosis, Layer
from cenet.train.logbook import METRICS, read_metrics
from cenet.train.weights import WEIGHTS

HERE = Path(__file__).parent
FIRST = 6
COUNTED = (
    "dormant", "dormant_strict", "rare", "saturated", "duplicates", "prunable", "inhibited",
)  # fmt: skip
KEY = ("recipe", "seed", "changes")


Run = tuple[str, int]  # recipe and seed


def main() -> None:
    """Train and diagnose what is missing."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = arguments.out / "measures.csv"
    known = {tuple(row[name] for name in KEY) for row in read(table)}
    todo = [
        (recipe, seed)
        for seed in arguments.seeds
        for recipe in arguments.recipes
        if (recipe, str(seed), " ".join(arguments.change)) not in known
    ]
    end = time.monotonic() + 60 * arguments.minutes
    training: dict[Run, subprocess.Popen[bytes]] = {}
    measuring: dict[Run, subprocess.Popen[bytes]] = {}
    failed: list[Run] = []
    while (todo or training or measuring) and time.monotonic() < end:
        while todo and len(training) < arguments.jobs:
            run = todo.pop(0)
            training[run] = train(arguments, *run)
        time.sleep(0.5)
        for run in ended(training):
            if (folder_of(arguments, *run) / WEIGHTS).is_file():
                measuring[run] = diagnose(arguments, *run)
            else:
                failed.append(run)
        for run in ended(measuring):
            if (folder_of(arguments, *run) / FILE).is_file():
                write_rows(arguments, table, *run)
            else:
                failed.append(run)
    for process in (*training.values(), *measuring.values()):
        process.send_signal(signal.SIGTERM)
    for process in (*training.values(), *measuring.values()):
        process.wait()
    for recipe, seed in failed:
        folder = folder_of(arguments, recipe, seed)
        print(f"{folder.name} failed; see {folder.with_suffix('.log')}")
    left = [f"{recipe} seed {seed}" for recipe, seed in (*measuring, *training, *todo)]
    if left:
        print(f"not finished: {', '.join(left)}; the same command goes on")
    if failed:
        sys.exit(1)


def ended(running: "dict[Run, subprocess.Popen[bytes]]") -> list[Run]:
    """Runs whose process has ended; they are taken out."""
    found = [run for run, process in running.items() if process.poll() is not None]
    for run in found:
        del running[run]
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", type=Path, help="images, as for `cenet train`")
    parser.add_argument("--change", nargs="*", default=[], help="recipe fields, weight_decay=2e-3")
    parser.add_argument("--options", nargs="*", default=[], help="run options, cuda_graphs=True")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--ablation-images", type=int, default=2000)
    parser.add_argument("--runs", type=Path, default=HERE / "out" / "runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--commit", default="", help="of this code, where git is not at hand")
    return parser.parse_args()


def folder_of(arguments: argparse.Namespace, recipe: str, seed: int) -> Path:
    """Where a run is."""
    return arguments.runs / "-".join([recipe, *arguments.change, f"seed{seed}"])


def train(arguments: argparse.Namespace, recipe: str, seed: int) -> "subprocess.Popen[bytes]":
    """`cenet train` in a process of its own."""
    command = ["train", recipe, "--seed", str(seed), "--resume", "auto"]
    command += ["--out", str(folder_of(arguments, recipe, seed))]
    for setting in (*arguments.change, *arguments.options):
        name, value = setting.split("=")
        command += [f"--{name.replace('_', '-')}", value]
    return start(arguments, recipe, seed, command)


def diagnose(arguments: argparse.Namespace, recipe: str, seed: int) -> "subprocess.Popen[bytes]":
    """`cenet diagnose` of a finished run."""
    command = ["diagnose", str(folder_of(arguments, recipe, seed)), "--batch", "500"]
    command += ["--ablation-images", str(arguments.ablation_images)]
    return start(arguments, recipe, seed, command)


def start(
    arguments: argparse.Namespace, recipe: str, seed: int, command: list[str]
) -> "subprocess.Popen[bytes]":
    """A command of cenet, with its output in the log of the run."""
    folder = folder_of(arguments, recipe, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command += [] if arguments.data is None else ["--data", str(arguments.data)]
    print(f"{time.strftime('%X')} cenet {' '.join(command)}", flush=True)
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "cenet", *command], stdout=log, stderr=log)


def write_rows(arguments: argparse.Namespace, table: Path, recipe: str, seed: int) -> None:
    """Write the rows of a run that was diagnosed."""
    folder = folder_of(arguments, recipe, seed)
    found = Diagnosis.read(folder / FILE)
    metrics = read_metrics(folder / METRICS)
    about = {
        "recipe": recipe, "seed": seed, "changes": " ".join(arguments.change),
        "options": " ".join(arguments.options), "epochs": len(metrics),
        "commit": arguments.commit or found.environment["commit"],
        "device": found.environment["device"],
    }  # fmt: skip
    append(table, [about | run_row(found, metrics)])
    layers = [about | layer_row(layer) for layer in found.layers]
    append(table.with_name("measures_layers.csv"), layers)
    print(f"{time.strftime('%X')} {folder.name} is finished", flush=True)


def run_row(found: Diagnosis, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of a whole network."""
    last, layers = metrics[-1], found.layers
    channels = sum(layer.channels for layer in layers)
    row: dict[str, Any] = {
        "top1": last["test_top1"], "top5": last["test_top5"], "train_loss": last["train_loss"],
        "test_loss": last["test_loss"], "train_seconds": sum(row["seconds"] for row in metrics),
    }  # fmt: skip
    for name in COUNTED:
        first = fmean(len(getattr(layer, name)) / layer.channels for layer in layers[:FIRST])
        row[f"{name}_first_six"] = first
        row[name] = sum(len(getattr(layer, name)) for layer in layers) / channels
    row["weak_contribution"] = weak(layers) / channels
    row["participation_share"] = fmean(layer.participation_share or 0 for layer in layers)
    row["correlation"] = fmean(layer.correlation or 0 for layer in layers)
    row["mean_activation"] = fmean(fmean(layer.mean_abs) for layer in layers)
    mixes = [layer.mix for layer in layers if layer.mix is not None]
    row["lambda"] = fmean(mixes) if mixes else ""
    if found.ablation is not None and found.importance is not None:
        row["ablation_layer"] = found.ablation.layer
        row["top1_without_half"] = fmean(found.ablation.top1[5])
        row["top1_without_least_half"] = found.ablation.least_important_first[5]
        row["gini"] = found.importance.gini
    row["verdict"] = found.verdict.kind
    return row


def layer_row(layer: Layer) -> dict[str, Any]:
    """Numbers of one layer."""
    row: dict[str, Any] = {"layer": layer.name, "channels": layer.channels}
    row |= {name: len(getattr(layer, name)) / layer.channels for name in COUNTED}
    row["weak_contribution"] = weak([layer]) / layer.channels
    row["participation_share"] = layer.participation_share or 0
    row["correlation"] = layer.correlation
    row["mean_activation"] = fmean(layer.mean_abs)
    row["lambda"] = "" if layer.mix is None else layer.mix
    return row


def weak(layers: Any) -> int:
    """Channels with at most a tenth of their layer's mean contribution."""
    return sum(value <= 0.1 for layer in layers for value in layer.contribution or ())


def read(table: Path) -> list[dict[str, str]]:
    """The rows so far."""
    if not table.is_file():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def append(table: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows, under a head if the table is new."""
    new = not table.is_file() or os.path.getsize(table) == 0
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
