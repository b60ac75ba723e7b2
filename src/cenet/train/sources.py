"""Where encoded images are, by number: in files of a folder."""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

# of image files
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Source(Protocol):
    """Encoded images in a fixed order, any of which can be read at any time, by any process."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def names(self) -> Iterator[str]:
        """A name of each image that is the same wherever the data are."""
        ...

    def where(self, index: int) -> str:
        """Where an image is, for a message."""
        ...

    def read(self, index: int) -> bytes:
        """The bytes of an image file; OSError if they cannot be read."""
        ...


class Folder:
    """Files, one for each image."""

    def __init__(self, paths: list[Path]) -> None:
        """Of these files."""
        self.paths = paths

    def __len__(self) -> int:
        """See `Source`."""
        return len(self.paths)

    def names(self) -> Iterator[str]:
        """See `Source`: class and file."""
        return (f"{path.parent.name}/{path.name}" for path in self.paths)

    def where(self, index: int) -> str:
        """See `Source`."""
        return str(self.paths[index])

    def read(self, index: int) -> bytes:
        """See `Source`."""
        return self.paths[index].read_bytes()


class Subset:
    """Some images of a source, in the order of the source."""

    def __init__(self, source: Source, places: Iterable[int]) -> None:
        """Of the images with these numbers, which grow."""
        self.source = source
        # numbers that worker processes share, where a list would be copied when it is read
        self.places = array("q", places)

    def __len__(self) -> int:
        """See `Source`."""
        return len(self.places)

    def names(self) -> Iterator[str]:
        """See `Source`: those of the whole source."""
        chosen = set(self.places)
        return (name for place, name in enumerate(self.source.names()) if place in chosen)

    def where(self, index: int) -> str:
        """See `Source`."""
        return self.source.where(self.places[index])

    def read(self, index: int) -> bytes:
        """See `Source`."""
        return self.source.read(self.places[index])
