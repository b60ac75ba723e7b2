"""A small detector, a planted run, a ResNet-18 over lists of batches: for cenet.detection."""

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from _reference import Block, Parameters
from _reference_list import equilibrium, rows
from cenet import NormCE2d
from cenet.detection import detector
from cenet.detection.data import SceneSplit, scenes
from cenet.detection.recipes import RECIPES
from cenet.detection.synthetic import draw_shapes

CHANNELS = (16, 24, 32, 48)
STEM = 64  # channels of timm's stem


def small_detector(backbone="ceresnet18", kind="mask_rcnn", **kwargs):
    torch.manual_seed(0)
    arguments = {"min_size": 64, "max_size": 96, "small": True, **kwargs}
    return detector(kind, backbone, 4, backbone_args={"channels": CHANNELS}, **arguments)


def few_shapes(train=12, test=4) -> SceneSplit:
    parts = []
    for seed, (name, count) in enumerate((("train", train), ("test", test))):
        pixels, coco = draw_shapes(count, seed)
        parts.append(scenes(name, coco, pixels=pixels))
    return SceneSplit(*parts)


def batch(count=3, seed=0):
    """Images of different sizes with one box and mask each, and one without any."""
    random = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for index in range(count):
        height, width = 64 + 8 * index, 80 - 8 * index
        images.append(torch.rand(3, height, width, generator=random))
        some = 0 if index == count - 1 else 1
        masks = torch.zeros(some, height, width, dtype=torch.uint8)
        masks[:, 10:40, 8:44] = 1
        targets.append(
            {
                "boxes": torch.tensor([[8.0, 10.0, 44.0, 40.0]])[:some],
                "labels": torch.tensor([1 + index % 3])[:some],
                "masks": masks,
            }
        )
    return images, targets


SQUARE = [10.0, 10.0, 30.0, 10.0, 30.0, 30.0, 10.0, 30.0]


def annotation(**changes):
    return {
        "id": 0, "image_id": 1, "category_id": 3, "bbox": [10.0, 10.0, 20.0, 20.0],
        "segmentation": [SQUARE], "area": 400.0, "iscrowd": 0, **changes,
    }  # fmt: skip


def coco(*annotations, images=1):
    return {
        "images": [
            {"id": number + 1, "file_name": f"{number + 1}.png", "width": 60, "height": 40}
            for number in range(images)
        ],
        "annotations": list(annotations),
        "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}],
    }


def box(left, top, width, height, score, image=1, category=3):
    corners = [left, top, left + width, top, left + width, top + height, left, top + height]
    return {
        "image_id": image, "category_id": category, "bbox": [left, top, width, height],
        "score": score, "segmentation": [[float(value) for value in corners]],
    }  # fmt: skip


TINY = replace(
    RECIPES["shapes"],
    channels=(16, 16, 16, 16),
    min_sizes=(48, 64),
    max_size=96,
    epochs=2,
    batch_size=3,
    lr_batch=3,
    lr=0.01,
    warmup_epochs=0.5,
)


COMMIT = "c5ed317"


def write_detection_run(folder, *, epochs=3, recipe=TINY, test_every=1):
    """A folder as `cenet detect train` leaves it, without weights; the numbers are made up."""
    folder.mkdir(parents=True)
    recipe = replace(recipe, epochs=epochs)
    inputs = few_shapes(1, 1).inputs().as_dict()
    facts = {"cenet": "0.1.0", "commit": COMMIT, "device": "cpu x86_64", "command": ["cenet"]}
    about = {"command": recipe.command, "recipe": recipe.as_dict(), "inputs": inputs}
    (folder / "run.json").write_text(json.dumps(about | {"environment": facts}))
    rows = [detection_row(epoch, tested=epoch % test_every == 0) for epoch in range(1, epochs + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def detection_row(epoch, *, tested=True):
    names = ("train_classifier", "train_box_reg", "train_objectness", "train_rpn_box_reg")
    losses = {name: (1 + place) / epoch for place, name in enumerate((*names, "train_mask"))}
    measures = {
        f"{kind}_{measure}": (1 - 1 / (epoch + place)) if tested else None
        for kind in ("box", "mask")
        for place, measure in enumerate(("ap", "ap50", "ap75"), start=1)
    }
    return {
        "epoch": epoch, "updates": 4 * epoch, "lr": 0.01, "train_loss": sum(losses.values()),
        **losses, **measures, "seconds": 1.0, "images_per_second": 12.0,
    }  # fmt: skip


def as_found(record, score=0.9, **changes):
    """An object as a network would have found it."""
    kept = {name: record[name] for name in ("image_id", "category_id", "bbox", "segmentation")}
    return {**kept, "score": score, **changes}


# a ResNet-18 over a list of batches whose images differ in size, from its parameters alone

Maps = list[Tensor]


def _norm(layer: nn.Module, maps: Maps, seen: dict[str, Tensor], name: str) -> Maps:
    """Batch norm, with CE if the layer has it, over all maps together."""
    if isinstance(layer, NormCE2d):
        norm, ce = layer.norm, layer.ce
        p = Parameters(
            gamma=norm.weight, beta=norm.bias, w1=ce.ir.fc1.weight, ln_weight=ce.ir.norm.weight,
            ln_bias=ce.ir.norm.bias, w2=ce.ir.fc2.weight, mix_logit=ce.mix_logit.squeeze(0),
        )  # fmt: skip
        block = Block(pool=ce.bd.pool)
        found = equilibrium(maps, p, block)
        seen[f"{name}.norm.running_mean"] = found.mean
        seen[f"{name}.norm.running_var"] = found.unbiased_var
        seen[f"{name}.ce.ir.running_inv_std"] = found.inv_std
        seen[f"{name}.ce.bd.running_inv_sqrt"] = _padded(found.inv_sqrt, ce.bd.group_size)
        return found.outputs
    values = rows(maps)
    mean, var = values.mean(1), values.var(1, correction=0)
    seen[f"{name}.running_mean"] = mean
    seen[f"{name}.running_var"] = var * values.shape[1] / (values.shape[1] - 1)
    scale = (layer.weight / (var + layer.eps).sqrt())[:, None, None]
    return [(x - mean[:, None, None]) * scale + layer.bias[:, None, None] for x in maps]


def _padded(operators: list[Tensor], size: int) -> Tensor:
    whole = torch.eye(size, dtype=torch.float64).repeat(len(operators), 1, 1)
    for place, operator in enumerate(operators):
        whole[place, : len(operator), : len(operator)] = operator.detach()
    return whole


def _each(layer: Callable[[Tensor], Tensor], maps: Maps) -> Maps:
    return [layer(x) for x in maps]


def resnet_over_list(body: nn.Module, maps: Maps) -> tuple[list[Maps], dict[str, Tensor]]:
    """Feature maps of the four stages, and the statistics that every norm and CE must see."""
    seen: dict[str, Tensor] = {}
    maps = _each(torch.relu, _norm(body.bn1, _each(body.conv1, maps), seen, "bn1"))
    maps = _each(body.maxpool, maps)
    stages = []
    for number in range(1, 5):
        for index, block in enumerate(getattr(body, f"layer{number}")):
            name = f"layer{number}.{index}"
            inner = _norm(block.bn1, _each(block.conv1, maps), seen, f"{name}.bn1")
            inner = _each(block.conv2, _each(torch.relu, inner))
            inner = _norm(block.bn2, inner, seen, f"{name}.bn2")
            if block.downsample is not None:
                conv, norm = block.downsample
                maps = _norm(norm, _each(conv, maps), seen, f"{name}.downsample.1")
            maps = [torch.relu(a + b) for a, b in zip(inner, maps, strict=True)]
        stages.append(maps)
    return stages, seen
