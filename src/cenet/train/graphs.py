"""A step of training as CUDA graphs: the host then starts one graph instead of hundreds of kernels.

A function is captured after it has run a few times, so that everything lazy (compilation, momenta,
workspaces) is there. Those first calls are steps of the training like all others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cenet.train.recipes import Recipe

EAGER_CALLS = 3
# DistributedDataParallel takes its own time in its first ten steps, which a graph cannot hold
EAGER_CALLS_DISTRIBUTED = 11


class Graphed:
    """A function of tensors that returns nothing, captured and replayed.

    It must do the same at each call, on tensors that stay where they are.
    """

    def __init__(self, run: Callable[..., None], eager_calls: int = EAGER_CALLS) -> None:
        """Capture `run` after so many calls."""
        self._run, self._eager_calls, self._calls = run, eager_calls, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> None:
        """Run on inputs that have the same shapes each time."""
        if self._graph is None:
            self._calls += 1
            if self._calls <= self._eager_calls:
                # as capture will run it: gradients are then added on the same kind of stream
                with side_stream():
                    self._run(*inputs)
                return
            self._inputs = tuple(value.clone() for value in inputs)
            self._graph = torch.cuda.CUDAGraph()
            # records, and does not run; other threads prepare batches meanwhile
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._run(*self._inputs)
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value)
        self._graph.replay()


@contextmanager
def side_stream() -> Iterator[None]:
    """Another stream, between what the present one has done and will do."""
    make: Any = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def problem(recipe: Recipe, device: torch.device, world: int) -> str | None:
    """Why a run cannot be captured, and what to do; None if it can."""
    if device.type != "cuda":
        return f"--cuda-graphs needs a GPU, and this run is on {device.type}; leave it away"
    if recipe.precision == "float16":
        return "--cuda-graphs cannot skip steps as float16 needs it; use --precision bfloat16"
    if world > 1 and recipe.sync_ce:
        return f"--cuda-graphs cannot hold --sync-ce among {world} processes; use --compile"
    if world > 1 and recipe.accumulate > 1:
        return (
            f"--cuda-graphs of {world} processes cannot hold --accumulate {recipe.accumulate}; use "
            "--compile"
        )
    return None
