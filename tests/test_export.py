"""Exports say the truth: the run's own images and classes, and files that compute what it does."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import cenet.export
import cenet.train.weights
from _checks import relative_error
from _disks import files_in
from _training import TINY, call, few_digits, trainer
from cenet.export import export_folded, export_onnx, photographs, sample_images
from cenet.models import create_model
from cenet.run_folder import ABOUT, WEIGHTS

pytestmark = pytest.mark.usefixtures("quick_weights")

COLOURS = np.array([[40, 90, 200], [70, 60, 150]])  # far from ImageNet's


def write_images(root, sizes):
    """Noise in two colours, one for each class, as raw files."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 5)):
        for label, colour in enumerate(COLOURS):
            for i in range(count):
                path = root / part / f"class{label}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                shape = (*sizes[i % len(sizes)], 3)
                pixels = random.normal(colour, 30, shape).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(path)


def prepared(path, about):
    """A raw file as the metadata of an exported network says."""
    _, height, width = about["input_size"]
    side = math.floor(height / about["crop_pct"])
    assert about["interpolation"] == "bilinear"
    shown = v2.CenterCrop((height, width))(v2.Resize(side)(Image.open(path).convert("RGB")))
    pixels = np.asarray(shown, dtype=np.float32) / 255
    normal = (pixels - np.float32(about["mean"])) / np.float32(about["std"])
    return normal.transpose(2, 0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("sizes", "size"),
    # files of the very size are normalized by their own statistics; others are scaled and cropped,
    # to a side that timm would round down
    [([(64, 64)], 64), ([(90, 70), (64, 64)], 40)],
    ids=["odd normalization", "cropped"],
)
def test_onnx_on_raw_files_is_what_eval_computes(sizes, size, tmp_path, monkeypatch, capsys):
    runtime = pytest.importorskip("onnxruntime")
    write_images(tmp_path / "data", sizes)
    run, data = str(tmp_path / "run"), ("--data", str(tmp_path / "data"), "--device", "cpu")
    recipe = ("tiny_shufflenetv2_x0_5_ce", "--image-size", str(size), "--batch-size", "8")
    call(monkeypatch, "train", *recipe, "--epochs", "2", "--workers", "0", "--out", run, *data)
    seen = []

    def load_run(folder):
        network = original(folder)
        network.register_forward_hook(lambda *args: seen.append(args[-1]))
        return network

    original = cenet.train.weights.load_run
    monkeypatch.setattr(cenet.train.weights, "load_run", load_run)
    capsys.readouterr()
    call(monkeypatch, "eval", run, *data)
    printed = capsys.readouterr().out
    call(monkeypatch, "export", run, "--out", str(tmp_path / "network.onnx"))
    assert f"images of 3×{size}×{size}" in capsys.readouterr().out
    session = runtime.InferenceSession(tmp_path / "network.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["cenet"])
    assert about["label_names"] == ["class0", "class1"]
    files = sorted((tmp_path / "data" / "test").rglob("*.png"))
    expected = torch.cat(seen)[: len(files)]
    if len(sizes) == 1:
        assert np.abs(np.array(about["mean"]) - COLOURS.mean(0) / 255).max() < 0.02
    hits = 0
    for path, logits in zip(files, expected, strict=True):
        found = session.run(None, {"images": prepared(path, about)[None]})[0]
        assert relative_error(torch.from_numpy(found[0]), logits) < 1e-4, path
        hits += about["label_names"][int(found.argmax())] == path.parent.name
    assert f"test top-1 {100 * hits / len(files):.2f} %" in printed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    before = torch.get_num_threads()
    trainer(replace(TINY, epochs=1, act="elu"), folder, few_digits()).run()
    torch.set_num_threads(before)
    return folder


def test_a_run_is_exported_with_its_own_images_and_classes(run, tmp_path, monkeypatch, capsys):
    pixels = few_digits().train.images.double() / 255
    sources = {"run": (str(run),), "weights": ("cevgg6", str(run / WEIGHTS))}
    for name, source in sources.items():
        out = tmp_path / name
        call(monkeypatch, "export", *source, "--format", "safetensors", "--out", str(out))
        config = timm.create_model(f"local-dir:{out}", pretrained=True).pretrained_cfg
        assert config["input_size"] == (1, 8, 8)
        assert config["mean"] == pytest.approx([pixels.mean().item()])
        assert config["std"] == pytest.approx([pixels.std(correction=0).item()])
        assert tuple(config["label_names"]) == tuple("0123456789")
        assert f"images of 1×8×8, mean {pixels.mean():.4g}, " in capsys.readouterr().out
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| trained on | digits |" in card
    assert re.search(r"\| top-1 on test images \| \d+\.\d\d % \|", card)
    larger = tmp_path / "larger"
    arguments = ("--format", "safetensors", "--out", str(larger), "--size", "16")
    call(monkeypatch, "export", str(run), *arguments)
    config = timm.create_model(f"local-dir:{larger}").pretrained_cfg
    assert config["input_size"] == (1, 16, 16)


def test_another_size_leaves_nothing_of_the_first(tmp_path, monkeypatch, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    cenet.save(timm.create_model("test_resnet", num_classes=3), first)
    assert "pool_size" in json.loads((first / "config.json").read_text())["pretrained_cfg"]
    arguments = ("--size", "64", "--format", "safetensors", "--out", str(second))
    call(monkeypatch, "export", str(first), *arguments)
    assert "images of 3×64×64, " in capsys.readouterr().out
    config = json.loads((second / "config.json").read_text())["pretrained_cfg"]
    assert config["input_size"] == [3, 64, 64]
    assert "pool_size" not in config


def test_images_of_a_folder_are_said_to_be_that(run, tmp_path, monkeypatch):
    folder, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, folder)
    about = json.loads((folder / ABOUT).read_text())
    about["recipe"]["dataset"] = "folder"
    (folder / ABOUT).write_text(json.dumps(about))
    call(monkeypatch, "export", str(folder), "--format", "safetensors", "--out", str(out))
    assert "| trained on | a folder of images |" in (out / "README.md").read_text()


def test_weights_that_do_not_say_how_images_were_normalized(tmp_path, monkeypatch, capsys):
    torch.save(create_model("vgg6", num_classes=3).state_dict(), tmp_path / "w.pth")
    arguments = ("--format", "safetensors", "--out", str(tmp_path / "out"))
    call(monkeypatch, "export", "cevgg6", str(tmp_path / "w.pth"), *arguments)
    assert "the defaults of cevgg6, because w.pth records none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x", (), "its ending does not say the format"),
        ("x.pth", (), "its ending does not say the format"),
        ("x.pt2", ("--format", "onnx"), "--format onnx writes a file such as x.onnx"),
        ("x.onnx", ("--format", "folded"), "--format folded writes a file such as x.pt2"),
        ("x.safetensors", ("--format", "safetensors"), "--format safetensors writes a folder"),
        ("x.onnx", ("--format", "safetensors"), "--format safetensors writes a folder"),
        ("x.pth", ("--format", "safetensors"), "--format safetensors writes a folder"),
        ("x.pt", ("--format", "safetensors"), "--format safetensors writes a folder"),
        ("full", ("--format", "safetensors"), "the folder holds other files (photo.png)"),
        (
            "file/x.onnx",
            (),
            "file: File exists; this is a file or a broken link; choose another path",
        ),
    ],
)
def test_names_that_do_not_fit_a_format(name, options, message, run, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.png").touch()
    (tmp_path / "file").touch()
    before = files_in(tmp_path)
    with pytest.raises(SystemExit, match="nothing was written to") as left:
        call(monkeypatch, "export", str(run), "--out", str(tmp_path / name), *options)
    assert message in left.value.code
    assert files_in(tmp_path) == before


def test_the_ending_says_the_format(run, tmp_path, monkeypatch, capsys):
    for out, options, format in (
        ("x.pt2", (), "folded"),
        ("new", ("--format", "safetensors"), "safetensors"),
        ("new", ("--format", "safetensors"), "safetensors"),  # its own folder is written again
        ("repository", ("--format", "safetensors"), "safetensors"),
    ):
        (tmp_path / "repository" / ".git").mkdir(parents=True, exist_ok=True)
        for name in ("LICENSE", ".gitattributes", ".gitignore"):
            (tmp_path / "repository" / name).touch()
        call(monkeypatch, "export", str(run), "--out", str(tmp_path / out), *options)
        assert f"wrote {tmp_path / out} ({format}): " in capsys.readouterr().out
    torch.export.load(tmp_path / "x.pt2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere is not a folder; give a run, a folder of cenet.save, or"),
        (("ceresnet50",), "ceresnet50 needs its weights; give a run"),
        (("{run}", "--size", "0"), "--size 0 must be at least 1"),
        (("{run}", "--size", "1"), "--size 1 does not suit this network: "),
        (("{run}", "--size", "100000000"), "--size 100000000 does not"),
        (("{run}", "--data", "nowhere"), "--data nowhere is not a folder"),
        (("{run}", "--data", "{empty}"), "has no image files"),
        (("cevgg16", "{run}/weights.safetensors"), "holds cevgg6, not cevgg16"),
    ],
)
def test_what_cannot_be_exported_is_one_line(arguments, message, run, tmp_path, monkeypatch):
    given = [text.format(run=run, empty=tmp_path) for text in arguments]
    with pytest.raises(SystemExit, match="nothing was written to") as left:
        call(monkeypatch, "export", *given, "--out", str(tmp_path / "x.onnx"))
    assert message in left.value.code
    assert len(left.value.code.splitlines()) == 1


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 3)
        self.pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.5,), "crop_pct": 1.0}

    def forward(self, x):
        return self.inner(x).mean((2, 3))


def test_a_program_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    network, images = Convolution(), torch.randn(3, 3, 8, 8)
    formats = {"network.onnx": export_onnx, "network.pt2": export_folded}
    for name, export in formats.items():
        assert export(network, tmp_path / name, images, check=images) < 1e-5
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    extra = {"cenet": ""}
    torch.export.load(tmp_path / "network.pt2", extra_files=extra)
    assert json.loads(extra["cenet"])["mean"] == [0.5]

    # random weights of its own
    monkeypatch.setattr(cenet.export, "_deployed", lambda model: Convolution().eval())
    for name, export in formats.items():
        with pytest.raises(ValueError, match=r"does not compute the same: on 3 images its logits"):
            export(network, tmp_path / name, images, check=images)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_program_that_computes_no_numbers_is_not_written(tmp_path, monkeypatch):
    network, images = Convolution(), torch.randn(3, 3, 8, 8)
    broken = Convolution()
    nn.init.constant_(broken.inner.bias, torch.nan)
    monkeypatch.setattr(cenet.export, "_deployed", lambda model: broken.eval())
    with pytest.raises(ValueError, match=r"does not compute the same: .* differ by nan"):
        export_folded(network, tmp_path / "network.pt2", images, check=images)
    assert not (tmp_path / "network.pt2").exists()


def test_an_exporter_that_fails_is_one_line(run, tmp_path, monkeypatch):
    def fail(*_given, **_options):
        raise RuntimeError("an operator has no counterpart")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(SystemExit, match=r"^nothing was written to .*pt2: an operator has no c"):
        call(monkeypatch, "export", str(run), "--out", str(tmp_path / "network.pt2"))


def test_images_to_check_on(tmp_path):
    config = {"input_size": (1, 24, 24), "mean": (0.3,), "std": (0.2,), "crop_pct": 1.0,
              "interpolation": "bilinear"}  # fmt: skip
    found = sample_images(config, None)
    assert found.shape == (8, 1, 24, 24)
    assert not torch.equal(found[0], found[4])  # of two photographs
    assert len(list(photographs())) == 8
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    (tmp_path / "class").mkdir()
    Image.fromarray(pixels).save(tmp_path / "class" / "x.png")
    expected = (torch.from_numpy(pixels[None, None, :, :, 0]) / 255 - 0.3) / 0.2
    assert torch.allclose(sample_images(config, tmp_path), expected, atol=1e-6)
