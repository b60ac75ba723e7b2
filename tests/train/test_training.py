"""The folder of a run, and how a run ends that goes wrong."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from _training import ALONE, TINY, call, few_digits, trainer
from cenet.distributed import Processes
from cenet.models import create_model
from cenet.run_folder import WEIGHTS
from cenet.train import checkpoint
from cenet.train.classifier import Trainer
from cenet.train.job import Job, evaluate_run, train
from cenet.train.nonfinite import NonFiniteLoss, first_non_finite
from cenet.train.options import Options
from cenet.train.run_log import RunLog
from cenet.train.weights import load_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_explains_itself_and_can_be_evaluated(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    row = train(Job(replace(TINY, epochs=1, batch_size=64), Options(out), device="cpu"))
    about = json.loads((out / "run.json").read_text())
    assert about["recipe"]["network"] == "vgg6"
    assert {"torch", "commit", "device", "command", "threads"} <= about["environment"].keys()
    assert (out / "metrics.csv").read_text().startswith("epoch,updates,lr,train_loss")
    # λ of every CE layer after the epoch
    weights = {
        f"lambda/{name.removesuffix('.ce.mix_logit')}": value.sigmoid().item()
        for name, value in load_file(out / WEIGHTS).items()
        if name.endswith("mix_logit")
    }
    assert len(weights) == 6
    assert {name: value for name, value in row.items() if "lambda" in name} == weights
    assert set(weights.values()) != {0.5}
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
    arguments = ("--recalibrate", "1", "--save", str(saved), "--device", "cpu")
    call(monkeypatch, "eval", str(out), *arguments)
    assert f"wrote the recalibrated weights to {saved}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="recalibrate=-1 must be at least 1"):
        evaluate_run(out, device="cpu", recalibrate=-1)
    (tmp_path / "folder.safetensors").mkdir()
    for wrong in (
        tmp_path / "x.pth", tmp_path, tmp_path / "nowhere" / "x.safetensors", out / WEIGHTS,
        tmp_path / "folder.safetensors", out / ".." / out.name / WEIGHTS,
        checkpoint.checkpoints(out)[0],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--save {wrong}"):
            evaluate_run(out, device="cpu", recalibrate=1, save=wrong)
    with pytest.raises(ValueError, match="add --recalibrate"):
        evaluate_run(out, device="cpu", save=saved)
    whole = (out / WEIGHTS).read_bytes()
    (out / WEIGHTS).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"weights.safetensors .* does not match its digest"):
        evaluate_run(out, device="cpu")
    (out / WEIGHTS).unlink()
    assert evaluate_run(out, device="cpu") == found
    with pytest.raises(ValueError, match="holds a run already; continue it with --resume auto"):
        train(Job(TINY, Options(out), device="cpu"))
    with pytest.raises(ValueError, match="another run: batch_size was 64 and is 16; epochs was"):
        train(Job(TINY, Options(out, resume="auto"), device="cpu"))
    with pytest.raises(ValueError, match=r"is not a folder of `cenet train`: it has no run.json$"):
        evaluate_run(tmp_path)


def test_a_run_of_an_earlier_version_gets_new_columns(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "seconds": 2.0}\n')
    RunLog(tmp_path).add({"epoch": 2, "lambda/bn": 0.25, "seconds": 3.0})
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["epoch,seconds,lambda/bn", "1,2.0,", "2,3.0,0.25"]


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
    with pytest.raises(ValueError, match="run has 9, which the data has not; the data has nine"):
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
    with pytest.raises(ValueError, match=r"vgg16 cannot .* of 8×8: [^;]*; raise --image-size$"):
        Trainer(recipe, split, Options(tmp_path), ALONE)


def test_more_accumulation_than_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="accumulate=7 is more than the 6 steps of an epoch"):
        trainer(replace(TINY, accumulate=7), tmp_path, few_digits())


def test_a_log_has_a_line_per_epoch(tmp_path, capsys):
    train(Job(replace(TINY, batch_size=256), Options(tmp_path), device="cpu"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]


def test_other_classes_are_another_run(tmp_path):
    trainer(replace(TINY, epochs=1), tmp_path, few_digits()).run()
    data = few_digits()
    named = data._replace(train=data.train._replace(classes=tuple("abcdefghij")))
    with pytest.raises(ValueError, match="the classes or the pixels of the data differ"):
        trainer(replace(TINY, epochs=1), tmp_path, named).resume()
    with pytest.raises(ValueError, match=r"epochs was 1 and is 3; use another --out") as refused:
        trainer(replace(TINY, epochs=3), tmp_path, named).resume()
    assert "pixels" not in str(refused.value)
    with pytest.raises(ValueError, match="epochs was 1 and is 3; use another") as fewer:
        trainer(replace(TINY, epochs=3), tmp_path, few_digits(80)).resume()
    assert "images" not in str(fewer.value)
    assert f"--weights {tmp_path} it starts from these weights" in str(refused.value)
    (tmp_path / WEIGHTS).unlink()  # as before its end
    with pytest.raises(ValueError, match=r"use another --out for this one$"):
        trainer(replace(TINY, epochs=3), tmp_path, named).resume()


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
    tensors = checkpoint.newest(tmp_path)[1]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits_c"), "'digits_c' is not a recipe (did you mean digits_ce"),
        (("train", "digits_ce", "--lr", "-1"), "lr=-1.0 must be at least 1e-12, and finite"),
        (("train", "digits_ce", "--lr", "inf"), "lr=inf must be at least 1e-12, and finite"),
        (("train", "digits_ce", "--lr", "nan"), "lr=nan must be at least 1e-12, and finite"),
        (("train", "digits_ce", "--momentum", "nan"), "momentum=nan must be 0 to 0.999999"),
        (("train", "digits_ce", "--log-every", "0"), "--log-every 0 must be at least 1"),
        (
            ("train", "digits_ce", "--checkpoint-seconds", "inf"),
            "--checkpoint-seconds inf must be at least 0, and finite",
        ),
        (
            ("train", "digits_ce", "--checkpoint-seconds", "nan"),
            "--checkpoint-seconds nan must be at least 0, and finite",
        ),
        (("train", "digits_ce", "--threads", "0"), "--threads 0 must be at least 1"),
        (("train", "digits_ce", "--blok", "ce"), "Perhaps you meant"),
        (("train", "vgg16_ce"), "cifar10 is not built in; say where it is with --data FOLDER"),
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


def test_whole_numbers_are_not_asked_to_be_finite(tmp_path):
    with pytest.raises(ValueError, match=r"^--log-every 0 must be at least 1$"):
        Options(tmp_path, log_every=0)


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
        (
            replace(TINY, sync_ce=True),
            Processes(0, 2, torch.device("cuda")),
            "cannot hold --sync-ce among 2 processes; use --compile",
        ),
        (
            replace(TINY, accumulate=4),
            Processes(0, 2, torch.device("cuda")),
            "of 2 processes cannot hold --accumulate 4; use --compile",
        ),
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


def test_a_decoder_that_is_not_there_is_refused_for_images_in_memory_too(tmp_path):
    with pytest.raises(ValueError, match="--decode cuda is not possible: this run is on cpu; use"):
        trainer(TINY, tmp_path, few_digits(), decode="cuda")


def test_channels_cannot_be_watched_in_cuda_graphs(tmp_path):
    with pytest.raises(ValueError, match="--monitor-every does not work with --cuda-graphs"):
        Options(tmp_path, monitor_every=1, cuda_graphs=True)
