"""`benchmarks/tune_tiles.py`: what it finds to be equal, what it refuses, what it prints."""

import csv
import sys

import pytest
import torch

pytest.importorskip("triton")

from _benchmarks import script
from _checks import assert_close
from _kernels import interpreted


@pytest.fixture
def tuning():
    with script("tune_tiles") as module:
        yield module


@pytest.fixture
def inputs(tuning):
    return tuning.Inputs("2x32x6", "channels_last", torch.device("cpu"))


@interpreted
def test_the_moments_of_the_parts_are_those_of_the_images(tuning, inputs):
    found = tuning.PASSES["measure"].result(inputs)
    images = inputs.x.double().transpose(0, 1).flatten(1)
    assert_close("moments", found, torch.stack([images.mean(1), images.var(1, correction=0)]), 1e-5)


@interpreted
def test_a_tile_is_taken_only_meanwhile_and_results_do_not_depend_on_it(tuning, inputs):
    for name in ("measure", "reduce_bare"):
        one = tuning.PASSES[name]
        tables = getattr(one.module, one.table)
        search = tuning.Search(one, inputs, "channels_last", inputs.x.device)
        # four times as many splits
        tile = search.start._replace(pixels=16, tiles=1, programs=4096)
        with one.using(tile):
            assert one.in_use(inputs, "channels_last") == tile
            assert_close(name, one.result(inputs), search.expected, tuning.ERROR)
        assert getattr(one.module, one.table) is tables


@interpreted
def test_tiles_that_cannot_run_or_find_something_else_are_out(tuning, inputs, monkeypatch):
    one = tuning.PASSES["measure"]
    search = tuning.Search(one, inputs, "channels_last", inputs.x.device)
    monkeypatch.setattr(tuning, "interleave", lambda runs, *_: pytest.fail("timed"))
    search.expected = search.expected * (1 + 2 * tuning.ERROR)
    assert search.time(search.start) == float("inf")

    def fails(_inputs):
        raise RuntimeError("out of resource")

    monkeypatch.setattr(one, "run", fails)
    assert search.time(search.start._replace(stages=2)) == float("inf")


def test_the_search_goes_on_as_long_as_a_step_is_faster(tuning, monkeypatch):
    monkeypatch.setattr(tuning, "CHOICES", {"pixels": (16, 32, 64), "warps": (1, 2)})
    search = tuning.Search.__new__(tuning.Search)
    search.start, search.times = tuning.Tile(1, 16, 32, 1, 3, 2048, 8), {}
    # two warps are better with 64 pixels only; 32 pixels gain too little
    times = {(16, 1): 1.0, (32, 1): 0.99, (64, 1): 0.9, (16, 2): 1.1, (64, 2): 0.8, (32, 2): 0.79}
    monkeypatch.setattr(search, "_time", lambda tile: times[tile.pixels, tile.warps])
    assert search.best(until=float("inf"))[1:4] == (64, 32, 2)
    assert search.best(until=0.0) == search.start


def test_the_table_has_equal_neighbours_once(tuning):
    small, large = tuning.Tile(512, 16, 32, 1, 3, 2048, 8), tuning.Tile(7, 64, 32, 4, 3, 2048, 8)
    found = {("forward", "channels_last"): [(49, small), (196, small), (3136, large)]}
    assert tuning.table(found) == (
        "FORWARD_TILES[True] = (Tile(3136, 64, 32, 4, 3, 2048, 8), Tile(1, 16, 32, 1, 3, 2048, 8),)"
    )


@interpreted
def test_rows_name_both_tiles(tuning, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "CHOICES", {"warps": (1,)})
    monkeypatch.setattr(tuning, "CALLS", 1)
    out = tmp_path / "tiles.csv"
    arguments = ["--device", "cpu", "--shapes", "1x16x4", "--passes", "measure", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["tune_tiles.py", *arguments, "--out", str(out)])
    assert tuning.main() == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layout"], row["role"]) for row in rows] == [
        ("channels_last", "in use"), ("channels_last", "best"),
        ("contiguous", "in use"), ("contiguous", "best"),
    ]  # fmt: skip
    assert all(float(row["us_p50"]) > 0 for row in rows)
