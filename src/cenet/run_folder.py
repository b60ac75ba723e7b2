"""The folder of a run: names of its files, a lock, and reading its rows."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cenet.files import check_regular, open_to_append

ABOUT = "run.json"  # recipe, input spec and environment
METRICS = "metrics.jsonl"  # one row per epoch
METRICS_CSV = "metrics.csv"  # the same rows
LAMBDA = "lambda/"  # columns of the rows: λ of a CE layer, whose name follows
CHANNELS = "channels.csv"  # channel statistics, with --monitor-every
WEIGHTS = "weights.safetensors"  # final weights
SAVED_WEIGHTS = "model.safetensors"  # the same in a folder of `cenet.save`, as timm names them
CONFIG = "config.json"  # network and images, in the format of timm
LOCK = ".lock"
CHECKPOINT = r"step-(\d+)\.safetensors"  # the number of updates is in the name
REPLACED = (ABOUT, METRICS, METRICS_CSV, CHANNELS, WEIGHTS, CONFIG)
# folders in which `files.replacing` writes: the name of a file, and eight random characters
UNFINISHED = re.compile(rf"\.({'|'.join(map(re.escape, REPLACED))}|{CHECKPOINT})\.[a-z0-9_]{{8}}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs from writing to a folder; the lock disappears if this process is killed.

    Files that an earlier run was writing when it was killed are removed. If nothing was written in
    the meantime, no trace of the lock is left at the end.

    Raises:
        ValueError: another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with open_to_append(path) as file:
        try:
            # a lock of this process only: workers that outlive it do not hold the lock
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise BlockingIOError  # its last owner has removed it in the meantime
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"another process is writing to {folder}; wait for it, or choose another --out"
            ) from error
        for path in folder.iterdir():
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        try:
            yield
        finally:
            with suppress(OSError):  # another process may add or remove files meanwhile
                if [*folder.iterdir()] == [path]:  # nothing was begun
                    path.unlink()
                    for place in new:
                        place.rmdir()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, one for each epoch; ValueError if the file is damaged.

    If an epoch has several rows, the last one counts. A last line whose writing was cut off is left
    out.
    """
    try:
        check_regular(path)
        lines = path.read_text(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{path} cannot be read: it is nested too deeply") from error
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} cannot be read: line {number}: {error}") from error
        if not isinstance(row, dict) or type(row.get("epoch")) is not int:
            raise ValueError(f"{path} cannot be read: line {number} is not the row of an epoch")
        rows.pop(row["epoch"], None)
        rows[row["epoch"]] = row
    return list(rows.values())
