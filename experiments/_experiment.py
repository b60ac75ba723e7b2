"""What the scripts of the paper's figures and tables share: runs, their diagnoses, figure and CSV.

A script asks for runs by recipe. Those that are finished are read, an interrupted one goes on,
a
missing one is trained; scripts share them. `--scale smoke` takes the digits recipe of the same
row
instead, for one epoch: it shows that everything works, and nothing about the paper.
"""

import argparse
import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cenet.analysis.command import FILE, examine
from cenet.analysis.diagnosis import Diagnosis
from cenet.train import RECIPES, Recipe
from cenet.train.logbook import CHANNELS, METRICS, read_metrics, read_run
from cenet.train.options import Options
from cenet.train.recipes import NETWORK_NAMES
from cenet.train.run import Job, train
from cenet.train.weights import WEIGHTS

HERE = Path(__file__).parent
SMOKE_EPOCHS = 1
WORKERS = min(8, os.cpu_count() or 1)
LOOK_EVERY = 20  # updates
SMOKE_IMAGES = 256  # of the test that a diagnosis looks at
# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222", "#999999")
plt.rcParams.update(
    {
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle":
        plt.cycler(color=COLOURS), "figure.constrained_layout.use": True, "font.size": 10,
        "legend.frameon": False, "svg.hashsalt": "cenet", "svg.fonttype": "none",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    study: "Study"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A row per epoch."""
        return read_metrics(self.folder / METRICS)

    @property
    def top1(self) -> float:
        """Test accuracy of the last epoch."""
        return float(self.metrics[-1]["test_top1"])

    @property
    def top5(self) -> float:
        """The same among the best five."""
        return float(self.metrics[-1]["test_top5"])

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Read, or made on the test images."""
        path = self.folder / FILE
        if not path.is_file():
            limit = SMOKE_IMAGES if self.study.smoke else None
            # folders of images: those of the test alone
            data = self.study.data
            if data is not None and not (data / "cifar-10-batches-py").is_dir():
                data = next(data / name for name in ("test", "val") if (data / name).is_dir())
            device: Any = self.study.device
            examine(str(self.folder), data, self.folder, batch=250, limit=limit, device=device)
        return Diagnosis.read(path)

    @cached_property
    def looks(self) -> list[dict[str, str]]:
        """Rows of the monitor: step, layer, inhibited_ratio, correlation, lambda."""
        with (self.folder / CHANNELS).open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def inhibited(self) -> float:
        """The paper's figure: mean share of inhibited channels in the first six layers."""
        found = self.diagnosis.first_six
        assert found is not None
        return found


@dataclass(frozen=True)
class Study:
    """One figure or table: where runs are, and where the result goes."""

    name: str
    smoke: bool
    data: Path | None
    runs: Path
    out: Path
    device: str
    epochs: int | None
    seeds: int

    def run(self, name: str, seed: int = 0, *, watched: bool = False, **changes: Any) -> Run:
        """The run of a recipe with some fields changed, finished now if it was not.

        Args:
            name: of the recipe.
            seed: of the run.
            watched: look at channels while it trains (`Run.looks`), which takes longer on a GPU.
            **changes: fields of the recipe.
        """
        if self.smoke:
            name = f"digits_{name.removeprefix(network_of(name)).lstrip('_')}"
        base = RECIPES[name] if self.epochs is None else shortened(RECIPES[name], self.epochs)
        recipe = replace(base, accuracy=None, seed=seed, **changes)
        folder = self.runs / (run_name(name, recipe) + watched * "-watched")
        if not (folder / WEIGHTS).is_file():
            print(f"training {folder.name}", flush=True)
            on_gpu = torch.cuda.is_available() and self.device != "cpu"
            options = Options(
                folder, resume="auto", workers=WORKERS, channels_last=on_gpu,
                cuda_graphs=on_gpu and not watched, monitor_every=LOOK_EVERY if watched else 0,
            )  # fmt: skip
            device: Any = self.device
            train(Job(recipe, options, self.data, device))
        found, _ = read_run(folder, Recipe)
        if replace(found, accuracy=None) != recipe:
            raise SystemExit(f"{folder} is a run of another recipe; use another --runs")
        return Run(folder, self)

    def repeats(self, name: str, **changes: Any) -> list[Run]:
        """One run for each seed."""
        return [self.run(name, seed, **changes) for seed in range(self.seeds)]

    def write(self, rows: Sequence[dict[str, Any]], figure: Figure | None = None) -> None:
        """Write OUT/NAME.csv and, with a figure, OUT/NAME.svg; print the rows."""
        if self.smoke:  # nothing to set beside the paper
            rows = [
                {"scale": "smoke", **{k: v for k, v in row.items() if "paper" not in k}}
                for row in rows
            ]
        self.out.mkdir(parents=True, exist_ok=True)
        table = self.out / f"{self.name}.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        if figure is not None:
            figure.savefig(self.out / f"{self.name}.svg", metadata={"Date": None})
            plt.close(figure)
        _show(self.name, rows)
        print(f"wrote {table}" + (f" and {table.with_suffix('.svg')}" if figure else ""))


def study(doc: str | None, name: str) -> Study:
    """What the command line asks for; `doc` is the docstring of the script."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=("paper", "smoke"), default="paper")
    parser.add_argument("--data", type=Path, help="images, as for `cenet train`")
    parser.add_argument("--runs", type=Path, help="folder of the runs, shared by all scripts")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--epochs", type=int, help="shorter runs; milestones move along")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row")
    found = parser.parse_args()
    if found.seeds < 1 or (found.epochs is not None and found.epochs < 1):
        parser.error("--seeds and --epochs must be at least 1")
    smoke = found.scale == "smoke"
    if not smoke and found.data is None:
        parser.error("--data FOLDER is needed, or --scale smoke")
    if smoke and found.data is not None:
        parser.error("--scale smoke takes the embedded digits; leave --data away")
    runs = found.runs or HERE / "out" / "runs"
    epochs = found.epochs or (SMOKE_EPOCHS if smoke else None)
    return Study(name, smoke, found.data, runs, found.out, found.device, epochs, found.seeds)


def network_of(name: str) -> str:
    """The network of a recipe's name: resnet50_gn_ce -> resnet50."""
    return max((n for n in NETWORK_NAMES if name.startswith(f"{n}_")), key=len)


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """A recipe of fewer epochs; what happens in between happens earlier."""
    share = epochs / recipe.epochs
    milestones = sorted({max(1, round(share * epoch)) for epoch in recipe.milestones})
    return replace(
        recipe, epochs=epochs, milestones=tuple(milestones),
        warmup_epochs=min(recipe.warmup_epochs, epochs / 4),
    )  # fmt: skip


def run_name(name: str, recipe: Recipe) -> str:
    """Of a folder: the recipe of that name, and what was changed in it."""
    base = asdict(RECIPES[name])
    changed = [
        f"{field}={value}"
        for field, value in asdict(recipe).items()
        if value != base[field] and field not in FOLLOW
    ]
    return "-".join([name, *changed])


# fields that follow from others
FOLLOW = ("accuracy", "milestones", "warmup_epochs")


def _show(title: str, rows: Sequence[dict[str, Any]], most: int = 24) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows[:most]:
        cells = (f"{v:.4f}" if isinstance(v, float) else escape(str(v)) for v in row.values())
        table.add_row(*cells)
    if len(rows) > most:
        table.caption = f"{len(rows) - most} more rows in the CSV"
    Console().print(table)
