"""Training steps as CUDA graphs: the host launches one graph instead of hundreds of kernels.

A function is captured after a few ordinary calls, when everything that is created on first use
(compiled kernels, momenta, workspaces) exists. Those calls are training steps like all others.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cenet.train.build import options_of_graphs
from cenet.train.recipes import Recipe

EAGER_CALLS = 3
# DistributedDataParallel measures its first ten steps on the host, which a graph cannot contain
EAGER_CALLS_DISTRIBUTED = 11


class GraphedFunction:
    """A function of tensors without a result, captured as a CUDA graph and replayed.

    Each call must launch the same kernels, and on tensors that keep their addresses.
    """

    def __init__(self, run: Callable[..., None], eager_calls: int = EAGER_CALLS) -> None:
        """Capture `run` after `eager_calls` ordinary calls."""
        self._run, self._eager_calls, self._calls = run, eager_calls, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> None:
        """Run the function; the inputs must have the same shapes each time."""
        if self._graph is None:
            self._calls += 1
            if self._calls <= self._eager_calls:
                # on a side stream as during capture: gradients stay on one kind of stream
                with side_stream():
                    self._run(*inputs)
                return
            self._inputs = tuple(value.clone() for value in inputs)
            self._graph = torch.cuda.CUDAGraph()
            # records without running; other threads may use the device meanwhile
            recording = torch.cuda.graph(self._graph, capture_error_mode="thread_local")
            with without_collection(), recording:
                self._run(*self._inputs)
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value)
        self._graph.replay()


@contextmanager
def without_collection() -> Iterator[None]:
    """Switch the garbage collector off inside this context.

    Garbage of an earlier run holds its graphs, and destroying one makes the capture of another fail
    (CUDNN_STATUS_BAD_PARAM_STREAM_MISMATCH, cudaErrorStreamCaptureInvalidated).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def side_stream() -> Iterator[None]:
    """Run on another stream, after the work queued on the current one and before what follows."""
    make: Any = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def capture_problem(recipe: Recipe, device: torch.device, world: int) -> str | None:
    """Why a run cannot be captured, with a fix; None if it can."""
    if device.type != "cuda":
        return f"--cuda-graphs needs a GPU, and this run is on {device.type}; remove it"
    if recipe.precision == "float16":
        return "--cuda-graphs cannot skip steps, which float16 needs; use --precision bfloat16"
    if not options_of_graphs(recipe.opt):
        return (
            f"--cuda-graphs cannot hold --opt {recipe.opt}, whose state is on the host; use "
            "momentum, nesterov, adam or adamw, or remove --cuda-graphs"
        )
    if world > 1 and recipe.sync_ce:
        return f"--cuda-graphs cannot hold --sync-ce among {world} processes; use --compile"
    if world > 1 and recipe.accumulate > 1:
        return (
            f"--cuda-graphs of {world} processes cannot hold --accumulate {recipe.accumulate}; use "
            "--compile"
        )
    return None
