"""Rows of runs that nobody made, for the tests of the experiments."""

import csv
from itertools import product
from pathlib import Path

from experiments import tables
from experiments.catalogue import RESULTS
from experiments.result import Result, Rows
from experiments.runs import DetectorRun, LastingRun, Run
from experiments.tables import names

from cenet.models.cost import PAPER_GFLOPS as NETWORKS

ROOT = Path(__file__).parents[2]
EVERY = list(dict.fromkeys(run for result in RESULTS.values() for run in result.needs))


def row(name, **values):
    return {"name": name, "recipe": name.rsplit("-", 1)[0], "seed": name[-1], "top1": 0.5, **values}


def filled(result: Result, folder: Path) -> None:
    """Rows of all runs of a result, with numbers that tell runs apart."""
    done = 0
    while found := [
        run for run in (*result.needs, *result.then(Rows(folder))) if run.name not in names(folder)
    ]:
        for place, run in enumerate(found, done):
            fill(run, (place + 1) / 1000, folder)
        done += len(found)
    if result.name == "main":
        for name in ("vgg16", "tiny_resnets", "tiny_small"):
            filled(RESULTS[name], folder)
    if result.name == "table_cost":
        with (folder / "inference.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["network", "block", "device", "multiply_adds", "ratio_to_plain"])
            writer.writerows(
                product(NETWORKS, ("plain", "se", "ce"), ("cpu", "cuda"), (1e9,), (1.1,))
            )


def fill(run: Run, share: float, folder: Path) -> None:
    columns = ("dormant", "inhibited", "inhibited_first_six", "dormant_first_six")
    own = {"name": run.name, "recipe": run.recipe, "top1": 0.9 - share, "top5": 0.99,
           **dict.fromkeys(columns, share)}  # fmt: skip
    name = {"name": run.name}
    if isinstance(run, LastingRun):
        tasks = [name | {"task": t, "accuracy": 0.5 + share, "dormant_ratio": share,
                         "participation_share": share} for t in range(1, 8)]  # fmt: skip
        tables.add({"lasting": [name | {"accuracy": 0.5 + share}], "tasks": tasks}, folder)
        return
    if isinstance(run, DetectorRun):
        columns = [f"{k}_ap{t}" for k in ("box", "mask") for t in ("", "50", "75")]
        losses = {"train_loss": 1 + share}
        tables.add({"detections": [own | dict.fromkeys(columns, share) | losses]}, folder)
        return
    for column in ("train_loss", "test_loss", "dormant_strict", "rare", "weak_contribution",
                   "prunable", "duplicates", "participation_share", "correlation", "gini",
                   "mean_activation", "correlation_in_groups"):  # fmt: skip
        own[column] = share
    place = round(1000 * share)
    own |= {"betas": 1000, "betas_nonpositive": 100 * place, "relu_betas": 400,
            "relu_betas_nonpositive": 99 + place}  # fmt: skip
    if not run.is_diagnosed:
        tables.add({"trials": [own]}, folder)
        return
    ratios = [i / 10 for i in range(11)]
    found = {
        "runs": [own],
        "layers": [name | {"layer": i, "title": f"l{i}", "channels": 64,
                           "correlation": share * (i + 1), "correlation_in_groups": share,
                           "participation_share": share, "lambda": i * share if i % 2 else ""}
                   for i in range(6)],
        "lambdas": [name | {"epoch": e, "layer": f"l{i}", "lambda": (i + e) / 10}
                    for e in (1, 2) for i in (1, 3, 5)],
        "epochs": [name | {"epoch": e, "train_top1": 0.2 * e, "test_top1": 0.1 * e,
                           "train_loss": 1 / e} for e in range(1, 4)],
        "ablation": [name | {"ratio": r, "random": 0.9 - r * share,
                             "least_important_first": 0.9} for r in ratios],
        "looks": [name | {"step": 400 * s, "layer": f"l{i}", "correlation": share}
                  for s in range(3) for i in range(6)],
        "maps": [name | {"layer": "f", "i": i, "j": j, "value": share + i + 2 * j}
                 for i in range(3) for j in range(4)],
        "cams": [name | {"image": k, "label": "a", "target": "a", "predicted": f"p{place - 1}",
                         "i": i, "j": j, "value": (i + j) / 2}
                 for k in range(2) for i in range(2) for j in range(2)],
    }  # fmt: skip
    tables.add(found, folder)


class Ended:
    """A command that has ended well."""

    def poll(self):
        return 0

    def send_signal(self, number):
        pass

    def wait(self):
        pass
