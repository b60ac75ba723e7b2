"""Files that others can reach, too: replaced whole, never through a link, and never waited for."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of formulas in a spreadsheet


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically; it is on the disk when this returns."""
    with replacing(path) as room:
        (room / path.name).write_bytes(content)


@contextmanager
def replacing(*paths: Path) -> Iterator[Path]:
    """A folder to write new versions of some files to, under their own names.

    At the end of the context all of them are synced to the disk, and only then does each replace
    its old version. The folder is hidden, beside the files, and of a name that nobody could know
    before; only this user can open it.

    Args:
        paths: the files to replace, all in one folder.

    Raises:
        OSError: with the first path as its file name; the files are as they were before.
    """
    for path in paths:
        check_regular(path)
    folder, room = paths[0].parent, None
    try:
        room = Path(mkdtemp(prefix=f".{paths[0].name}.", dir=folder))
        yield room
        for path in paths:
            _sync(room / path.name)
        for path in paths:
            os.replace(room / path.name, path)
    except Exception as error:
        number, reason = _system_error(error)
        if reason is None:
            raise
        raise OSError(number, reason, str(paths[0])) from error
    finally:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)
    _sync(folder)


def check_regular(path: Path) -> None:
    """Raise OSError for a folder, a device or a pipe, which could be waited for without end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to append to it; OSError if it is a link, which may lead anywhere."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which may lead anywhere; remove it", str(path))
    check_regular(path)
    return open(path, "a", newline="", opener=opener)


def make_folder(path: Path) -> Path:
    """Make a folder whose name the user has not chosen; OSError if it is a link, as above."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which may lead anywhere; remove it", str(path))
    path.mkdir(parents=True, exist_ok=True)
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file; ValueError if it cannot be read."""
    try:
        check_regular(path)
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError) as error:  # ValueError: bytes that are not text, or no JSON
        raise ValueError(f"{path} cannot be read: {error}") from error


def harmless(cell: Any) -> Any:
    """A cell of a CSV file; text that a spreadsheet would run as a formula gets a quote before."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _system_error(error: Exception) -> tuple[int | None, str | None]:
    """Number and text of the system's error, if it is one; safetensors has it in its message."""
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(found[1])
    if number is not None:
        return number, os.strerror(number)
    return None, str(error) if isinstance(error, OSError) else None


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
