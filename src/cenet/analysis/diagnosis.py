"""`Diagnosis` and its parts: the content of diagnosis.json, written down once.

Each part checks in `__post_init__` that its fields fit together, so a `Diagnosis` is consistent
wherever it comes from. `Diagnosis.read` is the only reader of the file: it checks every value
against the annotation of its field.
"""

import json
import math
import re
import types
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cenet.analysis.channels import WIDEST
from cenet.files import read_json, replace_file

FILE = "diagnosis.json"
FORMAT = "cenet.diagnosis"
# A new field of a record makes older files unreadable: raise VERSION, keep the old one in READABLE,
# and give the field its value for older files in a function like `_since_version_2`.
VERSION = 3
READABLE = (2, 3)
AGAIN = "write it again with `cenet diagnose`"
# fields of a layer that list channels by their numbers
COUNTED = (
    "dormant", "dormant_strict", "rare", "saturated", "duplicates", "prunable", "inhibited",
)  # fmt: skip
PNG = "data:image/png;base64,"
LARGEST = 1e100  # largest number; computing with larger ones overflows
Record = TypeVar("Record")


def data_uri(image: Any, kind: Literal["png", "jpeg"] = "png", **options: Any) -> str:
    """A PIL image as a data URI, the form in which diagnoses and pages hold their pictures.

    Args:
        image: the picture.
        kind: format of the file.
        **options: options of Pillow's writer for that format.
    """
    file = BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True)
class Model:
    """The network that was measured."""

    name: str
    checkpoint: str | None
    parameters: int
    untrained: bool  # its weights are the initial ones


@dataclass(frozen=True)
class Skipped:
    """A file that could not be used."""

    path: str
    reason: str


@dataclass(frozen=True)
class Images:
    """The images that the network was run on."""

    folder: str | None
    images: int
    size: tuple[int, int]  # height, width
    classes: tuple[str, ...] | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on all labelled images."""

    top1: float
    top5: float
    classes: int  # outputs of the network


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
    """One activation, and the channels it was applied to.

    Channels are numbered from 0. Everything is measured after the activation unless it says
    otherwise. When the layer is rescaled, `mean_abs`, the two `magnitude`, `gamma`, `beta` and
    the two `inhibited` change, and nothing else.

    Attributes:
        norm: name of the norm before the activation.
        mean_abs: mean absolute value over images and pixels, by channel.
        activity: mean_abs divided by its mean over the layer, by channel.
        dormant: channels with an activity of at most 0.1.
        dormant_strict: the same with 0.025.
        undecided: channels whose activity is within two standard errors of 0.1.
        firing: share of images in which a channel is positive at one pixel or more, by channel.
        rare: channels that fire in less than 1 % of the images.
        saturated: channels that are active, but stuck at one value.
        duplicates: channels that repeat one with a lower number (before the activation).
        contribution: activity times the norm of the weights that read the channel, relative to the
            layer's mean, by channel; of several readers the largest. None where the weights are
            not known.
        prunable: channels that contribute next to nothing, on average and in single images.
        shared: on a residual connection: it activates a sum, or is added to something later.
        participation_ratio: dimensions in which the channels vary (before the activation).
        correlation: mean absolute correlation over all pairs of channels (before the activation).
        correlation_in_groups: the same over the pairs of one group, which are the groups of CE, or
            of 16 channels where the layer has none. None in files of version 2.
        constant: channels that do not vary (before the activation).
        magnitude: ℓ2 over channels, by location.
        magnitude_before: the same before the activation: after the norm, or CE where it has one.
            None in files of version 2.
        inhibited: channels with mean_abs below the paper's threshold.
        inhibited_ratio: their share.
        ce_site: insert_ce_ would put CE after this norm.
    """

    name: str
    activation: str
    norm: str | None
    channels: int
    height: int
    width: int
    mean_abs: tuple[float, ...]
    activity: tuple[float, ...]
    dormant: tuple[int, ...] = field(metadata={"key": "dormant_0.1"})
    dormant_strict: tuple[int, ...] = field(metadata={"key": "dormant_0.025"})
    undecided: int
    firing: tuple[float, ...]
    rare: tuple[int, ...] = field(metadata={"key": "fires_below_1_percent"})
    saturated: tuple[int, ...]
    duplicates: tuple[int, ...]
    contribution: tuple[float, ...] | None
    prunable: tuple[int, ...]
    shared: bool
    participation_ratio: float | None
    correlation: float | None
    correlation_in_groups: float | None
    constant: int
    magnitude: tuple[tuple[float | None, ...], ...]
    magnitude_before: tuple[tuple[float | None, ...], ...] | None
    gamma: Gamma | None
    beta: Beta | None
    inhibited: tuple[int, ...]
    inhibited_ratio: float
    ce_site: bool
    has_ce: bool
    mix: float | None = field(metadata={"key": "lambda"})
    spectrum: Spectrum | None

    def __post_init__(self) -> None:
        """Check that lists by channel have one value per channel, and maps are rectangles."""
        for name in ("mean_abs", "activity", "firing", "contribution"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{self.channels} channels, but {len(values)} values of {name}")
        for name in COUNTED:
            if any(not 0 <= channel < self.channels for channel in getattr(self, name)):
                raise ValueError(f"{name} names a channel that is not one of the {self.channels}")
        for name in ("magnitude", "magnitude_before"):
            if len({len(row) for row in getattr(self, name) or ()}) > 1:
                raise ValueError(f"{name} has rows of different lengths")

    @property
    def participation_share(self) -> float | None:
        """The participation ratio divided by the channels among which it was measured."""
        if self.participation_ratio is None:
            return None
        return self.participation_ratio / min(self.channels, WIDEST)

    @property
    def ce_state(self) -> str | None:
        """Whether CE is "in place", or the norm is a "site" where insert_ce_ would put it."""
        return "in place" if self.has_ce else "site" if self.ce_site else None


@dataclass(frozen=True)
class BatchNorm:
    """β of one batch norm of the network."""

    name: str
    channels: int
    nonpositive: int  # channels with β ≤ 0
    activation: str | None  # takes the output unchanged; None after a sum, a gate or CE


@dataclass(frozen=True)
class Matrix:
    """Correlations among some channels of a layer; None where one of them is constant."""

    layer: str
    channels: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        """Check that there is a row and a column for each channel."""
        size = len(self.channels)
        if [len(row) for row in self.values] != [size] * size:
            raise ValueError(f"values must be {size} × {size}, as there are {size} channels")


@dataclass(frozen=True)
class AblationCurve:
    """Accuracy while a growing share of the channels of a layer is zero."""

    layer: str
    images: int
    ratios: tuple[float, ...]
    top1: tuple[tuple[float, ...], ...]  # in random order: by ratio, of each repeat
    least_important_first: tuple[float, ...]  # by ratio
    seed: int

    def __post_init__(self) -> None:
        """Check that both orders have a value for each ratio."""
        for name in ("top1", "least_important_first"):
            _expect_as_many(self.ratios, getattr(self, name), "ratios", name)
        if not all(self.top1):
            raise ValueError("top1 has a ratio without a value")


@dataclass(frozen=True)
class Importance:
    """How far the predictions move when a single channel of a layer is zero."""

    layer: str
    images: int
    divergence: tuple[float, ...]  # Kullback-Leibler, in nats, mean over images, by channel
    standard_error: tuple[float | None, ...]  # of the divergence; None for a single image
    gini: float  # how unequal the channels are

    def __post_init__(self) -> None:
        """Check that each channel has a standard error."""
        _expect_as_many(self.divergence, self.standard_error, "values of divergence",
                        "standard_error")  # fmt: skip


@dataclass(frozen=True)
class Removal:
    """Accuracy and loss without all prunable channels at once."""

    channels: int
    images: int
    top1: float  # accuracy of the whole network
    top1_without: float
    top1_error: float  # standard error of the difference
    loss: float
    loss_without: float
    loss_error: float


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the measurements, and what to do next.

    Attributes:
        kind: "untrained", "at chance", "more images", "prune", "try CE" or "nothing to do".
        headline: the verdict in one or two sentences.
        reasons: measurements that support it, a sentence each.
        next_step: the recommended step; None if there is nothing to do.
        command: a shell command or a line of Python for that step, if there is one.
    """

    kind: str
    headline: str
    reasons: tuple[str, ...]
    next_step: str | None
    command: str | None


@dataclass(frozen=True)
class Cam:
    """An image, and where the network sees evidence for a class."""

    image: str  # data:image/png;base64,…
    overlay: str
    label: str | None
    predicted: str
    target: str  # the class whose evidence is shown: the label, or without one the prediction
    # evidence from 0 to 1, averaged over 7×7 fields of the image; None in files of version 2
    evidence: tuple[tuple[float, ...], ...] | None

    def __post_init__(self) -> None:
        """Check that the pictures are PNG files in text: a page loads them as they are."""
        for name in ("image", "overlay"):
            if not re.fullmatch(f"{PNG}[A-Za-z0-9+/]+=*", getattr(self, name)):
                raise ValueError(f"{name} must be {PNG}…, got {getattr(self, name)[:40]!r}")


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of the channels of a network, and the verdict on them."""

    model: Model
    environment: dict[str, Any]
    data: Images
    accuracy: Accuracy | None
    verdict: Verdict
    layers: tuple[Layer, ...]  # in the order of execution
    threshold: float  # mean activation below which a channel is inhibited
    first_six: float | None  # the paper's single figure
    batch_norms: tuple[BatchNorm, ...] | None  # all of them; None in files of version 2
    matrices: tuple[Matrix, ...]
    ablation: AblationCurve | None
    importance: Importance | None
    removal: Removal | None
    sites: tuple[str, ...]  # where insert_ce_ would put CE by default
    gradcam: tuple[Cam, ...]

    @property
    def prunable(self) -> dict[str, tuple[int, ...]]:
        """By layer, the channels that can be removed; layers without any are left out."""
        return {layer.name: layer.prunable for layer in self.layers if layer.prunable}

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis in types of JSON; numbers are finite or None."""
        content: dict[str, Any] = to_json(self)
        return {"format": FORMAT, "version": VERSION, **content}

    @classmethod
    def from_dict(cls, values: Any) -> "Diagnosis":
        """Undo `as_dict`.

        Version 2 is read as well: fields that it lacks are None, and its Grad-CAMs explain the
        predicted class.

        Raises:
            ValueError: the content is damaged, of another version, or no diagnosis.
        """
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise ValueError(f"this is not a diagnosis: its format is {found!r}, not {FORMAT!r}")
        version = values.get("version")
        if version not in READABLE:
            raise ValueError(f"this diagnosis is of version {version!r}, not {VERSION}")
        content = {key: item for key, item in values.items() if key not in ("format", "version")}
        return from_json(cls, _since_version_2(content) if version == 2 else content)

    def write(self, path: Path) -> None:
        """Write diagnosis.json; an existing file is replaced atomically."""
        replace_file(path, self.as_bytes())

    def as_bytes(self) -> bytes:
        """The content of diagnosis.json."""
        return (json.dumps(self.as_dict(), allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> "Diagnosis":
        """Undo `write`; ValueError that names the file if it is damaged or no diagnosis."""
        try:
            content = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; {AGAIN}") from error
        try:
            return cls.from_dict(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}; {AGAIN}") from error


def _expect_as_many(one: Sequence[Any], other: Sequence[Any], first: str, second: str) -> None:
    if len(one) != len(other):
        raise ValueError(f"{len(one)} {first}, but {len(other)} of {second}")


def _since_version_2(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of version 2, with None for the fields added since."""

    def each(name: str, added: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        items = content.get(name)
        if not isinstance(items, list):  # damaged; `from_json` says so
            return items
        return [{**item, **added(item)} if isinstance(item, dict) else item for item in items]

    layers = each("layers", lambda layer: {"correlation_in_groups": None, "magnitude_before": None})
    pictures = each("gradcam", lambda cam: {"target": cam.get("predicted"), "evidence": None})
    found = {"layers": layers, "gradcam": pictures}
    return {
        **content, **{name: item for name, item in found.items() if name in content},
        "batch_norms": None,
    }  # fmt: skip


def to_json(value: Any) -> Any:
    """Dictionaries, lists and plain values. A number that is not finite becomes None."""
    if is_dataclass(value):
        return {key: to_json(getattr(value, name)) for name, key in _keys(type(value)).items()}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(kind: type[Record], value: Any) -> Record:
    """Undo `to_json`.

    Raises:
        ValueError: a value is not of the annotated type, or a `__post_init__` refuses a value.
            The message names the place, such as `layers[2].gamma.mean`.
    """
    read: Record = _read(kind, value, "")
    return read


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _read(kind, value, where)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        if arguments[-1] is Ellipsis:
            kinds = [arguments[0]] * len(value)
        else:
            _expect(len(value) == len(arguments), where, f"{len(arguments)} values", value)
            kinds = list(arguments)
        return tuple(_read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return dict(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(is_number, where, "a number", value)
    else:
        _expect(type(value) is kind, where, f"of type {kind.__name__}", value)
    if is_number:
        _expect(-LARGEST <= value <= LARGEST, where, f"finite, at most {LARGEST:g}", value)
    return float(value) if kind is float else value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints, keys = get_type_hints(kind), _keys(kind)
    missing = [key for key in keys.values() if key not in value]
    unknown = [key for key in value if key not in keys.values()]
    if missing or unknown:
        raise ValueError(f"{where or 'the file'}: missing {missing}, unknown {unknown}")
    read = {name: _read(hints[name], value[key], _join(where, key)) for name, key in keys.items()}
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{where or 'the file'}: {error}") from error


def _keys(kind: Any) -> dict[str, str]:
    """Names of the fields, and their keys in JSON where a key is not a name of Python."""
    return {field.name: field.metadata.get("key", field.name) for field in fields(kind)}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _expect(condition: bool, where: str, what: str, value: Any) -> None:
    if not condition:
        text = str(value)
        text = text if len(text) <= 60 else f"{text[:59]}…"
        raise ValueError(f"{where or 'the file'} must be {what}, got {text!r}")
