"""Object detection and instance segmentation: torchvision's R-CNNs on ResNets with CE."""

from cenet.extras import require

require("detection")

from cenet.detection.deploy import export_backbone, fold_detector
from cenet.detection.freezing import apply_setting_
from cenet.detection.job import load_detector
from cenet.detection.networks import (
    ce_fpn_backbone,
    detector,
    fasterrcnn_ceresnet50_fpn,
    fasterrcnn_ceresnet101_fpn,
    maskrcnn_ceresnet50_fpn,
    maskrcnn_ceresnet101_fpn,
)

__all__ = [
    "apply_setting_",
    "ce_fpn_backbone",
    "detector",
    "export_backbone",
    "fasterrcnn_ceresnet50_fpn",
    "fasterrcnn_ceresnet101_fpn",
    "fold_detector",
    "load_detector",
    "maskrcnn_ceresnet50_fpn",
    "maskrcnn_ceresnet101_fpn",
]
