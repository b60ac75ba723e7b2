"""`benchmarks/profile_layer.py`: kernels of a profile become lines of a table."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from _benchmarks import script


@pytest.fixture
def profiling():
    with script("profile_layer") as module:
        yield module


def event(name, start, end, device=DeviceType.CUDA):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end)
    )


def test_times_and_gaps_are_medians_over_the_replays(profiling):
    events = [event("cudaGraphLaunch", 0, 1, DeviceType.CPU), event("Memset (Device)", 0, 1)]
    for begin, slower in ((0, 0), (100, 1), (200, 5)):
        # the third begins before the second has ended
        events += [
            event("second", begin + 12, begin + 20 + slower),
            event("first", begin, begin + 10),
            event("third", begin + 18, begin + 30 + slower),
        ]
    lines = profiling.lines_of(profiling.kernels_of(events), 3)
    assert lines == [
        ("first", 10, None), ("second", 9, 2), ("third", 13, -3), ("whole step", 31, None),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 3])
def test_replays_that_differ_are_an_error(profiling, count):
    kernels = [profiling.Kernel(f"{i}", i, i + 1) for i in range(count)]
    with pytest.raises(RuntimeError, match="are not equal steps"):
        profiling.lines_of(kernels, 2)


def test_without_a_gpu_there_is_one_line(profiling, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile_layer.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        profiling.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: torch sees no GPU")
