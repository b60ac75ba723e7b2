"""Reading the folders of `cenet train` and the files of `cenet diagnose`."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cenet.analysis.diagnosis import FORMAT, Diagnosis, Layer
from cenet.report.shape import first_large, first_mismatch, first_problem
from cenet.train.logbook import CHANNELS, METRICS, read_metrics

RUN = "run.json"
DIAGNOSIS = "diagnosis.json"
AGAIN = "write it again with `cenet diagnose`"
WATCHED = ("dormant_ratio", "participation_share", "correlation")
MOST = 8  # colours that can be told apart
ROW = {"epoch": int} | {
    f"{part}_{name}?": float for part in ("train", "test") for name in ("loss", "top1")
}


@dataclass(frozen=True)
class Source:
    """A run, as far as it is known.

    Attributes:
        name: of its folder.
        recipe: of run.json.
        environment: of run.json, or of the diagnosis.
        metrics: a row per epoch.
        diagnosis: what `cenet diagnose` has measured.
        watched: a row per update and layer, of `cenet train --monitor-every`.
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
    """Read every path, and name each after its folder; a diagnosis is called like its model.

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


def from_diagnosis(diagnosis: Diagnosis) -> Source:
    """A source that is a diagnosis alone, named after its model; ValueError if it is damaged."""
    found = _checked(_plain(diagnosis.as_dict()), "the diagnosis")
    return _alone(found, found.model.name)


def read_diagnosis(path: Path) -> Diagnosis:
    """The content of a diagnosis.json; ValueError if it is damaged or of another version."""
    return _checked(_json(path, "`cenet diagnose`"), str(path))


def _read(path: Path | Diagnosis, name: str) -> Source:
    if isinstance(path, Diagnosis):
        return replace(from_diagnosis(path), name=name)
    if path.is_file():
        return _alone(read_diagnosis(path), name)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a folder of `cenet train` or a {DIAGNOSIS}")
    measured = path / DIAGNOSIS
    diagnosis = read_diagnosis(measured) if measured.is_file() else None
    if not (path / RUN).is_file():
        if diagnosis is None:
            raise ValueError(
                f"{path} holds neither {RUN} of `cenet train` nor {DIAGNOSIS} of "
                "`cenet diagnose`; give the folder of a run"
            )
        return _alone(diagnosis, name)
    trained = read_training(path, name)
    if not trained.metrics and diagnosis is None:
        raise ValueError(
            f"{path / METRICS} has no row yet, and there is no {DIAGNOSIS}; "
            "wait for the first epoch, or measure with `cenet diagnose`"
        )
    return replace(trained, diagnosis=diagnosis, watched=_watched(path / CHANNELS))


def _alone(diagnosis: Diagnosis, name: str) -> Source:
    return Source(name, environment=diagnosis.environment, diagnosis=diagnosis)


def read_training(
    folder: Path, name: str, row: dict[str, Any] = ROW, author: str = "`cenet train`"
) -> Source:
    """Recipe, environment and metrics of a run.

    Args:
        folder: of the run.
        name: of the source.
        row: the shape of a row of metrics.
        author: the command that writes such folders.

    Raises:
        ValueError: something is damaged, or not of this command.
    """
    about = _json(folder / RUN, author)
    wrong = first_problem(about, {"recipe": dict, "environment": dict, "command?": str})
    if wrong:
        raise ValueError(f"{folder / RUN} is not of {author}: {wrong}")
    made = f"`{about['command']}`" if "command" in about else author
    if made != author:
        raise ValueError(f"{folder} is a run of {made}; see {made.replace(' train', ' --help')}")
    rows = _metrics(folder / METRICS, row, author)
    return Source(printable(name), about["recipe"], about["environment"], rows)


def _metrics(path: Path, shape: dict[str, Any], author: str) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    rows = [_plain(row) for row in read_metrics(path)]
    for number, row in enumerate(rows, start=1):
        wrong = first_problem(row, shape)
        if wrong:
            raise ValueError(f"{path}, line {number}, is not a row of {author}: {wrong}")
    return tuple(rows)


def _watched(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    rows = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file, restval=""):
                numbers = {n: float(row[n]) if row.get(n) else None for n in WATCHED}
                rows.append(
                    {"step": int(row["step"]), "layer": printable(row["layer"]), **_plain(numbers)}
                )
    except (OSError, ValueError, KeyError, csv.Error) as error:
        where = f"{path}, line {len(rows) + 2},"
        raise ValueError(f"{where} is not of `cenet train --monitor-every`: {error}") from error
    return tuple(rows)


def _json(path: Path, author: str) -> dict[str, Any]:
    try:
        found = _plain(json.loads(path.read_text()))
    # bytes that are not text, text that is not JSON, and lists in lists without end
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; write it again with {author}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not of {author}: it holds no object")
    return found


def _checked(content: dict[str, Any], where: str) -> Diagnosis:
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{where} is not a diagnosis: its format is {content.get('format')!r}, not {FORMAT!r}"
        )
    large = first_large(content)
    if large:
        raise ValueError(f"{where} is damaged: {large}; {AGAIN}")
    try:
        found = Diagnosis.from_dict(content)
    except ValueError as error:
        raise ValueError(f"{where} cannot be read: {error}; {AGAIN}") from error
    wrong = first_mismatch(found)
    if wrong:
        raise ValueError(f"{where} is damaged: {wrong}; {AGAIN}")
    return found


def _plain(value: Any) -> Any:
    """The same without characters that do not print and numbers that are not finite."""
    if isinstance(value, dict):
        return {printable(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """The text, with a sign in place of what does not print."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _folder(place: Path) -> Path:
    """What gives a source its name: diagnosis.json is called like its folder."""
    if place.name == DIAGNOSIS:
        return place.parent
    return place.with_suffix("") if place.suffix == ".json" else place


def _names(places: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
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
