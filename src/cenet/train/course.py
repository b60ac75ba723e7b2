"""How any network is trained: what all recipes have in common.

A recipe says everything that moves a number. Where and on what it runs (folders, device, workers)
is not in it.
"""

from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

Schedule = Literal["step", "cosine", "poly"]
Precision = Literal["float32", "bfloat16", "float16"]
Ranges = tuple[tuple[str, float, float], ...]
C = TypeVar("C", bound="Course")
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
class Course:
    """The way of the weights through a training run.

    Attributes:
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
        clip_grad: largest norm of the gradient, 0 for no limit.
        precision: of autocast.
        seed: of everything that is left to chance.
    """

    # that writes folders of such a recipe
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
        """Refuse values that cannot be trained with, all in one ValueError."""
        problems = [*self._wrong_choices(), *self._wrong_numbers()]
        if problems:
            raise ValueError("; ".join(problems))

    def choices(self) -> dict[str, tuple[str, ...]]:
        """The valid values of the fields that have a few."""
        return {
            field.name: get_args(field.type)
            for field in fields(self)
            if get_origin(field.type) is Literal
        }

    def ranges(self) -> Ranges:
        """Names of numbers, and the least and the largest that they may be."""
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
                if not (least <= value <= most and value < INFINITY):  # a NaN is not, either
                    limits = f"at least {least}" if most == INFINITY else f"{least} to {most}"
                    problems.append(f"{name}={value!r} must be {limits}")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones or [1]) < 1:
            problems.append(f"milestones={self.milestones!r} must be epochs in growing order")
        return problems

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types that JSON has."""
        values = asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of the fields that have one, as in `as_dict`."""
        return {
            field.name: list(field.default) if isinstance(field.default, tuple) else field.default
            for field in fields(cls)
            if field.default is not MISSING
        }

    @classmethod
    def from_dict(cls: type[C], values: dict[str, Any]) -> C:
        """The recipe that `as_dict` came from; ValueError for another version's."""
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


def nearest(name: object, valid: Any) -> str:
    """A question after those of the valid names that look like `name`, or nothing."""
    close = get_close_matches(str(name), list(valid), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
