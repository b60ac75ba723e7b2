"""Profile of a layer on a GPU: every kernel of a training step, and the gaps between them.

    PYTHONPATH=src python benchmarks/profile_layer.py --out benchmarks/results/profile.csv
    PYTHONPATH=src python benchmarks/profile_layer.py --shapes 256x1024x14x14 --providers ce

A step (forward and backward) is captured in a CUDA graph, and PyTorch's profiler records its
replays. For each kernel the table has the median time, and the gap since the end of the kernel
before it, which is negative if both ran at the same time. The last line is the whole step, from the
start of the first kernel to the end of the last.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from _runner import append_rows, dimensions, environment, free_memory
from bench_layer import LAYOUTS, Candidate, Case, captured

SHAPES = (
    *("256x256x56x56", "256x512x28x28", "256x1024x14x14", "256x2048x7x7"),
    *("128x512x2x2", "32x96x56x56"),
)
PROVIDERS = ("ce", "bn_relu_compiled")
REPLAYS = 20
FIELDS = (
    *("shape", "layout", "dtype", "provider", "place", "kernel", "us_p50", "gap_us_p50"),
    *("gpu", "torch", "triton", "version", "commit", "command"),
)


class Kernel(NamedTuple):
    """One kernel of a step, microseconds."""

    name: str
    begin: float
    end: float


class Line(NamedTuple):
    """A line of the table, microseconds."""

    kernel: str
    took: float
    gap: float | None  # None of the first kernel, and of the whole step


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """The kernels among the events of a profile, in the order in which they began."""
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def lines_of(kernels: list[Kernel], replays: int) -> list[Line]:
    """Medians over the replays; all have the same kernels in the same order."""
    count, rest = divmod(len(kernels), replays)
    steps = [kernels[i * count : (i + 1) * count] for i in range(replays)]
    if rest or not count or len({tuple(kernel.name for kernel in step) for step in steps}) != 1:
        raise RuntimeError(f"{len(kernels)} kernels in {replays} replays are not equal steps")
    lines = []
    for place, first in enumerate(steps[0]):
        took = statistics.median(step[place].end - step[place].begin for step in steps)
        gaps = [step[place].begin - step[place - 1].end for step in steps] if place else []
        lines.append(Line(first.name, took, statistics.median(gaps) if gaps else None))
    whole = statistics.median(step[-1].end - step[0].begin for step in steps)
    return [*lines, Line("whole step", whole, None)]


def profiled(case: Case, provider: str) -> list[Line]:
    """The lines of a provider's training step."""
    replay = captured(Candidate(provider, case).run("graph"))
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    return lines_of(kernels_of(watched.events()), REPLAYS)


def main() -> int:
    """Profile what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", type=dimensions, default=[*map(dimensions, SHAPES)])
    add("--providers", nargs="+", choices=("ce", "bn_relu", "bn_relu_compiled"), default=PROVIDERS)
    add("--layouts", nargs="+", choices=LAYOUTS, default=["channels_last"])
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--out", type=Path, help="CSV file to append rows to")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda")
    about = environment(device) | {"command": shlex.join(["python", *sys.argv])}
    for shape in given.shapes:
        for layout in given.layouts:
            case = Case(shape, getattr(torch, given.dtype), layout, device)
            for provider in given.providers:
                torch._dynamo.reset()
                print(f"\n{case} {provider}", flush=True)
                rows = []
                for place, line in enumerate(profiled(case, provider)):
                    gap = "" if line.gap is None else f"{line.gap:.2f}"
                    print(f"  {line.took:9.2f} µs  gap {gap:>6}  {line.kernel[:80]}", flush=True)
                    own = {"provider": provider, "place": str(place), "kernel": line.kernel}
                    times = {"us_p50": f"{line.took:.2f}", "gap_us_p50": gap}
                    rows.append(case.columns | own | times | about)
                if given.out is not None:
                    append_rows(given.out, rows, FIELDS)
            del case
            free_memory(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
