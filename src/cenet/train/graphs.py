"""A step of training as CUDA graphs: the host then starts one graph instead of hundreds of kernels.

A function is captured after it has run a few times, so that everything lazy (compilation, momenta,
workspaces) is there. Those first calls are steps of the training like all others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EAGER_CALLS = 3


class Graphed:
    """A function of tensors that returns nothing, captured and replayed.

    It must do the same at each call, on tensors that stay where they are.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        """Capture `run` at its call number EAGER_CALLS + 1."""
        self._run, self._calls = run, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> None:
        """Run on inputs that have the same shapes each time."""
        if self._graph is None:
            self._calls += 1
            if self._calls <= EAGER_CALLS:
                self._on_side_stream(inputs)
                return
            self._inputs = tuple(value.clone() for value in inputs)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # records, and does not run
                self._run(*self._inputs)
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value)
        self._graph.replay()

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> None:
        """As capture will run it: gradients are then added on the same kind of stream."""
        make: Any = torch.cuda.Stream
        side = make()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(*inputs)
        torch.cuda.current_stream().wait_stream(side)


def problem(device: torch.device, world: int, precision: str) -> str | None:
    """Why a run cannot be captured, and what to do; None if it can."""
    if device.type != "cuda":
        return f"--cuda-graphs needs a GPU, and this run is on {device.type}; leave it away"
    if world > 1:
        return f"--cuda-graphs is for one process, and there are {world}; use --compile"
    if precision == "float16":
        return "--cuda-graphs cannot skip steps as float16 needs it; use --precision bfloat16"
    return None
