"""Share of training in the wall time of runs, from their run.json and metrics.csv.

    PYTHONPATH=src python benchmarks/wall_time.py runs/vgg16_plain runs/vgg16_ce

Each row has two ratios: the wall time since the start of the command, and the wall time since the
first step, both divided by epochs × the median time of a training epoch. Runs that were resumed are
left out, because their wall time is spread over several starts.
"""

import argparse
import csv
import json
import shlex
import statistics
from pathlib import Path

from _runner import RESULTS, append_rows
from cenet.train.times import PARTS, START

FIELDS = (
    *("network", "block", "epochs", "seed", "precision", "wall_s", "start_s", "epoch_s_p50"),
    *("ratio_from_command", "ratio_from_first_step", "images_per_second"),
    *(f"{part.replace(' ', '_')}_s" for part in PARTS),
    *("gpu", "torch", "commit", "command"),
)


def row(run: Path, commit: str) -> dict[str, str]:
    about = json.loads((run / "run.json").read_text())
    (times,) = about["times"]
    with (run / "metrics.csv").open(newline="") as file:
        seconds = [float(epoch["seconds"]) for epoch in csv.DictReader(file)]
    recipe, environment, spent = about["recipe"], about["environment"], times["seconds"]
    start = sum(spent[part] for part in START)
    epoch = statistics.median(seconds)
    wall = times["wall_seconds"]
    numbers = {
        "wall_s": wall, "start_s": start, "epoch_s_p50": epoch,
        "ratio_from_command": wall / (len(seconds) * epoch),
        "ratio_from_first_step": (wall - start) / (len(seconds) * epoch),
        **{f"{part.replace(' ', '_')}_s": spent[part] for part in PARTS},
    }  # fmt: skip
    return {
        "network": recipe["network"], "block": recipe["block"], "epochs": str(len(seconds)),
        "seed": str(recipe["seed"]), "precision": recipe["precision"],
        "images_per_second": f"{times['images_per_second']:.0f}",
        **{name: f"{value:.4g}" for name, value in numbers.items()},
        "gpu": environment["device"], "torch": environment["torch"],
        "commit": commit or str(environment["commit"]),
        "command": shlex.join(["cenet", *environment["command"][1:]]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument(
        "--commit", default="", help="commit of the code that ran, if run.json has none"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "wall_time.csv")
    args = parser.parse_args()
    rows = [row(run, args.commit) for run in args.runs]
    for found in rows:
        print(
            f"{found['network']} {found['block']}: {found['wall_s']} s, start {found['start_s']} s,"
            f" epoch {found['epoch_s_p50']} s; ratio {found['ratio_from_command']} from the "
            f"command, {found['ratio_from_first_step']} from the first step"
        )
    append_rows(args.out, rows, FIELDS)


if __name__ == "__main__":
    main()
