"""CUDA graphs without a GPU: what happens around a capture. With one: test_engine.py."""

import gc
from contextlib import nullcontext

import pytest
import torch

from cenet.train import cuda_graphs


class Recording:
    """Stands in for `torch.cuda.graph`."""

    active = False

    def __init__(self, graph, **_options):
        pass

    def __enter__(self):
        Recording.active = True

    def __exit__(self, *_error):
        Recording.active = False


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`; in a cycle, as that of a run is, once it is over."""

    destroyed_while_recording: list = []  # noqa: RUF012

    def __init__(self):
        self.own = self

    def replay(self):
        pass

    def __del__(self):
        Graph.destroyed_while_recording.append(Recording.active)


@pytest.mark.parametrize("enabled", [True, False])
def test_graphs_of_earlier_runs_are_not_destroyed_during_a_capture(enabled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(cuda_graphs, "side_stream", nullcontext)
    monkeypatch.setattr(Graph, "destroyed_while_recording", [])
    seen = []

    def run(x):
        seen.append((Recording.active, x.item()))
        Graph()
        for _ in range(3_000):  # enough for collections
            cycle = []
            cycle.append(cycle)

    graphed = cuda_graphs.GraphedFunction(run, eager_calls=1)
    given = [torch.tensor(value) for value in range(3)]
    if not enabled:
        gc.disable()
    try:
        for x in given:
            graphed(x)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert given == [0, 1, 2]  # the graph has a tensor of its own, to which they are copied
    del graphed
    gc.collect()
    assert seen == [(False, 0), (True, 1)]  # a step, a capture, a replay
    # two that `run` dropped, and that of the capture
    assert Graph.destroyed_while_recording == [False, False, False]
