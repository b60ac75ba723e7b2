"""Seconds per epoch of VGG-16 with batch norm and with CE, in the loop of `cenet train`.

Both networks train alternately in one process; the first epoch of each is a warm-up (and compiles)
and is not counted. Then one epoch of each runs under the profiler: utilisation is the time in which
a kernel was running on the GPU, divided by the time of the epoch.

    PYTHONPATH=src python benchmarks/bench_training.py --data CIFAR10 --cuda-graphs
    PYTHONPATH=src python benchmarks/bench_training.py --images 512 --rounds 1   # smoke test

Without --data it trains on noise of the size of CIFAR-10, which takes the same time.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from _runner import RESULTS, append_rows, environment, percentiles, row
from cenet.data.datasets import Resident, Split, load
from cenet.distributed import Processes
from cenet.formatting import percent
from cenet.signals import SignalWatch
from cenet.train import RECIPES
from cenet.train.classifier import Trainer
from cenet.train.options import Options

ROWS = {"plain": "vgg16_plain", "ce": "vgg16_ce"}


def noise(count: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    part = Resident(images, labels, tuple(map(str, range(10))))
    return Split(part, Resident(images[:256], labels[:256], part.classes))


def busy_seconds(events: Any) -> float:
    """Time covered by at least one kernel."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6


def epoch(trainer: Trainer, signals: SignalWatch) -> float:
    trainer.network.train()
    trainer.train_epoch(signals)
    seconds = trainer.position.seconds
    trainer.end_epoch()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10, as torchvision stores it or as image folders"
    )
    parser.add_argument(
        "--images", type=int, default=50_000, help="number of noise images, without --data"
    )
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "training.csv")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = noise(args.images) if args.data is None else load(RECIPES["vgg16_ce"], args.data)
    mode = " ".join(["compiled"] * args.compile + ["graphs"] * args.cuda_graphs) or "eager"
    size = f"{len(data.train.labels)}x3x32x32"
    columns = {**environment(device), "op": "vgg16", "mode": f"epoch {mode}", "shape": size,
               "dtype": args.precision, "layout": "channels_last"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, SignalWatch() as signals:
        trainers = {}
        for name, recipe in ROWS.items():
            chosen = replace(RECIPES[recipe], precision=args.precision, batch_size=args.batch)
            options = Options(Path(folder) / name, channels_last=True, compile=args.compile,
                              cuda_graphs=args.cuda_graphs)  # fmt: skip
            options.out.mkdir()
            trainers[name] = Trainer(chosen, data, options, Processes(0, 1, device))
            print(f"{name}: first epoch {epoch(trainers[name], signals):.2f} s", flush=True)
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(args.rounds):
            for name, trainer in trainers.items():
                times[name].append(epoch(trainer, signals))
        rows = []
        for name, trainer in trainers.items():
            trainer.network.train()
            busy = "no GPU"
            if device.type == "cuda":
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    trainer.train_epoch(signals)
                seconds = trainer.position.seconds
                share = busy_seconds(profiler.events()) / seconds
                busy = f"{percent(share)} of {seconds:.3f} s"
                trainer.end_epoch()
            timing = percentiles([1e3 * value for value in times[name]])
            rows.append(row(timing, None, {**columns, "provider": name}))
            last = trainer.run_log.rows[-1]
            ratio = timing.p50 / 1e3 / percentiles(times["plain"]).p50
            print(f"{mode} {args.precision} {name:5} {timing.p50 / 1e3:.3f} s an epoch "
                  f"({min(times[name]):.3f} to {max(times[name]):.3f}), {ratio:.2f} of plain; "
                  f"GPU busy {busy}; losses {last['train_loss']:.4f} and {last['test_loss']:.4f}, "
                  f"test top-1 {percent(last['test_top1'], '.2f')}")  # fmt: skip
    append_rows(args.out, rows)


if __name__ == "__main__":
    main()
