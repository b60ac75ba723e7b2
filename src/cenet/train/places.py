"""Which parts of a data set a folder holds, and in which form."""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from cenet.train.labels import read_names

TRAIN = ("train",)
TEST = ("test", "val", "validation")
FORMS: tuple[Literal["tar", "parquet"], ...] = ("tar", "parquet")
# of one part in one form, {0}; the first that finds files is taken
PATTERNS = ("{0}/*.{1}", "{0}-*.{1}", "*-{0}-*.{1}", "data/{0}-*.{1}")
COMPRESSED = ("tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst", "tar.lz4")


class Part(NamedTuple):
    """Training or test images of a folder."""

    name: str
    form: Literal["folder", "tar", "parquet"]
    paths: list[Path]  # of the files, or of the folder
    names: tuple[str, ...] | None  # of the classes, if a file beside them tells


def check_place(folder: Path) -> None:
    """ValueError if it is no folder of this machine."""
    if re.match(r"[a-z][a-z0-9+.-]+:", str(folder)):
        raise ValueError(
            f"--data {folder} is not on this machine; images are read in any order, so download "
            "the files and give their folder"
        )
    if not folder.is_dir():
        raise ValueError(f"--data {folder} is not a folder")


def find_part(folder: Path, names: tuple[str, ...]) -> Part | None:
    """The first of the parts that a folder has, as folders of classes or in files that hold many.

    Raises:
        ValueError: it has compressed tar files alone.
    """
    for name in names:
        own = folder / name
        if own.is_dir() and any(entry.is_dir() for entry in own.iterdir()):
            return Part(name, "folder", [own], None)
        for form in FORMS:
            if paths := _files(folder, name, form):
                return Part(name, form, paths, read_names((paths[0].parent, folder)))
        for ending in COMPRESSED:
            if paths := _files(folder, name, ending):
                raise ValueError(
                    f"{paths[0]} is compressed, and images are read in any order; decompress all "
                    "of them into files that end with .tar"
                )
        if own.is_dir():
            return Part(name, "folder", [own], None)
    return None


def _files(folder: Path, part: str, ending: str) -> list[Path]:
    found = (sorted(folder.glob(pattern.format(part, ending))) for pattern in PATTERNS)
    return next((paths for paths in found if paths), [])
