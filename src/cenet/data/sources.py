"""Encoded images that can be read by number, and the numbers and names of their classes."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cenet.files import check_regular

# endings of image files
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# files with the name of a class in each line
NAMES_FILES = ("classes.txt", "classnames.txt")


# number of training images, and of test images, whose contents are compared on resumption
SAMPLE = 256
MARK = 4  # bytes of the digest of one of them
REPAIRED = 1 / 8  # share of them that may have changed: damaged files are repaired


def sample(count: int) -> list[int]:
    """The numbers of all of `count` images, or of `SAMPLE` of them, evenly spaced."""
    chosen = min(count, SAMPLE)
    return [place * count // chosen for place in range(chosen)]


def mark(content: bytes) -> str:
    """A short digest of an image, for `are_same_images`."""
    return blake2b(content, digest_size=MARK).hexdigest()


def are_same_images(before: str, now: str) -> bool:
    """Whether two digests are of the same images: names, and after colons the marks of each set.

    Digests of earlier versions have fewer marks, or none (then only names are compared), or the
    marks of all sets as one text.
    """
    (names, *old), (names_now, *new) = before.split(":"), now.split(":")
    if names != names_now or len("".join(old)) < len("".join(new)):
        return names == names_now
    if len(old) == 1:
        new = ["".join(new)]
    return len(old) == len(new) and all(map(_are_same_marks, old, new))


def _are_same_marks(before: str, now: str) -> bool:
    step = 2 * MARK  # letters
    places = range(0, len(now), step)
    changed = sum(before[at : at + step] != now[at : at + step] for at in places)
    return len(before) == len(now) and changed <= REPAIRED * len(places)


class Source(Protocol):
    """Encoded images in a fixed order, any of which can be read at any time, by any process."""

    def __len__(self) -> int:
        """Number of images."""
        ...

    def names(self) -> Iterator[str]:
        """The name of each image, which does not depend on the folder of the data."""
        ...

    def where(self, index: int) -> str:
        """The place of an image, for messages."""
        ...

    def read(self, index: int) -> bytes:
        """The bytes of an image file; OSError if it cannot be read."""
        ...


class Folder:
    """A source with one file for each image."""

    def __init__(self, paths: list[Path]) -> None:
        """A source of these files."""
        self.paths = paths

    def __len__(self) -> int:
        """See `Source`."""
        return len(self.paths)

    def names(self) -> Iterator[str]:
        """Folder of the class, and file."""
        return (f"{path.parent.name}/{path.name}" for path in self.paths)

    def where(self, index: int) -> str:
        """See `Source`."""
        return str(self.paths[index])

    def read(self, index: int) -> bytes:
        """See `Source`."""
        check_regular(self.paths[index])
        return self.paths[index].read_bytes()


class Subset:
    """Some images of a source."""

    def __init__(self, source: Source, places: Iterable[int]) -> None:
        """The images with these numbers, in this order."""
        self.source = source
        # an array: worker processes share its memory, while reading a list would copy it
        self.places = array("q", places)

    def __len__(self) -> int:
        """See `Source`."""
        return len(self.places)

    def names(self) -> Iterator[str]:
        """The names that the images have in the whole source, in the order of the source."""
        chosen = set(self.places)
        return (name for place, name in enumerate(self.source.names()) if place in chosen)

    def where(self, index: int) -> str:
        """See `Source`."""
        return self.source.where(self.places[index])

    def read(self, index: int) -> bytes:
        """See `Source`."""
        return self.source.read(self.places[index])


def read_names(folders: Sequence[Path]) -> tuple[str, ...] | None:
    """Class names from classes.txt or classnames.txt in the first folder that has one, or None."""
    paths = (folder / name for folder in folders for name in NAMES_FILES)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    try:
        names = [line.strip() for line in path.read_text("utf-8").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8") from error
    lines: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise ValueError(f"line {number} of {path} is empty; each line is the name of a class")
        if name in lines:
            raise ValueError(
                f"lines {lines[name]} and {number} of {path} are both {name!r}; classes need "
                "different names"
            )
        lines[name] = number
    return tuple(names)


def labels_and_classes(
    numbers: Sequence[int], names: tuple[str, ...] | None, where: Callable[[int], str]
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels of images as a tensor, and the names of their classes.

    Args:
        numbers: class number of each image.
        names: names of the classes in order of their numbers; None names them by their numbers.
        where: returns the place of an image, for messages.

    Raises:
        ValueError: a number is negative or has no name; without names, a class has no image.
    """
    least, most = (pick(range(len(numbers)), key=lambda i: numbers[i]) for pick in (min, max))
    if numbers[least] < 0:
        raise ValueError(
            f"{where(least)} has class number {numbers[least]}, and the first class is 0; images "
            "without a label often have -1: take their files out of the folder"
        )
    if names is None:
        names = _numbers_as_names(numbers, where(most))
    elif numbers[most] >= len(names):
        raise ValueError(
            f"{where(most)} has class number {numbers[most]}, but {len(names)} classes have names, "
            f"0 to {len(names) - 1}"
        )
    return torch.tensor(numbers), names


def _numbers_as_names(numbers: Sequence[int], last: str) -> tuple[str, ...]:
    """The names '0', '1', …; ValueError if a class has no image."""
    used = set(numbers)
    if len(used) <= max(used):
        missing = next(number for number in count() if number not in used)
        raise ValueError(
            f"{last} has class number {max(used)}, but no image beside it has {missing}; number "
            f"the classes from 0 on, or name all of them in {NAMES_FILES[0]}, one in a line"
        )
    return tuple(str(number) for number in range(len(used)))
