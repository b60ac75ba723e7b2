"""Tune the tiles of the kernels' passes over x for the GPU of this machine.

    PYTHONPATH=src python benchmarks/tune_tiles.py --out benchmarks/results/tiles.csv
    PYTHONPATH=src python benchmarks/tune_tiles.py --passes reduce backward --shapes 256x1024x14

A pass is timed alone, as a CUDA graph, for every shape and layout. The search starts from the tile
in use and changes one of its numbers at a time (pixels, channels, warps, stages, programs, tiles
per split) as long as that is faster by more than `GAIN`; a tile whose result differs from that of
the tile in use is rejected. Then the best tile and the one in use are timed alternately, and a row
for each goes to the CSV file.

At the end the tables are printed in the form of those in `cenet.kernels.moments` and
`cenet.kernels.mix`. If the gain is worth it, put them there, and run `pytest -m gpu` and
`bench_layer.py` afterwards. Maps of up to 8 pixels and pooled covariances have tiles of their own,
which are not tuned here.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _runner import append_rows, environment, interleave, relative_error
from cenet.kernels import mix, moments
from cenet.kernels.tiles import ROWS_OF_VALUES, Tile

SHAPES = ("256x64x112", "256x256x56", "256x512x28", "256x1024x14", "256x2048x7")
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
# what is tried for each number of a tile
CHOICES: dict[str, tuple[int, ...]] = {
    "pixels": (16, 32, 64, 128, 256),
    "channels": (16, 32, 64),
    "warps": (1, 2, 4, 8),
    "stages": (2, 3, 4, 5),
    "programs": (1024, 2048, 4096),
    "tiles": (4, 8, 16),
}
GROUP_SIZE = 16
GAIN = 0.02  # share of the time; smaller gains are noise
CALLS = 10  # that are timed together, in a graph on a GPU
ERROR = 1e-3  # of a result, relative to that of the tile in use; both round alike
FIELDS = (
    *("pass", "layout", "shape", "role", *Tile._fields[1:], "us_p20", "us_p50", "us_p80"),
    *("gpu", "torch", "triton", "version", "commit", "command"),
)
Run = Callable[[], Any]


@dataclass
class Inputs:
    """What the passes read, for a shape."""

    x: Tensor
    grad: Tensor
    map: mix.Map
    through: mix.StatisticsGradient

    def __init__(self, shape: str, layout: str, device: torch.device) -> None:
        n, channels, side = map(int, shape.split("x"))
        torch.manual_seed(0)
        groups = -(-channels // GROUP_SIZE)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device)

        def images() -> Tensor:
            found = noise(n, channels, side, side).to(torch.bfloat16)
            return found.contiguous(memory_format=LAYOUTS[layout])

        self.x, self.grad = images(), images()
        values = noise(ROWS_OF_VALUES, channels) * 0.1 + 1
        P, Q = (0.1 * noise(groups, GROUP_SIZE, GROUP_SIZE) for _ in range(2))
        e, f, w = (noise(n, channels) for _ in range(3))
        self.map = mix.Map(values, P, w, GROUP_SIZE, "relu", 0.0)
        self.through = mix.StatisticsGradient(Q, e, f, None)

    def bare(self) -> mix.Map:
        """The map without an activation."""
        return self.map._replace(act="none")


class Pass:
    """A pass over x, and the table that it takes its tiles from.

    Args:
        module, table: where the table is.
        run: launches the pass.
        found: what the pass found, in a form that does not depend on the tile.
    """

    def __init__(
        self,
        module: Any,
        table: str,
        run: Callable[[Inputs], Any],
        found: Callable[[Inputs, Any], Tensor],
    ) -> None:
        self.module, self.table, self.run, self.found = module, table, run, found

    def result(self, inputs: Inputs) -> Tensor:
        """What the pass finds, in float64."""
        return self.found(inputs, self.run(inputs)).double()

    def in_use(self, inputs: Inputs, layout: str) -> Tile:
        """The tile that the table gives for these inputs."""
        tiles: tuple[Tile, ...] = getattr(self.module, self.table)[layout == "channels_last"]
        pixels = inputs.x.shape[2] * inputs.x.shape[3]
        return next(tile for tile in tiles if pixels >= tile.least)

    @contextmanager
    def using(self, tile: Tile) -> Iterator[None]:
        """Take this tile for everything meanwhile."""
        before = getattr(self.module, self.table)
        setattr(self.module, self.table, dict.fromkeys((True, False), (tile,)))
        try:
            yield
        finally:
            setattr(self.module, self.table, before)


def moments_of(inputs: Inputs, parts: moments.Parts) -> Tensor:
    """Mean and variance of every channel, from the parts of the measuring pass."""
    n, channels, height, width = inputs.x.shape
    pixels, shape = height * width, (n, parts.splits, channels)
    ends = torch.arange(1, parts.splits + 1, device=inputs.x.device) * parts.split_pixels
    counts = ends.clamp_max(pixels).diff(prepend=ends.new_zeros(1)).double()[None, :, None]
    means = (parts.pivot.double() + parts.rest.double()).view(shape)
    mean = (means * counts).sum((0, 1)) / (n * pixels)
    within = parts.square.double().view(shape).sum((0, 1))
    between = ((means - mean).square() * counts).sum((0, 1))
    return torch.stack([mean, (within + between) / (n * pixels)])


def total(inputs: Inputs, sums: mix.Sums) -> Tensor:
    """Gradients of P, d and c, added up."""
    assert sums.P is not None
    return torch.cat([part.double().sum(0).flatten() for part in (sums.P, sums.d, sums.c)])


def image(inputs: Inputs, y: Tensor) -> Tensor:
    """A result of the size of x, as it is."""
    return y


def mapped(inputs: Inputs) -> Tensor:
    """y."""
    y = torch.empty_like(inputs.x)
    mix.forward(inputs.x, y, inputs.map)
    return y


def reduced_from_y(inputs: Inputs) -> mix.Sums:
    """The reducing pass of a layer with a residual."""
    masked = torch.empty_like(inputs.x)
    return mix.reduce(inputs.x, inputs.grad, inputs.map, inputs.x, masked)


def gradient(inputs: Inputs) -> Tensor:
    """dx."""
    dx = torch.empty_like(inputs.x)
    mix.backward(inputs.x, inputs.grad, dx, inputs.map, inputs.through)
    return dx


PASSES = {
    "measure": Pass(
        moments, "TILES", lambda i: moments.measure(i.x, GROUP_SIZE, gram=True), moments_of
    ),
    "forward": Pass(mix, "FORWARD_TILES", mapped, image),
    "reduce": Pass(mix, "REDUCE_TILES", lambda i: mix.reduce(i.x, i.grad, i.map), total),
    "reduce_y": Pass(mix, "REDUCE_Y_TILES", reduced_from_y, total),
    "reduce_bare": Pass(
        mix, "REDUCE_BARE_TILES", lambda i: mix.reduce(i.x, i.grad, i.bare()), total
    ),
    "backward": Pass(mix, "BACKWARD_TILES", gradient, image),
}


def graphed(run: Run) -> Run:
    """Replay of what `run` launches, captured in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Search:
    """The search for the best tile of a pass over one shape."""

    def __init__(self, one: Pass, inputs: Inputs, layout: str, device: torch.device) -> None:
        self.one, self.inputs, self.device = one, inputs, device
        self.start = one.in_use(inputs, layout)
        self.expected = one.result(inputs)
        self.times: dict[Tile, float] = {}

    def time(self, tile: Tile) -> float:
        """Milliseconds of `CALLS` passes; infinite if it cannot run, or finds something else."""
        if tile not in self.times:
            self.times[tile] = self._time(tile)
        return self.times[tile]

    def _time(self, tile: Tile) -> float:
        try:
            with self.one.using(tile):
                found = self.one.result(self.inputs)
            if not relative_error(found, self.expected) <= ERROR:
                print(f"    {tile}: another result", flush=True)
                return float("inf")
            return interleave({"": self.timed(tile)}, 3, self.device)[""].p50
        except Exception as error:  # too many registers, too much shared memory
            print(f"    {tile}: {type(error).__name__}", flush=True)
            return float("inf")

    def timed(self, tile: Tile) -> Run:
        """What is timed: the launches of `CALLS` passes."""

        def calls() -> None:
            with self.one.using(tile):
                for _ in range(CALLS):
                    self.one.run(self.inputs)

        return graphed(calls) if self.device.type == "cuda" else calls

    def best(self, until: float) -> Tile:
        """The fastest tile that changes of one number at a time lead to, until a time is over."""
        best, improved = self.start, True
        while improved:
            improved = False
            for number, choices in CHOICES.items():
                for choice in choices:
                    if time.perf_counter() > until:
                        return best
                    tile = best._replace(**{number: choice})
                    if self.time(tile) < (1 - GAIN) * self.time(best):
                        best, improved = tile, True
        return best

    def compare(self, tile: Tile, rounds: int) -> dict[str, Any]:
        """Times of the tile in use and of another, in turns; the roles name them."""
        runs = {role: self.timed(one) for role, one in (("in use", self.start), ("best", tile))}
        return interleave(runs, rounds, self.device)


def table(best: dict[tuple[str, str], list[tuple[int, Tile]]]) -> str:
    """The tables in Python: tiles by falling number of pixels, equal neighbours as one."""
    lines = []
    for (name, layout), found in best.items():
        rows: list[Tile] = []
        for pixels, tile in sorted(found, reverse=True):
            if rows and rows[-1][1:] == tile[1:]:
                rows[-1] = rows[-1]._replace(least=pixels)
            else:
                rows.append(tile._replace(least=pixels))
        rows[-1] = rows[-1]._replace(least=1)
        tiles = ", ".join(f"Tile({', '.join(map(str, row))})" for row in rows)
        lines.append(f"{PASSES[name].table}[{layout == 'channels_last'}] = ({tiles},)")
    return "\n".join(lines)


def main() -> int:
    """Tune what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=[*PASSES])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], help="images×channels×side")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the last comparison")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of all searches together, in minutes"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="CSV file to append rows to")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no GPU; the interpreter of Triton needs --device cpu"
        )
    cases = [(s, lay, name) for s in given.shapes for lay in given.layouts for name in given.passes]
    end = time.perf_counter() + 60 * given.minutes
    best: dict[tuple[str, str], list[tuple[int, Tile]]] = {}
    about = environment(device) | {"command": shlex.join(["python", *sys.argv])}
    for place, (shape, layout, name) in enumerate(cases):
        now = time.perf_counter()
        search = Search(PASSES[name], Inputs(shape, layout, device), layout, device)
        tile = search.best(now + (end - now) / (len(cases) - place))  # an equal share of the rest
        times = search.compare(tile, given.rounds)
        side = int(shape.split("x")[2])
        best.setdefault((name, layout), []).append((side * side, tile))
        rows = []
        for role, one in {"in use": search.start, "best": tile}.items():
            took = {f"us_{k}": f"{1e3 * v / CALLS:.2f}" for k, v in times[role]._asdict().items()}
            what = {"pass": name, "layout": layout, "shape": shape, "role": role}
            rows.append(what | {k: str(v) for k, v in one._asdict().items() if k in FIELDS} | took)
            print(f"{name:12s} {layout:13s} {shape:12s} {role:6s} {took['us_p50']:>8s} µs  "
                  f"{tuple(one[1:])}", flush=True)  # fmt: skip
        if given.out is not None:
            append_rows(given.out, [row | about for row in rows], FIELDS)
    print(table(best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
