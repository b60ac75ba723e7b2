"""Interrupted and resumed runs equal uninterrupted ones."""

import csv
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from _checks import version_1
from _distributed import SERVER
from _training import (
    ALONE,
    PLAIN,
    TINY,
    VARIATIONS,
    assert_same_run,
    call,
    few_digits,
    metrics,
    stop_at,
    trainer,
    write_digits,
)
from cenet.checkpoints import read_state
from cenet.data.datasets import image_folders
from cenet.data.decoding import REMOVE
from cenet.data.sources import Folder
from cenet.distributed import Processes, total
from cenet.files import digest
from cenet.run_folder import WEIGHTS, locked
from cenet.signals import INTERRUPTED, Interrupted, SignalWatch
from cenet.train import checkpoint, run_log
from cenet.train.classifier import Trainer
from cenet.train.command import exit_with_reason
from cenet.train.job import Job, train
from cenet.train.nonfinite import NonFiniteLoss
from cenet.train.options import Options
from cenet.train.state import RunState
from cenet.train.weights import load_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_folder_written_before_version_2_goes_on_and_is_read(tmp_path):
    recipe = replace(TINY, **VARIATIONS["ema, mixup, clipping"])
    trainer(recipe, tmp_path / "whole", few_digits()).run()
    first = trainer(recipe, tmp_path / "old", few_digits())
    stop_at(first, 5)
    with pytest.raises(Interrupted):
        first.run()
    for path in checkpoint.checkpoints(tmp_path / "old"):
        tensors, facts = checkpoint.read(path)
        old = version_1(tensors)
        assert {name.partition(".")[0] for name in tensors.keys() - old.keys()} == {"ema", "model"}
        checkpoint.write(path, old, facts)
    second = trainer(recipe, tmp_path / "old", few_digits())
    assert "resuming from step-" in second.resume()
    second.run()
    assert_same_run(tmp_path / "whole", tmp_path / "old")
    new = load_run(tmp_path / "old").state_dict()
    path = tmp_path / "old" / WEIGHTS
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["cenet"])
    old = version_1(read_state(path))
    about["digest"] = digest(old, "")
    save_file(old, path, {"cenet": json.dumps(about)})
    found = load_run(tmp_path / "old").state_dict()
    assert found.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in found.items())


@pytest.mark.parametrize("name", VARIATIONS)
def test_an_interrupted_run_equals_an_uninterrupted_one(name, tmp_path):
    recipe = replace(TINY, **VARIATIONS[name])
    whole = trainer(recipe, tmp_path / "whole", few_digits())
    whole.run()
    updates = whole.position.updates
    for update in random.Random(name).sample(range(1, updates), 2):
        out = tmp_path / f"at {update}"
        first = trainer(recipe, out, few_digits())
        stop_at(first, update)
        with pytest.raises(Interrupted):
            first.run()
        assert checkpoint.newest(out)[2]["position"]["updates"] == update
        torch.manual_seed(99)  # nothing of this process may matter
        about = json.loads((out / "run.json").read_text())
        about["environment"]["commit"] = "the first"
        (out / "run.json").write_text(json.dumps(about))
        second = trainer(recipe, out, few_digits())
        assert "resuming from step-" in second.resume()
        second.run()
        assert_same_run(tmp_path / "whole", out)
        about = json.loads((out / "run.json").read_text())
        assert len(about["resumed"]) == 1
        assert about["environment"].keys() == about["resumed"][0].keys()
        assert about["environment"]["commit"] == "the first" != about["resumed"][0]["commit"]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_over_files(workers, few_files, tmp_path):
    recipe = replace(TINY, augment="imagenet", image_size=16, dataset="imagenet")
    trainer(recipe, tmp_path / "whole", few_files, workers=0).run()
    first = trainer(recipe, tmp_path / "cut", few_files, workers=workers)
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()
    second = trainer(recipe, tmp_path / "cut", few_files, workers=workers)
    second.resume()
    second.run()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    said = trainer(recipe, tmp_path / "cut", few_files, workers=workers).resume()
    assert said.endswith(f": all {recipe.epochs} epochs are trained")


def test_other_images_are_another_run(files_folder, few_files, tmp_path):
    def resumed(data, recipe, out):
        first = trainer(recipe, out, data)
        stop_at(first, 2)
        with pytest.raises(Interrupted):
            first.run()
        return lambda other: trainer(recipe, out, other).resume()

    digits = few_digits()
    again = resumed(digits, PLAIN, tmp_path / "digits")
    images = digits.train.images.flip(3)  # of the same mean and deviation
    with pytest.raises(
        ValueError, match="another run: the images, their labels or their annotations differ"
    ):
        again(digits._replace(train=digits.train._replace(images=images)))
    with pytest.raises(
        ValueError, match="another run: the images, their labels or their annotations differ"
    ):
        again(digits._replace(test=digits.test._replace(images=digits.test.images.flip(3))))
    named = digits.train._replace(classes=tuple("abcdefghij"))
    with pytest.raises(ValueError, match="another run: the classes or the pixels of the data diff"):
        again(digits._replace(train=named, test=digits.test._replace(classes=named.classes)))
    recipe = replace(PLAIN, augment="imagenet", image_size=16, dataset="imagenet")
    again = resumed(few_files, recipe, tmp_path / "files")
    shutil.copytree(files_folder / "train", tmp_path / "elsewhere")
    place = tmp_path / "elsewhere"
    elsewhere = [place.joinpath(*path.parts[-2:]) for path in few_files.train.source.paths]
    assert again(few_files._replace(train=few_files.train._replace(source=Folder(elsewhere))))
    renamed = [place / "other" / f"{i}.png" for i in range(len(elsewhere))]
    for one, other in zip(elsewhere, renamed, strict=True):
        other.parent.mkdir(exist_ok=True)
        shutil.copy(one, other)
    for paths in (elsewhere[::-1], [*elsewhere[:-1], elsewhere[0]], renamed):
        with pytest.raises(
            ValueError, match="the images, their labels or their annotations differ"
        ):
            again(few_files._replace(train=few_files.train._replace(source=Folder(paths))))


def hold(folder, told):
    with locked(folder):
        told.send("mine")
        signal.pause()


def test_only_one_run_writes_to_a_folder(tmp_path):
    here, there = SERVER.Pipe()
    other = SERVER.Process(target=hold, args=(tmp_path, there))
    other.start()
    assert here.recv() == "mine"
    with pytest.raises(ValueError, match="another process is writing to"):
        train(Job(PLAIN, Options(tmp_path), device="cpu"))
    other.kill()
    other.join()
    assert train(Job(replace(PLAIN, epochs=1, batch_size=256), Options(tmp_path), device="cpu"))


def test_a_signal_to_workers_too_is_saved(files_folder, tmp_path):
    """Managers of clusters signal every process of a job."""
    arguments = ["train", "digits_ce", "--dataset", "cifar10", "--image-size", "16", "--out"]
    arguments += [str(tmp_path / "run"), "--data", str(files_folder), "--device", "cpu"]
    arguments += ["--epochs", "500", "--batch-size", "4", "--workers", "2", "--warmup-epochs", "0"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "cenet", *arguments], start_new_session=True,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and not checkpoint.checkpoints(tmp_path / "run"):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert any(line.startswith("interrupted and saved") for line in process.stdout)
        os.killpg(process.pid, signal.SIGTERM)  # to make sure
        assert process.wait(60) == 75


def test_a_test_image_that_cannot_be_read_does_not_cost_the_epoch(files_folder, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(files_folder, root)
    (root / "test" / "3" / "x.png").write_bytes(b"no image")
    recipe = replace(PLAIN, dataset="cifar10", image_size=16, epochs=1, augment="none")
    for workers in (0, 2):
        out = tmp_path / str(workers)
        with pytest.raises(ValueError, match=r"^.*3/x.png is not .*; remove or replace it$"):
            train(Job(recipe, Options(out, workers=workers), root, device="cpu"))
        position = checkpoint.newest(out)[2]["position"]
        assert (position["epoch"], position["updates"]) == (0, position["step"])
        assert position["updates"] > 0
    Image.new("L", (20, 18), 60).save(root / "test" / "3" / "x.png")
    options = Options(out, workers=0, resume="auto")
    assert train(Job(recipe, options, root, device="cpu"))["epoch"] == 1


def test_momenta_come_back_in_the_layout_of_their_weights(tmp_path):
    """Fused optimizers refuse others, and a file knows none."""
    first = trainer(TINY, tmp_path, few_digits(), channels_last=True)
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()
    second = trainer(TINY, tmp_path, few_digits(), channels_last=True)
    second.resume()
    apart = 0
    for weight, state in second.optimizer.state.items():
        assert state["momentum_buffer"].stride() == weight.stride()
        apart += not weight.is_contiguous()
    assert apart


def test_a_worker_that_dies_while_the_run_computes_is_explained(few_files, tmp_path, monkeypatch):
    """torch raises wherever the run is."""
    recipe = replace(TINY, augment="imagenet", image_size=16, dataset="imagenet", epochs=50)

    def killing(engine, batch):
        (worker, *_) = multiprocessing.active_children()
        worker.kill()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(Trainer, "add_gradients", killing)
    monkeypatch.setattr("cenet.train.job.load", lambda *_: few_files)
    with pytest.raises(ValueError, match=r"a process that reads images has died .* --workers$"):
        train(Job(recipe, Options(tmp_path, workers=2), device="cpu"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_schedule_after_a_restart_with_fewer_processes(accumulate, tmp_path):
    """A checkpoint as of two processes, which had half as many updates for the same images."""
    recipe = replace(PLAIN, epochs=3, accumulate=accumulate, schedule="cosine")
    trainer(recipe, tmp_path / "whole", few_digits()).run()  # 6 steps an epoch
    first = trainer(recipe, tmp_path / "cut", few_digits())
    stop_at(first, 8 // accumulate)  # step 2 of the second epoch
    with pytest.raises(Interrupted):
        first.run()
    path, tensors, facts, _ = checkpoint.newest(tmp_path / "cut")
    facts["position"] |= {"updates": 4 // accumulate, "step": 1}
    checkpoint.write(path, tensors, facts)
    second = trainer(recipe, tmp_path / "cut", few_digits())
    second.resume()
    asked = []
    step_update = second.schedule.step_update
    second.schedule.step_update = lambda update: (asked.append(update), step_update(update))
    second.run()
    assert asked == [*range(8 // accumulate, 18 // accumulate)]
    rates = [[row["lr"] for row in metrics(tmp_path / name)] for name in ("whole", "cut")]
    assert rates[0] == rates[1]


def test_an_update_that_other_processes_began_is_finished(tmp_path):
    """One of its two steps was done when the run stopped, and the next updates are whole again."""
    recipe = replace(PLAIN, epochs=1, accumulate=2)
    first = trainer(recipe, tmp_path, few_digits())
    stop_at(first, 1)
    with pytest.raises(Interrupted):
        first.run()
    path, tensors, facts, _ = checkpoint.newest(tmp_path)
    facts["images"] = 16  # one step of this process
    checkpoint.write(path, tensors, facts)
    second = trainer(recipe, tmp_path, few_digits())
    second.resume()
    steps = []
    apply = second.apply_gradients
    second.apply_gradients = lambda: (steps.append(second.position.step), apply())
    second.run()
    assert steps == [2, 4, 6]


def test_a_checkpoint_counts_the_images_of_all_processes(tmp_path, monkeypatch):
    engine = trainer(PLAIN, tmp_path, few_digits())
    engine.position.step, engine.processes = 2, Processes(0, 3, torch.device("cpu"))
    monkeypatch.setattr("cenet.train.state.gathered", lambda value, _: [value] * 3)
    monkeypatch.setattr("cenet.train.state.total", lambda sums, _: sums)
    engine.save()
    engine.writer.wait()
    assert checkpoint.newest(tmp_path)[2]["images"] == 2 * 16 * 3


def test_copies_of_checkpoints_are_left_alone(tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits())
    stop_at(engine, 2)
    with pytest.raises(Interrupted):
        engine.run()
    path = checkpoint.checkpoints(tmp_path)[0]
    copies = [path.with_name("step-best.safetensors"), path.with_name("step-9 (2).safetensors")]
    for copy in copies:
        shutil.copy(path, copy)
    assert checkpoint.newest(tmp_path)[0] == path
    second = trainer(PLAIN, tmp_path, few_digits())
    assert path.name in second.resume()
    second.run()
    assert all(copy.exists() for copy in copies)
    path = checkpoint.checkpoints(tmp_path)[0]
    late = [checkpoint.checkpoint_path(tmp_path, updates) for updates in (2 * 10**9, 10**10)]
    for name in late:
        shutil.copy(path, name)
    assert checkpoint.checkpoints(tmp_path)[:2] == late[::-1]  # by number, not as text


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_finished_run_without_checkpoints_is_not_replaced(resume, tmp_path):
    engine = trainer(PLAIN, tmp_path, few_digits())
    engine.run()
    for path in checkpoint.checkpoints(tmp_path):
        path.unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"holds weights.safetensors of a finished run"):
        train(Job(PLAIN, Options(tmp_path, resume=resume), device="cpu"))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {**after, ".lock": b""} == {**before, ".lock": b""}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "run.json cannot be read: "),
        ("[]", "it is no object of JSON"),
        ('{"times": 5}', "times is 5"),
        ('{"times": {"a": 1}}', "times is {'a': 1}"),
        ('{"environment": []}', "environment is []"),
    ],
)
def test_a_damaged_run_json_is_told_and_written_again(text, reason, tmp_path, capsys):
    engine = trainer(PLAIN, tmp_path, few_digits())
    stop_at(engine, 2)
    with pytest.raises(Interrupted):
        engine.run()
    (tmp_path / "run.json").write_text(text)
    second = trainer(PLAIN, tmp_path, few_digits())
    second.resume()
    capsys.readouterr()
    second.run()
    said = capsys.readouterr().out
    assert reason in said
    assert "it is written again, without what earlier starts of the run recorded" in said
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["environment"]["torch"] == torch.__version__
    assert len(about["times"]) == 1


def test_runs_share_no_entry_of_run_json(tmp_path):
    """A run of an earlier version lacks entries; what is added to them is of that run alone."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.json").write_text("{}")
    one, other = (run_log._kept(tmp_path / f"{name}.json", {}) for name in ("one", "other"))
    one["tracked"]["wandb"] = "an id"
    one["times"].append({})
    assert (other["tracked"], other["times"]) == ({}, [])


def test_checkpoints_come_as_often_as_asked_and_two_stay(tmp_path, monkeypatch):
    written = []
    real = checkpoint.write

    def noted(path, tensors, facts):
        written.append(facts["position"]["updates"])
        real(path, tensors, facts)

    monkeypatch.setattr(checkpoint, "write", noted)
    trainer(PLAIN, tmp_path, few_digits(), checkpoint_every=4).run()
    assert written == [4, 6, 8, 12]  # an epoch has six
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-000000012.safetensors", "step-000000008.safetensors"]


def test_a_full_disk_ends_a_run_and_leaves_its_checkpoints(tmp_path, monkeypatch):
    real = checkpoint.save_file

    def full(tensors, path, metadata):
        real(tensors, path, metadata)
        if "000000018" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        trainer(replace(PLAIN, epochs=3), tmp_path, few_digits()).run()
    assert [int(path.stem[5:]) for path in checkpoint.checkpoints(tmp_path)] == [12, 6]
    assert checkpoint.newest(tmp_path)[3] == []


def test_all_random_number_generators_come_back():
    def draw():
        own = (random.gauss(0, 1), numpy.random.randn())  # noqa: NPY002
        return (*own, torch.rand(()).item())

    draw()  # both Gaussians keep a second number
    kept = checkpoint.rng_state(ALONE.device)
    expected = [draw() for _ in range(3)]
    checkpoint.set_rng_state(ALONE.device, *kept)
    assert [draw() for _ in range(3)] == expected


def test_a_finished_run_stays_finished(tmp_path):
    job = Job(replace(PLAIN, epochs=1, batch_size=256), Options(tmp_path, resume="auto"))
    row = train(job)
    before = (tmp_path / WEIGHTS).read_bytes()
    assert train(job) == row
    assert (tmp_path / WEIGHTS).read_bytes() == before


SMALL = ("--epochs", "2", "--batch-size", "128", "--device", "cpu", "--warmup-epochs", "0.5")


def test_signals_and_kills_through_the_command_line(tmp_path, monkeypatch, capsys):
    """SIGTERM saves and exits with 75, SIGKILL loses what came after the last checkpoint; both
    resume to the same end."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("train", "digits_ce", *SMALL, "--checkpoint-every", "1")
    call(monkeypatch, *arguments, "--out", str(whole))
    assert "test top-1" in capsys.readouterr().out
    resumed = (*arguments, "--out", str(cut), "--resume", "auto")
    for kind, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        process = subprocess.Popen([sys.executable, "-m", "cenet", *resumed])
        before = {path.name for path in checkpoint.checkpoints(cut)}
        while process.poll() is None and {p.name for p in checkpoint.checkpoints(cut)} <= before:
            time.sleep(0.005)
        process.send_signal(kind)
        assert process.wait(timeout=60) == code
    call(monkeypatch, *resumed)
    assert "resuming from step-" in capsys.readouterr().out
    assert_same_run(whole, cut)
    call(monkeypatch, "eval", str(cut), "--device", "cpu")
    assert "test top-1 " in capsys.readouterr().out


def test_what_a_full_disk_a_damaged_image_and_a_second_interrupt_say(tmp_path, capsys):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "step-1"))

    with pytest.raises(
        SystemExit, match=r"step-1: No space left on device; make room, and the same command"
    ):
        exit_with_reason(full, tmp_path)

    def damaged():
        raise ValueError(f"x.jpg is not an image that can be read: cut off; {REMOVE}")

    with pytest.raises(SystemExit, match=r"cut off; remove or replace it$"):
        exit_with_reason(damaged, tmp_path)
    (tmp_path / "step-1.safetensors").touch()  # without its image, it would be another run
    with pytest.raises(SystemExit, match=r"cut off; replace it, and the same command with --resu"):
        exit_with_reason(damaged, tmp_path)

    def forbidden():
        raise OSError(errno.EACCES, "Permission denied", str(tmp_path / "step-1"))

    with pytest.raises(SystemExit, match=r"step-1: Permission denied; .* choose another path$"):
        exit_with_reason(forbidden, tmp_path)

    def twice():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        exit_with_reason(twice, tmp_path)
    assert left.value.code == 130
    assert "--resume auto goes on from the newest checkpoint" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_has_an_exit_code_of_its_own(tmp_path, capsys):
    def diverges():
        raise NonFiniteLoss("epoch 2, update 8: parameter fc.weight is not finite")

    with pytest.raises(SystemExit) as left:
        exit_with_reason(diverges, tmp_path)
    assert left.value.code == 65
    assert capsys.readouterr().err == "epoch 2, update 8: parameter fc.weight is not finite\n"


def test_the_end_of_another_process_is_one_line(tmp_path, monkeypatch):
    def gone():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")

    def other():
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="closed by peer"):  # of something else
        exit_with_reason(gone, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(SignalWatch, "ever_asked", False)  # in another test
    with pytest.raises(SystemExit, match=r"^process 1: another process has ended; its"):
        exit_with_reason(gone, tmp_path)
    with pytest.raises(RuntimeError, match="a mistake"):
        exit_with_reason(other, tmp_path)


def test_one_that_left_at_a_signal_before_it_trained_does_not_change_the_status(
    tmp_path, monkeypatch, capsys
):
    def gone():
        with SignalWatch():
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        exit_with_reason(gone, tmp_path)
    assert left.value.code == INTERRUPTED
    assert capsys.readouterr().out.startswith("process 1: interrupted; --resume auto goes on in ")
    with SignalWatch():
        pass
    assert not SignalWatch.ever_asked


@pytest.mark.gpu
def test_an_interrupted_run_of_cuda_graphs_goes_on(tmp_path):
    device = Processes(0, 1, torch.device("cuda", 0))

    def trainer(name, epochs):
        options = Options(tmp_path / name, resume="auto", cuda_graphs=True, channels_last=True)
        return Trainer(replace(TINY, epochs=epochs), few_digits(), options, device)

    whole = trainer("whole", 3)
    whole.run()
    half = trainer("half", 3)
    half.recipe = replace(TINY, epochs=2)
    half.run()
    half.recipe = replace(TINY, epochs=3)
    half.save()
    half.writer.wait()
    rest = trainer("half", 3)
    assert rest.resume()
    rest.run()
    last, expected = rest.run_log.rows[-1], whole.run_log.rows[-1]
    # cuDNN adds in any order, and few images make the most of it
    assert last["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-2)


def test_channels_are_watched_without_a_trace_and_resumed(tmp_path):
    options = {"monitor_every": 2}
    data = few_digits()
    trainer(TINY, tmp_path / "plain", data).run()
    trainer(TINY, tmp_path / "whole", data, **options).run()
    assert_same_run(tmp_path / "plain", tmp_path / "whole")
    first = trainer(TINY, tmp_path / "cut", data, checkpoint_every=2, **options)
    stop_at(first, 5)
    with pytest.raises(Interrupted):
        first.run()
    second = trainer(TINY, tmp_path / "cut", data, **options)
    second.resume()
    second.run()
    # and a run that was killed after it had looked, and before it had saved
    killed = trainer(TINY, tmp_path / "killed", data, checkpoint_every=2, **options)
    real = killed._update

    def fail_at_five():
        if killed.position.updates == 4:
            raise MemoryError
        real()

    killed._update = fail_at_five
    with pytest.raises(MemoryError):
        killed.run()
    again = trainer(TINY, tmp_path / "killed", data, **options)
    again.resume()
    again.run()
    names = ("whole", "cut", "killed")
    whole, *others = ((tmp_path / name / "channels.csv").read_text() for name in names)
    assert others == [whole, whole]
    rows = list(csv.DictReader(whole.splitlines()))
    assert len({row["layer"] for row in rows}) == 6
    assert sorted({int(row["step"]) for row in rows}) == [0, 2, 4, 6, 8, 10]
    assert all(0 <= float(row["lambda"]) <= 1 for row in rows)


def test_a_row_that_is_gone_is_named(tmp_path, capsys):
    trainer(TINY, tmp_path, few_digits()).run()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n" + lines[1][:-9])
    capsys.readouterr()
    again = trainer(TINY, tmp_path, few_digits())
    again.resume()
    again.run()
    said = capsys.readouterr().out
    assert "metrics.jsonl has no row of epoch 2 (cut off or removed); the run goes on\n" in said
    assert "epoch 1" not in said.split(";")[0]


def test_rows_of_another_version_are_kept_and_the_run_goes_on(tmp_path):
    first = trainer(TINY, tmp_path, few_digits(), monitor_every=2)
    stop_at(first, 8)  # in the second epoch
    with pytest.raises(Interrupted):
        first.run()
    path = tmp_path / "metrics.jsonl"
    row = json.loads(path.read_text())
    other = {"epoch": 1, "note": "=by hand", "train_loss": row["train_loss"], "test_map": None}
    path.write_text(json.dumps(other) + '\n\n{"epoch": 2, "upd')  # the last line was cut off
    watched = tmp_path / "channels.csv"
    lines = watched.read_text().splitlines()
    lines = [f"{lines[0]},colour", *(f"{line},blue" for line in lines[1:])]
    watched.write_text("\n".join(lines) + "\n1")  # the last line was cut off by a full disk
    second = trainer(TINY, tmp_path, few_digits(), monitor_every=2)
    second.resume()
    stop_at(second, 11)
    with pytest.raises(Interrupted):
        second.run()
    third = trainer(TINY, tmp_path, few_digits(), monitor_every=2)
    third.resume()
    third.run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == other
    assert rows[1].keys() == row.keys()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {*table[0]} == {*other, *row}
    assert [line["epoch"] for line in table] == ["1", "2"]
    assert table[0]["test_top1"] == table[1]["note"] == ""
    assert float(table[1]["test_top1"]) == rows[1]["test_top1"]
    with watched.open(newline="") as file:
        steps = list(csv.DictReader(file, restval=""))
    assert {(line["step"], line["colour"]) for line in steps} == {
        *((str(step), "blue") for step in (0, 2, 4, 6)),
        *((str(step), "") for step in (8, 10)),
    }


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"test_accuracy": 0.5}, "epoch 1: everything is in"),
        ({"test_top1": 0.5, "test_loss": "low"}, "epoch 1: test top-1 50.00 %; everything is in"),
    ],
)
def test_a_finished_run_with_rows_of_another_version_says_what_it_knows(
    row, said, tmp_path, monkeypatch, capsys
):
    arguments = ["train", "digits_ce", "--out", str(tmp_path), "--device", "cpu"]
    arguments += ["--epochs", "1", "--batch-size", "512", "--warmup-epochs", "0"]
    call(monkeypatch, *arguments)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**row, "epoch": 1}) + "\n")
    call(monkeypatch, *arguments, "--resume", "auto")
    assert said in capsys.readouterr().out


def test_sums_over_all_processes_are_resumed_by_the_first_alone(tmp_path):
    first = trainer(TINY, tmp_path, few_digits())
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()
    images = 2 * TINY.batch_size
    for rank, expected in enumerate((images, 0, 0)):
        processes = Processes(rank, 3, torch.device("cpu"))
        engine = Trainer(TINY, few_digits(), Options(tmp_path), processes)
        engine.resume()
        assert engine.position.sums[-1] == expected
        assert bool(engine.position.sums.any()) == (rank == 0)


def test_a_sum_over_all_processes_leaves_the_own_values(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.mul_(2))
    own = torch.ones(3)
    summed = total(own, Processes(0, 2, torch.device("cpu")))
    assert (summed.tolist(), own.tolist()) == ([2] * 3, [1] * 3)


def test_training_and_test_images_are_both_compared():
    is_same = partial(RunState._is_of_same_data, SimpleNamespace(digest="a:11111111 b:22222222"))
    assert is_same("a:11111111 b:22222222")
    assert not is_same("a:11111111 b:33333333")
    assert not is_same("a:33333333 b:22222222")
    assert not is_same("a:11111111")


def test_files_with_other_contents_are_refused(tmp_path):
    data = write_digits(tmp_path / "data")
    recipe = replace(PLAIN, augment="imagenet", image_size=16, dataset="imagenet")
    first = trainer(recipe, tmp_path / "run", image_folders(data, 16, resident=False), workers=0)
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()

    def resumed():
        files = image_folders(data, 16, resident=False)
        return trainer(recipe, tmp_path / "run", files, workers=0).resume()

    copied = shutil.copytree(data, tmp_path / "copy")  # elsewhere, with other times
    data = copied
    assert "resuming" in resumed()
    Image.new("L", (20, 18)).save(data / "train" / "0" / "x.png")  # repaired
    assert "resuming" in resumed()
    for path in (data / "train").rglob("*.png"):
        Image.new("L", (20, 18)).save(path)
    with pytest.raises(
        ValueError, match="the images, their labels or their annotations differ; use another"
    ):
        resumed()
    # checkpoints of before have no digest of contents
    for path in checkpoint.checkpoints(tmp_path / "run"):
        tensors, facts = checkpoint.read(path)
        checkpoint.write(path, tensors, {**facts, "data": facts["data"].split(":")[0]})
    assert "resuming" in resumed()
    (data / "train" / "0" / "x.png").rename(data / "train" / "0" / "y.png")
    with pytest.raises(ValueError, match="the images, their labels or their annotations differ"):
        resumed()
