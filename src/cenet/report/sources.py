"""Read the runs of a page: folders of `cenet train`, and diagnoses."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cenet.analysis.diagnosis import FILE, LARGEST, Diagnosis, Layer
from cenet.files import read_json
from cenet.run_folder import ABOUT, CHANNELS, METRICS, read_metrics

WATCHED = ("dormant_ratio", "participation_share", "correlation")
MOST = 8  # runs on a page: the number of colours
# columns of metrics that may be missing
COLUMNS = tuple(f"{part}_{name}" for part in ("train", "test") for name in ("loss", "top1"))


@dataclass(frozen=True)
class Source:
    """One run of the page; whatever its folder does not hold is None or empty.

    Attributes:
        name: on the page; that of its folder.
        recipe: from run.json.
        environment: from run.json, or from the diagnosis.
        metrics: one row per epoch.
        diagnosis: from `cenet diagnose`.
        watched: one row per update and layer, from `cenet train --monitor-every`.
    """

    name: str
    recipe: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    metrics: tuple[dict[str, Any], ...] = ()
    diagnosis: Diagnosis | None = None
    watched: tuple[dict[str, Any], ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that were measured."""
        return () if self.diagnosis is None else self.diagnosis.layers


def read_sources(given: Sequence[Path | Diagnosis]) -> list[Source]:
    """Read every source. A path is named after its folder, a diagnosis after its model.

    Raises:
        ValueError: a path is missing, is no run, is damaged, or comes twice.
    """
    if not given:
        raise ValueError("no run was given; name at least one folder of `cenet train`")
    if len(given) > MOST:
        raise ValueError(f"{len(given)} runs are too many for a page; give at most {MOST}")
    paths = [one for one in given if isinstance(one, Path)]
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{path} was given twice; name each run once")
    names = _names(
        [_folder(one.resolve()) if isinstance(one, Path) else Path(one.model.name) for one in given]
    )
    return [_read(one, name) for one, name in zip(given, names, strict=True)]


def from_diagnosis(diagnosis: Diagnosis, name: str | None = None) -> Source:
    """A source that is a diagnosis alone, named after its model.

    Raises:
        ValueError: it holds a number that cannot be drawn.
    """
    found = _drawable(diagnosis)
    return Source(name or found.model.name, environment=found.environment, diagnosis=found)


def _drawable(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis with printable texts, its numbers checked as those of a file are."""
    return Diagnosis.from_dict(_printable_json(diagnosis.as_dict()))


def _read(path: Path | Diagnosis, name: str) -> Source:
    if isinstance(path, Diagnosis):
        return from_diagnosis(path, name)
    if path.is_file():
        return from_diagnosis(Diagnosis.read(path), name)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a folder of `cenet train` or a {FILE}")
    measured = path / FILE
    diagnosis = Diagnosis.read(measured) if measured.is_file() else None
    if not (path / ABOUT).is_file():
        if diagnosis is None:
            raise ValueError(
                f"{path} holds neither {ABOUT} of `cenet train` nor {FILE} of "
                "`cenet diagnose`; give the folder of a run, or run `cenet diagnose` on it first"
            )
        return from_diagnosis(diagnosis, name)
    trained = read_training(path, name)
    if not trained.metrics and diagnosis is None:
        raise ValueError(
            f"{path / METRICS} has no row yet, and there is no {FILE}; "
            "wait for the first epoch, or measure with `cenet diagnose`"
        )
    drawn = None if diagnosis is None else _drawable(diagnosis)
    return replace(trained, diagnosis=drawn, watched=_watched(path / CHANNELS))


def read_training(
    folder: Path,
    name: str,
    columns: Sequence[str] = COLUMNS,
    *,
    counts: Sequence[str] = ("epoch",),
    author: str = "`cenet train`",
) -> Source:
    """Recipe, environment and metrics of a run.

    Args:
        folder: folder of the run.
        name: name of the source.
        columns: columns of metrics that hold a number or nothing.
        counts: columns of metrics that hold a whole number in every row.
        author: the command that writes such folders.

    Raises:
        ValueError: a file is damaged, or the run is of another command.
    """
    about = _json(folder / ABOUT, author)
    for key in ("recipe", "environment"):
        if not isinstance(about.get(key), dict):
            raise ValueError(f"{folder / ABOUT} is not of {author}: {key} is missing or no object")
    made = f"`{about['command']}`" if "command" in about else author
    if made != author:
        raise ValueError(f"{folder} is a run of {made}; see {made.replace(' train', ' --help')}")
    rows = _metrics(folder / METRICS, columns, counts, author)
    return Source(printable(name), about["recipe"], about["environment"], rows)


def _metrics(
    path: Path, columns: Sequence[str], counts: Sequence[str], author: str
) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    rows: list[dict[str, Any]] = [_printable_json(row) for row in read_metrics(path)]
    for row in rows:
        problems = (
            *(_problem(row, name, int) for name in counts),
            *(_problem(row, name, float) for name in columns if row.get(name) is not None),
        )
        for problem in filter(None, problems):
            raise ValueError(f"{path}: epoch {row['epoch']} is not a row of {author}: {problem}")
    return tuple(rows)


def _problem(row: dict[str, Any], name: str, kind: type[int] | type[float]) -> str | None:
    """Why a value is not a number that can be drawn; None if it is."""
    if name not in row:
        return f"{name} is missing"
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        noun = "a number" if kind is float else "a whole number"
        return f"{name} is {str(value)[:40]!r}, not {noun}"
    return None if -LARGEST <= value <= LARGEST else f"{name} is too large to be drawn"


def _watched(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    rows = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file, restval=""):
                numbers = {n: float(row[n]) if row.get(n) else None for n in WATCHED}
                names = {"step": int(row["step"]), "layer": printable(row["layer"])}
                rows.append({**names, **_printable_json(numbers)})
    except (OSError, ValueError, KeyError, csv.Error) as error:
        where = f"{path}, line {len(rows) + 2},"
        raise ValueError(f"{where} is not of `cenet train --monitor-every`: {error}") from error
    return tuple(rows)


def _json(path: Path, author: str) -> dict[str, Any]:
    try:
        found = _printable_json(read_json(path))
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: {error}; write it again with {author}") from error
    except ValueError as error:
        raise ValueError(f"{error}; write it again with {author}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not of {author}: it holds no object")
    return found


def _printable_json(value: Any) -> Any:
    """The same content with printable texts, and None for numbers that are not finite."""
    if isinstance(value, dict):
        return {printable(key): _printable_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable_json(item) for item in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """The text, with U+FFFD in place of characters that do not print."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _folder(place: Path) -> Path:
    """The path that a source is named after: diagnosis.json is named after its folder."""
    if place.name == FILE:
        return place.parent
    return place.with_suffix("") if place.suffix == ".json" else place


def _names(places: list[Path]) -> list[str]:
    """The shortest endings of the paths that are all different."""
    ends = [place.name for place in places]
    depth = 1
    while len(set(ends)) < len(ends) and depth < max(len(place.parts) for place in places):
        depth += 1
        ends = ["/".join(place.parts[-depth:]) for place in places]
    # a folder and a file may still have one name
    for index, end in enumerate(ends):
        if end in ends[:index]:
            ends[index] = f"{end} ({index + 1})"
    return [printable(end) or "run" for end in ends]
