"""The engine: interrupted and resumed runs equal uninterrupted ones, and bad ends are clear."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cenet.cli import main
from cenet.models import create_model
from cenet.train import RECIPES, saving
from cenet.train.data import Split, digits, image_folders
from cenet.train.diagnosis import NonFiniteLoss, first_non_finite
from cenet.train.engine import Trainer
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


def stop_at(engine, update):
    """Have the run interrupted after so many updates."""
    real = engine._update

    def counted():
        real()
        if engine.position.updates == update:
            os.kill(os.getpid(), signal.SIGTERM)

    engine._update = counted


VARIATIONS = {
    "plain": {},
    "ema, mixup, clipping": {"ema": 0.9, "mixup": 0.2, "clip_grad": 1.0, "label_smoothing": 0.1},
    "accumulation": {"accumulate": 2, "augment": "crop_flip"},
    "bfloat16": {"precision": "bfloat16", "schedule": "step", "milestones": (1,)},
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


def test_a_log_has_a_line_per_epoch(tmp_path, capsys):
    train(Job(replace(TINY, batch_size=256), Options(tmp_path), device="cpu"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]


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
@pytest.mark.parametrize("accumulate", [1, 2])
def test_cuda_graphs_train_as_eager_steps_do(accumulate, tmp_path):
    recipe = replace(TINY, accumulate=accumulate, clip_grad=1.0, epochs=3)
    device = Processes(0, 1, torch.device("cuda", 0))
    rows = {}
    for graphs in (False, True):
        options = Options(tmp_path / str(graphs), cuda_graphs=graphs, channels_last=True)
        trainer = Trainer(recipe, few_digits(), options, device)
        trainer.run()
        rows[graphs] = trainer.logbook.rows
    for eager, graphed in zip(rows[False], rows[True], strict=True):
        assert eager["lr"] == graphed["lr"]
        for name in ("train_loss", "test_loss"):
            assert graphed[name] == pytest.approx(eager[name], rel=1e-3)


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
