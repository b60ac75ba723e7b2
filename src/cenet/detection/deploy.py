"""Trained detectors for inference: folded backbones, and ONNX of the backbone."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cenet.detection.freezing import apply_setting_
from cenet.export import write_onnx
from cenet.folding import fold_ce


def fold_detector(network: nn.Module) -> nn.Module:
    """Copy a detector with CE into its deploy form: the same detections, no norms in the backbone.

    Args:
        network: a detector of `cenet.detection`, in evaluation mode. It is not changed.

    Raises:
        ValueError: the network is in training mode, or has no CE.
    """
    folded: Any = deepcopy(network)
    # synchronized norms of another class become those that folding knows
    apply_setting_(folded.backbone.body, "frozen", 0)
    folded.backbone = fold_ce(folded.backbone)
    deployed: nn.Module = folded
    return deployed


def export_backbone(network: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write ONNX of the folded backbone and its pyramid, for images of one size and any batch size.

    Whole detectors are not exported: torch's exporter fails on those of torchvision
    (pytorch/vision issues 9306 and 9462).

    Args:
        network: a detector with CE, in evaluation mode.
        path: file to write.
        example: normalized images (N, 3, H, W); H and W are multiples of 32.
    """
    backbone = fold_detector(network).get_submodule("backbone").requires_grad_(False)
    write_onnx(backbone, path, example, ["0", "1", "2", "3", "pool"])
