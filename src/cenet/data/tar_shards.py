"""Images in tar files as WebDataset writes them, read by number from an index.

(The indexed reader wids of WebDataset is not used: it cuts names at 100 characters, does not notice
truncated files, and was removed in version 1.)
"""

import errno
import json
import tarfile
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor

from cenet.data.sources import SUFFIXES, labels_and_classes

BLOCK = 512
IMAGES = {ending.removeprefix(".") for ending in SUFFIXES}


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int
    size: int


class TarShards:
    """A source of images in tar files, in the order of the files and of their members."""

    def __init__(self) -> None:
        """Start without images."""
        self.paths: list[Path] = []
        self.starts: list[int] = []  # number of the first image of each tar file
        self.members: list[str] = []
        # arrays: worker processes share their memory, while reading tuples would copy it
        self.offsets, self.sizes = array("q"), array("q")

    def add(self, path: Path, images: list[Member]) -> None:
        """Append the images of a tar file."""
        self.paths.append(path)
        self.starts.append(len(self))
        for name, offset, size in images:
            self.members.append(name)
            self.offsets.append(offset)
            self.sizes.append(size)

    def __len__(self) -> int:
        """See `Source`."""
        return len(self.members)

    def names(self) -> Iterator[str]:
        """Name of the tar file, and of the member."""
        return (f"{self._path(i).name}/{self.members[i]}" for i in range(len(self)))

    def where(self, index: int) -> str:
        """See `Source`."""
        return _where(self._path(index), self.members[index])

    def read(self, index: int) -> bytes:
        """See `Source`. The file is opened each time: threads and processes share no open file."""
        with self._path(index).open("rb") as file:
            content = _content(file, self.offsets[index], self.sizes[index])
        if len(content) < self.sizes[index]:
            raise OSError(errno.EIO, "the tar file became shorter")
        return content

    def _path(self, index: int) -> Path:
        return self.paths[bisect_right(self.starts, index) - 1]


def tar_images(
    paths: list[Path], names: tuple[str, ...] | None
) -> tuple[TarShards, Tensor, tuple[str, ...]]:
    """Images, labels and classes of tar files with KEY.jpg, KEY.cls or KEY.json for each sample.

    Args:
        paths: tar files in order.
        names: names of the classes in order of their numbers, or None.

    Raises:
        ValueError: a tar file is damaged or empty, or an image has no usable label.
    """
    shards = TarShards()
    numbers: list[int] = []
    for path in paths:
        images, found = _samples(path)
        shards.add(path, images)
        numbers += found
    return shards, *labels_and_classes(numbers, names, shards.where)


def _samples(path: Path) -> tuple[list[Member], list[int]]:
    """The images of a tar file, and their class numbers."""
    samples: dict[str, dict[str, Member]] = defaultdict(dict)
    images: list[Member] = []
    numbers: list[int] = []
    with path.open("rb") as file:
        for member in _members(file, path):
            folder, slash, base = member.name.rpartition("/")
            stem, _, kind = base.lower().partition(".")
            if kind in IMAGES:
                kind = "image"
            if stem and kind in ("image", "cls", "json"):
                sample = samples[folder + slash + base[: len(stem)]]
                if kind in sample:
                    both = f"{sample[kind].name} and {member.name}"
                    raise ValueError(f"{path} has {both} for one sample; keep one of them")
                sample[kind] = member
        for sample in samples.values():
            if "image" in sample:
                images.append(sample["image"])
                numbers.append(_number(file, path, sample))
            elif "cls" in sample:
                where = _where(path, sample["cls"].name)
                raise ValueError(f"{where} has no image beside it that ends with {sorted(IMAGES)}")
    if not images:
        raise ValueError(f"{path} has no images; take it out of the folder")
    return images, numbers


def _members(file: IO[bytes], path: Path) -> Iterator[Member]:
    """The files in a tar file; the end of the tar file is checked after the last one."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                end = member.offset_data
                if member.issparse():
                    raise ValueError(
                        f"{_where(path, member.name)} is packed as a sparse file; pack it without "
                        "tar's option --sparse"
                    )
                if member.isfile():
                    end += -(-member.size // BLOCK) * BLOCK
                    yield Member(member.name, member.offset_data, member.size)
    except tarfile.ReadError as error:
        if end == 0:
            reason = "is no tar file, or a compressed one, which must be decompressed"
            raise ValueError(f"{path} {reason} ({error})") from error
        raise ValueError(_truncated(path)) from error
    if _content(file, end, BLOCK) != bytes(BLOCK):
        raise ValueError(_truncated(path))


def _truncated(path: Path) -> str:
    return f"{path} is damaged: it has no end, as after a copy that broke off; copy it again"


def _number(file: IO[bytes], path: Path, sample: dict[str, Member]) -> int:
    """The class number of a sample."""
    label = sample.get("cls") or sample.get("json")
    if label is None:
        where, key = _where(path, sample["image"].name), Path(sample["image"].name).stem
        raise ValueError(f"{where} has no label: neither {key}.cls nor {key}.json is beside it")
    text = _content(file, label.offset, label.size)
    try:
        if "cls" in sample:
            return int(text)
        number = json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"holds no class number: {text[:40]!r}"
        raise ValueError(f"{_where(path, label.name)} {problem}") from error
    if type(number) is not int:
        raise ValueError(
            f"{_where(path, label.name)} has the label {number!r}, which is no class number"
        )
    return number


def _content(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _where(path: Path, name: str) -> str:
    return f"{path}: {name}"
