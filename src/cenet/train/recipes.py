"""What to train and how: a frozen dataclass for each row of Appendix E.

A recipe says everything that moves a number. Where and on what it runs (folders, device, workers)
is not in it.
"""

from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

Block = Literal["plain", "se", "bd", "ir", "ce"]
Norm = Literal["bn", "gn", "in", "ln", "sn", "iternorm", "sw"]
Act = Literal["default", "relu", "elu", "leaky_relu"]
Dataset = Literal["imagenet", "cifar10", "digits"]
Schedule = Literal["step", "cosine", "poly"]
Augment = Literal["none", "crop_flip", "imagenet"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        network: resnet18, resnet50, resnet101, mobilenetv2_100, shufflenetv2_x0_5,
            shufflenetv2_x1_0, vgg16 or vgg6.
        block: what follows the norms of the paper's places.
        norm: all norms of the network.
        act: all activations; default leaves the network's own.
        dataset: imagenet and cifar10 are folders you bring, digits is embedded.
        image_size: height and width.
        epochs: passes over the training images.
        batch_size: images per process and step.
        accumulate: steps whose gradients are added before an update.
        lr: learning rate for `lr_batch` images per update; it grows with their number.
        lr_batch: images per update that `lr` is for.
        momentum: of SGD.
        weight_decay: on every parameter but λ and α, norms included (decayed γ are what makes
            channels inhibited).
        decay_norms: False leaves norms and biases out of weight decay.
        schedule: step, cosine or poly.
        milestones: epochs after which the step schedule multiplies by `gamma`.
        gamma: of the step schedule.
        power: of the poly schedule.
        warmup_epochs: of linear warm-up from 0.
        label_smoothing: of the loss.
        label_corruption: share of training images with a wrong label.
        mixup: α of mixup, 0 for none.
        augment: of the training images.
        clip_grad: largest norm of the gradient, 0 for no limit.
        ema: decay of the averaged weights that are evaluated, 0 for none.
        precision: of autocast.
        sync_ce: statistics of norms and CE over all processes instead of each alone.
        seed: of initial weights, order, augmentation and label corruption.
        accuracy: top-1 test accuracy that the recipe is known to reach, if it is.
    """

    network: str
    block: Block = "ce"
    norm: Norm = "bn"
    act: Act = "default"
    dataset: Dataset = "imagenet"
    image_size: int = 224
    epochs: int = 100
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 0.1
    lr_batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms: bool = True
    schedule: Schedule = "step"
    milestones: tuple[int, ...] = (30, 60, 90)
    gamma: float = 0.1
    power: float = 1.0
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0
    label_corruption: float = 0.0
    mixup: float = 0.0
    augment: Augment = "imagenet"
    clip_grad: float = 0.0
    ema: float = 0.0
    precision: Precision = "float32"
    sync_ce: bool = False
    seed: int = 0
    accuracy: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with, all in one ValueError."""
        problems = [*self._wrong_choices(), *self._wrong_numbers()]
        if problems:
            raise ValueError("; ".join(problems))

    def _wrong_choices(self) -> list[str]:
        choices = {
            field.name: get_args(field.type)
            for field in fields(self)
            if get_origin(field.type) is Literal
        }
        choices["network"] = NETWORK_NAMES
        return [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(valid)}"
            + nearest(getattr(self, name), valid)
            for name, valid in choices.items()
            if getattr(self, name) not in valid
        ]

    def _wrong_numbers(self) -> list[str]:
        problems = []
        for names, least, most in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if not (least <= value <= most and value < INFINITY):  # a NaN is not, either
                    limits = f"at least {least}" if most == INFINITY else f"{least} to {most}"
                    problems.append(f"{name}={value!r} must be {limits}")
        if self.mixup > 0 and self.batch_size % 2:
            problems.append(f"batch_size={self.batch_size} must be even, because mixup makes pairs")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones or [1]) < 1:
            problems.append(f"milestones={self.milestones!r} must be epochs in growing order")
        return problems

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types that JSON has."""
        return {**asdict(self), "milestones": list(self.milestones)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """The recipe that `as_dict` came from; ValueError for another version's."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or not isinstance(values.get("milestones", []), list):
            raise ValueError(f"not a recipe of this version of cenet: {unknown or values}")
        return cls(**{**values, "milestones": tuple(values.get("milestones", (30, 60, 90)))})


INFINITY = float("inf")
RANGES: tuple[tuple[str, float, float], ...] = (
    ("epochs batch_size accumulate lr_batch", 1, INFINITY),
    ("image_size", 8, INFINITY),
    ("lr", 1e-12, INFINITY),
    ("weight_decay warmup_epochs clip_grad mixup power", 0, INFINITY),
    ("momentum label_smoothing ema", 0, 0.999999),
    ("label_corruption gamma", 0, 1),
    ("seed", 0, 2**31),
)
NETWORK_NAMES = (
    "resnet18",
    "resnet50",
    "resnet101",
    "mobilenetv2_100",
    "shufflenetv2_x0_5",
    "shufflenetv2_x1_0",
    "vgg16",
    "vgg6",
)

# Appendix E, with CE. Each GPU has 32 images (ShuffleNetV2: 128), and there are eight
_RESNET = Recipe("resnet50")
_MOBILENET = replace(
    _RESNET, network="mobilenetv2_100", epochs=150, lr=0.05, weight_decay=4e-5, schedule="cosine"
)
_SHUFFLENET = replace(
    _RESNET,
    network="shufflenetv2_x1_0",
    epochs=240,
    batch_size=128,
    lr=0.5,
    lr_batch=1024,
    weight_decay=4e-5,
    schedule="poly",
    warmup_epochs=5.0,
    label_smoothing=0.1,
)
_VGG = Recipe(
    "vgg16",
    dataset="cifar10",
    image_size=32,
    epochs=160,
    batch_size=256,
    weight_decay=5e-4,
    milestones=(60, 120),
    warmup_epochs=5.0,
    augment="crop_flip",
)
_DIGITS = Recipe(
    "vgg6",
    dataset="digits",
    image_size=8,
    epochs=15,
    batch_size=64,
    lr=0.03,
    lr_batch=64,
    weight_decay=5e-4,
    schedule="cosine",
    warmup_epochs=3.0,
    augment="none",
    accuracy=0.98,
)
_BASES = {
    "resnet18": replace(_RESNET, network="resnet18"),
    "resnet50": _RESNET,
    "resnet101": replace(_RESNET, network="resnet101"),
    "mobilenetv2_100": _MOBILENET,
    "shufflenetv2_x0_5": replace(_SHUFFLENET, network="shufflenetv2_x0_5"),
    "shufflenetv2_x1_0": _SHUFFLENET,
    "vgg16": _VGG,
    "digits": _DIGITS,
}
# the rows a network is compared with
_ROWS: dict[str, dict[str, Any]] = {
    **{block: {"block": block} for block in get_args(Block)},
    **{
        norm: {"block": "plain", "norm": norm}
        for norm in ("iternorm", "sw", "sn", "gn", "in", "ln")
    },
    **{f"{norm}_ce": {"norm": norm} for norm in ("sn", "gn", "in", "ln")},
    **{
        f"{act}{suffix}": {"block": block, "act": act}
        for act in ("elu", "leaky_relu")
        for suffix, block in (("", "plain"), ("_ce", "ce"))
    },
}
RECIPES = {
    f"{name}_{row}": replace(base, **changes)
    for name, base in _BASES.items()
    for row, changes in _ROWS.items()
}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ValueError with the nearest names if there is none."""
    if name not in RECIPES:
        raise ValueError(
            f"{name!r} is not a recipe{nearest(name, RECIPES)}; `cenet recipes` lists them"
        )
    return RECIPES[name]


def nearest(name: object, valid: Any) -> str:
    """A question after those of the valid names that look like `name`, or nothing."""
    close = get_close_matches(str(name), list(valid), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
