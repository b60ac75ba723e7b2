"""Inference time as in the paper's Table 1: plain, SE and CE, folded or not, as ratios in one run.

    python benchmarks/bench_networks.py resnet50                    # a CPU, batch 32
    python benchmarks/bench_networks.py resnet50 --device cuda --compiled

The networks are timed alternately, so that a busy machine slows all of them alike.
"""

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from _runner import folded_plain, seconds
from cenet import fold_ce
from cenet.models import NETWORKS, create_model

Run = Callable[[], object]


class Ratio(NamedTuple):
    name: str
    milliseconds: float  # median
    ratio: float  # to the plain network: median of the rounds
    spread: tuple[float, float]  # least and largest ratio of the rounds


def time_inference(
    name: str, *, device: str, batch: int, rounds: int, size: int, compiled: bool
) -> list[Ratio]:
    """Time each form of a network `rounds` times, after one round that is not counted."""
    images = torch.randn(batch, 3, size, size, device=device)
    runs = dict(_runs(name, images, compiled=compiled))
    times: dict[str, list[float]] = {key: [] for key in runs}
    for round_ in range(rounds + 1):
        for key, run in runs.items():
            elapsed = 1e3 * seconds(run, torch.device(device))
            if round_ > 0:
                times[key].append(elapsed)
    ratios = {
        key: [t / plain for t, plain in zip(values, times["plain"], strict=True)]
        for key, values in times.items()
    }
    return [
        Ratio(key, median(times[key]), median(values), (min(values), max(values)))
        for key, values in ratios.items()
    ]


def _runs(name: str, images: Tensor, *, compiled: bool) -> Iterator[tuple[str, Run]]:
    networks = {
        "plain": create_model(name, None),
        "SE": create_model(name, "se"),
        "CE": create_model(name, "ce"),
    }
    for key, model in networks.items():
        yield key, _run(model.eval().to(images.device), images)
    folded = {
        "plain folded": folded_plain(networks["plain"]),
        "SE folded": folded_plain(networks["SE"]),
        "CE folded": fold_ce(networks["CE"]),
    }
    for key, model in folded.items():
        yield key, _run(model, images)
    if compiled:
        for key in ("plain folded", "CE folded"):
            yield f"{key}, compiled", _run(torch.compile(folded[key]), images)


def _run(model: Callable[[Tensor], Tensor], images: Tensor) -> Run:
    return torch.inference_mode()(lambda: model(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", default="resnet50", help="name of a network; `cenet models` lists them"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="images per batch; 32 in the paper")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of times each network is timed"
    )
    parser.add_argument(
        "--size", type=int, help="height and width of the images; default: the network's own"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="also time networks compiled by torch.compile"
    )
    options = parser.parse_args()
    name, device = options.model.removeprefix("ce"), options.device
    if name not in NETWORKS:
        raise SystemExit(
            f"{options.model} is not a network of the paper; use one of {', '.join(NETWORKS)}"
        )
    size = NETWORKS[name].input_size if options.size is None else options.size
    if min(options.batch, options.rounds, size) < 1:
        raise SystemExit("batch, rounds and size must be at least 1")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this machine has no CUDA device; use --device cpu")
    try:
        found = time_inference(
            name, device=device, batch=options.batch, rounds=options.rounds, size=size,
            compiled=options.compiled,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"{name} does not take {options.batch} images of this size here: {reason}"
        ) from error
    table = Table(
        title=f"{name}, inference, {options.batch} images of {size}², {device}, "
        f"n = {options.rounds} turns"
    )
    for column in ("network", "ms", "ratio to plain", "least to largest"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in found:
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}"
        table.add_row(row.name, f"{row.milliseconds:.1f}", f"{row.ratio:.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
