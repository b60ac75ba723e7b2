"""Recipes of detection are the paper's, and detectors are what their names say."""

import json
from dataclasses import replace

import pytest
import torch
from torchvision.models.detection import FasterRCNN, MaskRCNN

import cenet.detection as detection
from cenet import NormCE2d
from cenet.detection.recipes import RECIPES, DetectionRecipe, find_recipe

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


def test_the_recipes_for_128_images_differ_in_ce_alone():
    plain, ce = RECIPES["coco128_plain"], RECIPES["coco128_ce"]
    assert replace(ce, backbone="resnet50") == plain
    assert (ce.setting, ce.trainable_layers, ce.holdout) == ("frozen", 3, 0.25)


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


def test_recipes_go_through_json_and_name_what_is_wrong():
    for recipe in RECIPES.values():
        assert DetectionRecipe.from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe
    with pytest.raises(ValueError, match=r"'shape' is not a detection recipe \(did you mean shap"):
        find_recipe("shape")
    with pytest.raises(ValueError, match=r"min_sizes=\(2000,\) must be lengths from 32 to max_s"):
        DetectionRecipe(min_sizes=(2000,))
    with pytest.raises(ValueError, match=r"setting='sync' must be one of frozen, synchronized"):
        DetectionRecipe(setting="sync")
