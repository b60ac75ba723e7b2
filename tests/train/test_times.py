"""Where the wall time of a run goes, by a clock of our own."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cenet.train.times as times
from _distributed import run_alone
from _training import PLAIN, few_digits, stop_at, trainer
from cenet.signals import Interrupted
from cenet.train.job import Job, train
from cenet.train.options import Options
from cenet.train.times import PARTS, Clock, Waits, in_words, process_age, start_in_words

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def now(monkeypatch):
    value = [100.0]
    monkeypatch.setattr(times.time, "perf_counter", lambda: value[0])
    return value


def test_every_moment_belongs_to_one_part(now):
    clock = Clock("libraries", age=5.0)
    now[0] += 1
    clock.enter("training")
    now[0] += 10
    with clock.on("saving"):
        now[0] += 2
        with clock.on("waiting for data"):
            now[0] += 4
        now[0] += 1
    now[0] += 20
    clock.move(3, "training", "waiting for data")
    found = clock.summary(86)
    spent = {"libraries": 6, "training": 27, "saving": 3, "waiting for data": 7}
    assert found["seconds"] == {part: spent.get(part, 0) for part in PARTS}
    assert found["wall_seconds"] == 43
    assert found["images_per_second"] == 2
    assert in_words(found) == (
        "86 images in 43.0 s of wall time: 2.00 images/s (start 14 %, training 63 %, "
        "waiting for data 16 %, test 0 %, saving 7 %)"
    )
    now[0] += 1  # it runs on
    assert clock.summary(86)["wall_seconds"] == 44


def test_the_start_is_told_with_its_parts(now):
    clock = Clock("libraries")
    for part, seconds in (("data", 3), ("network", 1), ("first step", 2), ("training", 0.5)):
        now[0] += seconds
        clock.enter(part)
    assert start_in_words(clock.spent) == (
        "first step after 6.5 s (libraries 3.0, data 1.0, network 2.0, first step 0.5)"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_batch_belongs_to_the_start(now, device, monkeypatch):
    """With marks of our own in the place of a GPU's."""

    def mark():
        at = now[0]
        return SimpleNamespace(elapsed_time=lambda other: 1e3 * (other.at - at), at=at)

    monkeypatch.setattr(times, "_mark", mark)
    clock, waits = Clock("first step"), Waits(torch.device(device))

    def batches():
        while True:
            now[0] += 5
            yield "batch"

    found = batches()
    waits.next(found, clock)
    now[0] += 1
    clock.enter("training")
    for _ in range(2):
        waits.next(found, clock)
        now[0] += 2
    waits.settle(clock)
    seconds = clock.summary(1)["seconds"]
    assert (seconds["first step"], seconds["training"], seconds["waiting for data"]) == (6, 4, 10)


def test_waiting_for_a_batch_is_not_training(now):
    clock = Clock("training")

    def batches():
        now[0] += 7
        yield "batch"

    waits = Waits(torch.device("cpu"))
    assert waits.next(batches(), clock) == "batch"
    waits.settle(clock)
    assert clock.summary(1)["seconds"]["waiting for data"] == 7


@pytest.mark.gpu
def test_a_gpu_that_is_busy_does_not_wait():
    """A host that waits for a batch says nothing: the GPU may have work for longer."""
    big = torch.randn(8192, 8192, device="cuda")

    def waited(work, pause):
        clock, waits = Clock("training"), Waits(torch.device("cuda"))

        def batches():
            time.sleep(pause)
            yield None

        big @ big  # warm
        torch.cuda.synchronize()
        for _ in range(work):
            big @ big
        waits.next(batches(), clock)
        torch.cuda.synchronize()
        waits.settle(clock)
        return clock.summary(1)["seconds"]["waiting for data"]

    assert waited(0, 0.3) == pytest.approx(0.3, rel=0.2)
    assert waited(400, 0.1) < 0.02  # 400 products of this size take longer than that


def test_a_run_says_where_its_time_went(tmp_path, capsys):
    first = trainer(PLAIN, tmp_path, few_digits())
    stop_at(first, 8)
    with pytest.raises(Interrupted):
        first.run()
    second = trainer(PLAIN, tmp_path, few_digits())
    second.resume()
    second.run()
    written = json.loads((tmp_path / "run.json").read_text())["times"]
    assert [entry["images"] for entry in written] == [8 * 16, 4 * 16]
    for entry in written:
        assert entry["seconds"].keys() == set(PARTS)
        assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_seconds"])
        assert all(seconds >= 0 for seconds in entry["seconds"].values())
        assert min(entry["seconds"][part] for part in ("training", "saving")) > 0
        speed = entry["images"] / entry["wall_seconds"]
        assert entry["images_per_second"] == pytest.approx(speed)
    assert written[1]["seconds"]["test"] > 0
    said = capsys.readouterr().out
    assert said.count("first step after ") == 2
    assert "128 images in " in said
    assert "64 images in " in said
    # a run that had ended says nothing
    third = trainer(PLAIN, tmp_path, few_digits())
    third.resume()
    third.run()
    assert json.loads((tmp_path / "run.json").read_text())["times"] == written


def test_the_wall_time_of_a_job_begins_with_its_clock(tmp_path):
    clock = Clock("libraries", age=1000)
    train(Job(replace(PLAIN, epochs=1, batch_size=256), Options(tmp_path), device="cpu"), clock)
    (entry,) = json.loads((tmp_path / "run.json").read_text())["times"]
    assert entry["seconds"]["libraries"] > 1000
    assert entry["seconds"]["network"] > 0


def check_age(begun):
    time.sleep(0.2)
    age = process_age()
    assert 0.2 <= age <= time.time() - begun + 0.1


def test_the_age_of_a_process():
    run_alone(check_age, time.time())
    assert process_age() > 0
