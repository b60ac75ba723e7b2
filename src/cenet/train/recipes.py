"""Recipes: the base class of all, and those of classifiers (Appendix E, short runs, digits).

A recipe holds every setting that changes a number. Folders, device and worker processes are not
part of it: those are `RunOptions`. A run writes its recipe into run.json, and `read_run` reads it.
"""

import sys
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import tyro
from typing_extensions import override

from cenet.data.datasets import Augment, CorruptionTo, Dataset, InputSpec
from cenet.files import read_json
from cenet.formatting import nearest, percent
from cenet.run_folder import ABOUT, CONFIG

Schedule = Literal["step", "cosine", "poly", "tanh", "wsd", "rsqrt", "constant"]
Precision = Literal["float32", "bfloat16", "float16"]
Ranges = tuple[tuple[str, float, float], ...]
R = TypeVar("R", bound="TrainingRecipe")
INFINITY = float("inf")
LARGEST = sys.float_info.max  # files may hold whole numbers beyond it
RANGES: Ranges = (
    ("epochs batch_size accumulate lr_batch", 1, INFINITY),
    ("lr", 1e-12, INFINITY),
    ("weight_decay warmup_epochs clip_grad power", 0, INFINITY),
    ("momentum", 0, 0.999999),
    ("gamma", 0, 1),
    ("seed", 0, 2**31),
)
Block = Literal["plain", "se", "bd", "ir", "ce"]
Norm = Literal["bn", "gn", "in", "ln", "sn", "iternorm", "sw"]
Act = Literal["default", "relu", "elu", "leaky_relu"]
CEStart = Literal["paper", "identity"]
NormPlaces = Literal["all", "published"]
RD_RATIO = 0.25  # width of the gate in the paper
# optimizers of timm whose state has more than tensors, numbers and names
UNSAVED = ("kron", "adafactorbv", "cadafactorbv")
SGD = "momentum"  # timm's name of SGD with momentum; its "sgd" is Nesterov's


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Optimizer, schedule and precision settings shared by all recipes.

    Attributes:
        epochs: passes over the training images.
        batch_size: images per process and step.
        accumulate: batches whose gradients are added up before an update.
        lr: learning rate of updates with `lr_batch` images. With other numbers of images, the rate
            is lr × (images per update) / lr_batch.
        lr_batch: images per update with which the learning rate is exactly `lr`.
        opt: optimizer, by its name in timm: adamw, lamb, … momentum is SGD with momentum; timm's
            sgd and nesterov are SGD with Nesterov momentum.
        momentum: momentum of the optimizers that have one, SGD among them.
        weight_decay: weight decay. The parameters λ and α of CE are never decayed.
        decay_norms: apply weight decay to norms and biases too, as in the paper, where decay of γ
            inhibits channels.
        schedule: learning rate after the warm-up. step follows `milestones`; cosine, poly and tanh
            fall to 0; wsd is constant, rsqrt falls with the inverse square root of time, and both
            fall to 0 in the last fifth of the updates; constant does not change.
        milestones: epochs after which the step schedule multiplies the learning rate by `gamma`.
        gamma: factor of the step schedule.
        power: exponent of the poly schedule.
        warmup_epochs: epochs in which the learning rate grows linearly from 0.
        clip_grad: largest norm of the gradient, 0 for no limit.
        precision: precision of autocast.
        seed: seed of all random numbers.
    """

    # the command that runs recipes of this class
    command: ClassVar[str] = "cenet train"

    epochs: int = 100
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 0.1
    lr_batch: int = 256
    opt: str = SGD
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms: bool = True
    schedule: Schedule = "step"
    milestones: tuple[int, ...] = (30, 60, 90)
    gamma: float = 0.1
    power: float = 1.0
    warmup_epochs: float = 0.0
    clip_grad: float = 0.0
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise one ValueError that lists all invalid values."""
        # values of other types, as in an edited file, could not be compared
        problems = self._wrong_types() or [
            *self._wrong_choices(), *self._wrong_numbers(), *self._wrong_optimizer()
        ]  # fmt: skip
        if problems:
            raise ValueError("; ".join(problems))

    def choices(self) -> dict[str, tuple[str, ...]]:
        """The valid values of fields that are one of a few names."""
        return {
            field.name: get_args(field.type)
            for field in fields(self)
            if get_origin(field.type) is Literal
        }

    def ranges(self) -> Ranges:
        """Names of numeric fields with their smallest and largest valid values."""
        return RANGES

    def _wrong_types(self) -> list[str]:
        return [
            f"{field.name}={getattr(self, field.name)!r:.40} must be {_in_words(field.type)}"
            for field in fields(self)
            if not _is_of(getattr(self, field.name), field.type)
        ]

    def _wrong_choices(self) -> list[str]:
        return [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(valid)}"
            + nearest(getattr(self, name), valid)
            for name, valid in self.choices().items()
            if getattr(self, name) not in valid
        ]

    def _wrong_numbers(self) -> list[str]:
        problems = []
        for names, least, most in self.ranges():
            for name in names.split():
                value = getattr(self, name)
                if not (least <= value <= most and value <= LARGEST):  # also refuses NaN
                    limits = f"{least} to {most}"
                    if most == INFINITY:
                        finite = isinstance(value, int) and value <= LARGEST
                        limits = f"at least {least}" + ("" if finite else ", and finite")
                    problems.append(f"{name}={value!r:.40} must be {limits}")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones or [1]) < 1:
            problems.append(f"milestones={self.milestones!r} must be epochs in increasing order")
        return problems

    def _wrong_optimizer(self) -> list[str]:
        if self.opt == SGD:  # importing timm takes seconds
            return []
        from timm.optim import (  # type: ignore[attr-defined]
            get_optimizer_info,
            list_optimizers,
        )

        valid = [str(name) for name in list_optimizers()]
        if self.opt not in valid:
            return [
                f"opt={self.opt!r} is not an optimizer of timm{nearest(self.opt, valid)}; "
                "timm.optim.list_optimizers() lists them"
            ]
        info = get_optimizer_info(self.opt)
        if info.second_order:
            return [f"opt={self.opt} needs second derivatives, which training does not compute"]
        if self.opt.startswith(UNSAVED):
            return [f"opt={self.opt} has a state that checkpoints cannot hold; use another"]
        package = info.opt_class.partition(".")[0] if isinstance(info.opt_class, str) else "timm"
        if find_spec(package) is None:
            return [f"opt={self.opt} needs a package that is not installed: pip install {package}"]
        return []

    def about_warmup(self) -> str | None:
        """A line about a warm-up that takes the whole run; None if it ends earlier."""
        if self.warmup_epochs < self.epochs:
            return None
        plural = "s" * (self.warmup_epochs != 1)
        return (
            f"the warm-up of {self.warmup_epochs:g} epoch{plural} takes the whole run of "
            f"{self.epochs}: "
            f"the learning rate only grows, to {percent(self.epochs / self.warmup_epochs)} of its "
            f"value; --warmup-epochs {self.epochs / 4:g} would be a quarter of the run"
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types of JSON."""
        values = asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of the fields that have one, in types of JSON."""
        return {
            field.name: list(field.default) if isinstance(field.default, tuple) else field.default
            for field in fields(cls)
            if field.default is not MISSING
        }

    @classmethod
    def from_dict(cls: type[R], values: dict[str, Any]) -> R:
        """The recipe that `as_dict` wrote; ValueError if another version of cenet wrote it."""
        wrong = sorted(set(values) - {field.name for field in fields(cls)})
        if wrong:
            raise ValueError(f"not a recipe of this version of cenet: {wrong}")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**given)


KINDS = {int: "a whole number (int)", float: "a number (float)", str: "text", bool: "true or false"}


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of the annotated type; whole numbers are numbers, too."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:  # `_wrong_choices` checks which of the names
        return isinstance(value, str)
    if origin is Annotated:
        return _is_of(value, parts[0])
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(item, parts[0]) for item in value)
    if parts:  # one of several
        return any(_is_of(value, part) for part in parts)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _in_words(kind: Any) -> str:
    parts = [part for part in get_args(kind) if part in KINDS]
    word = KINDS.get(parts[0] if parts else kind, "text")
    return f"a tuple (in JSON a list), each {word}" if get_origin(kind) is tuple else word


def read_run(folder: Path, kind: type[R]) -> tuple[R, InputSpec]:
    """Recipe and input spec of a run; ValueError if `folder` is no run of this kind of recipe."""
    path = folder / ABOUT
    if not path.is_file():
        saved = f"; `cenet diagnose {folder}` measures the accuracy of this network"
        raise ValueError(
            f"{folder} is not a folder of `{kind.command}`: it has no {path.name}"
            + (saved if (folder / CONFIG).is_file() else "")
        )
    about = read_json(path)
    for key in ("recipe", "inputs"):
        if not isinstance(about, dict) or not isinstance(about.get(key), dict):
            raise ValueError(f"{path} is not of `{kind.command}`: {key} is missing or no object")
    made = " ".join(str(about.get("command")).split())
    if made != kind.command:
        raise ValueError(
            f"{folder} is a run of `{made}`, not of `{kind.command}`; see "
            f"`{made.removesuffix(' train')} --help`"
        )
    try:
        return kind.from_dict(about["recipe"]), InputSpec.from_dict(about["inputs"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not of this version of `{kind.command}`: {reason}") from error


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """All settings that decide the numbers of a classifier's training.

    Attributes:
        network: resnet18, resnet50, resnet101, mobilenetv2_100, shufflenetv2_x0_5,
            shufflenetv2_x1_0, vgg16 or vgg6. With `stock` any classifier: the name of a timm model,
            or torchvision/NAME.
        stock: use the network as timm or torchvision has it, with CE where `insert_ce_` puts it by
            default, instead of a network of the paper with CE at the paper's places.
        block: layer at the places where CE goes: ce; one of its branches alone, bd or ir; or none,
            plain. se puts squeeze-excite into networks of the paper instead.
        ce_position: which convolution of a residual block CE follows, in ResNets: 2 or 3 of a
            bottleneck's three, 1 or 2 of a basic block's two. None is the last, as in the paper.
        rd_ratio: hidden width of CE's gate, as a share of the channels.
        ce_start: identity makes CE the identity at first, for a network that starts from trained
            weights (--weights); paper initializes CE as the paper does.
        norm: kind of all norms of the network.
        norm_places: all norms, or those that the published code of IterNorm and switchable
            whitening replaces in ResNets; the others stay batch norms.
        act: kind of all activations; default keeps those of the network.
        dataset: imagenet, tinyimagenet, cifar10, or folder for any other images, which are read
            from --data; digits is built in.
        image_size: height and width of the images. With `stock`, 0 is the size that the weights
            were trained for.
        label_smoothing: label smoothing of the loss.
        label_corruption: share of training images whose label is replaced by a random one.
        label_corruption_to: classes that the random label is drawn from: other classes, so that all
            of these labels are wrong; or any class, the original one included, as Zhang et al.
            (2017) do.
        holdout: share of the training images of each class to hold out, for choosing settings. The
            run does not train on them. It is tested on them instead of on the test images, which
            are not read. The choice depends only on the data and this share, not on the seed.
        mixup: α of mixup, 0 for none.
        augment: augmentation of the training images: none, crop_flip (padded by 4 pixels), imagenet
            (random part, resized, and flip), the same with AlexNet's colour noise
            (imagenet_colour), or with that noise as the paper's released code computes it
            (imagenet_colour_released).
        ema: decay of the averaged weights that are evaluated, 0 for none.
        sync_ce: compute statistics of norms and CE over all processes instead of in each one.
        accuracy: top-1 test accuracy that the recipe is known to reach, or None.
    """

    network: Annotated[str, tyro.conf.arg(aliases=("--model",))]
    stock: bool = False
    block: Block = "ce"
    ce_position: int | None = None
    rd_ratio: float = RD_RATIO
    ce_start: CEStart = "paper"
    norm: Norm = "bn"
    norm_places: NormPlaces = "all"
    act: Act = "default"
    dataset: Dataset = "imagenet"
    image_size: int = 224
    label_smoothing: float = 0.0
    label_corruption: float = 0.0
    label_corruption_to: CorruptionTo = "other"
    holdout: float = 0.0
    mixup: float = 0.0
    augment: Augment = "imagenet"
    ema: float = 0.0
    sync_ce: bool = False
    accuracy: float | None = None

    @property
    def in_colour(self) -> bool:
        """Whether the network takes images of three channels, whatever the data has."""
        return self.stock

    @override
    def choices(self) -> dict[str, tuple[str, ...]]:
        # whether a stock network exists is checked when it is built: importing timm takes seconds
        return super().choices() | ({} if self.stock else {"network": NETWORK_NAMES})

    def _wrong_numbers(self) -> list[str]:
        problems = super()._wrong_numbers()
        if self.stock:
            problems += [
                f"{name}={getattr(self, name)} is for the networks of the paper; {self.network} of "
                "timm or torchvision stays as it is, except for CE"
                for name in ("norm", "norm_places", "act", "ce_position")
                if getattr(self, name) != self.defaults()[name]
            ]
            if self.block == "se":
                problems.append(
                    "block=se is for the networks of the paper; use ce, bd, ir or plain"
                )
        if self.mixup > 0 and self.batch_size % 2:
            problems.append(f"batch_size={self.batch_size} must be even, because mixup makes pairs")
        if not 0 <= self.holdout < 1:
            problems.append(f"holdout={self.holdout!r} must be at least 0 and less than 1")
        if self.rd_ratio != RD_RATIO and self.block not in ("ce", "ir"):
            problems.append(
                f"rd_ratio={self.rd_ratio} is for the gate of ce and ir; {self.block} has none"
            )
        has_ce = self.block in ("ce", "bd", "ir")
        if self.ce_start != "paper" and not has_ce and not self.stock:
            problems.append(f"ce_start={self.ce_start} is for CE; block={self.block} has none")
        return problems

    @override
    def ranges(self) -> Ranges:
        return (
            *RANGES,
            ("image_size", 0 if self.image_size == 0 and self.stock else 8, INFINITY),
            ("mixup", 0, INFINITY),
            ("label_smoothing ema", 0, 0.999999),
            ("label_corruption", 0, 1),
            ("rd_ratio", 1e-6, 1),
            *(() if self.accuracy is None else (("accuracy", 0, 1),)),
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

# Appendix E, with CE: eight GPUs with 32 images each (ShuffleNetV2: 128)
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
# not from a paper: short runs on Tiny ImageNet or a part of it, the same for all networks
_TINY = Recipe(
    "resnet50",
    dataset="tinyimagenet",
    image_size=64,
    epochs=24,
    batch_size=256,
    weight_decay=5e-4,
    schedule="cosine",
    warmup_epochs=2.0,
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
    **{
        f"tiny_{network}": replace(_TINY, network=network)
        for network in (
            "resnet18", "resnet50", "mobilenetv2_100", "shufflenetv2_x0_5", "shufflenetv2_x1_0"
        )
    },
    "digits": _DIGITS,
}  # fmt: skip
# the variants that every network is compared with
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
# variants of ResNets only; those of the released code on ImageNet only. Training in that code
# (github.com/Tangshitao/CENet, imagenet/train_imagenet.py and its only configuration) differs from
# Appendix E in three fields
_RELEASED: dict[str, Any] = {
    "warmup_epochs": 5.0, "label_smoothing": 0.1, "augment": "imagenet_colour_released",
}  # fmt: skip
_PUBLISHED: dict[str, Any] = {"block": "plain", "norm_places": "published"}
_RESNET_ROWS: dict[str, Any] = {"iternorm_first": {**_PUBLISHED, "norm": "iternorm"}}
_RELEASED_ROWS: dict[str, Any] = {
    "released": _RELEASED,
    "released_plain": {**_RELEASED, "block": "plain"},
}
# the number in sw_7 counts the norms that switchable whitening replaces. The gates of ce_small are
# so narrow that the network has as many parameters as the one with squeeze-excite
_OWN_ROWS: dict[str, dict[str, Any]] = {
    "resnet18": {
        **_RESNET_ROWS,
        "ce_conv1": {"ce_position": 1},
        "ce_small": {"rd_ratio": 0.0625},
        "sw_4": {**_PUBLISHED, "norm": "sw"},
    },
    "resnet50": {
        **_RESNET_ROWS,
        "ce2": {"ce_position": 2},
        "ce_small": {"rd_ratio": 0.168},
        "sw_7": {**_PUBLISHED, "norm": "sw"},
    },
    "resnet101": {
        **_RESNET_ROWS,
        "ce2": {"ce_position": 2},
        "sw_15": {**_PUBLISHED, "norm": "sw"},
    },
}


def _rows(family: str, base: Recipe) -> dict[str, dict[str, Any]]:
    own = _OWN_ROWS.get(base.network, {})
    is_released = family.startswith("resnet")
    return {**_ROWS, **own, **(_RELEASED_ROWS if is_released else {})}


RECIPES = {
    f"{family}_{row}": replace(base, **changes)
    for family, base in _BASES.items()
    for row, changes in _rows(family, base).items()
}


# fine-tuning of any classifier; ordinary values, not chosen by a result
FINETUNE = Recipe(
    "resnet18",
    stock=True,
    ce_start="identity",
    dataset="folder",
    image_size=0,
    epochs=10,
    lr=0.01,
    schedule="cosine",
    warmup_epochs=1.0,
)


def family_and_row(name: str) -> tuple[str, str]:
    """The two parts of a recipe's name: tiny_resnet50_gn_ce -> tiny_resnet50, gn_ce."""
    family = max((base for base in _BASES if name.startswith(f"{base}_")), key=len)
    return family, name.removeprefix(f"{family}_")


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ValueError with the nearest names if there is none."""
    if name == "finetune":
        return FINETUNE
    if name not in RECIPES:
        close = nearest(name, [*RECIPES, "finetune"])
        if name in _BASES:
            close = f" (did you mean {name}_plain or {name}_ce?)"
        raise ValueError(f"{name!r} is not a recipe{close}; `cenet recipes` lists them")
    return RECIPES[name]
