"""What a recipe of detection says is what happens: network, losses, inputs, chance, ranks, runs."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN

import cenet.detection as detection
import cenet.detection.data as data_module
import cenet.detection.loaders as loaders
from _checks import assert_close
from _detection import TINY, batch, few_shapes, small_detector
from _distributed import run
from _training import ALONE, assert_same_run, call, metrics
from cenet import NormCE2d
from cenet.detection.command import parse
from cenet.detection.data import load, outline_mask, scenes
from cenet.detection.engine import DetectionOptions, DetectionTrainer, build_detector
from cenet.detection.evaluation import evaluate, predict, score
from cenet.detection.loaders import sample, training_batches
from cenet.detection.recipes import RECIPES
from cenet.detection.run import DetectionJob, evaluate_run, load_detector, train
from cenet.detection.shapes import draw_shapes
from cenet.models import create_model
from cenet.train.inputs import Inputs
from cenet.train.loaders import Shard
from cenet.train.processes import Processes

CPU = torch.device("cpu")
CHANNELS = (16, 24, 32, 48)
INPUTS = Inputs(("cat", "dog"), (51.0, 102.0, 204.0), (25.5, 127.5, 255.0))


def classifier(path):
    """A small CE-ResNet-18 and the file of its weights."""
    torch.manual_seed(5)
    model = create_model("resnet18", num_classes=7, channels=CHANNELS)
    with torch.no_grad():
        model(torch.randn(4, 3, 64, 64))  # statistics
    save_file(dict(model.state_dict()), path)
    return model


# the network


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


# losses


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


# inputs


def test_images_of_the_test_are_the_pictures():
    data = few_shapes(2, 5).test
    order = [3, 0, 4]
    found = list(loaders.test_batches(data, order, 2, device=CPU, workers=0))
    assert [chosen for chosen, _ in found] == [[3, 0], [4]]
    images = [image for _, images in found for image in images]
    for index, image in zip(order, images, strict=True):
        assert torch.equal(image, data.pixels[index] / 255)
        assert 0.5 < image.max() <= 1


def stretch(old: int, new: int) -> torch.Tensor:
    """Weights (new, old) of linear interpolation between the centres of pixels."""
    places = ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
    distances = places[:, None] - torch.arange(old)
    return (1 - distances.abs()).clamp_min(0)


@pytest.mark.parametrize("size", [(40, 60), (70, 90), (24, 36), (33, 100)])
def test_training_images_are_resized_linearly(size):
    """As torchvision's detectors do it: centres of pixels, and no smoothing."""
    image = torch.randint(256, (3, 40, 60), generator=torch.Generator().manual_seed(0))
    data = scenes("one", coco(1), pixels=[image.to(torch.uint8)])
    expected = stretch(40, size[0]) @ (image.double() / 255) @ stretch(60, size[1]).T
    pixels, _ = sample(data, 0, size, flip=False, masks=True)
    assert_close("pixels", pixels, expected, 1e-5)
    pixels, _ = sample(data, 0, size, flip=True, masks=True)
    assert_close("mirrored", pixels, expected.flip(2), 1e-5)


# chance

COUNT = 60


def coco(count, width=60, height=40):
    """Annotations of images with one square each."""
    square = {"bbox": [5, 5, 10, 10], "segmentation": [[5, 5, 15, 5, 15, 15, 5, 15]], "area": 100}
    sizes = {"width": width, "height": height}
    return {
        "images": [{"id": i, "file_name": f"{i}.png", **sizes} for i in range(count)],
        "annotations": [{**square, "image_id": i, "category_id": 1} for i in range(count)],
        "categories": [{"id": 1, "name": "square"}],
    }


@pytest.fixture(scope="module")
def sided():
    """Images whose left half has the colour of their number, and whose right half is white."""
    pixels = []
    for index in range(COUNT):
        pixels.append(torch.full((3, 40, 60), index, dtype=torch.uint8))
        pixels[-1][:, :, 30:] = 255
    return scenes("sided", coco(COUNT), pixels=pixels)


def seen(data, epoch, **changes):
    """Number of every image of an epoch, with its shorter side and whether it was mirrored."""
    recipe = replace(TINY, min_sizes=(32, 36, 40), detector="faster_rcnn", **changes)
    shard = Shard(COUNT, 6)
    found = {}
    for images, _ in training_batches(
        data, recipe, shard, epoch=epoch, start=0, device=CPU, workers=0
    ):
        for image in images:
            left, right = (round(255 * float(image[0, 0, side])) for side in (0, -1))
            found[min(left, right)] = (min(image.shape[1:]), left > right)
    assert len(found) == COUNT
    return found


EPOCHS = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]


def test_chance_depends_on_seed_and_epoch(sided):
    first, again = ([seen(sided, epoch, seed=seed) for seed, epoch in EPOCHS] for _ in range(2))
    assert [list(found.items()) for found in first] == [list(found.items()) for found in again]
    for place, one in enumerate(first):
        for other in first[:place]:
            assert list(one) != list(other), "another order"
            for what in (0, 1):  # sizes, mirrors
                same = sum(one[i][what] == other[i][what] for i in range(COUNT))
                assert same < 0.8 * COUNT


def test_half_are_mirrored_and_all_sizes_come(sided):
    found = [values for seed, epoch in EPOCHS for values in seen(sided, epoch, seed=seed).values()]
    for size in (32, 36, 40):
        flips = [flip for side, flip in found if side == size]
        assert 0.2 < len(flips) / len(found) < 0.5
        assert 0.3 < sum(flips) / len(flips) < 0.7


def test_mirroring_can_be_left_away(sided):
    assert parse(["shapes"]).recipe.flip
    recipe = parse(["shapes", "--flip", "False"]).recipe
    assert not recipe.flip
    assert not any(flip for _, flip in seen(sided, 0, flip=recipe.flip).values())


# evaluation over ranks


class Oracle(nn.Module):
    """Knows the truth of every image, and tells it with noise."""

    def __init__(self, data):
        super().__init__()
        self.data = data
        self.roi_heads = nn.Module()
        self.roi_heads.mask_head = nn.Identity()

    def forward(self, images):
        return [self.found(image) for image in images]

    def found(self, image):
        known = [(p / 255).equal(image) for p in self.data.pixels]
        index = known.index(True)
        _, target = sample(self.data, index, image.shape[1:], flip=False, masks=True)
        random = torch.Generator().manual_seed(index)
        boxes = target["boxes"]
        return {
            "boxes": boxes + 2 * torch.randn(boxes.shape, generator=random),
            "labels": target["labels"],
            "scores": torch.rand(len(boxes), generator=random),
            "masks": target["masks"][:, None].float().roll(3, -1),
        }


COUNTS = (7, 3, 1)


def parts():
    """Different numbers of images; the last leaves a second rank without any."""
    return [few_shapes(2, count).test for count in COUNTS]


def scores(rank, world):
    return [evaluate(Oracle(part), part, Processes(rank, world, CPU)) for part in parts()]


def test_ranks_evaluate_every_image_once():
    expected = []
    for part in parts():
        indices = list(range(len(part.images)))
        found = predict(Oracle(part), part, indices, device=CPU, workers=0)
        expected.append(score(part.coco, found, ("box", "mask")))
    assert all(0.1 < expected[0].numbers[f"{kind}_ap"] < 0.95 for kind in ("box", "mask"))
    assert [scores(0, 1), *run(scores, 2, 2)] == [expected] * 3


# shapes


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(data_module, "SHAPES", (6, 3))


@pytest.mark.usefixtures("_few")
def test_shapes_to_test_with_are_others():
    split = load(TINY, None)
    assert [len(part.images) for part in split] == [6, 3]
    for image in split.test.pixels:
        assert not any(image.equal(other) for other in split.train.pixels)


# corners, and the share of the box that is covered
KINDS = {"ellipse": (24, 3.1416 / 4), "rectangle": (4, 1.0), "triangle": (3, 0.5)}


def test_shapes_have_the_names_of_what_is_drawn():
    pixels, truth = draw_shapes(40, 0)
    data = scenes("shapes", truth, pixels=pixels)
    assert data.classes == tuple(KINDS)
    for record, objects in zip(data.images, data.objects, strict=True):
        for one in objects:
            corners, share = KINDS[data.classes[data.labels[one["category_id"]] - 1]]
            assert len(one["segmentation"][0]) == 2 * corners
            size = record["height"], record["width"]
            drawn = outline_mask(one["segmentation"], *size, (1.0, 1.0)).sum()
            assert float(drawn) == pytest.approx(share * one["bbox"][2] * one["bbox"][3], rel=0.1)


# recipes

COCO = {
    "detector": "mask_rcnn", "trainable_layers": 3, "channels": (64, 128, 256, 512), "small": False,
    "dataset": "coco", "min_sizes": (800,), "max_size": 1333, "flip": True, "epochs": 24,
    "batch_size": 2, "accumulate": 1, "lr": 0.02, "lr_batch": 16, "momentum": 0.9,
    "weight_decay": 1e-4, "decay_norms": True, "schedule": "step", "milestones": (16, 22),
    "gamma": 0.1, "warmup_epochs": 0.07, "clip_grad": 0.0, "precision": "float32",
}  # fmt: skip
ROWS = {
    "resnet50_plain": ("resnet50", "frozen"),
    "resnet50_ce": ("ceresnet50", "frozen"),
    "resnet50_syncce": ("ceresnet50", "synchronized"),
    "resnet101_plain": ("resnet101", "frozen"),
    "resnet101_ce": ("ceresnet101", "frozen"),
    "resnet101_syncce": ("ceresnet101", "synchronized"),
}


def test_there_are_six_recipes_for_coco():
    assert {name for name, recipe in RECIPES.items() if recipe.dataset == "coco"} == {*ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_recipes_for_coco_say_this(name):
    recipe = RECIPES[name]
    assert (recipe.backbone, recipe.setting) == ROWS[name]
    assert {field: getattr(recipe, field) for field in COCO} == COCO


@pytest.mark.parametrize(
    ("name", "kind", "blocks", "layers"),
    [
        # CE at the stem and in all blocks but those of the last stage, or in the first seven
        ("maskrcnn_ceresnet50_fpn", MaskRCNN, [3, 4, 6, 3], 14),
        ("maskrcnn_ceresnet101_fpn", MaskRCNN, [3, 4, 23, 3], 8),
        ("fasterrcnn_ceresnet50_fpn", FasterRCNN, [3, 4, 6, 3], 14),
        ("fasterrcnn_ceresnet101_fpn", FasterRCNN, [3, 4, 23, 3], 8),
    ],
)
def test_detectors_are_what_their_names_say(name, kind, blocks, layers):
    with torch.device("meta"):
        model = getattr(detection, name)(num_classes=5)
    body = model.backbone.body
    assert type(model) is kind
    assert [len(body[f"layer{number}"]) for number in range(1, 5)] == blocks
    assert sum(isinstance(module, NormCE2d) for module in body.modules()) == layers
    assert model.roi_heads.box_predictor.cls_score.out_features == 5


# runs


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
    with pytest.raises(ValueError, match=r"on other classes than .* has: .*disc.*ellipse"):
        evaluate_run(run, other, "cpu")


@pytest.mark.usefixtures("_few")
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
    assert "interrupted and saved; go on with --resume auto" in capsys.readouterr().out
    call(monkeypatch, *command, str(cut))
    assert "resuming from step-000000002.safetensors: epoch 1, step 2" in capsys.readouterr().out
    assert_same_run(whole, cut)


# deploy


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
