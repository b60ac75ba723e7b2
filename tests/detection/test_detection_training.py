"""Training detectors: interrupted runs equal whole ones, empty images train, the commands."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image

import cenet.detection.data as data_module
from _detection import TINY, batch, few_shapes, small_detector
from _distributed import torchrun
from _training import assert_same_run, call, metrics, stop_at
from cenet.detection.data import SceneSplit, scenes
from cenet.detection.job import evaluate_run
from cenet.detection.recipes import DetectionRecipe
from cenet.detection.trainer import DetectionOptions, DetectionTrainer
from cenet.distributed import Processes
from cenet.run_folder import read_metrics
from cenet.signals import Interrupted
from cenet.train import checkpoint
from cenet.train.nonfinite import NonFiniteLoss
from cenet.train.recipes import read_run

ALONE = Processes(0, 1, torch.device("cpu"))


def trainer(recipe, out, data=None, **options):
    options = DetectionOptions(out, **{"workers": 0, **options})
    return DetectionTrainer(recipe, few_shapes() if data is None else data, options, ALONE)


VARIATIONS = {
    "Mask R-CNN with CE": {},
    "Faster R-CNN without": {"backbone": "resnet18", "detector": "faster_rcnn"},
    "accumulation and bfloat16": {"accumulate": 2, "precision": "bfloat16", "batch_size": 2},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_an_interrupted_run_equals_an_uninterrupted_one(name, tmp_path):
    recipe = replace(TINY, **VARIATIONS[name])
    whole = trainer(recipe, tmp_path / "whole")
    whole.run()
    update = whole.position.updates // 2 + 1
    first = trainer(recipe, tmp_path / "cut")
    stop_at(first, update)
    with pytest.raises(Interrupted):
        first.run()
    assert checkpoint.newest(tmp_path / "cut")[2]["position"]["updates"] == update
    torch.manual_seed(99)  # nothing of this process may matter
    second = trainer(recipe, tmp_path / "cut")
    assert "resuming from step-" in second.resume()
    second.run()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    other = trainer(replace(recipe, lr=0.5), tmp_path / "cut")
    with pytest.raises(ValueError, match=r"another run: lr was 0.01 and is 0.5") as refused:
        other.resume()
    assert "--weights" not in str(refused.value)  # detectors have no such option


def empty(count):
    """Images without any object, but one."""
    split = few_shapes(40, 4)
    chosen = [i for i, objects in enumerate(split.train.objects) if not objects][:count]
    some = next(i for i, objects in enumerate(split.train.objects) if objects)
    records = [split.train.images[index] for index in [*chosen, some]]
    ids = {record["id"] for record in records}
    coco = {
        "images": records,
        "annotations": [a for a in split.train.coco["annotations"] if a["image_id"] in ids],
        "categories": split.train.coco["categories"],
    }
    pixels = [split.train.pixels[index] for index in [*chosen, some]]
    return SceneSplit(scenes("train", coco, pixels=pixels), split.test)


@pytest.mark.parametrize("detector", ["mask_rcnn", "faster_rcnn"])
def test_batches_without_any_object_train(detector, tmp_path):
    split = empty(3)
    assert sum(not objects for objects in split.train.objects) == 3
    recipe = replace(TINY, batch_size=1, epochs=1, detector=detector)
    engine = trainer(recipe, tmp_path, split)
    row = engine.run()
    assert 0 < row["train_loss"] < 20
    assert all(p.isfinite().all() for p in engine.network.parameters())


@pytest.mark.parametrize("setting", ["frozen", "synchronized", "scratch"])
def test_a_batch_of_empty_images_has_gradients_everywhere(setting):
    """DDP waits for the gradient of every parameter."""
    model = small_detector(setting=setting).train()
    images, targets = batch(1)
    losses = model(images, targets)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


def test_a_loss_that_is_not_finite_is_diagnosed(tmp_path):
    engine = trainer(TINY, tmp_path)
    real = engine._update

    def spoiled():
        real()
        if engine.position.updates == 5:
            with torch.no_grad():
                engine.network.backbone.fpn.inner_blocks[0][0].weight[3] = torch.nan

    engine._update = spoiled
    with pytest.raises(NonFiniteLoss, match=r"epoch 2, update 5: parameter backbone.fpn.inner_b"):
        engine.run()
    assert checkpoint.newest(tmp_path)[2]["position"]["updates"] == 4


def test_tests_can_be_rare(tmp_path):
    trainer(replace(TINY, epochs=3), tmp_path, evaluate_every=2).run()
    rows = metrics(tmp_path)
    assert [row["box_ap"] is None for row in rows] == [True, False, False]
    assert "train_mask" in rows[0]
    with pytest.raises(ValueError, match="evaluate_every=0 must be at least 1"):
        DetectionOptions(tmp_path, evaluate_every=0)


# the commands

FIELDS = ("--epochs", "2", "--batch-size", "3", "--channels", "16", "16", "16", "16", "--min-sizes",
          "48", "--max-size", "96", "--device", "cpu", "--workers", "0")  # fmt: skip


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(data_module, "SHAPES", (12, 4))


@pytest.mark.usefixtures("_few")
def test_train_eval_and_show(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    call(monkeypatch, "detect", "train", "shapes", *FIELDS, "--out", str(out))
    said = capsys.readouterr().out
    assert "train: 12 images" in said
    assert re.search(r"epoch 2 of 2: loss \d", said)
    row = metrics(out)[-1]
    call(monkeypatch, "detect", "eval", str(out), "--device", "cpu")
    said = capsys.readouterr().out
    assert f"mask_ap50 {row['mask_ap50']:.4f}" in said
    found = evaluate_run(out, device="cpu").numbers
    assert found == {name: row[name] for name in found}
    call(monkeypatch, "detect", "show", str(out), "--device", "cpu", "--images", "3")
    page = (out / "detection.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 6
    assert f"box AP {row['box_ap']:.3f}, mask AP {row['mask_ap']:.3f}" in page
    assert 'role="note"' not in page  # drawn is what was measured
    with pytest.raises(SystemExit, match="is a run of `cenet detect train`, not of `cenet train`"):
        call(monkeypatch, "eval", str(out), "--device", "cpu")
    with pytest.raises(SystemExit, match="run of `cenet detect train`; see `cenet detect --help`"):
        call(monkeypatch, "report", str(out))
    about = json.loads((out / "run.json").read_text())
    assert about["recipe"]["backbone"] == "ceresnet18"
    assert about["inputs"]["classes"] == ["ellipse", "rectangle", "triangle"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "shape"), "'shape' is not a detection recipe (did you mean shapes"),
        (("train", "shapes", "--lr", "-1"), "lr=-1.0 must be at least"),
        (("train", "resnet50_ce"), "pass a classifier's weights by --checkpoint FILE"),
        (("train", "resnet50_ce", "--setting", "scratch"), "trainable_layers=3 freeze parts of"),
        (
            ("train", "resnet50_ce", "--setting", "scratch", "--trainable-layers", "5"),
            "coco is not built in",
        ),
        (("train", "shapes", "--data", "x"), "shapes are drawn"),
        (("eval", "nowhere"), "nowhere is not a folder of `cenet detect train`"),
        (("show", "nowhere"), "nowhere is not a folder of `cenet detect train`"),
    ],
)
def test_bad_input_gets_one_clear_error(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, "detect", *arguments)
    assert caught.value.code != 0
    said = f"{caught.value.code} {capsys.readouterr().err}"
    assert message in " ".join(said.replace("│", " ").split())


@pytest.fixture
def coco_folder(tmp_path):
    """A few shapes as files."""
    split = few_shapes(12, 4)
    (tmp_path / "coco" / "images").mkdir(parents=True)
    for record, pixels in zip(split.train.images, split.train.pixels, strict=True):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(tmp_path / "coco" / "images" / record["file_name"])
    (tmp_path / "coco" / "instances.json").write_text(json.dumps(split.train.coco))
    return tmp_path / "coco"


@pytest.mark.slow
def test_signals_and_kills_through_the_command_line(coco_folder, tmp_path, monkeypatch, capsys):
    """SIGTERM saves and exits with 75, SIGKILL loses what came after the last checkpoint; both
    resume to the same end."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("detect", "train", "shapes", "--dataset", "coco", "--data", str(coco_folder))
    arguments += (*FIELDS, "--checkpoint-every", "1")
    call(monkeypatch, *arguments, "--out", str(whole))
    resumed = (*arguments, "--out", str(cut), "--resume", "auto")
    for kind, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-m", "cenet", *resumed], env=environment)
        before = {path.name for path in checkpoint.checkpoints(cut)}
        while process.poll() is None and {p.name for p in checkpoint.checkpoints(cut)} <= before:
            time.sleep(0.005)
        process.send_signal(kind)
        assert process.wait(timeout=120) == code
    capsys.readouterr()
    call(monkeypatch, *resumed)
    assert "resuming from step-" in capsys.readouterr().out
    assert_same_run(whole, cut)


@pytest.mark.slow
def test_two_processes_stop_and_resume(coco_folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("detect", "train", "shapes", "--dataset", "coco", "--data", str(coco_folder))
    arguments += (*FIELDS, "--checkpoint-every", "1")
    assert torchrun(*arguments, "--out", str(whole)).wait(300) == 0
    process = torchrun(*arguments, "--out", str(cut))
    while process.poll() is None and not checkpoint.checkpoints(cut):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) != 0
    assert torchrun(*arguments, "--out", str(cut), "--resume", "auto").wait(300) == 0
    assert_same_run(whole, cut)
    found = evaluate_run(whole, coco_folder, device="cpu").numbers
    assert found == pytest.approx({name: metrics(whole)[-1][name] for name in found})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["shapes", "shapes_plain"])
def test_shapes_are_found_from_scratch(recipe, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    call(monkeypatch, "detect", "train", recipe, "--device", "cpu", "--workers", "0", "--out",
         str(out), "--evaluate-every", "99")  # fmt: skip
    capsys.readouterr()
    call(monkeypatch, "detect", "eval", str(out), "--device", "cpu")
    said = capsys.readouterr().out
    at_half = re.findall(r"\(AP\) @\[ IoU=0.50 +\| area= +all \| maxDets=100 \] = ([\d.]+)", said)
    assert len(at_half) == 2  # boxes and masks
    assert all(float(value) > 0.5 for value in at_half)


@pytest.mark.slow
def test_training_is_deterministic(tmp_path):
    for name in "ab":
        trainer(replace(TINY, epochs=3), tmp_path / name).run()
    assert_same_run(tmp_path / "a", tmp_path / "b")
    trainer(replace(TINY, epochs=3, seed=1), tmp_path / "c").run()
    assert metrics(tmp_path / "c") != metrics(tmp_path / "a")


def test_other_objects_are_another_run(tmp_path):
    def start(data):
        return trainer(TINY, tmp_path, data)

    data = few_shapes()
    first = start(data)
    stop_at(first, 1)
    with pytest.raises(Interrupted):
        first.run()
    assert start(few_shapes()).resume()
    moved = copy.deepcopy(data.train.coco)
    moved["annotations"][0]["bbox"][0] += 1
    other = scenes("train", moved, pixels=data.train.pixels)
    with pytest.raises(ValueError, match="the images, their labels or their annotations differ"):
        start(SceneSplit(other, data.test)).resume()


def test_without_pycocotools_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    message = r"^pycocotools is not installed; pip install 'cenet\[detection\]'$"
    with pytest.raises(SystemExit, match=message):
        call(monkeypatch, "detect", "train", "shapes", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "[" * 100_000, "run.json cannot be read"),
        ("run.json", '{"command": "cenet detect train", "recipe": {}}', "inputs is missing"),
        (
            "run.json",
            json.dumps(
                {
                    "command": "cenet detect train",
                    "recipe": TINY.as_dict(),
                    "inputs": {"classes": ["a"], "mean": ["a"], "std": [1.0]},
                }
            ),
            "classes are names, and mean and std are numbers",
        ),
        ("metrics.jsonl", "[1]\n", "line 1 is not the row of an epoch"),
        ("metrics.jsonl", '{"epoch": "one"}\n', "line 1 is not the row of an epoch"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path, DetectionRecipe) if name == "run.json" else read_metrics(tmp_path / name)
