"""What a diagnosis says, as plain records: the content of diagnosis.json."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cenet.analysis.records import from_json, to_json

FORMAT = "cenet.diagnosis"
VERSION = 1


@dataclass(frozen=True)
class Subject:
    """The network that was examined."""

    name: str
    checkpoint: str | None
    parameters: int


@dataclass(frozen=True)
class Skipped:
    """A file that was no use."""

    path: str
    reason: str


@dataclass(frozen=True)
class Images:
    """What the network was shown."""

    folder: str | None
    images: int
    size: tuple[int, int]  # height, width
    classes: tuple[str, ...] | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Accuracy:
    """On all labelled images."""

    top1: float
    top5: float


@dataclass(frozen=True)
class Gamma:
    """γ of the norm before an activation."""

    mean: float | None
    std: float | None
    share_small: float | None = field(metadata={"key": "abs_below_1e-2"})


@dataclass(frozen=True)
class Beta:
    """β of the norm before an activation."""

    mean: float | None
    std: float | None
    share_nonpositive: float | None


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of W."""

    min: float | None
    median: float | None
    max: float | None


@dataclass(frozen=True)
class Layer:
    """One activation, and the channels it was applied to."""

    name: str
    activation: str
    norm: str | None  # before it
    channels: int
    height: int
    width: int
    mean_abs: tuple[float | None, ...]  # of the post-activation value, by channel
    asleep: tuple[int, ...]  # channels below the threshold
    inhibited_ratio: float
    correlation: float | None  # mean absolute, before the activation
    constant: int  # channels that do not vary
    magnitude: tuple[tuple[float | None, ...], ...]  # ℓ2 over channels, by location
    gamma: Gamma | None
    beta: Beta | None
    ce_site: bool  # insert_ce_ would put CE after this norm
    has_ce: bool
    mix: float | None = field(metadata={"key": "lambda"})
    spectrum: Spectrum | None


@dataclass(frozen=True)
class Matrix:
    """Correlations among some channels of a layer; None where one of them is constant."""

    layer: str
    channels: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class AblationCurve:
    """Accuracy while a growing share of random channels is zero."""

    layer: str
    ratios: tuple[float, ...]
    top1: tuple[tuple[float, ...], ...]  # of each repeat, by ratio
    seed: int


@dataclass(frozen=True)
class Importance:
    """How much accuracy falls without each channel."""

    layer: str
    drop: tuple[float, ...]
    gini: float


@dataclass(frozen=True)
class Cam:
    """An image, and where the network looked."""

    image: str  # data:image/png;base64,…
    overlay: str
    label: str | None
    predicted: str


@dataclass(frozen=True)
class Diagnosis:
    """Which channels are asleep, how redundant the rest are, and what that does to accuracy."""

    model: Subject
    environment: dict[str, Any]
    data: Images
    accuracy: Accuracy | None
    threshold: float
    layers: tuple[Layer, ...]  # in the order of execution
    first_six: float | None  # the paper's single figure
    matrices: tuple[Matrix, ...]
    ablation: AblationCurve | None
    importance: Importance | None
    sites: tuple[str, ...]  # where insert_ce_ would put CE by default
    gradcam: tuple[Cam, ...]

    def as_dict(self) -> dict[str, Any]:
        """In types that JSON has; numbers are finite or None."""
        content: dict[str, Any] = to_json(self)
        return {"format": FORMAT, "version": VERSION, **content}

    @classmethod
    def from_dict(cls, values: Any) -> "Diagnosis":
        """Undo `as_dict`; ValueError if it is something else, or of another version."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"this is not a diagnosis: it has no format {FORMAT!r}")
        version = values.get("version")
        if version != VERSION:
            raise ValueError(f"this diagnosis is of version {version!r}, not {VERSION}")
        content = {key: item for key, item in values.items() if key not in ("format", "version")}
        return from_json(cls, content)

    def write(self, path: Path) -> None:
        """Write diagnosis.json: all of it, or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.as_dict(), allow_nan=False) + "\n")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Diagnosis":
        """Undo `write`; ValueError if the file is damaged or something else."""
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
