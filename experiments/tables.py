"""Rows of finished runs in CSV files to which several processes add."""

import csv
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cenet.files import open_to_append

Row = dict[str, str]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
# a row per run: of a classifier, one that chooses settings on held-out images, a detector, or a
# network that learns task after task
HEADS = ("runs", "trials", "detections", "lasting")
# what a run is made of: a row per layer, epoch, λ of a layer and epoch, share of removed channels,
# look, location, field of a Grad-CAM, task
PARTS = ("layers", "epochs", "lambdas", "ablation", "looks", "maps", "cams", "tasks")
DIGITS = 6  # that are kept of a number


def read(table: str, folder: Path = RESULTS) -> list[Row]:
    """All rows of a table."""
    path = folder / f"{table}.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def names(folder: Path = RESULTS) -> set[str]:
    """Of the runs that have rows."""
    return {row["name"] for table in HEADS for row in read(table, folder)}


def add(found: Mapping[str, Sequence[dict[str, Any]]], folder: Path = RESULTS) -> bool:
    """Add the rows of a run to their tables, unless it has rows already.

    Args:
        found: rows by table; those of `HEADS` have one.
        folder: of the tables.

    Returns:
        Whether they were added.
    """
    (row,) = (row for table in HEADS for row in found.get(table, ()))
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if row["name"] in names(folder):
            return False
        # the row of the run last: who finds it finds the others, too
        for table in (*PARTS, *HEADS):
            _append(folder / f"{table}.csv", found.get(table, ()))
    return True


def merge(source: Path, folder: Path = RESULTS) -> list[str]:
    """Add the rows of runs that another folder has and this one has not; their names."""
    if not any((source / f"{table}.csv").is_file() for table in HEADS):
        raise ValueError(f"{source} has none of {', '.join(f'{table}.csv' for table in HEADS)}")
    tables = {table: read(table, source) for table in (*HEADS, *PARTS)}
    added = []
    for name in sorted(names(source)):
        own = {
            table: [row for row in rows if row["name"] == name] for table, rows in tables.items()
        }
        if add(own, folder):
            added.append(name)
    return added


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    head = list(rows[0])
    if path.is_file():
        with path.open(newline="") as file:
            known = next(csv.reader(file))
        if known != head:
            other = sorted(set(known) ^ set(head)) or "in another order"
            raise ValueError(f"{path} has other columns than this version writes: {other}")
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(head)
        writer.writerows([[_short(value) for value in row.values()] for row in rows])


def _short(value: Any) -> Any:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, on all machines that share the folder."""
    with open_to_append(folder / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
