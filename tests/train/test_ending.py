"""How the process of a run ends: the threads of its process group first, then the interpreter.

A thread that lets go of a tensor while the interpreter ends would abort the process.
"""

import importlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import cenet.distributed
from _distributed import SERVER
from _training import PLAIN
from cenet.signals import Interrupted
from cenet.train.classifier import Trainer
from cenet.train.job import Job, train
from cenet.train.loop import Loop
from cenet.train.nonfinite import NonFiniteLoss
from cenet.train.options import Options

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc"),
]
RECIPE = replace(PLAIN, epochs=1, batch_size=256)


def as_torchrun_starts_it():
    """The variables of the only process of a run, which listens at any port that is free."""
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def threads_of_the_group():
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name or "tcpstore" in name]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("finished", None), ("interrupted", Interrupted), ("diverged", NonFiniteLoss)],
)
def test_the_threads_of_the_process_group_end_with_the_run(kind, error, tmp_path, monkeypatch):
    for name, value in as_torchrun_starts_it().items():
        monkeypatch.setenv(name, value)
    recipe, seen = RECIPE, []
    if kind == "diverged":
        recipe = replace(recipe, lr=1e30, warmup_epochs=0.0)
    real = Loop._update

    def update(loop):
        seen.extend(threads_of_the_group())
        real(loop)
        if kind == "interrupted":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_update", update)
    job = Job(recipe, Options(tmp_path), device="cpu")
    if error is None:
        train(job)
    else:
        with pytest.raises(error) as held:  # with its traceback, as until the end of a process
            train(job)
        assert held.tb is not None
    assert seen
    # the system still lists a thread for a moment after it has been joined
    until = time.monotonic() + 5
    while threads_of_the_group() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads_of_the_group()


def fresh_run(folder, to):
    """A run in a process that has not imported timm, and does so when the group has been made."""
    os.environ |= as_torchrun_starts_it()
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
        del sys.modules[name]
    importlib.reload(cenet.distributed)
    Trainer.prepare = lambda loop: importlib.import_module("torch.distributed.nn.functional")
    train(Job(RECIPE, Options(folder), device="cpu"))
    to.send(threads_of_the_group())


@pytest.mark.slow
def test_what_is_imported_during_a_run_does_not_keep_the_process_group(tmp_path):
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=fresh_run, args=(tmp_path, sender))
    process.start()
    sender.close()
    assert receiver.recv() == []
    process.join()
    assert process.exitcode == 0
