"""Read and write files in folders that other users and processes may reach.

Files are replaced as a whole, never through a link, and reading them cannot block on a pipe.
Tensors in them have a digest, which reveals damage.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

import torch
from torch import Tensor

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of formulas in a spreadsheet

ADVICE = {
    errno.ENOTDIR: "a part of this path is a file; choose another path",
    errno.EEXIST: "this is a file or a broken link; choose another path",
    errno.ENOENT: "choose another path",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "nothing can be written here; choose another path",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
}


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically; it is on the disk when this returns."""
    replace_files({path: content})


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace several files, one after the other, when all their contents are on the disk.

    Args:
        contents: by path, as for `replacing`.
    """
    with replacing(*contents) as room:
        for path, content in contents.items():
            written = room / path.relative_to(_common_folder(*contents))
            try:
                written.write_bytes(content)
            except OSError as error:  # an error while writing does not name the file
                raise OSError(error.errno, error.strerror, str(written)) from error


@contextmanager
def replacing(*paths: Path) -> Iterator[Path]:
    """A folder to write new versions of some files to, under their own names.

    At the end of the context all of them are synced to the disk, and only then does each replace
    its old version. The folder is hidden and beside the files, its name cannot be guessed, and
    only this user can open it. Missing folders are created, and removed again if the files cannot
    be written.

    A process that is killed while the files are replaced leaves the first of them new and the
    others old.

    Args:
        paths: the files to replace, in one folder or in folders below it.

    Raises:
        OSError: with the file or folder that could not be written as its file name, or with the
            first file if that is not known; the files are as they were before.
    """
    folder, room = _common_folder(*paths), None
    new: dict[Path, Path] = {}
    inner = {path.parent for path in paths} - {folder}
    made = [place for place in (*inner, folder, *folder.parents) if not place.exists()]
    for below in inner:
        _check_no_link(below)
    for path in paths:
        check_regular(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        room = Path(mkdtemp(prefix=f".{paths[0].name}.", dir=folder))
        new = {path: room / path.relative_to(folder) for path in paths}
        for written in new.values():
            written.parent.mkdir(parents=True, exist_ok=True)
        yield room
        for written in new.values():
            _sync(written)
        for below in inner:
            below.mkdir(parents=True, exist_ok=True)
        for path, written in new.items():
            os.replace(written, path)
    except Exception as error:
        number, reason = _system_error(error)
        if reason is None:
            raise
        known = {str(place): place for place in (*inner, folder, *folder.parents)}
        known |= {str(written): path for path, written in new.items()}
        named = known.get(str(getattr(error, "filename", None)), paths[0])
        raise OSError(number, reason, str(named)) from error
    finally:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)
        for place in made:
            with suppress(OSError):  # not empty, because the files are in it
                place.rmdir()
    for changed in (*inner, folder):
        _sync(changed)


def _common_folder(*paths: Path) -> Path:
    """The folder that holds all of these files, some of them in folders below it."""
    return Path(os.path.commonpath([path.parent for path in paths]))


def check_regular(path: Path) -> None:
    """Raise OSError for a folder, a device or a pipe, on which reading may block forever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def check_is_folder(out: Path) -> None:
    """Raise ValueError, before the work, if `--out` is no folder and none could be made there."""
    place = next(place for place in (out, *out.parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ValueError(f"--out {out}: {place} is a file or a broken link; it must be a folder")


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to append to it; OSError if it is a link, which may point anywhere."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    _check_no_link(path)
    check_regular(path)
    return open(path, "a", newline="", opener=opener)


def append(path: Path, text: str) -> None:
    """Append text to a file, which is opened by `open_to_append`.

    Raises:
        OSError: with the path as its file name; the file has all of the text or none of it.
    """
    rest = memoryview(text.encode())
    with open_to_append(path) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError as error:
            os.ftruncate(file.fileno(), before)
            raise OSError(error.errno, error.strerror, str(path)) from error


def in_words(error: Exception) -> str:
    """The message of an error; for errors of the system: path, reason and advice."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    advice = ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror}" + ("" if advice is None else f"; {advice}")


def make_folder(path: Path) -> Path:
    """Make a folder whose name the user has not chosen; OSError if it is a link."""
    _check_no_link(path)
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


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """A digest of names, types, shapes and bytes."""
    found = blake2b(facts.encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def harmless(cell: Any) -> Any:
    """A cell of a CSV file; text that a spreadsheet would run as a formula gets a leading quote."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which may lead anywhere; remove it", str(path))


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
