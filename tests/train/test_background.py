"""Checkpoints written beside the training: copies of one moment, kills, signals, full disks."""

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from _disks import file_size_limit, fill, small_disk
from _distributed import run_alone
from _training import PLAIN, TINY, assert_same_run, call, few_digits, stop_at, trainer
from cenet.data.datasets import digits
from cenet.signals import Interrupted
from cenet.train import RECIPES, checkpoint
from cenet.train.checkpoint import BackgroundWriter, Staging

pytestmark = pytest.mark.usefixtures("one_thread")


def test_one_job_at_a_time_in_order():
    done, running = [], []

    def job(number):
        running.append(number)
        assert len(running) == 1
        time.sleep(0.01)
        running.pop()
        done.append((number, threading.current_thread() is threading.main_thread()))

    with BackgroundWriter() as background:
        for number in range(4):
            background.start(lambda number=number: job(number))
            assert len(done) >= number  # all but the last have ended
    assert done == [(number, False) for number in range(4)]


def fail():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["start", "look", "wait", "exit"])
def test_the_error_of_a_job_is_raised_once_where_the_run_looks_next(where):
    background = BackgroundWriter()

    def run():
        with background:
            background.start(fail)
            while where == "look":
                background.look()
            if where != "exit":
                getattr(background, where)(*[int] * (where == "start"))

    with pytest.raises(OSError, match="No space left"):
        run()
    background.wait()


def test_an_error_of_the_run_comes_before_that_of_a_job():
    def run():
        with BackgroundWriter() as background:
            background.start(fail)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_what_is_being_written_is_written_to_its_end_after_an_error():
    done = []

    def run():
        with BackgroundWriter() as background:
            background.start(lambda: (time.sleep(0.1), done.append(1)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done


def test_only_the_first_process_says_when_a_checkpoint_is_due(tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits(), checkpoint_seconds=1e-9)
    assert engine.save_is_due()
    engine.processes = engine.processes._replace(rank=1)
    assert not engine.save_is_due()


def test_looking_does_not_wait():
    go = threading.Event()
    with BackgroundWriter() as background:
        background.start(go.wait)
        background.look()
        go.set()


def check_copies(device):
    shared = torch.arange(6.0, device=device)
    last = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    weight = torch.zeros(64, 64, device=device)
    tensors = {"view": shared.view(2, 3), "alias": shared, "last": last, "weight": weight}
    tensors |= {"count": torch.tensor(3), "none": torch.zeros(0, 2, device=device)}
    staging = Staging()
    for step in range(3):
        weight.fill_(step)
        expected = {name: value.detach().cpu().clone() for name, value in tensors.items()}
        take = staging.take(tensors)
        for value in (shared, last, weight):
            value.add_(1)  # training goes on
        found = take()
        assert found.keys() == tensors.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
            assert value.device.type == "cpu"
            assert value.is_contiguous()
        places = [value.data_ptr() for value in found.values() if value.numel()]
        assert len({*places}) == len(places)
    # momenta come with the first step
    take = staging.take({**tensors, "momentum": weight * 2})
    assert torch.equal(take()["momentum"], weight.cpu() * 2)
    assert torch.equal(staging.take({"weight": weight[:2]})()["weight"], weight[:2].cpu())


def test_copies_are_those_of_one_moment():
    check_copies("cpu")


@pytest.mark.gpu
def test_copies_of_a_gpu_are_those_of_one_moment():
    check_copies("cuda")
    big = torch.zeros(64, 2**20, device="cuda")
    staging = Staging()
    for step in range(20):
        big.fill_(step)
        take = staging.take({"big": big})
        big.fill_(-1)
        assert torch.equal(take()["big"], torch.full((64, 2**20), float(step)))


def half_written(folder):
    """Whether a checkpoint is being written there."""
    try:
        return any(folder.glob(".step-*/*"))
    except FileNotFoundError:  # a folder got its final name meanwhile
        return False


def kill_while_saving(body, in_flight, delay, ready=lambda: True):
    """Fork `body`, wait for `ready`, and kill it `delay` seconds after a checkpoint was begun.

    Returns whether a checkpoint was still being written, and whether `body` had ended before.
    """
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    while not (ready() and in_flight()):
        if os.waitpid(child, os.WNOHANG)[0]:
            return False, True
    time.sleep(delay)
    hit = in_flight()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return hit, False


@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_while_a_checkpoint_is_written_beside(kills, tmp_path):
    run_alone(kill_often, tmp_path, kills)  # from a small process, which is soon forked


def kill_often(folder, kills):
    """All tensors of a step have its number: a copy that was not of one moment would be seen."""
    names = [f"weight.{i}" for i in range(40)]
    real = checkpoint.save_file

    def save_again_and_again(stays):
        def slow(tensors, path, metadata):
            real(tensors, path, metadata)
            time.sleep(600 if stays else 0.01)

        checkpoint.save_file = slow
        begin = checkpoint.newest(folder)
        step = begin[2]["step"] if begin else 0
        tensors = {name: torch.full((5000,), float(step)) for name in names}
        staging = Staging()
        with BackgroundWriter() as background:
            while True:
                step += 1
                for value in tensors.values():
                    value.add_(1)
                background.wait()
                take, path = staging.take(tensors), checkpoint.checkpoint_path(folder, step)
                background.start(
                    lambda take=take, path=path, step=step: (
                        checkpoint.write(path, take(), {"step": step}),
                        checkpoint.forget_old(folder),
                    )
                )

    steps = []
    hits, chance = 0, random.Random(0)
    for number in range(kills):
        delay = chance.uniform(0, 0.015)
        before = checkpoint.checkpoints(folder)

        def moved_on(before=before, wanted=number % 5 == 0):  # however slow the disk is
            return not wanted or checkpoint.checkpoints(folder)[:1] != before[:1]

        stays = number % 5 in (1, 3)  # half written until the kill; the others end when they will
        found, ended = kill_while_saving(
            lambda stays=stays: save_again_and_again(stays),
            lambda: half_written(folder), delay, moved_on,
        )  # fmt: skip
        assert not ended
        assert found or not stays
        hits += found
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
        newest = checkpoint.newest(folder)
        if newest is None:
            continue
        _, tensors, facts, problems = newest
        assert not problems
        values = torch.cat([tensors[name] for name in names])
        assert values.unique().tolist() == [facts["step"]]
        steps.append(facts["step"])
    assert steps == sorted(steps)
    assert steps[-1] > kills // 10
    assert hits >= 2 * (kills // 5)  # kills that came while a file was half written


@pytest.mark.parametrize(
    ("kills", "epochs"), [(8, 5), pytest.param(100, 60, marks=pytest.mark.slow)]
)
def test_a_run_killed_while_saving_comes_to_the_same_end(kills, epochs, tmp_path):
    recipe = replace(TINY, epochs=epochs)
    out = tmp_path / "cut"
    # from a process that has made no backward pass: autograd refuses to run in a fork of one
    run_alone(kill_a_run, recipe, out, kills, timeout=300)
    for folder in (tmp_path / "whole", out):
        engine = trainer(recipe, folder, few_digits())
        engine.resume()
        engine.run()
    assert_same_run(tmp_path / "whole", out)


def kill_a_run(recipe, out, kills):
    data = few_digits()  # once: it takes a second
    real = checkpoint.save_file

    def slow(tensors, path, metadata):
        real(tensors, path, metadata)
        time.sleep(0.03)  # so that steps are made beside

    def go_on():
        checkpoint.save_file = slow
        engine = trainer(recipe, out, data, checkpoint_every=1)
        engine.resume()
        engine.run()

    hits, chance = 0, random.Random(0)
    for _ in range(kills):
        for left in out.glob(".step-*"):
            shutil.rmtree(left)
        delay = chance.uniform(0, 0.06)
        hit, ended = kill_while_saving(go_on, lambda: half_written(out), delay)
        assert not ended
        hits += hit
        newest = checkpoint.newest(out)
        assert newest is None or not newest[3]
    assert hits > kills // 4  # the others came just after


def test_a_signal_while_saving_waits_and_saves_the_last_step(tmp_path, monkeypatch):
    real, begun = checkpoint.write, []

    def slow(path, tensors, facts):
        begun.append(facts["position"]["updates"])
        time.sleep(0.2)
        real(path, tensors, facts)

    monkeypatch.setattr(checkpoint, "write", slow)
    engine = trainer(PLAIN, tmp_path, few_digits(), checkpoint_every=4)
    stop_at(engine, 5)  # the one of the fourth update is being written
    with pytest.raises(Interrupted):
        engine.run()
    assert begun == [4, 5]
    assert [int(path.stem[5:]) for path in checkpoint.checkpoints(tmp_path)] == [5, 4]
    assert checkpoint.newest(tmp_path)[3] == []
    times = json.loads((tmp_path / "run.json").read_text())["times"]
    assert [entry["images"] for entry in times] == [5 * PLAIN.batch_size]
    assert times[0]["seconds"]["saving"] > 0.2


def test_an_error_while_saving_beside_ends_the_run_soon(tmp_path, monkeypatch):
    real = checkpoint.write

    def failing(path, tensors, facts):
        if facts["position"]["updates"] == 4:
            fail()
        real(path, tensors, facts)

    monkeypatch.setattr(checkpoint, "write", failing)
    engine = trainer(replace(PLAIN, epochs=50), tmp_path, few_digits(), checkpoint_every=2)
    with pytest.raises(OSError, match="No space left"):
        engine.run()
    assert engine.position.updates < 12
    assert [int(path.stem[5:]) for path in checkpoint.checkpoints(tmp_path)] == [2]


@contextmanager
def disk_that_fills(kind, folder):
    """A disk at `folder`, and a function that leaves room for half of a file on it."""
    if kind == "limit on the size of files":
        yield lambda whole: file_size_limit(whole.stat().st_size // 2)
        return

    def fill_up(whole):
        fill(folder)
        filling = folder / "filling"
        os.truncate(filling, filling.stat().st_size - whole.stat().st_size // 2)
        return nullcontext()

    with small_disk(folder, 32 * 2**20):
        yield fill_up


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("limit on the size of files", "{}: File too large"),
        ("full disk", "{}: No space left on device; make room, and the same command .*"),
    ],
)
def test_a_disk_that_fills_while_saving_is_one_line_and_nothing_whole_is_lost(
    kind, message, tmp_path, monkeypatch
):
    """In the middle of a checkpoint."""
    folder = tmp_path / "disk"
    with disk_that_fills(kind, folder) as filled:
        saving_fails(folder, filled, message, monkeypatch)


def saving_fails(folder, filled, message, monkeypatch):
    recipe = replace(RECIPES["digits_ce"], epochs=3, batch_size=256)
    first = trainer(recipe, folder, digits())
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()
    (whole,) = checkpoint.checkpoints(folder)
    before = whole.read_bytes()
    arguments = ["train", "digits_ce", "--out", str(folder), "--device", "cpu"]
    arguments += ["--epochs", "3", "--batch-size", "256", "--resume", "auto"]
    with filled(whole), pytest.raises(SystemExit) as left:
        call(monkeypatch, *arguments)
    wanted = message.format("step-000000005.safetensors")
    assert re.fullmatch(f".*{wanted}", left.value.code)
    assert checkpoint.checkpoints(folder) == [whole]
    assert whole.read_bytes() == before
    assert not list(folder.glob(".*step*"))


def test_checkpoints_by_time(tmp_path, monkeypatch):
    """By a clock on which an update takes ten seconds: an epoch has six."""
    now, written = [0.0], []
    monkeypatch.setattr("cenet.train.state.time.monotonic", lambda: now[0])
    real = checkpoint.write

    def noted(path, tensors, facts):
        written.append(facts["position"]["updates"])
        real(path, tensors, facts)

    monkeypatch.setattr(checkpoint, "write", noted)

    def run(name, **options):
        written.clear()
        now[0] = 0.0
        engine = trainer(PLAIN, tmp_path / name, few_digits(), **options)
        update = engine._update

        def slow():
            now[0] += 10
            update()

        engine._update = slow
        engine.run()
        return list(written)

    assert run("by epochs") == [6, 12]
    assert run("often", checkpoint_seconds=20) == [2, 4, 6, 8, 10, 12]
    assert run("seldom", checkpoint_seconds=80) == [8, 12]
    assert run("never before the end", checkpoint_seconds=1000) == [12]
    assert run("both", checkpoint_seconds=50, checkpoint_every=4) == [4, 8, 12]
    with pytest.raises(ValueError, match="--checkpoint-seconds -1 must be at least 0"):
        trainer(PLAIN, tmp_path, few_digits(), checkpoint_seconds=-1)
