"""Signals ask a run to save and stop, wherever it is; a closed terminal does, too."""

import ctypes
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from _training import (
    PLAIN,
    few_digits,
    stop_at,
    trainer,
)
from cenet.run_folder import WEIGHTS
from cenet.signals import INTERRUPTED, SIGNALS, Interrupted, SignalWatch, exit_on_sigterm
from cenet.train import checkpoint
from cenet.train.command import exit_with_reason

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL = ("--epochs", "2", "--batch-size", "128", "--device", "cpu", "--warmup-epochs", "0.5")


def test_a_compiler_that_takes_signals_over_does_not_keep_them(tmp_path):
    """Under Python, in C, as Triton's does."""
    engine = trainer(PLAIN, tmp_path, few_digits())
    add = engine.add_gradients

    def compiled(batch):
        if engine.position.updates == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(signal.SIG_IGN))
        add(batch)

    engine.add_gradients = compiled
    stop_at(engine, 3)
    with pytest.raises(Interrupted):
        engine.run()
    assert checkpoint.newest(tmp_path)[2]["position"]["updates"] == 3


def test_a_thread_trains_without_signals(tmp_path):
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(trainer(PLAIN, tmp_path, few_digits()).run)
    assert done.result()["epoch"] == PLAIN.epochs


def test_a_second_interrupt_stops_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    engine = trainer(PLAIN, tmp_path, few_digits())
    stop_at(engine, 2, signal.SIGINT)
    with pytest.raises(Interrupted):
        engine.run()
    engine = trainer(PLAIN, tmp_path, few_digits())
    stop_at(engine, 3, signal.SIGINT)
    stop_at(engine, 3, signal.SIGINT)  # at the same update, twice
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def handlers():
    """Put the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_handlers_that_are_reclaimed_leave_the_second_interrupt_alone():
    with SignalWatch() as watch:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as by a compiler
        watch.reclaim()
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.asked == signal.SIGINT
        watch.reclaim()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with SignalWatch() as watch:
        watch.reclaim()
        os.kill(os.getpid(), signal.SIGHUP)
        assert watch.asked is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_run_whose_terminal_is_closed_is_saved(tmp_path):
    """It has printed to that terminal, and writing to it is an error from then on."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cenet", "train", "digits_ce", *SMALL[2:], "--epochs", "50"),
            *("--checkpoint-every", "1", "--log-every", "1", "--out", str(tmp_path)),
        ],
        **dict.fromkeys(("stdin", "stdout", "stderr"), side),
        preexec_fn=lambda: _own(side),
    )
    os.close(side)
    while process.poll() is None and not checkpoint.checkpoints(tmp_path):
        with suppress(BlockingIOError):
            os.set_blocking(terminal, False)
            os.read(terminal, 10_000)  # so that the run does not wait for its output to be read
        time.sleep(0.005)
    os.close(terminal)
    assert process.wait(timeout=60) == INTERRUPTED
    assert json.loads((tmp_path / "run.json").read_text())["times"]


HUNG_UP = """
import os, signal, sys
from cenet.signals import SignalWatch
with SignalWatch() as watch:
    sys.stdin.read()  # until nobody reads what is printed
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("saved", flush=True)
    sys.exit(10 + watch.asked)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 10 + signal.SIGHUP), ("SIGTERM", 1)])
def test_a_hangup_ends_those_who_read_what_is_printed_too(name, code):
    """Another signal does not: without a reader, printing is an error as always."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", HUNG_UP, name], **pipes)
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=60) == code


def test_a_printed_line_that_fails_loses_no_epoch(tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits())

    def broken(text):
        if text.startswith("epoch 1 "):
            raise BrokenPipeError

    engine.progress.say = broken
    with pytest.raises(BrokenPipeError):
        engine.run()
    assert checkpoint.newest(tmp_path)[2]["position"]["epoch"] == 1


def _own(terminal):
    """Make a terminal that of this process, which is told when it is closed."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_a_signal_while_the_final_weights_are_written_changes_nothing(tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits())
    write = engine.write_network

    def signalled():
        os.kill(os.getpid(), signal.SIGTERM)
        write()

    engine.write_network = signalled
    engine.run()
    assert (tmp_path / WEIGHTS).is_file()
    assert len(json.loads((tmp_path / "run.json").read_text())["times"]) == 1


@pytest.mark.usefixtures("handlers")
def test_signals_behind_the_last_word_do_not_change_the_status(tmp_path):
    def interrupted():
        raise Interrupted

    with exit_on_sigterm(), pytest.raises(SystemExit) as left:
        exit_with_reason(interrupted, tmp_path)
    assert left.value.code == INTERRUPTED
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


def test_an_interrupt_behind_sigterm_is_the_first_one(tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits())
    stop_at(engine, 3, signal.SIGTERM)
    stop_at(engine, 3, signal.SIGINT)
    with pytest.raises((Interrupted, KeyboardInterrupt)) as left:
        engine.run()
    assert left.type is Interrupted
    assert checkpoint.checkpoint_path(tmp_path, 3).exists()


# `python -m cenet ARGUMENTS` that gets its signals when it begins to build the network
SIGNALLED = """
import os, runpy, signal, sys
import cenet.train.classifier as module
build = module.build_network

def build_after_signals(*given):
    for _ in range({times}):
        os.kill(os.getpid(), signal.SIGTERM)
    return build(*given)

module.build_network = build_after_signals
runpy.run_module("cenet", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_a_command_starts(tmp_path, times):
    """There is nothing to save, and a job script that tries again on 75 must."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", SIGNALLED.format(times=times), "train", "digits_ce", *SMALL]
    process = subprocess.run(
        [*command, "--out", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    said = process.stderr
    assert process.returncode == 75
    assert said == "interrupted; the same command with --resume auto goes on\n"
    assert not checkpoint.checkpoints(folder)
