"""Inference time as the paper's Table 1 has it: plain, SE and CE, as ratios inside one run."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from cenet.folding import fold_ce
from cenet.models.factory import create_model
from cenet.models.placement import NETWORKS

Run = Callable[[], object]


class Ratio(NamedTuple):
    """Time of one way to run a network."""

    name: str
    milliseconds: float  # median
    ratio: float  # to the plain network: median of the rounds
    spread: tuple[float, float]  # least and largest ratio of the rounds


def time_inference(
    name: str, *, device: str, batch: int, rounds: int, size: int | None, compiled: bool
) -> list[Ratio]:
    """Time a network of the paper, in turns, so that a busy machine slows all alike.

    Args:
        name: as in `create_model`.
        device: cpu or cuda.
        batch: images at a time; the paper has 32.
        rounds: how often each is timed, after one round that is not counted.
        size: of the images; by default the network's own.
        compiled: with torch.compile too.
    """
    size = size or NETWORKS[name].input_size
    images = torch.randn(batch, 3, size, size, device=device)
    runs = dict(_runs(name, images, compiled=compiled))
    times: dict[str, list[float]] = {key: [] for key in runs}
    for round_ in range(rounds + 1):
        for key, run in runs.items():
            elapsed = _milliseconds(run, device)
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
    folded = fold_ce(networks["CE"])
    yield "CE folded", _run(folded, images)
    if compiled:
        for key, model in (("plain", networks["plain"]), ("CE folded", folded)):
            yield f"{key}, compiled", _run(torch.compile(model), images)


def _run(model: Callable[[Tensor], Tensor], images: Tensor) -> Run:
    return torch.inference_mode()(lambda: model(images))


def _milliseconds(run: Run, device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
