"""Images per second of CE-ResNet-50: the network alone, epochs over image files, the loader alone.

A folder of JPEG files is made from photographs: each file is a photograph with a random crop, flip
and brightness. Then these are measured one after the other, in the loop of `cenet train`:

    network            training steps on one fixed batch
    loop, cpu          epochs over the folder, decoded by worker processes
    loop, cuda         the same, decoded by the GPU's decoder
    loader, cpu|cuda   batches of the loader without a network

Numbers are medians and percentiles over windows of ten steps; the first window is not counted.
The files have just been written, so they are read from memory.

    PYTHONPATH=src python benchmarks/bench_input.py --images coco/val2017 --out benchmarks/results/input_h200.csv
    PYTHONPATH=src python benchmarks/bench_input.py --device cpu --count 40 --size 32 --batch 8  # smoke
"""  # noqa: E501

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image, ImageEnhance

from _runner import RESULTS, append_rows, commit, environment, percentiles, synchronize
from cenet.data.datasets import load
from cenet.data.loaders import training_loader
from cenet.distributed import Processes
from cenet.signals import SignalWatch
from cenet.train import RECIPES
from cenet.train.classifier import Trainer
from cenet.train.options import Options
from cenet.train.times import WAITING

LONG, SHORT = 500, 375
WINDOW = 10
FIELDS = (
    *("case", "images_per_second_p20", "images_per_second_p50", "images_per_second_p80"),
    *(
        "ms_per_step_p50",
        "waiting_ms_per_step",
        "n",
        "window",
        "batch",
        "size",
        "files",
        "workers",
        "dtype",
    ),
    *("gpu", "torch", "torchvision", "version", "commit", "command"),
)


def write_image(task: tuple[int, Path | None, Path]) -> int:
    """Write a file and return its bytes."""
    number, source, target = task
    chance = random.Random(number)
    if source is None:
        small = Image.effect_noise((20, 15), 90).convert("RGB")
        image = small.resize((640, 480), Image.Resampling.BICUBIC)
    else:
        with Image.open(source) as opened:
            image = opened.convert("RGB")
    margins = [chance.uniform(0, 0.08) for _ in range(4)]
    width, height = image.size
    box = (margins[0] * width, margins[1] * height,
           (1 - margins[2]) * width, (1 - margins[3]) * height)  # fmt: skip
    size = (LONG, SHORT) if width >= height else (SHORT, LONG)
    image = image.resize(size, Image.Resampling.BICUBIC, box=box)
    if chance.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(chance.uniform(0.9, 1.1))
    image.save(target, quality=90)
    return target.stat().st_size


def write_folder(folder: Path, count: int, images: Path | None) -> None:
    """train/CLASS/*.jpg, and one image of each class in val."""
    sources: list[Path | None] = [None]
    if images is not None:
        sources = [*sorted(images.rglob("*.jpg"))]
        if not sources:
            raise SystemExit(f"--images {images} has no *.jpg")
    classes = min(100, count // 4)
    tasks = []
    for number in range(count + classes):
        part = "train" if number < count else "val"
        target = folder / part / f"{number % classes:03d}" / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        tasks.append((number, sources[number % len(sources)], target))
    started = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        sizes = list(processes.map(write_image, tasks, chunksize=16))
    print(f"{len(tasks)} files of {sum(sizes) / len(sizes) / 1e3:.0f} kB from {len(sources)} "
          f"photographs in {time.perf_counter() - started:.1f} s", flush=True)  # fmt: skip


class Clock:
    """Time of each step, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, []
        self.waited: float | None = None  # milliseconds a step, by the clock of the run

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def windows(self, skipped: int) -> tuple[list[float], int]:
        """Milliseconds of a step in each window after so many steps, and steps of a window."""
        synchronize(self.device)
        marks = self.marks[min(skipped, len(self.marks) // 2) :]
        window = max(1, min(WINDOW, (len(marks) - 1) // 3))
        ends = marks[::window]
        if self.device.type == "cuda":
            times = [a.elapsed_time(b) for a, b in pairwise(ends)]
        else:
            times = [1e3 * (b - a) for a, b in pairwise(ends)]
        return [value / window for value in times], window


def fixed_batch(trainer: Trainer, steps: int) -> Clock:
    """The network alone."""
    batch = next(trainer.batches(0, 0))
    trainer.network.train()
    clock = Clock(trainer.processes.device)
    for _ in range(steps):
        trainer._backward(batch, last=True)
        trainer._update()
        clock.mark()
    return clock


def loop(trainer: Trainer, epochs: int) -> Clock:
    """Epochs of the loop."""
    clock = Clock(trainer.processes.device)
    update: Callable[[], None] = trainer._update

    def counted() -> None:
        update()
        clock.mark()

    trainer._update = counted
    try:
        with SignalWatch() as signals:
            for epoch in range(epochs):
                trainer.position.epoch, trainer.position.step = epoch, 0
                trainer.position.seconds = 0.0
                trainer.train_epoch(signals)
    finally:
        del trainer._update
    synchronize(trainer.processes.device)
    trainer.waits.settle(trainer.clock)
    clock.waited = 1e3 * trainer.clock.spent[WAITING] / len(clock.marks)
    trainer.clock.spent[WAITING] = 0.0
    return clock


def alone(loader: Any, epochs: int, device: torch.device) -> Clock:
    """Batches that nobody needs."""
    clock = Clock(device)
    for epoch in range(epochs):
        for _ in loader.epoch(epoch):
            clock.mark()
            if device.type == "cuda":
                clock.marks[-1].synchronize()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="folder of photographs (*.jpg); default: noise")
    parser.add_argument("--folder", type=Path, help="keep the files in this folder, and reuse them")
    parser.add_argument("--count", type=int, default=20_000, help="number of files")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4, help="epochs over the folder")
    parser.add_argument("--network", default="resnet50_ce", help="name of a recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "input.csv")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "data"
        if not (folder / "train").is_dir():
            write_folder(folder, args.count, args.images)
        device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
        measure(args, folder, Path(temporary), device)


def measure(args: argparse.Namespace, folder: Path, temporary: Path, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    precision = "bfloat16" if on_gpu else "float32"
    recipe = replace(
        RECIPES[args.network], batch_size=args.batch, precision=precision, epochs=args.epochs,
        image_size=args.size, lr=1e-3,
    )  # fmt: skip
    data = load(recipe, folder)
    options = Options(
        temporary / "run", workers=args.workers, channels_last=True, cuda_graphs=on_gpu,
        log_every=1000,
    )  # fmt: skip
    trainer = Trainer(recipe, data, options, Processes(0, 1, device))
    shared = {
        **environment(device), "torchvision": torchvision.__version__, "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "batch": str(args.batch),
        "size": str(args.size), "files": str(len(data.train.labels)), "workers": str(args.workers),
        "dtype": precision,
    }  # fmt: skip
    shared.pop("triton")
    rows = []

    def note(case: str, clock: Clock, skipped: int = WINDOW) -> None:
        times, window = clock.windows(skipped)
        if not times:
            print(f"{case:14} too few steps to time")
            return
        speeds = percentiles([1e3 * args.batch / value for value in times])
        print(f"{case:14} {speeds.p50:8.0f} images/s ({speeds.p20:.0f} to {speeds.p80:.0f}), "
              f"{percentiles(times).p50:7.2f} ms a step; n = {len(times)} windows of {window}",
              end="", flush=True)  # fmt: skip
        print("" if clock.waited is None else f", of which {clock.waited:.2f} waiting for data")
        rows.append({
            **shared, "case": case, "ms_per_step_p50": f"{percentiles(times).p50:.3f}",
            "n": str(len(times)), "window": str(window),
            "waiting_ms_per_step": "" if clock.waited is None else f"{clock.waited:.3f}",
            **{f"images_per_second_{name}": f"{value:.1f}"
               for name, value in speeds._asdict().items()},
        })  # fmt: skip

    def loader(decode: Any) -> Any:
        return training_loader(
            recipe, data.train, trainer.inputs, trainer.shard, device=device, channels_last=True,
            workers=args.workers, steps=trainer.updates_per_epoch * recipe.accumulate,
            decode=decode,
        )  # fmt: skip

    started = time.perf_counter()
    fixed_batch(trainer, 5)  # compiles, and captures graphs
    synchronize(device)
    print(f"first steps in {time.perf_counter() - started:.0f} s", flush=True)
    note("network", fixed_batch(trainer, 11 * WINDOW if on_gpu else 10))
    ahead = 3 * args.workers  # batches that are ready before the first is needed
    kinds: list[Any] = ["cpu", "cuda"] if on_gpu else ["cpu"]
    for decode in kinds:
        trainer.loader.end()
        trainer.loader = loader(decode)
        note(f"loop, {decode}", loop(trainer, args.epochs), ahead)
        trainer.loader.end()
        own = loader(decode)
        note(f"loader, {decode}", alone(own, args.epochs, device), ahead)
        own.end()
    append_rows(args.out, rows, FIELDS)


if __name__ == "__main__":
    main()
