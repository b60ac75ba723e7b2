"""Faster and Mask R-CNN of torchvision on the ResNets of the paper, with CE or without."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from cenet.checkpoints import load_state_, read_state
from cenet.detection.freezing import Setting, apply_setting_
from cenet.models import create_model

Detector = Literal["mask_rcnn", "faster_rcnn"]
RESNETS = ("resnet18", "resnet50", "resnet101")
COCO_CLASSES = 91  # the ids 1 to 90, and 0 for the background
POOLED = 7  # side of the map that the box head sees
# arguments of torchvision's detectors for images of about 100×100 pixels, on a CPU
SMALL: dict[str, Any] = {
    "rpn_pre_nms_top_n_train": 200,
    "rpn_pre_nms_top_n_test": 100,
    "rpn_post_nms_top_n_train": 100,
    "rpn_post_nms_top_n_test": 50,
    "rpn_batch_size_per_image": 64,
    "box_batch_size_per_image": 32,
    "box_detections_per_img": 20,
}
SMALL_ANCHORS = (12, 24, 48, 72, 96)
SMALL_HIDDEN = 128


def ce_fpn_backbone(
    name: str,
    *,
    setting: Setting = "frozen",
    trainable_layers: int = 3,
    checkpoint: str | Path | None = None,
    out_channels: int = 256,
    **kwargs: Any,
) -> BackboneWithFPN:
    """A ResNet and a feature pyramid, for any detector of torchvision.

    Args:
        name: ceresnet18, ceresnet50 or ceresnet101; without "ce", the network without CE.
        setting: decides which parameters of norms and CE are trained (see `apply_setting_`).
        trainable_layers: number of stages of the ResNet that are trained, counted from the last.
        checkpoint: weights of this network as a classifier; its last layer is not loaded.
        out_channels: number of channels of the pyramid.
        **kwargs: arguments of `cenet.models.create_model`.

    Raises:
        ValueError: there is no such network or setting, or the checkpoint is of another network.
    """
    plain = name.removeprefix("ce")
    if plain not in RESNETS:
        names = ", ".join(f"ce{resnet}, {resnet}" for resnet in RESNETS)
        raise ValueError(f"{name!r} is not a backbone; use one of {names}")
    body: Any = create_model(plain, "plain" if name == plain else "ce", num_classes=0, **kwargs)
    if checkpoint is not None:
        _load_classifier_(body, name, checkpoint)
    apply_setting_(body, setting, trainable_layers)
    channels = [info["num_chs"] for info in body.feature_info[1:]]
    layers = {f"layer{index + 1}": str(index) for index in range(len(channels))}
    return BackboneWithFPN(body, layers, channels, out_channels)


def _load_classifier_(body: nn.Module, name: str, checkpoint: str | Path) -> None:
    state = {key: v for key, v in read_state(checkpoint).items() if not key.startswith("fc.")}
    broken = [key for key, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{checkpoint} has values that are not finite: {', '.join(broken)}")
    try:
        load_state_(body, state)
    except ValueError as error:
        plain = name.startswith("ce") and not any(".ce." in key for key in state)
        hint = f"; it has no CE, so use the backbone {name.removeprefix('ce')}" if plain else ""
        raise ValueError(f"{checkpoint} is not a checkpoint of {name}: {error}{hint}") from error


def maskrcnn_ceresnet50_fpn(num_classes: int = COCO_CLASSES, **kwargs: Any) -> MaskRCNN:
    """Mask R-CNN on CE-ResNet-50, with random weights unless a `checkpoint` is given.

    Args:
        num_classes: number of classes, including the background, which is class 0.
        **kwargs: arguments of `detector` (setting, trainable_layers, checkpoint, ...) and of
            torchvision's MaskRCNN (min_size, max_size, box_score_thresh, ...).
    """
    return detector("mask_rcnn", "ceresnet50", num_classes, **kwargs)


def maskrcnn_ceresnet101_fpn(num_classes: int = COCO_CLASSES, **kwargs: Any) -> MaskRCNN:
    """Mask R-CNN on CE-ResNet-101, with random weights unless a `checkpoint` is given.

    Args:
        num_classes: number of classes, including the background, which is class 0.
        **kwargs: arguments of `detector` (setting, trainable_layers, checkpoint, ...) and of
            torchvision's MaskRCNN (min_size, max_size, box_score_thresh, ...).
    """
    return detector("mask_rcnn", "ceresnet101", num_classes, **kwargs)


def fasterrcnn_ceresnet50_fpn(num_classes: int = COCO_CLASSES, **kwargs: Any) -> FasterRCNN:
    """Faster R-CNN on CE-ResNet-50, with random weights unless a `checkpoint` is given.

    Args:
        num_classes: number of classes, including the background, which is class 0.
        **kwargs: arguments of `detector` (setting, trainable_layers, checkpoint, ...) and of
            torchvision's FasterRCNN (min_size, max_size, box_score_thresh, ...).
    """
    return detector("faster_rcnn", "ceresnet50", num_classes, **kwargs)


def fasterrcnn_ceresnet101_fpn(num_classes: int = COCO_CLASSES, **kwargs: Any) -> FasterRCNN:
    """Faster R-CNN on CE-ResNet-101, with random weights unless a `checkpoint` is given.

    Args:
        num_classes: number of classes, including the background, which is class 0.
        **kwargs: arguments of `detector` (setting, trainable_layers, checkpoint, ...) and of
            torchvision's FasterRCNN (min_size, max_size, box_score_thresh, ...).
    """
    return detector("faster_rcnn", "ceresnet101", num_classes, **kwargs)


def detector(
    kind: Detector,
    backbone: str,
    num_classes: int = COCO_CLASSES,
    *,
    setting: Setting = "frozen",
    trainable_layers: int = 3,
    checkpoint: str | Path | None = None,
    small: bool = False,
    backbone_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A detector of torchvision, with random weights unless a `checkpoint` is given.

    The settings frozen and synchronized leave parts of the backbone untrained: use them with a
    checkpoint.

    Args:
        kind: mask_rcnn or faster_rcnn.
        backbone: name of the network, as in `ce_fpn_backbone`.
        setting: as in `ce_fpn_backbone`.
        trainable_layers: as in `ce_fpn_backbone`.
        checkpoint: as in `ce_fpn_backbone`.
        num_classes: number of classes, including the background, which is class 0.
        small: use narrow pyramid and heads, and few and small proposals, for small images.
        backbone_args: arguments of `cenet.models.create_model`.
        **kwargs: arguments of torchvision's class.
    """
    make = {"mask_rcnn": MaskRCNN, "faster_rcnn": FasterRCNN}.get(kind)
    if make is None:
        raise ValueError(f"kind={kind!r} must be mask_rcnn or faster_rcnn")
    pyramid = ce_fpn_backbone(
        backbone,
        setting=setting,
        trainable_layers=trainable_layers,
        checkpoint=checkpoint,
        out_channels=64 if small else 256,
        **(backbone_args or {}),
    )
    if small:
        heads = _small_heads(kind, pyramid.out_channels, num_classes)
        model = make(pyramid, **{**SMALL, **heads, **kwargs})
    else:
        model = make(pyramid, num_classes, **kwargs)
    for module in model.modules():
        if isinstance(module, MultiScaleRoIAlign):
            _set_scales(module)
    return model


def _set_scales(pool: MultiScaleRoIAlign) -> None:
    """Tell a pooling layer the strides of the pyramid: 4, 8, 16 and 32.

    Otherwise it computes them from the first images it sees and keeps them. For small images they
    depend on the image size, so a resumed run could continue with other strides.
    """
    with torch.device("cpu"):
        features = {str(level): torch.zeros(1, 1, 256 >> level, 256 >> level) for level in range(4)}
        pool(features, [torch.zeros(0, 4)], [(1024, 1024)])


def _small_heads(kind: Detector, channels: int, num_classes: int) -> dict[str, Any]:
    heads: dict[str, Any] = {
        "rpn_anchor_generator": AnchorGenerator(
            tuple((size,) for size in SMALL_ANCHORS), ((0.5, 1.0, 2.0),) * len(SMALL_ANCHORS)
        ),
        "box_head": TwoMLPHead(channels * POOLED**2, SMALL_HIDDEN),
        "box_predictor": FastRCNNPredictor(SMALL_HIDDEN, num_classes),
    }
    if kind == "mask_rcnn":
        heads["mask_head"] = MaskRCNNHeads(channels, (channels,) * 2, 1)
        heads["mask_predictor"] = MaskRCNNPredictor(channels, channels, num_classes)
    return heads
