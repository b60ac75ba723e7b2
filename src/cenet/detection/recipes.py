"""Recipes of detectors: the rows of the paper's table, 128 images of COCO, and drawn shapes."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from typing_extensions import override

from cenet.detection.freezing import Setting
from cenet.detection.networks import Detector
from cenet.formatting import nearest
from cenet.train.recipes import (
    INFINITY,
    RANGES,
    Precision,
    Ranges,
    Schedule,
    TrainingRecipe,
)

Backbone = Literal["resnet18", "resnet50", "resnet101", "ceresnet18", "ceresnet50", "ceresnet101"]
Dataset = Literal["coco", "coco128", "shapes"]


@dataclass(frozen=True)
class DetectionRecipe(TrainingRecipe):
    """All settings that decide the numbers of a detector's training.

    Attributes:
        backbone: a ResNet of the paper, with CE or without.
        detector: Mask R-CNN, or Faster R-CNN, which has no masks.
        setting: which parameters of norms and CE are trained. frozen: none. synchronized: γ and β,
            with statistics over all processes; gate and λ are fixed. scratch: all.
        trainable_layers: number of stages of the backbone that are trained, counted from the last;
            3 freezes stem and first stage.
        channels: channels of the four stages, before the expansion of bottlenecks.
        small: narrow pyramid and heads, few and small proposals, for small images.
        dataset: coco and coco128 (128 images of COCO) are read from --data; shapes are synthetic.
        holdout: share of the training images to hold out. The run does not train on them, and is
            tested on them instead of on the test images. The choice depends only on the number of
            images and this share, not on the seed.
        min_sizes: lengths of the shorter side of an image; training draws one of them for each
            image, the test takes the last.
        max_size: largest length of the longer side.
        flip: mirror half of the training images.
    """

    command: ClassVar[str] = "cenet detect train"

    backbone: Backbone = "ceresnet50"
    detector: Detector = "mask_rcnn"
    setting: Setting = "frozen"
    trainable_layers: int = 3
    channels: tuple[int, ...] = (64, 128, 256, 512)
    small: bool = False
    dataset: Dataset = "coco"
    holdout: float = 0.0
    min_sizes: tuple[int, ...] = (800,)
    max_size: int = 1333
    flip: bool = True
    epochs: int = 24
    batch_size: int = 2
    lr: float = 0.02
    lr_batch: int = 16
    schedule: Schedule = "step"
    milestones: tuple[int, ...] = (16, 22)
    warmup_epochs: float = 0.07  # 500 updates on COCO
    precision: Precision = "float32"

    @override
    def ranges(self) -> Ranges:
        return (
            *RANGES,
            ("trainable_layers", 0, 5),
            ("max_size", 32, INFINITY),
            ("holdout", 0, 0.999999),
        )

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with."""
        super().__post_init__()
        if not self.min_sizes or min(self.min_sizes) < 32 or max(self.min_sizes) > self.max_size:
            raise ValueError(
                f"min_sizes={self.min_sizes!r} must be lengths from 32 to max_size={self.max_size}"
            )
        if len(self.channels) != 4 or min(self.channels) < 16:
            raise ValueError(f"channels={self.channels!r} must be four numbers, at least 16")


_COCO = DetectionRecipe()
# to try a classifier's weights in a detector, within a minute on a GPU
_COCO128 = replace(
    _COCO,
    dataset="coco128",
    holdout=0.25,
    min_sizes=(320,),
    max_size=533,
    epochs=60,
    batch_size=8,
    lr_batch=8,
    schedule="cosine",
    warmup_epochs=5.0,
    clip_grad=10.0,
)
_SHAPES = DetectionRecipe(
    backbone="ceresnet18",
    setting="scratch",
    trainable_layers=5,
    channels=(32, 48, 64, 96),
    small=True,
    dataset="shapes",
    min_sizes=(96,),
    max_size=160,
    epochs=10,
    batch_size=8,
    lr=0.02,
    lr_batch=8,
    schedule="cosine",
    warmup_epochs=1.0,
    clip_grad=10.0,
)
_ROWS: dict[str, dict[str, Any]] = {
    "resnet50_plain": {"backbone": "resnet50"},
    "resnet50_ce": {"backbone": "ceresnet50"},
    "resnet50_syncce": {"backbone": "ceresnet50", "setting": "synchronized"},
    "resnet101_plain": {"backbone": "resnet101"},
    "resnet101_ce": {"backbone": "ceresnet101"},
    "resnet101_syncce": {"backbone": "ceresnet101", "setting": "synchronized"},
}
RECIPES = {
    **{name: replace(_COCO, **changes) for name, changes in _ROWS.items()},
    "coco128_plain": replace(_COCO128, backbone="resnet50"),
    "coco128_ce": _COCO128,
    "shapes": _SHAPES,
    "shapes_plain": replace(_SHAPES, backbone="resnet18"),
}


def find_recipe(name: str) -> DetectionRecipe:
    """The recipe of this name; ValueError with the nearest names if there is none."""
    if name not in RECIPES:
        raise ValueError(
            f"{name!r} is not a detection recipe{nearest(name, RECIPES)}; use one of "
            f"{', '.join(RECIPES)}"
        )
    return RECIPES[name]
