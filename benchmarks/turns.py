"""A layer of two versions of cenet, timed alternately: time of a training step, as a ratio.

    git worktree add /tmp/before COMMIT
    python benchmarks/turns.py /tmp/before/src src
    python benchmarks/turns.py /tmp/before/src src --device cuda --channels-last \\
        --shapes 256x256x56 256x512x28 256x1024x14

For each shape, two processes run steps alternately. On a CPU they have one thread each, and CPU
seconds are counted. On a GPU the step is in bfloat16, and the time until the device has finished is
counted, for replays of a CUDA graph and for eager steps. The memory layout of a process changes the
time of all its steps (on a CPU by up to 40 %), so freed memory is kept (`KEEP`), and everything is
repeated with fresh processes. The ratio is the median over processes of the median over rounds.
With --out, a row for each shape is added to a CSV file.
"""

import argparse
import itertools
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from _runner import append_rows, cpu_name

SHAPES = ("8x64x7", "8x256x14", "8x1024x14", "8x512x28", "8x256x56")
# settings of glibc: without them large blocks go back to the system, and each new page costs a trap
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
SECONDS = 0.1  # of one turn
FIELDS = (
    *("shape", "layout", "mode", "ratio", "ratio_lowest", "ratio_highest", "processes", "rounds"),
    *("before_ms", "now_ms", "device", "torch", "before", "now", "command"),
)
MODES = {"cpu": ("eager",), "cuda": ("graph", "eager")}
WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import cenet
assert cenet.__file__.startswith(sys.argv[1]), cenet.__file__
torch.set_num_threads(1)
torch.manual_seed(0)
n, channels, side = map(int, sys.argv[2].split("x"))
layout = torch.channels_last if sys.argv[3] == "channels_last" else torch.contiguous_format
device, mode = sys.argv[4:]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
x = torch.randn(n, channels, side, side).contiguous(memory_format=layout)
x = x.to(device, dtype).requires_grad_()
layer = cenet.NormCE2d(nn.BatchNorm2d(channels), cenet.ChannelEquilibrium2d(channels), nn.ReLU())
layer.to(device)
gradient = torch.randn_like(x)
def step():
    layer(x).backward(gradient)
    x.grad = None
    layer.zero_grad()
if mode == "graph":
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    step = graph.replay
def clock():
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
for line in sys.stdin:
    start = clock()
    for _ in range(int(line)):
        step()
    print((clock() - start) / int(line), flush=True)
"""


class Worker:
    """A process that has one version of the layer."""

    def __init__(self, tree: Path, *of: str) -> None:
        command = [sys.executable, "-c", WORKER, str(tree.resolve()), *of]
        environment = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, steps: int) -> float:
        """Seconds of a step, the mean of several."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def commit_of(tree: Path) -> str:
    """The commit of a checkout, with a plus if files of the tree have changed since."""
    git = ["git", "-C", str(tree)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True)
    return (done.stdout.strip() or "unknown") + "+" * bool(changed.returncode)


def in_turns(trees: list[Path], rounds: int, *of: str) -> list[tuple[float, ...]]:
    """Seconds of a step of both versions in each round, by one fresh process each."""
    workers = [Worker(tree, *of) for tree in trees]
    try:
        for worker in workers:
            worker.seconds(3)  # compiles kernels
        steps = max(2, round(SECONDS / min(worker.seconds(2) for worker in workers)))
        pairs = []
        for number in range(rounds):
            order = workers if number % 2 else workers[::-1]  # neither is always first
            found = {worker: worker.seconds(steps) for worker in order}
            pairs.append(tuple(found[worker] for worker in workers))
        return pairs
    finally:
        for worker in workers:
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="src folder of the version to compare with")
    parser.add_argument("now", type=Path, help="src folder of the other version")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="images x channels x side")
    parser.add_argument("--device", choices=list(MODES), default="cpu")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES["cuda"], help="default: all modes of --device"
    )
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument(
        "--commits",
        nargs=2,
        metavar=("BEFORE", "NOW"),
        help="commits of both versions, if git is not available",
    )
    parser.add_argument("--out", type=Path, help="CSV file to add a row for each shape to")
    arguments = parser.parse_args()
    trees = [arguments.before, arguments.now]
    for tree in trees:
        if not (tree / "cenet").is_dir():
            parser.error(f"{tree} has no folder cenet; give the src folder of a checkout")
    layout = "channels_last" if arguments.channels_last else "contiguous"
    commits = arguments.commits or [commit_of(tree) for tree in trees]
    on_gpu = arguments.device == "cuda"
    modes = arguments.modes or MODES[arguments.device]
    for shape, mode in itertools.product(arguments.shapes, modes):
        runs = [
            in_turns(trees, arguments.rounds, shape, layout, arguments.device, mode)
            for _ in range(arguments.processes)
        ]
        ratios = [statistics.median(now / before for before, now in pairs) for pairs in runs]
        before, now = (
            1e3 * statistics.median(times)
            for times in zip(*(pair for pairs in runs for pair in pairs), strict=True)
        )
        row = {
            "shape": shape,
            "layout": layout,
            "mode": mode,
            "ratio": f"{statistics.median(ratios):.3f}",
            "ratio_lowest": f"{min(ratios):.3f}",
            "ratio_highest": f"{max(ratios):.3f}",
            "processes": str(arguments.processes),
            "rounds": str(arguments.rounds),
            "before_ms": f"{before:.3f}",
            "now_ms": f"{now:.3f}",
            "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
            "torch": torch.__version__,
            "before": commits[0],
            "now": commits[1],
            "command": shlex.join(["python", *sys.argv]),
        }
        print(*(f"{key}={row[key]}" for key in FIELDS[:10]), flush=True)
        if arguments.out is not None:
            append_rows(arguments.out, [row], FIELDS)


if __name__ == "__main__":
    main()
