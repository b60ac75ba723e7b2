"""The images of a folder as a stream of batches. Unusable files are skipped and counted."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from cenet.analysis.diagnosis import Skipped
from cenet.data.datasets import TEST, TRAIN, Encoded, encoded, find_part
from cenet.data.decoding import eight_bits
from cenet.data.sources import Folder, Source, Subset

READERS = 4  # threads
NOT_AN_IMAGE = "not an image file"


class Found(NamedTuple):
    """The images of a folder."""

    source: Source
    labels: list[str] | None  # names of the class folders
    classes: tuple[str, ...] | None
    skipped: list[Skipped]
    folder: Path  # the one that holds all of them


def find_images(folder: Path, limit: int | None = None) -> Found:
    """Images of class folders, `folder/CLASS/*`, or of a flat folder, which has no labels.

    In a folder with `train` and `test` (or `val`, `validation`) the test images are used. The same
    holds for tar and parquet files in the layout for `cenet train`.

    Args:
        folder: where to look.
        limit: largest number of images, which are chosen at random, the same in every run.

    Raises:
        ValueError: it is not a folder, or has no image files.
    """
    if not folder.is_dir():
        raise ValueError(f"--data {folder} is not a folder")
    packed = find_part(folder, TEST)
    if packed is not None and packed.form != "folder":
        return _found_in(encoded(packed), folder, limit)
    if set(_folders(folder)) <= {*TRAIN, *TEST}:
        parts = (folder / name for name in TEST)
        folder = next((part for part in parts if part.is_dir()), folder)
    files = [path for path in _files(folder) if not _is_hidden(path.relative_to(folder))]
    paths = [path for path in files if path.suffix.lower() in IMG_EXTENSIONS]
    if not paths:
        raise ValueError(
            f"{folder} has no image files ({', '.join(IMG_EXTENSIONS)}), and no test-*.tar or "
            "test-*.parquet"
        )
    others = [path for path in files if path.suffix.lower() not in IMG_EXTENSIONS]
    skipped = [Skipped(str(path), NOT_AN_IMAGE) for path in others]
    classes: list[str] = []
    if any(path.parent != folder for path in paths):
        classes = _folders(folder)
        stray = [path for path in paths if path.parent == folder]
        skipped += [Skipped(str(path), "outside the class folders") for path in stray]
        paths = [path for path in paths if path.parent != folder]
    paths = [paths[place] for place in _shuffled(len(paths))[:limit]]
    if not classes:
        return Found(Folder(paths), None, None, skipped, folder)
    labels = [path.relative_to(folder).parts[0] for path in paths]
    return Found(Folder(paths), labels, tuple(classes), skipped, folder)


def _found_in(images: Encoded, folder: Path, limit: int | None) -> Found:
    """The images of tar or parquet files."""
    places = _shuffled(len(images.source))[:limit]
    labels = [images.classes[int(images.labels[place])] for place in places]
    return Found(Subset(images.source, places), labels, images.classes, [], folder)


def _shuffled(count: int) -> list[int]:
    """An order of images; a stream sorted by class would begin with one class."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return order


def _files(folder: Path) -> list[Path]:
    """All files below a folder. Links to folders are followed, each folder once."""
    seen: set[str] = set()
    files: list[Path] = []
    for place, inner, names in os.walk(folder, followlinks=True):
        inner.sort()
        real = os.path.realpath(place)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        files += (Path(place, name) for name in names)
    return sorted(files)


def _folders(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _is_hidden(path: Path) -> bool:
    """Whether a file is in a hidden folder, such as .ipynb_checkpoints."""
    return any(part.startswith(".") for part in path.parts)


class ImageStream:
    """Batches of images, or of images and labels, from a source.

    Attributes:
        skipped: files that could not be read, so far.
    """

    def __init__(
        self,
        source: Source,
        labels: Sequence[int] | None,
        transform: Callable[[Any], Tensor],
        batch: int,
    ) -> None:
        """Read nothing yet."""
        self.source, self.labels = source, labels
        self.transform, self.batch = transform, batch
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[Any]:
        """Read the files, a batch at a time; ValueError if none of them can be read."""
        self.skipped = []
        usable = 0
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(0, len(self.source), self.batch):
                places = range(start, min(start + self.batch, len(self.source)))
                images, kept = [], []
                for place, read in zip(places, pool.map(self._read, places), strict=True):
                    if isinstance(read, Skipped):
                        self.skipped.append(read)
                    else:
                        images.append(read)
                        kept.append(place)
                usable += len(kept)
                if images and self.labels is not None:
                    yield torch.stack(images), torch.tensor([self.labels[i] for i in kept])
                elif images:
                    yield torch.stack(images)
        if not usable:
            first = self.skipped[0]
            raise ValueError(
                f"none of {len(self.source)} image files can be read; the first: {first.path}: "
                f"{first.reason}"
            )

    def _read(self, place: int) -> Tensor | Skipped:
        from PIL import Image, UnidentifiedImageError

        where = self.source.where(place)
        try:
            content = BytesIO(self.source.read(place))
        except OSError as error:
            return Skipped(where, error.strerror or type(error).__name__)
        try:
            with Image.open(content) as image:
                return self.transform(eight_bits(image).convert("RGB"))
        except UnidentifiedImageError:  # its own message names the buffer
            return Skipped(where, "cannot identify image file")
        except Exception as error:  # decoders raise many kinds on damaged bytes
            return Skipped(
                where, str(error).splitlines()[0] if str(error) else type(error).__name__
            )
