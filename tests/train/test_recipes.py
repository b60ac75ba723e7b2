"""Recipes against Appendix E of the paper, and their data."""

from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from _training import call
from cenet.data.datasets import corrupt, digits, image_folders, input_spec_of, load
from cenet.data.decoding import read_image
from cenet.models import create_model
from cenet.train import RECIPES, Recipe, find_recipe
from cenet.train.build import build_loss, build_optimizer, build_schedule
from cenet.train.recipes import family_and_row
from cenet.train.weights import build_network


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
    more = {"resnet18": 6, "resnet50": 6, "resnet101": 5, "tiny_resnet18": 4, "tiny_resnet50": 4}
    assert len(RECIPES) == 13 * 19 + sum(more.values())
    assert all(
        "".join(f"{part}_" for part in family_and_row(name))[:-1] == name for name in RECIPES
    )
    assert family_and_row("tiny_resnet18_sw_4") == ("tiny_resnet18", "sw_4")


def test_short_recipes_train_all_networks_alike():
    own = {name: recipe for name, recipe in RECIPES.items() if name.startswith("tiny_")}
    fields = ("epochs", "batch_size", "lr", "lr_batch", "weight_decay", "schedule", "augment")
    assert len({tuple(getattr(r, field) for field in fields) for r in own.values()}) == 1
    assert {r.network for r in own.values()} == {
        recipe.network for recipe in RECIPES.values() if recipe.dataset == "imagenet"
    } - {"resnet101"}


def test_unknown_names_and_values_name_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean resnet18_plain or resnet18_ce\?"):
        find_recipe("resnet18")
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


def test_a_warm_up_that_takes_the_whole_run_is_said(tmp_path, monkeypatch, capsys):
    recipe = replace(RECIPES["digits_ce"], epochs=2)
    assert recipe.warmup_epochs == 3
    said = recipe.about_warmup()
    # what the schedule does: the rate grows until the end, and would be reached after 3 epochs
    found = rates(recipe)
    assert found == sorted(found)
    assert found[-1] / recipe.lr == pytest.approx(2 / 3, abs=0.05)
    assert said == (
        "the warm-up of 3 epochs takes the whole run of 2: the learning rate only grows, to 66.7 % "
        "of its value; --warmup-epochs 0.5 would be a quarter of the run"
    )
    assert replace(recipe, warmup_epochs=1.9).about_warmup() is None
    assert "to 100.0 %" in replace(recipe, warmup_epochs=2.0).about_warmup()
    call(monkeypatch, "train", "digits_ce", "--epochs", "2", "--out", str(tmp_path))
    assert said in capsys.readouterr().out.splitlines()


def test_all_is_decayed_but_lambda_and_alpha():
    recipe = RECIPES["digits_ce"]
    model = build_network(recipe, input_spec_of(digits().train))
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
        other = corrupt(clean.train.labels, share, 10, seed=4, to="other")
        assert not torch.equal(other, found.train.labels)


def test_label_corruption_is_even():
    """Over places, and over the other classes."""
    labels = torch.arange(9000) % 10
    wrong = corrupt(labels, 0.5, 10, seed=0, to="other")
    moves = (wrong - labels) % 10
    assert (moves[:4500] > 0).sum() == pytest.approx(2250, abs=150)  # five deviations
    assert moves.bincount(minlength=10)[1:].tolist() == pytest.approx([500] * 9, abs=105)


@pytest.mark.parametrize(("share", "classes"), [(0.3, 4), (1.0, 10)])
def test_labels_corrupted_to_any_class(share, classes):
    """A share 1/K of the chosen labels stays; the images are those that `other` chooses."""
    count = 20000
    labels = torch.arange(count) % classes
    other, to_any = (corrupt(labels, share, classes, seed=1, to=to) for to in ("other", "any"))
    chosen = other != labels
    assert chosen.sum() == round(share * count)
    assert not ((to_any != labels) & ~chosen).any()
    drawn = to_any[chosen]
    n, p = len(drawn), 1 / classes
    deviation = (n * p * (1 - p)) ** 0.5
    assert (drawn != labels[chosen]).sum() == pytest.approx(n * (1 - p), abs=5 * deviation)
    assert drawn.bincount(minlength=classes).tolist() == pytest.approx(
        [n * p] * classes, abs=5 * deviation
    )
    moves = (drawn - labels[chosen]) % classes
    assert moves.bincount(minlength=classes).tolist() == pytest.approx(
        [n * p] * classes, abs=5 * deviation
    )


def test_a_recipe_says_what_labels_are_corrupted_to():
    clean = digits().train.labels
    recipe = replace(RECIPES["digits_ce"], label_corruption=0.5, seed=3)
    assert recipe.label_corruption_to == "other"
    to_any = replace(recipe, label_corruption_to="any")
    for made in (recipe, to_any):
        expected = corrupt(clean, 0.5, 10, seed=3, to=made.label_corruption_to)
        assert torch.equal(load(made, None).train.labels, expected)
    assert not torch.equal(load(recipe, None).train.labels, load(to_any, None).train.labels)
    with pytest.raises(ValueError, match=r"^label_corruption_to='all' must be one of other, any$"):
        replace(recipe, label_corruption_to="all")


def test_labels_corrupted_to_other_classes_stay_what_they_were():
    """Runs of earlier versions mean the same: labels that they were trained on."""
    labels = corrupt(torch.arange(12) % 3, 0.5, 3, seed=0, to="other")
    assert labels.tolist() == [1, 1, 2, 0, 2, 1, 0, 2, 0, 1, 1, 2]


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
    (tmp_path / "train/.ipynb_checkpoints").mkdir()  # is none
    (tmp_path / "train/empty").mkdir()
    with pytest.raises(ValueError, match="empty has no images"):
        image_folders(tmp_path, 16, resident=True)
    save("train/empty/1.png")
    with pytest.raises(
        ValueError, match=r"different classes: train has empty, which test has not$"
    ):
        image_folders(tmp_path, 16, resident=True)
    with pytest.raises(ValueError, match=r"must have the folders train and test"):
        image_folders(tmp_path / "train", 16, resident=True)
    recipe = RECIPES["vgg16_ce"]
    with pytest.raises(ValueError, match="say where it is with --data"):
        load(recipe, None)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load(recipe, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="the digits dataset is built in; remove --data"):
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
