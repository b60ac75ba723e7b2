"""`diagnose` on untouched networks and folders of images, good and bad."""

import gc
import os
import resource
import shutil
import signal
import tarfile
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from io import BytesIO

import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import get_weight
from torchvision.transforms.functional import pil_to_tensor

import cenet
import cenet.export as export
from _planted import Planted, Tangled, images
from _sources import write_rows
from _training import call
from cenet.analysis.diagnosis import Diagnosis
from cenet.diagnosing.command import run
from cenet.diagnosing.images import ImageStream, find_images
from cenet.diagnosing.network import find_network
from cenet.models.lookup import create_named

pytestmark = pytest.mark.usefixtures("quick_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve images in three classes, and files that are no use."""
    root = tmp_path_factory.mktemp("images")
    pixels = (255 * torch.rand(12, 40, 36, 3)).byte().numpy()
    for i, image in enumerate(pixels):
        place = root / f"class{i % 3}"
        place.mkdir(exist_ok=True)
        Image.fromarray(image).save(place / f"{i}.png")
    (root / "class1" / "notes.txt").write_text("not an image")
    (root / "class1" / "empty.png").write_bytes(b"")
    (root / "class2" / "torn.jpg").write_bytes((root / "class0" / "0.png").read_bytes()[:200])
    (root / "class2" / "liar.png").write_text("<html>404</html>")
    Image.new("RGB", (9, 9)).save(root / "stray.png")
    return root


def names_of(diagnosis):
    return [layer.name for layer in diagnosis.layers]


@pytest.mark.parametrize(
    ("name", "layers", "sites"),
    [
        ("resnet18", 17, 8),
        ("efficientnet_b0", 33, 9),
        ("convnext_atto", 12, 12),
        ("torchvision/densenet121", 121, 121),
    ],
)
def test_untouched_networks(name, layers, sites, folder, tmp_path, capsys):
    found = run(name, folder, tmp_path / "out", size=64, batch=5)
    assert len(found.layers) == layers
    assert len(found.sites) == sites
    assert (found.data.images, found.data.size) == (12, (64, 64))
    assert found.accuracy is None  # three classes are not a thousand
    assert found.ablation is None
    assert all(len(layer.mean_abs) == layer.channels for layer in found.layers)
    assert all(0 <= layer.correlation <= 1 for layer in found.layers)
    assert len(set(names_of(found))) == layers
    assert len(found.matrices) == 3
    assert Diagnosis.read(tmp_path / "out" / "diagnosis.json") == found
    text = capsys.readouterr().out
    assert f"{name} on 12 images of 64×64" in text
    assert "there is no accuracy" in " ".join(text.split())
    assert found.verdict.kind == "untrained"
    assert (found.gradcam, found.prunable) == ((), {})


def test_corrupt_and_foreign_files_are_counted(folder, tmp_path, capsys):
    found = run("resnet18", folder, tmp_path, size=32)
    reasons = {path.split("/")[-1]: reason for path, reason in
               ((skipped.path, skipped.reason) for skipped in found.data.skipped)}  # fmt: skip
    assert set(reasons) == {"notes.txt", "empty.png", "torn.jpg", "liar.png", "stray.png"}
    assert reasons["notes.txt"] == "not an image file"
    assert reasons["stray.png"] == "outside the class folders"
    assert found.data.images == 12
    text = " ".join(capsys.readouterr().out.split())
    assert "4 images were skipped, the first" in text
    assert "1 files that are not images were skipped." in text


def test_flat_folder_and_limit(folder, tmp_path):
    for i, path in enumerate(sorted((folder / "class0").glob("*.png"))):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes())
    (tmp_path / "thumbnails").mkdir()
    (tmp_path / "thumbnails" / "index.html").write_text("no images here")
    found = run("resnet18", tmp_path, tmp_path / "out", size=32, limit=3)
    assert found.data.images == 3
    assert found.data.classes is None
    assert (found.accuracy, found.importance, found.ablation) == (None, None, None)
    assert find_images(tmp_path, 3).source.paths == find_images(tmp_path, 3).source.paths


@pytest.mark.parametrize("name", ["test", "val", "validation"])
def test_train_and_test_folders_stand_for_the_test_images(name, folder, tmp_path):
    for part in ("train", name):
        (tmp_path / part).mkdir()
    (tmp_path / name / "a").symlink_to(folder / "class0")
    (tmp_path / "train" / "b").symlink_to(folder / "class1")
    found = find_images(tmp_path)
    assert found.classes == ("a",)


def test_labelled_images_of_a_checkpoint(folder, tmp_path):
    torch.manual_seed(0)
    network = create_named("torchvision/resnet18", num_classes=3)
    torch.save({"state_dict": network.state_dict()}, tmp_path / "weights.pth")
    found = run(
        "torchvision/resnet18", folder, tmp_path, checkpoint=tmp_path / "weights.pth",
        size=32, ablation_images=2,
    )  # fmt: skip
    assert found.data.classes == ("class0", "class1", "class2")
    assert found.accuracy.top5 == 1
    assert found.ablation.layer == found.importance.layer == "relu"
    assert found.ablation.ratios == tuple(i / 10 for i in range(10))
    assert [len(row) for row in found.ablation.top1] == [5] * 10
    assert found.ablation.images == found.importance.images == 2
    assert len(found.ablation.least_important_first) == 10
    assert len(found.importance.divergence) == found.layers[0].channels
    assert found.model.checkpoint == str(tmp_path / "weights.pth")


def test_pretrained_weights(folder, tmp_path, monkeypatch):
    """Where torchvision keeps what it has downloaded, there are weights already."""
    network = create_named("torchvision/resnet18")
    address = get_weight("ResNet18_Weights.DEFAULT").url
    cache = tmp_path / "hub" / "checkpoints" / address.rsplit("/", 1)[1]
    cache.parent.mkdir(parents=True)
    torch.save(network.state_dict(), cache)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    options = {"size": 32, "limit": 2}
    found = run("torchvision/resnet18", folder, tmp_path, pretrained=True, **options)
    same = run("torchvision/resnet18", folder, tmp_path, checkpoint=cache, **options)
    assert found.layers == same.layers
    assert found.model.checkpoint == "pretrained"


def test_a_wrong_layer_is_found_with_the_first_images():
    def stream():
        yield images()
        raise AssertionError("looked at the second batch")

    with pytest.raises(ValueError, match="layer 'relu7' is not one of"):
        cenet.diagnose(Tangled(), stream(), layer="relu7")


def test_ctrl_c_ends_in_one_word(folder, tmp_path, monkeypatch, capsys):
    # a shell starts what runs in the background deaf to it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(
        "cenet.diagnosing.command.find_images", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    try:
        with pytest.raises(SystemExit) as left:
            call(monkeypatch, *command(folder, tmp_path / "out"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")
    assert not (tmp_path / "out").exists()


def command(data, out):
    return "diagnose", "resnet18", "--data", str(data), "--out", str(out)


def test_pictures_where_gradcam_is_installed(folder, tmp_path):
    pytest.importorskip("pytorch_grad_cam")
    network = create_named("resnet18")
    network(images(4, 32))
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    found = run("resnet18", folder, tmp_path, size=32, checkpoint=tmp_path / "weights.pth")
    assert len(found.gradcam) == 4
    names = {cam.predicted for cam in found.gradcam}
    assert all(not name.isdigit() and not name.startswith("n0") for name in names)
    assert all(cam.overlay.startswith("data:image/png;base64,") for cam in found.gradcam)
    assert found.gradcam[0].label is None
    assert all(cam.target == cam.predicted for cam in found.gradcam)
    assert found.gradcam[0].image != found.gradcam[0].overlay


def test_a_hand_written_module():
    torch.manual_seed(0)
    model = Tangled().train()
    model.bn1.eval()
    with torch.no_grad():
        model.bn1.weight[:3], model.bn1.bias[:3] = 0, -1
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [(images(6), torch.arange(6) % 4), (images(2, seed=1), torch.tensor([0, 1]))]
    found = cenet.diagnose(model, batches, ablation_images=4)
    assert names_of(found) == ["relu", "relu#2", "elu", "relu#3", "gelu"]
    first, second = found.layers[:2]
    assert first.inhibited == first.dormant == first.dormant_strict == first.rare == (0, 1, 2)
    assert first.prunable == (0, 1, 2)
    assert first.constant == 3
    assert first.gamma.share_small == first.beta.share_nonpositive - 5 / 8 == 3 / 8
    assert (first.norm, second.norm) == ("bn1", "bn2")
    # the sum of two linear branches, as in RepVGG, has no default site
    assert (first.ce_site, second.ce_site) == (True, False)
    assert tuple(found.sites) == ("bn1",)
    assert found.first_six == pytest.approx(sum(e.inhibited_ratio for e in found.layers) / 5)
    # left as it was
    assert model.training
    assert not model.bn1.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_the_layer_to_ablate():
    model, batch = Tangled().eval(), (images(), torch.arange(6) % 4)
    by_norm = cenet.diagnose(model, [batch], layer="bn2", ablation_images=1)
    assert by_norm.ablation.layer == "relu#2"
    assert cenet.diagnose(model, [batch], ablation_images=1).ablation.layer == "relu"
    assert cenet.diagnose(model, [batch], ablation_images=0).ablation is None
    MyVGG = type("MyVGG", (Tangled,), {})
    assert cenet.diagnose(MyVGG().eval(), [batch], ablation_images=1).ablation.layer == "elu"
    with pytest.raises(ValueError, match="layer 'bn7' is not one of the layers seen: relu, relu#2"):
        cenet.diagnose(model, [batch], layer="bn7")


def test_how_many_images_are_ablated(monkeypatch):
    module = import_module("cenet.analysis.diagnose")  # its name in the package is the function's
    assert (module.ABLATION_IMAGES, module.ABLATION_IMAGES_SLOW) == (512, 128)
    for name, value in {"ABLATION_IMAGES": 12, "ABLATION_IMAGES_SLOW": 5, "SMALL": 64}.items():
        monkeypatch.setattr(module, name, value)
    model = Tangled().eval()

    def ablated(count, size, **options):
        batch = (images(count, size), torch.arange(count) % 4)
        return cenet.diagnose(model, [batch], **options).ablation.images

    assert ablated(20, 8) == 12  # and not all
    assert ablated(7, 8) == 7
    assert ablated(20, 9) == 5
    assert ablated(20, 9, ablation_images=6) == 6
    assert ablated(20, 9, ablation_images="all") == 20
    for wrong in (-1, "some"):
        with pytest.raises(ValueError, match=f'ablation_images={wrong!r} must be 0 or more, or "a'):
            ablated(20, 9, ablation_images=wrong)


def test_removal_is_measured_over_the_same_images():
    torch.manual_seed(0)
    model = Planted(torch.randn(9, 3))
    with torch.no_grad():
        model.conv.weight[:2] *= 0.005
    x, y = images(20), torch.arange(20) % 2
    found = cenet.diagnose(model, [(x, y)])
    assert found.prunable == {"act": (0, 1)}
    without = deepcopy(model)
    with torch.no_grad():
        without.conv.weight[:2] = 0
        losses = [nn.functional.cross_entropy(m(x).double(), y, reduction="none")
                  for m in (model, without)]  # fmt: skip
    difference = losses[1] - losses[0]
    assert found.removal.loss == pytest.approx(losses[0].mean().item())
    assert found.removal.loss_without == pytest.approx(losses[1].mean().item())
    assert found.removal.loss_error == pytest.approx(difference.std().item() / 20**0.5, rel=1e-4)
    assert cenet.diagnose(model, [(x[:1], y[:1])]).removal is None


def test_the_least_important_channels_go_first():
    weight = torch.zeros(10, 3)
    weight[:, 1:] = 0.1 * torch.randn(10, 2)
    weight[3] = torch.tensor([1.0, 0, 0])
    model = Planted(weight)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[1, 3] = 1
        model.head.bias.copy_(torch.tensor([0.1, 0.0]))
    x, y = images(40), torch.arange(40) % 2
    x[:, 0] = 2.0 * y[:, None, None] - 1
    found = cenet.diagnose(model, [(x, y)])
    assert found.ablation.least_important_first == (1.0,) * 10
    assert found.importance.gini == pytest.approx(0.9)


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_that_are_no_class(label):
    labels = torch.tensor([0, 1, 2, 3, 0, label])
    with pytest.raises(ValueError, match=f"labels must be from 0 to 3, .* 4 outputs; got {label}"):
        cenet.diagnose(Tangled(), [(images(), labels)], ablation_images=0)


def test_labels_of_any_whole_type_and_masked_classes(tmp_path):
    class Masked(Tangled):
        def forward(self, x):
            return super().forward(x).index_fill(1, torch.tensor([3]), -torch.inf)

    found = cenet.diagnose(Masked(), [(images(), torch.arange(6, dtype=torch.int32) % 3)])
    found.write(tmp_path / "diagnosis.json")
    assert Diagnosis.read(tmp_path / "diagnosis.json") == found

    class Broken(Tangled):
        def forward(self, x):
            return super().forward(x) * torch.nan

    with pytest.raises(ValueError, match="the network returns NaN"):
        cenet.diagnose(Broken(), [(images(), torch.arange(6) % 3)])


def test_networks_with_ce():
    model = Tangled().eval()
    cenet.insert_ce_(model, lambda norm, name: name == "bn1")
    first, second = cenet.diagnose(model, [images()]).layers[:2]
    assert (first.norm, first.has_ce, first.mix) == ("bn1", True, 0.5)
    assert (first.spectrum.min, first.spectrum.max) == (1, 1)
    assert not first.ce_site
    assert (second.has_ce, second.mix, second.spectrum) == (False, None, None)


def test_what_cannot_be_diagnosed():
    with pytest.raises(ValueError, match="no images to run the network on"):
        cenet.diagnose(Tangled(), [])
    with pytest.raises(ValueError, match=r"expected images \(N, C, H, W\), got shape \(2, 3\)"):
        cenet.diagnose(Tangled(), [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="applies no activation to feature maps"):
        cenet.diagnose(nn.Conv2d(3, 4, 1), [images()])
    with pytest.raises(ValueError, match="one row of logits per image"):
        cenet.diagnose(Planted(torch.randn(4, 3)).conv, [(images(), torch.zeros(6).long())])


def test_numbers_are_finite_or_null(tmp_path):
    model = Planted(torch.randn(4, 3))
    with torch.no_grad():
        model.conv.weight[1] = 0  # constant: it correlates with nothing
    found = cenet.diagnose(model, [images()])
    found.write(tmp_path / "diagnosis.json")
    text = (tmp_path / "diagnosis.json").read_text()
    assert "NaN" not in text
    assert Diagnosis.read(tmp_path / "diagnosis.json").matrices[0].values[1][0] is None
    # a network that diverged must not look healthy
    with torch.no_grad():
        model.conv.bias[1] = torch.nan
    with pytest.raises(ValueError, match="layer act gives values that are not finite"):
        cenet.diagnose(model, [images()])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"image": images()},
            "must be images, or pairs of images and labels, as tensors; got dict",
        ),
        ((images(), torch.zeros(3)), r"got labels of shape \(3,\)"),
        (images()[0], r"expected images \(N, C, H, W\)"),
    ],
)
def test_batches_that_are_none(batch, message):
    with pytest.raises(ValueError, match=message):
        cenet.diagnose(Planted(torch.randn(4, 3)), [batch])


def test_hidden_folders_and_a_folder_of_test_images_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x" / "test")
    expected = find_images(folder)
    hidden = tmp_path / "x" / "test" / ".ipynb_checkpoints"
    shutil.copytree(folder / "class0", hidden)
    found = find_images(tmp_path / "x")
    assert found.classes == expected.classes == ("class0", "class1", "class2")
    assert len(found.source) == len(expected.source)


def test_a_run_of_cenet_train(tmp_path, capsys):
    pytest.importorskip("sklearn")
    from cenet.train.job import Job, evaluate_run, train
    from cenet.train.options import Options
    from cenet.train.recipes import find_recipe

    out = tmp_path / "run"
    train(Job(replace(find_recipe("digits_ce"), epochs=1), Options(out)))
    found = run(str(out), None, tmp_path / "out", limit=200, ablation_images=5)
    assert found.data.images == 200
    assert found.data.classes == tuple("0123456789")
    assert all(layer.has_ce for layer in found.layers)
    assert found.model.checkpoint == str(out / "weights.safetensors")
    everything = run(str(out), None, tmp_path / "out", ablation_images=0)
    assert everything.accuracy.top1 == pytest.approx(evaluate_run(out)["test_top1"])
    with pytest.raises(ValueError, match="a folder with weights of its own"):
        find_network(str(out), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="remove --pretrained"):
        find_network(str(out), pretrained=True)


def test_a_folder_of_cenet_save(folder, tmp_path, monkeypatch, capsys):
    """In one channel, with classes in another order than that of the alphabet."""
    torch.manual_seed(0)
    network = create_named("test_resnet", num_classes=3, in_chans=1)
    cenet.insert_ce_(network, start="identity", example_input=torch.zeros(2, 1, 32, 32))
    classes = ["class2", "class0", "class1"]
    cenet.save(
        network, tmp_path / "saved", classes=classes, image_size=32, mean=[0.4], std=[0.3],
        network_args={"in_chans": 1, "num_classes": 3},
    )  # fmt: skip
    loaded = find_network(str(tmp_path / "saved"))
    assert loaded.classes == tuple(classes)
    grey = Image.new("RGB", (32, 32), (51, 7, 9))
    shown = loaded.transform(32)(grey)
    assert shown.shape == (1, 32, 32)
    assert loaded.transform(16)(grey).shape == (1, 16, 16)  # as for --size 16
    assert torch.allclose(shown, torch.tensor((51 / 255 - 0.4) / 0.3))
    call(monkeypatch, "diagnose", str(tmp_path / "saved"), "--data", str(folder), "--device", "cpu")
    found = Diagnosis.read(tmp_path / "saved" / "diagnosis.json")
    assert found.data.classes == tuple(classes)
    assert found.model.checkpoint == str(tmp_path / "saved" / "model.safetensors")
    assert found.accuracy is not None
    assert found.data.size == (32, 32)
    out = tmp_path / "small"
    call(
        monkeypatch, "diagnose", str(tmp_path / "saved"), "--data", str(folder), "--device", "cpu",
        "--size", "16", "--out", str(out),
    )  # fmt: skip
    assert Diagnosis.read(out / "diagnosis.json").data.size == (16, 16)
    with pytest.raises(ValueError, match="remove --pretrained"):
        find_network(str(tmp_path / "saved"), pretrained=True)
    with pytest.raises(SystemExit, match=r"no run.json; `cenet diagnose .*saved` measures the acc"):
        call(monkeypatch, "eval", str(tmp_path / "saved"))


def test_images_in_tar_files_are_those_of_their_folders(folder, tmp_path, monkeypatch):
    """In another order: shuffled as files of a folder are, and the tar file has its own."""
    kept = sorted(path for path in folder.glob("class*/*.png") if path.name[0].isdigit())
    with tarfile.open(tmp_path / "test-0.tar", "w") as tar:
        for number, path in enumerate(kept):
            tar.add(path, f"{number:03}.png")
            label = path.parent.name[-1].encode()
            about = tarfile.TarInfo(f"{number:03}.cls")
            about.size = len(label)
            tar.addfile(about, BytesIO(label))
    (tmp_path / "classes.txt").write_text("class0\nclass1\nclass2\n")
    found = find_images(tmp_path)
    plain = find_images(folder)
    assert found.classes == plain.classes == ("class0", "class1", "class2")
    numbers = [int(found.source.where(place)[-7:-4]) for place in range(len(kept))]
    assert sorted(numbers) == list(range(len(kept))) != numbers
    assert found.labels == [kept[number].parent.name for number in numbers]
    labels = [found.classes.index(name) for name in found.labels]
    stream = ImageStream(found.source, labels, pil_to_tensor, 5)
    shown = torch.cat([images for images, _ in stream])
    expected = [pil_to_tensor(Image.open(kept[number]).convert("RGB")) for number in numbers]
    assert torch.equal(shown, torch.stack(expected))
    assert torch.cat([labels for _, labels in stream]).tolist() == labels
    assert len(find_images(tmp_path, 5).source) == len(find_images(tmp_path, 5).labels) == 5
    read = list(export._images_in(tmp_path))
    assert [pixels.tobytes() for pixels in read] == [
        Image.open(path).convert("RGB").tobytes() for path in kept
    ]
    monkeypatch.setattr(export, "SAMPLES", 4)  # of twelve, evenly
    assert [pixels.tobytes() for pixels in export._images_in(tmp_path)] == [
        pixels.tobytes() for pixels in read[::3]
    ]


def test_images_in_parquet_files_are_read_and_unusable_ones_skipped(folder, tmp_path):
    kept = sorted(path for path in folder.glob("class*/*.png") if path.name[0].isdigit())
    contents = [kept[0].read_bytes(), b"no image", None]
    rows = [
        {"image": {"bytes": content, "path": None}, "label": label}
        for label, content in enumerate(contents)
    ]
    write_rows(tmp_path / "test-0.parquet", rows)
    found = find_images(tmp_path)
    assert found.classes == ("0", "1", "2")
    stream = ImageStream(found.source, [*map(int, found.labels)], pil_to_tensor, 5)
    ((shown, labels),) = stream
    assert torch.equal(shown[0], pil_to_tensor(Image.open(kept[0]).convert("RGB")))
    assert labels.tolist() == [0]
    assert {skipped.path[-5:]: skipped.reason for skipped in stream.skipped} == {
        "row 1": "cannot identify image file", "row 2": "the row has no bytes of an image",
    }  # fmt: skip


BAD = {
    "resnet5000": "resnet5000 is not a timm model",
    "torchvision/fcn_resnet50": "is not a classification network of torchvision",
}


def test_a_network_without_pretrained_weights(folder, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"the weights of ceresnet18 cannot be loaded: .*retrained.*--checkpoint FILE",
    ):
        run("ceresnet18", folder, tmp_path, pretrained=True)


@pytest.mark.parametrize("name", BAD)
def test_unknown_networks(name, folder, tmp_path):
    with pytest.raises(ValueError, match=BAD[name]):
        run(name, folder, tmp_path)


def test_bad_input_gets_one_line_and_a_non_zero_exit(folder, tmp_path, monkeypatch):
    unreadable = tmp_path / "bad" / "a"
    unreadable.mkdir(parents=True)
    for i in range(3):
        (unreadable / f"{i}.png").write_bytes(b"not a png")
    foreign = tmp_path / "foreign.pth"
    torch.save({"conv1.weight": torch.zeros(2, 2)}, foreign)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\x10\x00" * 40)
    # a text that the process ends with is printed, and its exit code is 1
    with pytest.raises(SystemExit, match="none of 3 image files can be read; the first:"):
        call(monkeypatch, *command(unreadable.parent, tmp_path / "o"))
    for options, message in [
        ({"data": tmp_path / "nowhere"}, "nowhere is not a folder"),
        ({"data": None}, "resnet18 needs images: --data FOLDER"),
        ({"checkpoint": foreign}, r"foreign\.pth does not fit ResNet"),
        ({"checkpoint": damaged}, r"damaged\.safetensors cannot be read as a checkpoint"),
        ({"checkpoint": foreign, "pretrained": True}, "--pretrained exclude each other"),
        ({"limit": 0}, "--limit 0 must be at least 1"),
        ({"layer": "bn9", "size": 32}, "layer 'bn9' is not one of the layers seen"),
        ({"out": foreign}, "is a file or a broken link; it must be a folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            run("resnet18", **{"data": folder, "out": tmp_path / "o", **options})


def held():
    """Bytes of all tensors alive in this process."""
    gc.collect()  # of what ran before
    kinds = (torch.Tensor, nn.Parameter)  # others are a compiler's, without bytes
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak():
    """The most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    ("count", "side"), [(300, 16), pytest.param(10_000, 32, marks=pytest.mark.slow)]
)
def test_memory_does_not_grow_with_the_number_of_images(count, side):
    def stream(number, sizes):
        for seed in range(number // 50):
            yield images(50, side, seed), torch.arange(50) % 4
        sizes.append(held())

    model, sizes = Tangled().eval(), []
    for _ in range(3):  # the allocator settles
        cenet.diagnose(model, stream(100, sizes), ablation_images=1)
    before = peak()
    found = cenet.diagnose(model, stream(count, sizes), ablation_images=1)
    assert found.data.images == count
    assert sizes[-1] <= sizes[-2]
    # the images alone would be 123 MB for 10,000
    assert peak() - before < 40


def test_a_network_that_writes_into_its_images():
    """Accuracy and ablation see the same images."""

    class Negating(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 4, 1), nn.ReLU()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.act(self.conv(x.mul_(-1))).mean((2, 3)))

    torch.manual_seed(4)  # both classes, and every channel counts
    model = Negating().eval()
    given = images(24) + 2 * images(24, size=1, seed=1)
    labels = model(given.clone()).argmax(1)
    found = cenet.diagnose(model, [(given.clone(), labels)])
    assert found.accuracy.top1 == 1
    assert found.ablation.top1[0] == (1.0,) * 5
    whole = model(given.clone()).double().softmax(1)
    for channel, divergence in enumerate(found.importance.divergence):
        without = deepcopy(model)
        with torch.no_grad():
            without.conv.weight[channel] = without.conv.bias[channel] = 0
        left = without(given.clone()).double().softmax(1)
        expected = (whole * (whole / left).log()).sum(1).mean()
        assert divergence == pytest.approx(expected.item(), rel=1e-5)
    assert min(found.importance.divergence) > 0


def test_recursion_bounds_and_links(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 3, 1), nn.ReLU()

        def forward(self, x, again=True):
            x = self.act(self.conv(x)).clamp(min=torch.full((3, 1, 1), -1.0))
            return self(x, False) if again else x

    found = cenet.diagnose(Twice(), [images()])
    assert names_of(found) == ["act", "act#2"]
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    shown = find_images(tmp_path)
    assert len(shown.source) == 2
    stream = ImageStream(shown.source, None, lambda image: torch.zeros(3, 8, 8), 4)
    assert [len(batch) for batch in stream] == [1]
    assert [skipped.reason for skipped in stream.skipped] == ["not a regular file"]


def test_names_are_no_markup(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a[").mkdir()
    (tmp_path / "data" / "a[" / "red].png").write_text("no image")
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "a[" / "y.png")
    run("resnet18", tmp_path / "data", tmp_path / "out", size=32)
    assert "a[/red].png" in capsys.readouterr().out.replace("\n", "")
