"""Seconds from the start of a process to the end of its first training step and its first test.

Fresh processes run with and without preparation of the kernels, each first with an empty and then
with a full cache of compiled kernels. Images are noise.

    PYTHONPATH=src python benchmarks/bench_startup.py
    PYTHONPATH=src python benchmarks/bench_startup.py --recipe resnet50_ce --size 64
    PYTHONPATH=src python benchmarks/bench_startup.py --recipe digits_ce --batch 16   # smoke test
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from _runner import RESULTS, append_rows, environment, synchronize
from cenet.data.datasets import Resident, Split
from cenet.distributed import Processes
from cenet.signals import SignalWatch
from cenet.train import RECIPES
from cenet.train.classifier import Trainer
from cenet.train.evaluation import RESIDENT_BATCH
from cenet.train.options import Options

PARTS = ("imports", "building", "preparation", "first_step", "first_test")
FIELDS = (
    *("recipe", "size", "batch", "precision", "cache", "prepared"),
    *(f"{part}_s" for part in PARTS),
    *("command", "gpu", "torch", "triton", "version", "commit"),
)


def noise(train: int, test: int, channels: int, size: int) -> Split:
    """The training images, and test images of which the last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    shape = (train + test, channels, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.arange(train + test) % 10
    classes = tuple(map(str, range(10)))
    return Split(
        Resident(images[:train], labels[:train], classes),
        Resident(images[train:], labels[train:], classes),
    )


def run(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part, in this process."""
    marks = [args.started, time.time()]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def mark() -> None:
        synchronize(device)
        marks.append(time.time())

    recipe = replace(
        RECIPES[args.recipe], image_size=args.size, batch_size=args.batch, augment="none",
        precision=args.precision, epochs=2,
    )  # fmt: skip
    channels = 1 if recipe.dataset == "digits" else 3
    data = noise(args.batch, RESIDENT_BATCH, channels, args.size)
    with tempfile.TemporaryDirectory() as folder, SignalWatch() as signals:
        options = Options(Path(folder), channels_last=True)
        trainer = Trainer(recipe, data, options, Processes(0, 1, device))
        mark()
        if args.prepared:
            trainer.prepare()
        mark()
        trainer.train_epoch(signals)  # of one step
        mark()
        trainer.test()
        mark()
    return {part: marks[i + 1] - marks[i] for i, part in enumerate(PARTS)}


def fresh(args: argparse.Namespace, cache: Path, *, prepared: bool) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--recipe", args.recipe, "--size", str(args.size)]
    command += ["--batch", str(args.batch), "--precision", args.precision]
    command += ["--prepared"] * prepared + ["--started", str(time.time())]
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    *said, last = done.stdout.splitlines()
    for line in said:
        print(f"  {line}")
    return json.loads(last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="vgg16_ce", choices=RECIPES)
    parser.add_argument(
        "--size", type=int, help="height and width of the images; default: the recipe's"
    )
    parser.add_argument("--batch", type=int, help="images per batch; default: the recipe's")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.csv")
    parser.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.size = args.size or RECIPES[args.recipe].image_size
    args.batch = args.batch or RECIPES[args.recipe].batch_size
    if args.started is not None:
        print(json.dumps(run(args)))
        return

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        **environment(device), "recipe": args.recipe, "size": str(args.size),
        "batch": str(args.batch), "precision": args.precision,
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    print(f"{args.recipe}, {args.batch} images of {args.size}×{args.size}, {args.precision}")
    for prepared in (False, True):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "full"):
                seconds = fresh(args, Path(cache), prepared=prepared)
                words = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
                name = "prepared" if prepared else "unprepared"
                print(f"{state} cache, {name}: {words}; in all {sum(seconds.values()):.2f} s",
                      flush=True)  # fmt: skip
                times = {f"{part}_s": f"{value:.3f}" for part, value in seconds.items()}
                row = {**facts, **times, "cache": state, "prepared": str(prepared)}
                append_rows(args.out, [row], FIELDS)


if __name__ == "__main__":
    main()
