"""Training in several processes, through torchrun, and what FSDP2 does with a CE network."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from cenet.train import saving
from test_training import assert_same_run, metrics

pytestmark = pytest.mark.slow
SMALL = ("--epochs", "2", "--batch-size", "64", "--device", "cpu", "--checkpoint-every", "2")


def torchrun(*arguments, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(20000 + os.getpid() % 20000), "-m", "cenet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *arguments], env=environment)


def test_two_processes_stop_resume_and_become_one(tmp_path):
    """SIGTERM reaches both, which save together; the resumed run equals the whole one. With another
    number of processes a run goes on at the same image."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("train", "digits_ce", *SMALL)
    assert torchrun(*arguments, "--out", str(whole)).wait(120) == 0
    process = torchrun(*arguments, "--out", str(cut))
    while process.poll() is None and not saving.checkpoints(cut):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) != 0
    updates = saving.newest(cut)[2]["position"]["updates"]
    assert 0 < updates < 20
    resumed = (*arguments, "--out", str(cut), "--resume", "auto")
    assert torchrun(*resumed).wait(120) == 0
    assert_same_run(whole, cut)
    assert [row["updates"] for row in metrics(cut)] == [10, 20]
    tensors, facts = saving.newest(cut)[1:3]
    assert len(facts["chance"]) == 2
    assert not torch.equal(tensors["chance.0.torch"], tensors["chance.1.torch"])


def test_another_number_of_processes_goes_on_at_the_same_image(tmp_path):
    arguments = ("train", "digits_ce", *SMALL, "--out", str(tmp_path))
    process = torchrun(*arguments)
    while process.poll() is None and not saving.checkpoints(tmp_path):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    facts = saving.newest(tmp_path)[2]
    assert torchrun(*arguments, "--resume", "auto", processes=1).wait(120) == 0
    first = metrics(tmp_path)[0]
    # 21 steps of 64 images in one process, what was seen by two taken off
    left = 21 - facts["images"] // 64
    assert first["updates"] == facts["position"]["updates"] + left
