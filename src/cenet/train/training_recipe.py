"""Optimizer, schedule and precision settings shared by all recipes.

A recipe holds every setting that changes a number. Folders, device and worker processes are not
part of it: those are `RunOptions`. A run writes its recipe into run.json, and `read_run` reads it.
"""

from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from cenet.data.input_spec import InputSpec
from cenet.run_folder import ABOUT, read_json

Schedule = Literal["step", "cosine", "poly"]
Precision = Literal["float32", "bfloat16", "float16"]
Ranges = tuple[tuple[str, float, float], ...]
R = TypeVar("R", bound="TrainingRecipe")
INFINITY = float("inf")
RANGES: Ranges = (
    ("epochs batch_size accumulate lr_batch", 1, INFINITY),
    ("lr", 1e-12, INFINITY),
    ("weight_decay warmup_epochs clip_grad power", 0, INFINITY),
    ("momentum", 0, 0.999999),
    ("gamma", 0, 1),
    ("seed", 0, 2**31),
)


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Optimizer, schedule and precision settings shared by all recipes.

    Attributes:
        epochs: passes over the training images.
        batch_size: images per process and step.
        accumulate: batches whose gradients are added up before an update.
        lr: learning rate for updates of `lr_batch` images; it is scaled in proportion to the
            number of images per update.
        lr_batch: number of images per update that `lr` is given for.
        momentum: momentum of SGD.
        weight_decay: applied to every parameter except λ and α. Norms are included, because decayed
            γ are what inhibits channels.
        decay_norms: apply weight decay to norms and biases too.
        schedule: step, cosine or poly.
        milestones: epochs after which the step schedule multiplies by `gamma`.
        gamma: factor of the step schedule.
        power: exponent of the poly schedule.
        warmup_epochs: epochs in which the learning rate grows linearly from 0.
        clip_grad: largest norm of the gradient, 0 for no limit.
        precision: precision of autocast.
        seed: seed of everything random.
    """

    # the command that runs recipes of this class
    command: ClassVar[str] = "cenet train"

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
    clip_grad: float = 0.0
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise one ValueError that lists all invalid values."""
        problems = [*self._wrong_choices(), *self._wrong_numbers()]
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
                if not (least <= value <= most and value < INFINITY):  # also refuses NaN
                    limits = f"at least {least}" if most == INFINITY else f"{least} to {most}"
                    problems.append(f"{name}={value!r} must be {limits}")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones or [1]) < 1:
            problems.append(f"milestones={self.milestones!r} must be epochs in growing order")
        return problems

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
        known = {field.name: isinstance(field.default, tuple) for field in fields(cls)}
        wrong = sorted(set(values) - set(known))
        wrong += [
            name
            for name, value in values.items()
            if known.get(name) and not isinstance(value, list)
        ]
        if wrong:
            raise ValueError(f"not a recipe of this version of cenet: {wrong}")
        given: dict[str, Any] = {
            name: tuple(value) if known[name] else value for name, value in values.items()
        }
        return cls(**given)


def read_run(folder: Path, kind: type[R]) -> tuple[R, InputSpec]:
    """Recipe and input spec of a run; ValueError if `folder` is no run of this kind of recipe."""
    path = folder / ABOUT
    if not path.is_file():
        raise ValueError(f"{folder} is not a folder of `{kind.command}`: it has no {path.name}")
    about = read_json(path)
    try:
        made = about["command"]
        if made != kind.command:
            raise ValueError(
                f"{folder} is a run of `{made}`, not of `{kind.command}`; see "
                f"`{str(made).removesuffix(' train')} --help`"
            )
        return kind.from_dict(about["recipe"]), InputSpec.from_dict(about["inputs"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of this version of `{kind.command}`: {error!r}") from error


def nearest(name: object, valid: Any) -> str:
    """' (did you mean …?)' with the valid names closest to `name`; empty if none is close."""
    close = get_close_matches(str(name), list(valid), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
