"""What a recipe of detection says is what happens: network, losses, runs, deployment."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models.detection import FasterRCNN

import cenet.detection as detection
from _checks import assert_close
from _detection import TINY, batch, few_shapes, small_detector
from _training import ALONE, assert_same_run, call, metrics
from cenet import NormCE2d
from cenet.data.datasets import InputSpec
from cenet.detection.job import DetectionJob, evaluate_run, load_detector, train
from cenet.detection.trainer import DetectionOptions, DetectionTrainer, build_detector
from cenet.models import create_model

pytestmark = pytest.mark.usefixtures("quick_weights")

CHANNELS = (16, 24, 32, 48)


INPUTS = InputSpec(("cat", "dog"), (51.0, 102.0, 204.0), (25.5, 127.5, 255.0))


def classifier(path):
    """A small CE-ResNet-18 and the file of its weights."""
    torch.manual_seed(5)
    model = create_model("resnet18", num_classes=7, channels=CHANNELS)
    with torch.no_grad():
        model(torch.randn(4, 3, 64, 64))  # statistics
    save_file(dict(model.state_dict()), path)
    return model


def conv(name: str) -> bool:
    return "conv" in name or "downsample.0" in name


@pytest.mark.parametrize(
    ("setting", "layers", "trains"),
    [
        ("frozen", 1, lambda name: name.startswith("layer4") and conv(name)),
        ("synchronized", 3, lambda name: "layer1" not in name and ".ce." not in name),
        ("scratch", 4, lambda name: True),
    ],
)
def test_the_recipe_says_what_trains(setting, layers, trains):
    recipe = replace(TINY, setting=setting, trainable_layers=layers)
    body = build_detector(recipe, INPUTS).backbone.body
    found = {name for name, value in body.named_parameters() if value.requires_grad}
    stages = {name for name, _ in body.named_parameters() if name.startswith("layer")}
    assert found == {name for name in stages if trains(name)} != set()


def test_the_recipe_says_what_the_network_is():
    recipe = replace(TINY, channels=CHANNELS)
    network = build_detector(recipe, INPUTS)
    assert [b.conv2.out_channels for b in network.backbone.body.layer4] == [48, 48]
    assert network.backbone.out_channels == 64  # of the small ones
    assert network.roi_heads.box_predictor.cls_score.out_features == 3  # with the background
    other = build_detector(replace(recipe, backbone="resnet18", detector="faster_rcnn"), INPUTS)
    assert not any(isinstance(module, NormCE2d) for module in other.modules())
    assert type(other) is FasterRCNN


def test_the_network_has_the_weights_of_the_checkpoint(tmp_path):
    model = classifier(tmp_path / "w.safetensors")
    recipe = replace(TINY, channels=CHANNELS)
    body = build_detector(recipe, INPUTS, tmp_path / "w.safetensors").backbone.body
    state = body.state_dict()
    assert {*model.state_dict()} - {*state} == {"fc.weight", "fc.bias"}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_the_network_normalizes_by_mean_and_deviation():
    network = build_detector(TINY, INPUTS)
    assert network.transform.image_mean == pytest.approx([0.2, 0.4, 0.8])
    assert network.transform.image_std == pytest.approx([0.1, 0.5, 1.0])
    image = torch.full((3, 64, 64), 0.6)
    normal = network.eval().transform([image])[0].tensors
    assert_close("pixels", normal.mean((0, 2, 3)), torch.tensor([4.0, 0.4, -0.2]), 1e-5)


def test_training_keeps_sizes_and_the_test_takes_the_last():
    network = build_detector(TINY, INPUTS)  # min_sizes are 48 and 64, max_size is 96
    images = [torch.rand(3, 70, 90), torch.rand(3, 40, 120)]
    kept = network.train().transform(images)[0].image_sizes
    assert kept == [(70, 90), (40, 120)]
    resized = network.eval().transform(images)[0].image_sizes
    assert resized == [(64, 82), (32, 96)]


def trainer(out, **changes):
    options = DetectionOptions(out, workers=0)
    return DetectionTrainer(replace(TINY, **changes), few_shapes(6, 2), options, ALONE)


def by_hand(network, images, targets):
    """Losses of a batch."""
    torch.manual_seed(7)  # proposals are drawn
    return network.train()(images, targets)


def by_engine(engine, *batches):
    engine.network.train()
    for one in batches:
        torch.manual_seed(7)
        engine.add_gradients(one)


HEADS = ("backbone.body", "backbone.fpn", "rpn.head", "roi_heads.box_predictor")


@pytest.mark.parametrize(
    ("detector", "heads"),
    [("faster_rcnn", HEADS), ("mask_rcnn", (*HEADS, "roi_heads.mask_predictor"))],
)
def test_every_part_of_the_network_gets_a_gradient(detector, heads, tmp_path):
    engine = trainer(tmp_path, detector=detector)
    by_engine(engine, batch())
    for head in heads:
        gradients = [p.grad for p in engine.network.get_submodule(head).parameters()]
        assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0, head


def test_accumulated_gradients_are_the_mean_of_their_batches(tmp_path):
    engine = trainer(tmp_path, accumulate=2)
    batches = batch(3, seed=1), batch(2, seed=2)
    for one in batches:
        (sum(by_hand(engine.network, *one).values()) / 2).backward()
    expected = {name: p.grad.clone() for name, p in engine.network.named_parameters()}
    engine.network.zero_grad()
    by_engine(engine, *batches)
    for name, parameter in engine.network.named_parameters():
        assert_close(name, parameter.grad, expected[name], 1e-5)


@pytest.mark.parametrize("detector", ["faster_rcnn", "mask_rcnn"])
def test_an_epoch_tells_the_mean_of_every_loss(detector, tmp_path):
    engine = trainer(tmp_path, detector=detector)
    batches = batch(3, seed=1), batch(2, seed=2)
    losses = [by_hand(engine.network, *one) for one in batches]
    mean = {name: (3 * losses[0][name] + 2 * losses[1][name]).item() / 5 for name in losses[0]}
    by_engine(engine, *batches)
    sums = engine.position.sums.tolist()
    names = ["classifier", "box_reg", "objectness", "rpn_box_reg", "mask"][: len(mean)]
    expected = {f"train_{name}": mean[f"loss_{name}"] for name in names}
    assert engine.summary(sums) == pytest.approx(expected, rel=1e-5)
    assert sums[0] / sums[-1] == pytest.approx(sum(expected.values()), rel=1e-5)


def write_coco(folder, data, **renamed):
    """Images as files, to train and test on, with other names for some classes."""
    (folder / "images").mkdir(parents=True)
    for record, pixels in zip(data.images, data.pixels, strict=True):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(folder / "images" / record["file_name"])
    names = [
        {**record, "name": renamed.get(record["name"], record["name"])}
        for record in data.coco["categories"]
    ]
    (folder / "instances.json").write_text(json.dumps({**data.coco, "categories": names}))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An epoch on a few files with the backbone of a classifier: folder of the run, of the data,
    and the classifier."""
    root = tmp_path_factory.mktemp("trained")
    model = classifier(root / "w.safetensors")
    data = write_coco(root / "coco", few_shapes(4, 2).train)
    recipe = replace(
        TINY, dataset="coco", setting="frozen", trainable_layers=3, epochs=1, batch_size=2,
        channels=CHANNELS,
    )  # fmt: skip
    options = DetectionOptions(root / "run", workers=0)
    train(DetectionJob(recipe, options, data, root / "w.safetensors", "cpu"))
    return root / "run", data, model


def test_a_run_trains_the_backbone_of_its_checkpoint(trained):
    run, _, model = trained
    body = load_detector(run).backbone.body
    before = model.state_dict()
    moved = {name for name, value in body.state_dict().items() if not value.equal(before[name])}
    names = {name for name, _ in body.named_parameters() if conv(name)}
    assert moved == {n for n in names if n.startswith(("layer2", "layer3", "layer4"))}


def test_the_parts_of_the_loss_add_up(trained):
    (row,) = metrics(trained[0])
    parts = ("classifier", "box_reg", "objectness", "rpn_box_reg", "mask")
    assert row["train_loss"] == pytest.approx(sum(row[f"train_{part}"] for part in parts))


def test_a_run_is_not_evaluated_on_other_classes(trained, tmp_path):
    run, data, _ = trained
    assert evaluate_run(run, data, "cpu").numbers.keys() <= metrics(run)[-1].keys()
    other = write_coco(tmp_path / "other", few_shapes(4, 2).train, ellipse="disc")
    with pytest.raises(ValueError, match="has ellipse, which the data has not; the data has disc"):
        evaluate_run(run, other, "cpu")


@pytest.mark.usefixtures("few_drawn")
def test_an_interrupt_of_the_command_saves_and_resumes(tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fields = ("--epochs", "1", "--batch-size", "2", "--channels", "16", "16", "16", "16",
              "--min-sizes", "48", "--max-size", "96", "--device", "cpu", "--workers", "0",
              "--resume", "auto")  # fmt: skip
    command = ("detect", "train", "shapes", *fields, "--out")
    call(monkeypatch, *command, str(whole))
    real = DetectionTrainer._update

    def interrupted(self):
        real(self)
        if self.position.updates == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DetectionTrainer, "_update", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        call(monkeypatch, *command, str(cut))
    assert getattr(caught.value, "code", None) == 75
    assert (
        "interrupted and saved; the same command with --resume auto goes on in"
        in capsys.readouterr().out
    )
    call(monkeypatch, *command, str(cut))
    assert "resuming from step-000000002.safetensors: epoch 1, step 2" in capsys.readouterr().out
    assert_same_run(whole, cut)


def test_folding_leaves_the_network_as_it_was():
    network = small_detector(setting="scratch", trainable_layers=5).eval()
    images = batch()[0]
    with torch.no_grad():
        before, found = {n: v.clone() for n, v in network.state_dict().items()}, network(images)
        folded = detection.fold_detector(network)
        for parameter in folded.parameters():  # which are its own
            parameter.zero_()
        after, again = network.state_dict(), network(images)
    assert list(before) == list(after)
    assert all(value.equal(after[name]) for name, value in before.items())
    for ours, theirs in zip(found, again, strict=True):
        assert all(value.equal(theirs[name]) for name, value in ours.items())
    assert all(parameter.requires_grad for parameter in network.parameters())
