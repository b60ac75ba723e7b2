"""Recipes against Appendix E of the paper; their data, order and augmentation."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from cenet.models import create_model
from cenet.train import RECIPES, Recipe, find_recipe
from cenet.train.data import (
    Files,
    Resident,
    corrupt,
    digits,
    image_folders,
    load,
    read_image,
)
from cenet.train.inputs import inputs_of
from cenet.train.loaders import (
    FilesLoader,
    ResidentLoader,
    Shard,
    epoch_order,
    evaluation_batches,
)
from cenet.train.setup import build_loss, build_network, build_optimizer, build_schedule

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("network", "epochs", "batch", "lr", "decay", "schedule"),
    [
        ("resnet18", 100, 32, 0.1, 1e-4, "step"),
        ("resnet50", 100, 32, 0.1, 1e-4, "step"),
        ("resnet101", 100, 32, 0.1, 1e-4, "step"),
        ("mobilenetv2_100", 150, 32, 0.05, 4e-5, "cosine"),
        ("shufflenetv2_x0_5", 240, 128, 0.5, 4e-5, "poly"),
        ("shufflenetv2_x1_0", 240, 128, 0.5, 4e-5, "poly"),
        ("vgg16", 160, 256, 0.1, 5e-4, "step"),
    ],
)
@pytest.mark.parametrize("row", ["plain", "se", "bd", "ir", "ce", "iternorm", "sw", "sn"])
def test_appendix_e(network, epochs, batch, lr, decay, schedule, row):
    recipe = RECIPES[f"{network}_{row}"]
    assert (recipe.epochs, recipe.batch_size, recipe.lr) == (epochs, batch, lr)
    assert (recipe.weight_decay, recipe.schedule, recipe.momentum) == (decay, schedule, 0.9)
    assert recipe.lr_batch == (256 if network == "vgg16" else 8 * batch)
    assert recipe.norm == (row if row in ("iternorm", "sw", "sn") else "bn")
    assert recipe.block == ("plain" if recipe.norm != "bn" else row)
    assert (recipe.label_smoothing > 0) == network.startswith("shufflenet")


def test_every_recipe_says_how_to_be_built_and_goes_through_json():
    for recipe in RECIPES.values():
        assert Recipe.from_dict(recipe.as_dict()) == recipe
    assert len(RECIPES) == 8 * 19


def test_unknown_names_and_values_name_the_nearest():
    with pytest.raises(ValueError, match=r"'resnet5_ce' is not a recipe.*resnet50_ce"):
        find_recipe("resnet5_ce")
    with pytest.raises(ValueError, match=r"network='resnet34'.*did you mean resnet50 or resnet18"):
        Recipe("resnet34")
    bad = {"epochs": 0, "lr": float("nan"), "label_corruption": 1.5, "milestones": (60, 30)}
    with pytest.raises(ValueError, match="must be at least 1") as caught:
        replace(RECIPES["vgg16_ce"], **bad)
    assert all(f"{name}=" in str(caught.value) for name in bad)
    with pytest.raises(ValueError, match="not a recipe of this version"):
        Recipe.from_dict({"network": "vgg16", "flavour": 1})


def rates(recipe, updates_per_epoch=10):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], recipe.lr)
    schedule = build_schedule(recipe, optimizer, updates_per_epoch=updates_per_epoch)
    found = []
    for update in range(recipe.epochs * updates_per_epoch):
        schedule.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_schedules_are_those_of_their_formulas():
    step = rates(RECIPES["resnet50_ce"])
    assert [step[i] for i in (0, 299, 300, 599, 600, 899, 900)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4]
    )
    cosine = torch.tensor(rates(RECIPES["mobilenetv2_100_ce"]))
    t = torch.arange(1500) / 1500
    torch.testing.assert_close(cosine, 0.025 * (1 + torch.cos(torch.pi * t)))
    poly = torch.tensor(rates(RECIPES["shufflenetv2_x1_0_ce"]))
    t = torch.arange(2400) / 2400
    torch.testing.assert_close(poly[50:], 0.5 * (1 - t[50:]))
    torch.testing.assert_close(poly[:50], 0.5 * torch.arange(50) / 50)


def test_all_is_decayed_but_lambda_and_alpha():
    recipe = RECIPES["digits_ce"]
    model = build_network(recipe, inputs_of(digits().train))
    decayed, spared = build_optimizer(recipe, model, images_per_update=128).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rpartition(".")[2] for p in spared["params"]} == {"mix_logit"}
    assert spared["weight_decay"] == 0
    assert len(spared["params"]) + len(decayed["params"]) == len(names)
    assert decayed["weight_decay"] == recipe.weight_decay
    assert decayed["lr"] == pytest.approx(2 * recipe.lr)  # for twice the images
    assert not decayed["nesterov"]
    bare = build_optimizer(replace(recipe, decay_norms=False), model, images_per_update=64)
    assert all(p.dim() > 1 for p in bare.param_groups[0]["params"])


def test_alpha_is_not_decayed():
    model = create_model("vgg6", "ce", start="identity", in_chans=1)
    _, spared = build_optimizer(RECIPES["digits_ce"], model, images_per_update=64).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rpartition(".")[2] for p in spared["params"]} == {"mix_logit", "blend"}


def test_loss_of_label_smoothing():
    logits, labels = torch.randn(5, 7), torch.randint(7, (5,))
    smooth = build_loss(replace(RECIPES["digits_ce"], label_smoothing=0.1))(logits, labels)
    torch.testing.assert_close(smooth, nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.333, 1.0])
def test_label_corruption_is_exact_fixed_and_only_of_training(share):
    recipe = replace(RECIPES["digits_ce"], label_corruption=share, seed=3)
    clean, found, again = digits(), load(recipe, None), load(recipe, None)
    wrong = found.train.labels != clean.train.labels
    assert wrong.sum() == round(share * len(clean.train.labels))
    assert torch.equal(found.train.labels, again.train.labels)
    assert torch.equal(found.test.labels, clean.test.labels)
    assert torch.equal(found.test.images, clean.test.images)
    assert found.train.labels.unique().numel() == 10
    if 0 < share < 1:
        other = corrupt(clean.train.labels, share, 10, seed=4)
        assert not torch.equal(other, found.train.labels)


def test_label_corruption_is_even():
    """Over places, and over the other classes."""
    labels = torch.arange(9000) % 10
    wrong = corrupt(labels, 0.5, 10, seed=0)
    moves = (wrong - labels) % 10
    assert (moves[:4500] > 0).sum() == pytest.approx(2250, abs=150)  # five deviations
    assert moves.bincount(minlength=10)[1:].tolist() == pytest.approx([500] * 9, abs=105)


def test_processes_share_every_step_and_epochs_differ():
    order = epoch_order(103, seed=1, epoch=0)
    assert order.sort().values.tolist() == list(range(103))
    assert not torch.equal(order, epoch_order(103, seed=1, epoch=1))
    whole = Shard(103, 12)
    parts = [Shard(103, 4, rank=rank, world=3) for rank in range(3)]
    assert whole.steps == parts[0].steps == 8
    for step in range(8):
        joined = torch.cat([order[part.places(step)] for part in parts])
        assert torch.equal(joined, order[whole.places(step)])
    with pytest.raises(ValueError, match="do not fill one step of 64 images in each of 2"):
        Shard(103, 64, world=2)


def resident(n=40, size=10):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return Resident(images, torch.arange(n) % 4, ("a", "b", "c", "d"))


def cropping_loader(data, *, channels_last):
    return ResidentLoader(
        data, inputs_of(data), Shard(40, 8), augment="crop_flip", seed=0, device=CPU,
        channels_last=channels_last,
    )  # fmt: skip


def test_crops_and_flips_on_the_device():
    """Every image of an epoch is a crop of its padded original, flipped or not; all kinds occur."""
    data = resident()
    loader = cropping_loader(data, channels_last=False)
    mean, std = inputs_of(data).statistics(CPU)
    expected = data.images.double()
    torch.testing.assert_close(mean.double(), expected.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        std.double(), expected.transpose(0, 1).flatten(1).std(1, correction=0), rtol=1e-6, atol=0
    )
    order = epoch_order(40, 0, 0)
    padded = nn.functional.pad(data.images, (4, 4, 4, 4)).float()
    kinds = set()
    for step, (images, labels) in enumerate(loader.epoch(0)):
        assert images.is_contiguous()
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            index = order[step * 8 + place]
            assert label == data.labels[index]
            raw = (image * std[:, None, None] + mean[:, None, None]).round()
            matches = [
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (False, True)
                if torch.equal(
                    padded[index, :, top : top + 10, left : left + 10],
                    raw.flip(2) if flip else raw,
                )
            ]
            assert matches
            kinds.add(matches[0])
    tops, lefts, flips = (set(values) for values in zip(*kinds, strict=True))
    assert flips == {False, True}
    assert len(tops) > 4
    assert len(lefts) > 4
    assert len(kinds) > 20  # of 40 images: each has its own
    assert not torch.equal(loader._moves(0), loader._moves(1))


def batches_equal(first, second):
    pairs = list(zip(first, second, strict=True))
    assert pairs
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_an_epoch_can_begin_anywhere():
    data = resident()
    loader = cropping_loader(data, channels_last=True)
    whole = list(loader.epoch(3))
    assert batches_equal(whole[2:], loader.epoch(3, start=2))
    assert not torch.equal(whole[0][0], next(loader.epoch(4))[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of three sizes in four classes."""
    root = tmp_path_factory.mktemp("images")
    data = resident(24, 40)
    for part, places in (("train", range(16)), ("val", range(16, 24))):
        for i in places:
            path = root / part / data.classes[int(data.labels[i])] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (40, 36, 44)[i % 3]
            image = Image.fromarray(data.images[i].permute(1, 2, 0).numpy())
            image.resize((size, 40)).save(path)
    return root


@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none"])
def test_files_do_not_depend_on_workers_or_on_where_an_epoch_begins(folder, augment):
    files = image_folders(folder, 32, resident=True).train
    assert isinstance(files, Files)

    def loader(workers):
        return FilesLoader(
            files, inputs_of(files), Shard(16, 4), augment=augment, size=32, seed=5, device=CPU,
            channels_last=True, workers=workers,
        )  # fmt: skip

    before = torch.get_rng_state()
    alone = list(loader(0).epoch(1))
    assert torch.equal(before, torch.get_rng_state())
    assert batches_equal(alone, loader(2).epoch(1))
    assert batches_equal(alone[1:], loader(2).epoch(1, start=1))
    assert alone[0][0].shape == (4, 3, 32, 32)
    if augment != "none":
        shown = {round(float(images.sum()), 3) for images, _ in alone}
        assert shown.isdisjoint(round(float(images.sum()), 3) for images, _ in loader(0).epoch(2))


def test_workers_leave_signals_to_the_run(folder):
    """A signal to the whole group must not take them away before the run has saved."""
    files = image_folders(folder, 32, resident=True).train
    loader = FilesLoader(
        files, inputs_of(files), Shard(16, 1), augment="none", size=32, seed=0, device=CPU,
        channels_last=False, workers=1,
    )  # fmt: skip
    batches = loader.epoch(0)
    next(batches)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 15


DEAD = r"a process that reads images has died \(.*by --workers\n"


@pytest.mark.parametrize(
    ("fails", "pause", "message"),
    [
        ("raise ValueError('it is truncated')", 0, r"it is truncated\n"),
        ("index or os._exit(1)", 0, DEAD),
        ("index or os._exit(1)", 1, DEAD),  # while the loader is being made
    ],
)
def test_workers_end_with_a_run_that_fails(fails, pause, message):
    """Deaf to signals, they once outlived it, and Python waited for them."""
    script = (
        "import os, time\n"
        "class Batches(list):\n"
        "    def __iter__(self):\n"
        "        for batch in super().__iter__():\n"
        "            yield batch\n"
        f"            time.sleep({pause})\n"
        "from cenet.train.loaders import loaded\n"
        "class Damaged:\n"
        "    def __getitem__(self, index):\n"
        f"        {fails}\n"
        "try:\n"
        "    list(loaded(Damaged(), Batches([[0], [1], [2]]), workers=2, seed=0))\n"
        "except ValueError as error:\n"
        "    raise SystemExit(str(error)) from error\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    assert re.fullmatch(message, found.stderr)


def gradient(path, size):
    """An image that grows from left to right and from top to bottom, in a file."""
    ramp = torch.arange(size, dtype=torch.uint8)
    image = torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size)])
    image = torch.cat([image, image[:1] + image[1:]])
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(path)
    return image


def raw(images):
    """Pixels before ImageNet's normalization."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return ((images * std + mean) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none"])
def test_what_happens_to_an_image_file(tmp_path, augment):
    """One file, 32 times: every copy and every epoch has its own chance."""
    image = gradient(tmp_path / "x.png", 32)
    files = Files([tmp_path / "x.png"] * 32, torch.zeros(32, dtype=torch.long), ("a",))
    loader = FilesLoader(
        files, inputs_of(files), Shard(32, 32), augment=augment, size=32, seed=0, device=CPU,
        channels_last=False, workers=0,
    )  # fmt: skip
    first, second = (raw(next(loader.epoch(epoch))[0]) for epoch in range(2))
    kinds = [{copy.numpy().tobytes() for copy in epoch} for epoch in (first, second)]
    if augment == "none":
        assert torch.equal(first, image.expand_as(first))
        return
    assert len(kinds[0]) > 16
    assert len(kinds[0] & kinds[1]) < 8
    turned = {bool(copy[0, 16, 8] > copy[0, 16, 24]) for copy in first}
    assert turned == {False, True}
    if augment == "crop_flip":
        padded = nn.functional.pad(image, (4, 4, 4, 4))
        crops = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        crops = {crop.numpy().tobytes() for c in crops for crop in (c.contiguous(), c.flip(2))}
        assert kinds[0] <= crops


def test_test_images_are_cropped_in_their_middle(tmp_path):
    image = gradient(tmp_path / "x.png", 32)
    files = Files([tmp_path / "x.png"], torch.zeros(1, dtype=torch.long), ("a",))
    ((found, _),) = evaluation_batches(
        files, inputs_of(files), size=28, batch=1, device=CPU, channels_last=False
    )
    assert torch.equal(raw(found)[0], image[:, 2:30, 2:30])


def test_test_images_are_seen_once_over_all_processes(folder):
    split = image_folders(folder, 32, resident=True)
    for data in (split.test, resident(23)):
        seen = []
        for rank in range(3):
            batches = evaluation_batches(
                data, inputs_of(data), size=32, batch=2, device=CPU,
                channels_last=False, rank=rank, world=3,
            )  # fmt: skip
            seen += [label for _, labels in batches for label in labels.tolist()]
        assert sorted(seen) == sorted(data.labels.tolist())


def test_folders_in_memory_and_what_is_wrong_with_them(tmp_path):
    def save(name, size=16):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (size, size), (1, 2, 3)).save(path)

    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        save(name)
    split = image_folders(tmp_path, 16, resident=True)
    assert split.train.images.shape == (2, 3, 16, 16)
    assert split.train.images[0, :, 0, 0].tolist() == [1, 2, 3]
    save("train/a/2.png", 20)
    (tmp_path / "train/b/3.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2 of 4 images cannot be used.*2.png is 20×20.*3.jpg"):
        image_folders(tmp_path, 16, resident=True)
    (tmp_path / "train/empty").mkdir()
    with pytest.raises(ValueError, match="empty has no images"):
        image_folders(tmp_path, 16, resident=True)
    save("train/empty/1.png")
    with pytest.raises(ValueError, match=r"different classes: \['empty'\]"):
        image_folders(tmp_path, 16, resident=True)
    with pytest.raises(ValueError, match=r"must have the folders train and test"):
        image_folders(tmp_path / "train", 16, resident=True)
    recipe = RECIPES["vgg16_ce"]
    with pytest.raises(ValueError, match="say where it is with --data"):
        load(recipe, None)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load(recipe, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="the digits are embedded"):
        load(RECIPES["digits_ce"], tmp_path)


def test_images_of_sixteen_bits_keep_their_shades(tmp_path):
    values = torch.arange(256, dtype=torch.int32).reshape(16, 16) * 257
    Image.fromarray(values.to(torch.uint16).numpy()).save(tmp_path / "x.png")
    image = read_image(tmp_path / "x.png")
    assert image.mode == "RGB"
    assert numpy.asarray(image)[..., 0].flatten().tolist() == list(range(256))
    Image.fromarray(values.float().numpy()).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"x.tif .* floating-point numbers; save it with 8 or 16"):
        read_image(tmp_path / "x.tif")


def test_one_class_is_nothing_to_learn(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / part / "cat" / "1.png")
    with pytest.raises(ValueError, match="has one class, 'cat'; there is nothing to learn"):
        load(RECIPES["vgg16_ce"], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": float("inf")}, "lr=inf must be"),
        ({"warmup_epochs": float("inf")}, "warmup_epochs=inf must be"),
        ({"mixup": 0.2, "batch_size": 63}, "batch_size=63 must be even, because mixup"),
    ],
)
def test_numbers_that_would_fail_later(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RECIPES["digits_ce"], **changes)
