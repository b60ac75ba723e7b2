"""The engine: interrupted and resumed runs equal uninterrupted ones, and bad ends are clear."""

import copy
import csv
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import cenet.train.engine as engine_module
import cenet.train.loop as loop_module
from cenet.cli import main
from cenet.models import create_model
from cenet.nn import ce_layers
from cenet.train import RECIPES, saving, snapshot
from cenet.train.data import Split, digits, image_folders
from cenet.train.diagnosis import NonFiniteLoss, first_non_finite
from cenet.train.engine import Trainer
from cenet.train.loaders import epoch_order, seed_of
from cenet.train.logbook import TIMES, read_metrics
from cenet.train.loop import Interrupted
from cenet.train.options import Options
from cenet.train.processes import Processes
from cenet.train.run import Job, evaluate_run, train
from cenet.train.weights import WEIGHTS, load_run

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = replace(RECIPES["digits_ce"], epochs=2, batch_size=16, warmup_epochs=0.5, accuracy=None)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def few_digits(train=96, test=64):
    split = digits()
    return Split(
        split.train._replace(images=split.train.images[:train], labels=split.train.labels[:train]),
        split.test._replace(images=split.test.images[:test], labels=split.test.labels[:test]),
    )


@pytest.fixture(scope="module")
def files_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    split = few_digits(48, 16)
    for part, data in (("train", split.train), ("test", split.test)):
        for i, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
            path = root / part / str(int(label)) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).resize((20, 18)).save(path)
    for label in range(10):  # both parts have all classes
        for part in ("train", "test"):
            path = root / part / str(label) / "x.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (20, 18), label * 20).save(path)
    return root


@pytest.fixture(scope="module")
def few_files(files_folder):
    return image_folders(files_folder, 16, resident=False)


def trainer(recipe, out, data, **options):
    return Trainer(recipe, data, Options(out, **options), ALONE)


def metrics(out):
    rows = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    first, second = (saving.newest(out) for out in (one, other))
    assert first[0].name == second[0].name
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert torch.equal(value, second[1][name]), name
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


def stop_at(engine, update, number=signal.SIGTERM):
    """Have the run interrupted after so many updates."""
    real = engine._update

    def counted():
        real()
        if engine.position.updates == update:
            os.kill(os.getpid(), number)

    engine._update = counted


VARIATIONS = {
    "plain": {},
    "ema, mixup, clipping": {"ema": 0.9, "mixup": 0.2, "clip_grad": 1.0, "label_smoothing": 0.1},
    "accumulation": {"accumulate": 2, "augment": "crop_flip"},
    "bfloat16": {"precision": "bfloat16", "schedule": "step", "milestones": (1,)},
    # the scale of the loss is too large at first, and falls
    "float16": {"precision": "float16", "clip_grad": 0.5},
}


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
        assert saving.newest(out)[2]["position"]["updates"] == update
        torch.manual_seed(99)  # nothing of this process may matter
        second = trainer(recipe, out, few_digits())
        assert "resuming from step-" in second.resume()
        second.run()
        assert_same_run(tmp_path / "whole", out)


BY_HAND = {
    **{name: fields for name, fields in VARIATIONS.items() if name != "accumulation"},
    "accumulation": {"accumulate": 2, "momentum": 0.5},
    "ema": {"ema": 0.7, "decay_norms": False},
    "smoothing": {"label_smoothing": 0.2, "lr_batch": 32, "schedule": "poly", "power": 2.0},
    "mixup": {"mixup": 0.4, "seed": 1},
}


def targets_by_hand(recipe, labels):
    """Class probabilities: smoothed."""
    hot = nn.functional.one_hot(labels, 10).float()
    return hot * (1 - recipe.label_smoothing) + recipe.label_smoothing / 10


def rate_by_hand(recipe, update, per_epoch):
    peak = recipe.lr * recipe.batch_size * recipe.accumulate / recipe.lr_batch
    done = update / (recipe.epochs * per_epoch)
    warmup = round(recipe.warmup_epochs * per_epoch)
    if update < warmup:
        return peak * update / warmup
    return (
        peak
        * {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "poly": (1 - done) ** recipe.power,
            "step": recipe.gamma ** sum(update >= m * per_epoch for m in recipe.milestones),
        }[recipe.schedule]
    )


def by_hand(recipe, data):
    """The weights and the rows of metrics of a recipe, written out."""
    pixels = data.train.images.double()
    mean, std = pixels.mean(), pixels.std(correction=0)
    x, test_x = (((part.images - mean) / std).float() for part in data)
    snapshot.seed_everything(seed_of("weights", recipe.seed))
    network = create_model("vgg6", "ce", num_classes=10, in_chans=1)
    snapshot.seed_everything(seed_of("chance", recipe.seed, 0))
    groups = {True: [], False: []}
    for name, parameter in network.named_parameters():
        free = name.endswith("mix_logit") or (parameter.dim() < 2 and not recipe.decay_norms)
        groups[free].append(parameter)
    sgd = torch.optim.SGD(
        [{"params": groups[False], "weight_decay": recipe.weight_decay}, {"params": groups[True]}],
        momentum=recipe.momentum,
    )
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(recipe.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    average, rows, updates = None, [], 0
    per_epoch = len(x) // recipe.batch_size // recipe.accumulate
    for epoch in range(recipe.epochs):
        network.train()
        order = epoch_order(len(x), recipe.seed, epoch)
        loss_sum = correct = seen = 0
        for update in range(per_epoch):
            first = update * recipe.accumulate
            for step in range(first, first + recipe.accumulate):
                chosen = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
                images, wanted = x[chosen], targets_by_hand(recipe, data.train.labels[chosen])
                if recipe.mixup:
                    numpy.random.rand()  # noqa: NPY002, timm's chance of not mixing
                    share = numpy.random.beta(recipe.mixup, recipe.mixup)  # noqa: NPY002
                    images = share * images + (1 - share) * images.flip(0)
                    wanted = share * wanted + (1 - share) * wanted.flip(0)
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    logits = network(images)
                loss = -(wanted * logits.float().log_softmax(1)).sum(1).mean()
                scaler.scale(loss / recipe.accumulate).backward()
                loss_sum += loss.item() * len(chosen)
                correct += (logits.argmax(1) == data.train.labels[chosen]).sum().item()
                seen += len(chosen)
            for group in sgd.param_groups:
                group["lr"] = rate_by_hand(recipe, updates, per_epoch)
            if recipe.clip_grad:
                scaler.unscale_(sgd)
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
            updates += 1
            if average is None:
                average = copy.deepcopy(network)
            states = (module.state_dict().values() for module in (average, network))
            for own, new in zip(*states, strict=True):
                decay = recipe.ema if own.is_floating_point() else 0
                own.copy_(decay * own + (1 - decay) * new)
        average.eval()
        with torch.no_grad():
            logits = average(test_x)
        places = (logits > logits.gather(1, data.test.labels[:, None])).sum(1)
        rows.append({
            "epoch": epoch + 1,
            "updates": updates,
            "lr": sgd.param_groups[0]["lr"],
            "train_loss": loss_sum / seen,
            "train_top1": correct / seen,
            "test_loss": nn.functional.cross_entropy(logits, data.test.labels).item(),
            "test_top1": (places < 1).double().mean().item(),
            "test_top5": (places < 5).double().mean().item(),
        })  # fmt: skip
    return average.state_dict(), rows


@pytest.mark.parametrize("name", BY_HAND)
def test_a_run_is_what_its_recipe_says(name, tmp_path):
    """Schedule, accumulation, clipping, smoothing, mixup, averaging and metrics, against a loop
    that has none of the engine's code."""
    recipe = replace(TINY, **BY_HAND[name])
    weights, rows = by_hand(recipe, few_digits())
    trainer(recipe, tmp_path, few_digits()).run()
    for found, expected in zip(metrics(tmp_path), rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    final = load_file(tmp_path / WEIGHTS)
    assert final.keys() == weights.keys()
    for key, value in final.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5, msg=key)
    found = evaluate_run(tmp_path, device="cpu")
    (tmp_path / WEIGHTS).unlink()
    assert evaluate_run(tmp_path, device="cpu") == found  # of the checkpoint


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


def test_a_run_explains_itself_and_can_be_evaluated(tmp_path):
    out = tmp_path / "run"
    row = train(Job(replace(TINY, epochs=1, batch_size=64), Options(out), device="cpu"))
    about = json.loads((out / "run.json").read_text())
    assert about["recipe"]["network"] == "vgg6"
    assert {"torch", "commit", "device", "command", "threads"} <= about["environment"].keys()
    assert (out / "metrics.csv").read_text().startswith("epoch,updates,lr,train_loss")
    found = evaluate_run(out, device="cpu")
    assert found == {name: row[name] for name in ("test_loss", "test_top1", "test_top5")}
    # other statistics of norms and CE, the same weights
    saved = tmp_path / "recalibrated.safetensors"
    other = evaluate_run(out, device="cpu", recalibrate=5, save=saved)
    assert other["test_loss"] != found["test_loss"]
    assert other["test_loss"] < 2 * found["test_loss"]
    before, after = load_run(out).state_dict(), load_file(saved)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if "running" in name or "num_batches" in name}
    with pytest.raises(ValueError, match="recalibrate=-1 must be at least 1"):
        evaluate_run(out, device="cpu", recalibrate=-1)
    with pytest.raises(ValueError, match="add --recalibrate"):
        evaluate_run(out, device="cpu", save=saved)
    (out / WEIGHTS).unlink()
    assert evaluate_run(out, device="cpu") == found
    with pytest.raises(ValueError, match="holds a run already; go on with it by --resume auto"):
        train(Job(TINY, Options(out), device="cpu"))
    with pytest.raises(ValueError, match="another run: batch_size was 64 and is 16; epochs was"):
        train(Job(TINY, Options(out, resume="auto"), device="cpu"))
    with pytest.raises(ValueError, match=r"is not a folder of `cenet train`"):
        evaluate_run(tmp_path)


def test_a_run_is_evaluated_as_it_was_trained(files_folder, tmp_path):
    """Pixels are normalized as in training, whatever data it meets, and classes must agree."""
    root = tmp_path / "data"
    shutil.copytree(files_folder, root)
    recipe = replace(TINY, dataset="cifar10", image_size=16, epochs=1, augment="none")
    out = tmp_path / "run"
    row = train(Job(recipe, Options(out, workers=0), root, device="cpu"))
    expected = {name: row[name] for name in ("test_loss", "test_top1", "test_top5")}
    shutil.rmtree(root / "train")
    assert evaluate_run(out, root, device="cpu") == expected
    (root / "test" / "9").rename(root / "test" / "nine")
    with pytest.raises(ValueError, match=r"other classes than .* has: \['9', 'nine'\]"):
        evaluate_run(out, root, device="cpu")


def test_images_in_memory_keep_the_statistics_of_training(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for part, dark in (("train", 1), ("test", 4)):
        for i in range(24):
            image = torch.randint(256 // dark, (16, 16, 3), generator=generator)
            path = tmp_path / part / str(i % 2) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.to(torch.uint8).numpy()).save(path)
    recipe = replace(TINY, dataset="cifar10", image_size=16, epochs=1, augment="none")
    out = tmp_path / "run"
    row = train(Job(recipe, Options(out), tmp_path, device="cpu"))
    inputs = json.loads((out / "run.json").read_text())["inputs"]
    assert inputs["mean"][0] == pytest.approx(127.5, rel=0.05)
    assert inputs["classes"] == ["0", "1"]
    for name in ("0", "1"):  # other training images
        shutil.copytree(tmp_path / "test" / name, tmp_path / "train" / name, dirs_exist_ok=True)
    found = evaluate_run(out, tmp_path, device="cpu")
    assert found["test_loss"] == row["test_loss"]


def test_images_too_small_for_a_network_are_refused_before_training(tmp_path):
    split = few_digits()
    recipe = replace(TINY, network="vgg16", image_size=8)
    with pytest.raises(ValueError, match=r"vgg16 cannot train on images of 8×8: .*--image-size"):
        Trainer(recipe, split, Options(tmp_path), ALONE)


def test_only_one_run_writes_to_a_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cenet.train.claims import claimed\n"
        "with claimed(Path(sys.argv[1])): print('mine', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(ValueError, match="another process is writing to"):
            train(Job(TINY, Options(tmp_path), device="cpu"))
        other.kill()
    assert train(Job(replace(TINY, epochs=1, batch_size=256), Options(tmp_path), device="cpu"))


def test_a_signal_to_workers_too_is_saved(files_folder, tmp_path):
    """Managers of clusters signal every process of a job."""
    arguments = ["train", "digits_ce", "--dataset", "cifar10", "--image-size", "16", "--out"]
    arguments += [str(tmp_path / "run"), "--data", str(files_folder), "--device", "cpu"]
    arguments += ["--epochs", "500", "--batch-size", "4", "--workers", "2", "--warmup-epochs", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cenet", *arguments], start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and not saving.checkpoints(tmp_path / "run"):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 75


def test_a_test_image_that_cannot_be_read_does_not_cost_the_epoch(files_folder, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(files_folder, root)
    (root / "test" / "3" / "x.png").write_bytes(b"no image")
    recipe = replace(TINY, dataset="cifar10", image_size=16, epochs=1, augment="none")
    for workers in (0, 2):
        out = tmp_path / str(workers)
        with pytest.raises(ValueError, match=r"^.*3/x.png is not an image that can be read: .*$"):
            train(Job(recipe, Options(out, workers=workers), root, device="cpu"))
        position = saving.newest(out)[2]["position"]
        assert (position["epoch"], position["updates"]) == (0, position["step"])
        assert position["updates"] > 0
    Image.new("L", (20, 18), 60).save(root / "test" / "3" / "x.png")
    options = Options(out, workers=0, resume="auto")
    assert train(Job(recipe, options, root, device="cpu"))["epoch"] == 1


def test_more_accumulation_than_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="accumulate=7 is more than the 6 steps of an epoch"):
        trainer(replace(TINY, accumulate=7), tmp_path, few_digits())


def test_a_log_has_a_line_per_epoch(tmp_path, capsys):
    train(Job(replace(TINY, batch_size=256), Options(tmp_path), device="cpu"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]


def test_a_second_interrupt_stops_at_once(tmp_path):
    engine = trainer(TINY, tmp_path, few_digits())
    stop_at(engine, 2, signal.SIGINT)
    with pytest.raises(Interrupted):
        engine.run()
    engine = trainer(TINY, tmp_path, few_digits())
    stop_at(engine, 3, signal.SIGINT)
    stop_at(engine, 3, signal.SIGINT)  # at the same update, twice
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_checkpoints_come_as_often_as_asked_and_two_stay(tmp_path, monkeypatch):
    written = []
    real = saving.write

    def noted(path, tensors, facts):
        written.append(facts["position"]["updates"])
        real(path, tensors, facts)

    monkeypatch.setattr(saving, "write", noted)
    trainer(TINY, tmp_path, few_digits(), checkpoint_every=4).run()
    assert written == [4, 6, 8, 12]  # an epoch has six
    names = [path.name for path in saving.checkpoints(tmp_path)]
    assert names == ["step-000000012.safetensors", "step-000000008.safetensors"]


def test_a_full_disk_ends_a_run_and_leaves_its_checkpoints(tmp_path, monkeypatch):
    real = saving.replace_file

    def full(path, content):
        if path == saving.checkpoint_path(tmp_path, 18):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(saving, "replace_file", full)
    with pytest.raises(OSError, match="No space left"):
        trainer(replace(TINY, epochs=3), tmp_path, few_digits()).run()
    assert [int(path.stem[5:]) for path in saving.checkpoints(tmp_path)] == [12, 6]
    assert saving.newest(tmp_path)[3] == []


def test_seconds_are_those_of_training_over_all_parts_of_an_epoch(tmp_path, monkeypatch):
    """By a clock on which an update takes a second, and a test an hour."""
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: now[0])
    tested = engine_module.evaluate

    def slow_test(*args, **options):
        now[0] += 3600
        return tested(*args, **options)

    monkeypatch.setattr(engine_module, "evaluate", slow_test)

    def slow(engine):
        real = engine._update

        def update():
            now[0] += 1
            real()

        engine._update = update
        return engine

    first = slow(trainer(TINY, tmp_path, few_digits()))
    stop_at(first, 8)
    with pytest.raises(Interrupted):
        first.run()
    now[0] += 1e6  # until somebody resumes it
    second = slow(trainer(TINY, tmp_path, few_digits()))
    second.resume()
    second.run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["seconds"] for row in rows] == [6, 6]
    assert [row["images_per_second"] for row in rows] == [16, 16]


def test_other_classes_are_another_run(tmp_path):
    trainer(replace(TINY, epochs=1), tmp_path, few_digits()).run()
    data = few_digits()
    named = data._replace(train=data.train._replace(classes=tuple("abcdefghij")))
    with pytest.raises(ValueError, match="the classes or the pixels of the data differ"):
        trainer(replace(TINY, epochs=1), tmp_path, named).resume()


def test_a_recipe_can_ask_for_synchronized_layers(tmp_path):
    for asked in (False, True):
        engine = trainer(replace(TINY, sync_ce=asked), tmp_path, few_digits())
        assert {layer.sync is not None for _, layer in ce_layers(engine.network)} == {asked}


def test_all_random_number_generators_come_back():
    def draw():
        own = (random.gauss(0, 1), numpy.random.randn())  # noqa: NPY002
        return (*own, torch.rand(()).item())

    draw()  # both Gaussians keep a second number
    kept = snapshot.chance(ALONE.device)
    expected = [draw() for _ in range(3)]
    snapshot.set_chance(ALONE.device, *kept)
    assert [draw() for _ in range(3)] == expected


def test_a_finished_run_stays_finished(tmp_path):
    job = Job(replace(TINY, epochs=1, batch_size=256), Options(tmp_path, resume="auto"))
    row = train(job)
    before = (tmp_path / WEIGHTS).read_bytes()
    assert train(job) == row
    assert (tmp_path / WEIGHTS).read_bytes() == before


def test_a_loss_that_is_not_finite_is_diagnosed_and_the_last_good_checkpoint_kept(tmp_path):
    engine = trainer(replace(TINY, epochs=3), tmp_path, few_digits())
    real = engine._update

    def spoiled():
        real()
        if engine.position.updates == 8:
            with torch.no_grad():
                engine.network.features[7].weight[3] = torch.nan

    engine._update = spoiled
    with pytest.raises(NonFiniteLoss, match=r"epoch 2, update 8: parameter features.7.weight"):
        engine.run()
    tensors = saving.newest(tmp_path)[1]
    assert all(value.isfinite().all() for value in tensors.values() if value.is_floating_point())


def test_the_first_layer_that_is_not_finite_is_named():
    model = create_model("vgg6", "plain", in_chans=1)
    x = torch.randn(4, 1, 8, 8)
    buffers = [buffer.clone() for buffer in model.buffers()]
    assert "all layers are finite" in first_non_finite(model, x)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert first_non_finite(model, x * torch.inf) == "the images are not finite"
    with torch.no_grad():
        model.features[4].running_var.fill_(-1)
    model.eval()
    found = first_non_finite(model, x)
    assert found == "the output of layer features.4 is the first that is not finite"


SMALL = ("--epochs", "2", "--batch-size", "128", "--device", "cpu", "--warmup-epochs", "0.5")


def call(monkeypatch, *arguments):
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["cenet", *arguments])
    main()


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
        before = {path.name for path in saving.checkpoints(cut)}
        while process.poll() is None and {p.name for p in saving.checkpoints(cut)} <= before:
            time.sleep(0.005)
        process.send_signal(kind)
        assert process.wait(timeout=60) == code
    call(monkeypatch, *resumed)
    assert "resuming from step-" in capsys.readouterr().out
    assert_same_run(whole, cut)
    call(monkeypatch, "eval", str(cut), "--device", "cpu")
    assert "test_top1 " in capsys.readouterr().out


@pytest.mark.slow
def test_digits_reach_the_accuracy_of_their_recipe_and_are_deterministic(tmp_path):
    recipe = RECIPES["digits_ce"]
    rows = [train(Job(recipe, Options(tmp_path / name), device="cpu")) for name in "ab"]
    assert rows[0]["test_top1"] >= recipe.accuracy
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits_c"), "'digits_c' is not a recipe (did you mean digits_ce"),
        (("train", "digits_ce", "--lr", "-1"), "lr=-1.0 must be at least"),
        (("train", "digits_ce", "--log-every", "0"), "log_every=0 must be at least 1"),
        (("train", "digits_ce", "--blok", "ce"), "Perhaps you meant"),
        (("train", "vgg16_ce"), "cifar10 is not embedded; say where it is with --data FOLDER"),
        (("train", "digits_ce", "--out", "/proc/nowhere"), "/proc/nowhere"),
        (("eval", "nowhere"), "nowhere is not a folder of `cenet train`"),
    ],
)
def test_bad_input_gets_one_clear_error(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *arguments)
    assert caught.value.code != 0
    said = f"{caught.value.code} {capsys.readouterr().err}"
    assert message in " ".join(said.replace("│", " ").split())


def test_recipes_are_listed(monkeypatch, capsys):
    call(monkeypatch, "recipes")
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("shufflenetv2_x0_5", "digits", "leaky_relu_ce", "iternorm")
    )


@pytest.mark.parametrize(
    ("recipe", "processes", "message"),
    [
        (TINY, ALONE, "needs a GPU, and this run is on cpu"),
        (TINY, Processes(0, 2, torch.device("cuda")), "for one process, and there are 2"),
        (
            replace(TINY, precision="float16"),
            Processes(0, 1, torch.device("cuda")),
            "use --precision bfloat16",
        ),
    ],
)
def test_cuda_graphs_are_refused_where_they_cannot_be(recipe, processes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Trainer(recipe, few_digits(), Options(tmp_path, cuda_graphs=True), processes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (1, {"cuda_graphs": True}),
        (2, {"cuda_graphs": True}),
        (1, {"compile": True}),
        (1, {"compile": True, "cuda_graphs": True}),
    ],
)
def test_options_of_a_gpu_train_as_eager_steps_do(accumulate, options, tmp_path):
    """Each network as itself, with the other one in the same process."""
    device = Processes(0, 1, torch.device("cuda", 0))
    for block in ("plain", "ce"):
        recipe = replace(TINY, block=block, accumulate=accumulate, clip_grad=1.0, epochs=3)
        rows = {}
        for name, chosen in (("eager", {}), ("other", options)):
            where = Options(tmp_path / f"{block}_{name}", channels_last=True, **chosen)
            trainer = Trainer(recipe, few_digits(), where, device)
            trainer.run()
            rows[name] = trainer.logbook.rows
        for eager, other in zip(rows["eager"], rows["other"], strict=True):
            assert eager["lr"] == other["lr"]
            for name in ("train_loss", "test_loss"):
                assert other[name] == pytest.approx(eager[name], rel=1e-2)


@pytest.mark.gpu
def test_an_interrupted_run_of_cuda_graphs_goes_on(tmp_path):
    device = Processes(0, 1, torch.device("cuda", 0))

    def trainer(name, epochs):
        options = Options(tmp_path / name, resume="auto", cuda_graphs=True)
        return Trainer(replace(TINY, epochs=epochs), few_digits(), options, device)

    whole = trainer("whole", 3)
    whole.run()
    half = trainer("half", 3)
    half.recipe = replace(TINY, epochs=2)
    half.run()
    half.recipe = replace(TINY, epochs=3)
    half.save()
    rest = trainer("half", 3)
    assert rest.resume()
    rest.run()
    last, expected = rest.logbook.rows[-1], whole.logbook.rows[-1]
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
    whole, cut = ((tmp_path / name / "channels.csv").read_text() for name in ("whole", "cut"))
    assert whole == cut
    rows = list(csv.DictReader(whole.splitlines()))
    assert len({row["layer"] for row in rows}) == 6
    assert sorted({int(row["step"]) for row in rows}) == [0, 2, 4, 6, 8, 10]
    assert all(0 <= float(row["lambda"]) <= 1 for row in rows)


def test_channels_cannot_be_watched_in_cuda_graphs(tmp_path):
    with pytest.raises(ValueError, match="--monitor-every cannot look into --cuda-graphs"):
        Options(tmp_path, monitor_every=1, cuda_graphs=True)
