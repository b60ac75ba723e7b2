"""Checkpoints: whole or refused, whatever happens while they are written."""

import errno
import os
import random
import signal
import stat
import time

import pytest
import torch
from safetensors.torch import save_file

from cenet.run_folder import locked
from cenet.train import checkpoint
from cenet.train.checkpoint import DamagedCheckpoint


def content(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(64, 40, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    return tensors, {"seed": seed, "loss": 0.1, "nan": float("nan"), "names": ["ä", "b"]}


def same(found, expected):
    tensors, facts = found
    assert tensors.keys() == expected[0].keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected[0].items())
    assert repr(facts) == repr(dict(sorted(expected[1].items())))
    return True


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "step-000000001.safetensors"
    checkpoint.write(path, *content())
    assert same(checkpoint.read(path), content())
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "step-000000001.safetensors"
    checkpoint.write(path, *content())
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 4096), *range(0, 600, 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint, match=r"step-000000001.safetensors"):
            checkpoint.read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DamagedCheckpoint):
        checkpoint.read(path)


def test_every_bit_counts(tmp_path):
    path = tmp_path / "step-000000001.safetensors"
    checkpoint.write(path, *content())
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    chance = random.Random(0)
    places = [chance.randrange(header) for _ in range(400)]
    places += [chance.randrange(header, len(whole)) for _ in range(200)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            found = checkpoint.read(path)
        except DamagedCheckpoint:
            continue
        pytest.fail(f"a flipped bit in byte {place} was not found: {found[1]}")


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "step-000000001.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(DamagedCheckpoint, match="was not written by `cenet train`"):
        checkpoint.read(path)
    for data in (b"", b"\x80\x04code", b"{}"):
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match="cannot be read as a checkpoint"):
            checkpoint.read(path)
    with pytest.raises(DamagedCheckpoint, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path / "none.safetensors")


def test_two_are_kept_and_an_older_one_takes_over(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 2, 30):
        checkpoint.write(checkpoint.checkpoint_path(tmp_path, step), *content(step))
        checkpoint.forget_old(tmp_path)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-000000030.safetensors", "step-000000002.safetensors"]
    path, *found, problems = checkpoint.newest(tmp_path)
    assert same(found, content(30))
    assert not problems
    path.write_bytes(path.read_bytes()[:-9])
    older, *found, problems = checkpoint.newest(tmp_path)
    assert same(found, content(2))
    assert "step-000000030.safetensors" in problems[0]
    older.write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"step-000000030.*step-000000002"):
        checkpoint.newest(tmp_path)


def test_tensors_of_a_group_of_an_optimizer_come_back():
    """LAMB counts its steps in a tensor there."""

    def optimizer(steps):
        made = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        made.param_groups[0]["step"] = torch.tensor(steps)
        return made

    new = optimizer(steps=0)
    tensors, facts = checkpoint.optimizer_state(optimizer(steps=5))
    checkpoint.load_optimizer_(new, tensors, facts)
    assert torch.equal(new.param_groups[0]["step"], torch.tensor(5))
    assert new.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    path = checkpoint.checkpoint_path(tmp_path, 1)
    checkpoint.write(path, *content())

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(path, *content(1))
    monkeypatch.undo()
    assert same(checkpoint.read(path), content())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_file_and_its_name_reach_the_disk_in_order(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace

    def noted_sync(file):
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        sync(file)

    def noted_replace(*names):
        calls.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoint.write(checkpoint.checkpoint_path(tmp_path, 1), *content())
    assert calls == ["file", "rename", "folder"]


@pytest.mark.slow  # test_background has kills beside the training
def test_a_hundred_kills_while_saving_leave_a_whole_checkpoint(tmp_path):
    chance = random.Random(0)
    checkpoint.write(checkpoint.checkpoint_path(tmp_path, 0), *content(0))
    step = 0
    for _ in range(100):
        child = os.fork()
        if child == 0:
            while True:
                step += 1
                checkpoint.write(checkpoint.checkpoint_path(tmp_path, step), *content(step))
                checkpoint.forget_old(tmp_path)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _, *found, problems = checkpoint.newest(tmp_path)
        assert not problems
        step = found[1]["seed"]
        assert same(found, content(step))
    assert step > 100
    # what was left over goes with the next checkpoint, what was half written with the next run
    checkpoint.forget_old(tmp_path)
    with locked(tmp_path):
        assert len(list(tmp_path.iterdir())) == 3  # with the lock
