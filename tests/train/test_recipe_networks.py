"""Recipes at their real configuration, up to the first step: networks, norms, settings."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from timm.layers import SEModule
from torch import nn

import cenet.detection.networks as detectors
from _training import TINY, few_digits, trainer
from cenet import NormCE2d
from cenet.baselines import IterNorm2d, SwitchableWhitening2d
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec
from cenet.detection.recipes import Backbone
from cenet.models import NETWORKS, factory
from cenet.nn import ChannelEquilibrium2d
from cenet.run_folder import ABOUT
from cenet.train import RECIPES, Recipe, checkpoint
from cenet.train.build import build_loss, build_optimizer, build_schedule
from cenet.train.recipes import NETWORK_NAMES, RD_RATIO, Act, Block, Norm, read_run
from cenet.train.weights import build_network

IMAGENET = InputSpec(tuple(str(i) for i in range(1000)), FILES_MEAN, FILES_STD)
RESNETS = ("resnet18", "resnet50", "resnet101")
# blocks of the four stages
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
# of the fields that all recipes of ResNets had before
APPENDIX_E = {
    "epochs": 100, "batch_size": 32, "lr": 0.1, "lr_batch": 256, "momentum": 0.9,
    "weight_decay": 1e-4, "schedule": "step", "milestones": (30, 60, 90), "gamma": 0.1,
    "dataset": "imagenet", "image_size": 224,
}  # fmt: skip


def test_recipes_offer_what_the_factory_builds():
    """Recipes list the names again, because importing the networks takes seconds."""
    assert set(NETWORK_NAMES) == {*factory.NETWORKS, *factory.SMALL_NETWORKS}
    assert set(get_args(Block)) == set(factory.BLOCKS)
    assert set(get_args(Norm)) == set(factory.NORMS)
    assert set(get_args(Act)) == {"default", *factory.ACTIVATIONS}
    backbones = {f"{ce}{network}" for ce in ("", "ce") for network in detectors.RESNETS}
    assert set(get_args(Backbone)) == backbones


def network(name):
    """The network of a recipe, without its values."""
    with torch.device("meta"):
        return build_network(RECIPES[name], IMAGENET)


def sites(model, kind=NormCE2d):
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def blocks(name, stages):
    return [f"layer{i}.{j}" for i in stages for j in range(DEPTHS[name][i - 1])]


@pytest.mark.parametrize(
    ("name", "stages", "norm"),
    [
        ("resnet18_ce", (1, 2, 3, 4), "bn2"),
        ("resnet18_ce_conv1", (1, 2, 3, 4), "bn1"),
        ("resnet50_ce", (1, 2, 3), "bn3"),
        ("resnet50_ce2", (1, 2, 3), "bn2"),
        ("resnet101_ce", (1, 2), "bn3"),
        ("resnet101_ce2", (1, 2), "bn2"),
    ],
)
def test_ce_behind_another_convolution(name, stages, norm):
    model, kind = network(name), name.split("_")[0]
    found = sites(model)
    assert found == ["bn1", *(f"{block}.{norm}" for block in blocks(kind, stages))]
    for site in found[1:]:
        block, _, own = site.rpartition(".")
        convolution = model.get_submodule(f"{block}.{own.replace('bn', 'conv')}")
        assert model.get_submodule(site).ce.num_features == convolution.out_channels
    assert all(getattr(RECIPES[name], field) == value for field, value in APPENDIX_E.items())


@pytest.mark.parametrize("name", RESNETS)
def test_iternorm_in_the_first_norm_only(name):
    recipe, model = RECIPES[f"{name}_iternorm_first"], network(f"{name}_iternorm_first")
    assert sites(model, IterNorm2d) == ["bn1"]
    assert (model.bn1.group_size, model.bn1.newton_steps) == (64, 5)
    plain = network(f"{name}_plain")
    assert sites(model, nn.BatchNorm2d) == [s for s in sites(plain, nn.BatchNorm2d) if s != "bn1"]
    assert not sites(model)
    assert all(getattr(recipe, field) == value for field, value in APPENDIX_E.items())


@pytest.mark.parametrize(
    ("name", "norm", "count"), [("resnet18", "bn1", 4), ("resnet50", "bn2", 7),
                                ("resnet101", "bn2", 15)],
)  # fmt: skip
def test_switchable_whitening_where_its_authors_have_it(name, norm, count):
    """Written out after models/backbones/resnet.py of their repository."""
    model = network(f"{name}_sw_{count}")
    expected = ["bn1"]
    for stage, depth in zip((1, 2, 3), DEPTHS[name], strict=False):
        expected += [f"layer{stage}.{i}.{norm}" for i in range(1, depth) if i % 2 == 1]
    found = sites(model, SwitchableWhitening2d)
    assert found == expected
    assert len(found) == count
    layer = model.get_submodule(found[-1])
    assert (layer.group_size, layer.newton_steps) == (16, 5)
    assert layer.statistics == ("bw", "iw")
    norms = len(sites(network(f"{name}_plain"), nn.BatchNorm2d))
    assert len(sites(model, nn.BatchNorm2d)) == norms - count
    # and the rows in all norms are as they were
    assert len(sites(network(f"{name}_sw"), SwitchableWhitening2d)) == norms


@pytest.mark.parametrize("name", RESNETS)
@pytest.mark.parametrize(("row", "block"), [("released", "ce"), ("released_plain", "plain")])
def test_training_as_in_the_released_code(name, row, block):
    recipe = RECIPES[f"{name}_{row}"]
    assert (recipe.block, recipe.norm) == (block, "bn")
    assert (recipe.warmup_epochs, recipe.label_smoothing) == (5, 0.1)
    assert recipe.augment == "imagenet_colour_released"
    assert all(getattr(recipe, field) == value for field, value in APPENDIX_E.items())
    model = network(f"{name}_{row}")
    assert sites(model) == sites(network(f"{name}_{block}"))
    optimizer = build_optimizer(recipe, model, images_per_update=256)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 1e-4)
    assert not group["nesterov"]
    schedule = build_schedule(recipe, optimizer, updates_per_epoch=10)

    def rate(update):
        schedule.step_update(update)
        return group["lr"]

    # the formula of devkit/core/lr_scheduler.py
    expected = [0.0, 0.1 * 25 / 50, 0.1 * 49 / 50, 0.1, 0.1, 0.01, 1e-3, 1e-4]
    updates = (0, 25, 49, 50, 299, 300, 600, 900)
    assert [rate(update) for update in updates] == pytest.approx(expected)
    logits, labels = torch.randn(5, 1000), torch.randint(1000, (5,))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels)
    torch.testing.assert_close(build_loss(recipe)(logits, labels), smooth)


@pytest.mark.parametrize(("name", "added", "of_se"), [("resnet18", 89369, 90112),
                                                      ("resnet50", 2536164, 2530992)])  # fmt: skip
def test_ce_with_the_parameters_of_squeeze_excite(name, added, of_se):
    plain, se, small = (network(f"{name}_{row}") for row in ("plain", "se", "ce_small"))
    assert sites(small) == sites(network(f"{name}_ce"))
    assert sites(se, SEModule)
    own, other = (parameters(model) - parameters(plain) for model in (small, se))
    print(f"{name}: plain {parameters(plain):,}, SE adds {other:,}, small CE {own:,}")
    assert (own, other) == (added, of_se)
    # within 1 % of what SE adds, which is far closer for the whole network
    assert abs(own - other) / other < 0.01
    assert abs(parameters(small) - parameters(se)) / parameters(se) < 2e-4
    layer = small.layer1[0].bn2 if name == "resnet18" else small.layer1[0].bn3
    wide = int(RECIPES[f"{name}_ce_small"].rd_ratio * layer.ce.num_features)
    assert layer.ce.ir.fc1.out_features == max(8, wide)


def test_the_paper_gate_is_the_default():
    model = network("resnet50_ce")
    assert {site.ce.ir.fc1.out_features / site.ce.num_features for site in model.modules()
            if isinstance(site, NormCE2d)} == {RD_RATIO}  # fmt: skip
    assert ChannelEquilibrium2d(64).ir.fc1.out_features == RD_RATIO * 64


def test_positions_are_those_of_the_blocks():
    assert {name: found.positions for name, found in NETWORKS.items() if found.positions} == {
        "resnet18": (1, 2), "resnet50": (2, 3), "resnet101": (2, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet18_ce", {"ce_position": 3}, "ce_position=3 must be one of 1, 2"),
        ("resnet50_plain", {"ce_position": 2}, "ce_position=2 is for CE in the residual blocks"),
        ("vgg16_sw", {"norm_places": "published"}, "norm_places='published' is for"),
        ("resnet50_gn", {"norm_places": "published"}, "norm_places='published' is for"),
        ("resnet50_se", {"rd_ratio": 0.1}, "rd_ratio=0.1 is for the gate of ce and ir"),
        ("resnet50_ce", {"rd_ratio": 0.0}, "rd_ratio=0.0 must be 1e-06 to 1"),
        ("digits_ce", {"accuracy": float("nan")}, "accuracy=nan must be 0 to 1"),
        ("digits_ce", {"accuracy": 97.0}, "accuracy=97.0 must be 0 to 1"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        build_network(replace(RECIPES[name], **changes), IMAGENET)


# fields that runs of earlier versions do not have
NEW = ("ce_position", "rd_ratio", "norm_places")


def test_a_run_of_an_earlier_version_is_read_and_goes_on(tmp_path, monkeypatch):
    engine = trainer(TINY, tmp_path, few_digits())
    as_dict = Recipe.as_dict

    def earlier(recipe):
        return {name: value for name, value in as_dict(recipe).items() if name not in NEW}

    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "as_dict", earlier)
        engine.run()
    about = json.loads((tmp_path / ABOUT).read_text())
    assert not set(NEW) & set(about["recipe"])
    assert not set(NEW) & set(checkpoint.newest(tmp_path)[2]["recipe"])
    recipe, _ = read_run(tmp_path, Recipe)
    assert recipe == TINY
    assert trainer(TINY, tmp_path, few_digits()).resume().endswith("epochs are trained")
    changed = replace(TINY, rd_ratio=0.5)
    with pytest.raises(ValueError, match=r"rd_ratio was 0\.25 and is 0\.5; use another --out"):
        trainer(changed, tmp_path, few_digits()).resume()
