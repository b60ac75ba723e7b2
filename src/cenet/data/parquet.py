"""Images in parquet files as the Hugging Face hub stores them, read by number.

The datasets library would first copy all images to a cache in the home folder. Here pyarrow reads
the files directly, one row group at a time, and each process keeps the row groups it used last.
"""

import errno
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from cenet.data.sources import labels_and_classes
from cenet.extras import require

# largest size of the row groups that a process keeps, in bytes
KEPT = 128 * 2**20


class Columns(NamedTuple):
    """The columns of image, file name and label."""

    image: str  # path of the column of bytes
    file: str | None  # path of the column of file names
    label: str
    classes: tuple[str, ...] | None


class Group(NamedTuple):
    """A row group of a parquet file."""

    path: Path
    number: int
    start: int  # number of its first row in the file
    rows: int
    size: int  # bytes of its images


class ParquetRows:
    """A source of images in parquet files, in the order of the files and of their rows."""

    def __init__(self, groups: list[Group], columns: Columns) -> None:
        """The images of these row groups."""
        self.groups, self.columns = groups, columns
        # number of the first image of each row group
        self.starts = [0, *accumulate(group.rows for group in groups)]
        self.kept: dict[int, _Kept] = {}  # by process id: a fork may copy a lock that is held

    def __reduce__(self) -> tuple[type["ParquetRows"], tuple[list[Group], Columns]]:
        """Pickle for processes that are not forked."""
        return ParquetRows, (self.groups, self.columns)

    def __len__(self) -> int:
        """See `Source`."""
        return self.starts[-1]

    def names(self) -> Iterator[str]:
        """Name of the parquet file, row, and file name of the image if it has one."""
        for group in self.groups:
            files = [None] * group.rows
            if self.columns.file is not None:
                files = _column(group, self.columns.file).to_pylist()
            for row, file in enumerate(files, group.start):
                yield f"{group.path.name}/{row}/{file or ''}"

    def where(self, index: int) -> str:
        """See `Source`."""
        group, row = self._place(index)
        return f"{self.groups[group].path}: row {self.groups[group].start + row}"

    def read(self, index: int) -> bytes:
        """See `Source`."""
        group, row = self._place(index)
        kept = self.kept.setdefault(os.getpid(), _Kept())
        content = kept.images(group, self.groups[group], self.columns.image)[row].as_py()
        if content is None:
            raise OSError(errno.ENODATA, "the row has no bytes of an image")
        return bytes(content)

    def _place(self, index: int) -> tuple[int, int]:
        """The row group of an image, and the row in it."""
        group = bisect_right(self.starts, index) - 1
        return group, index - self.starts[group]


class _Kept:
    """The row groups that a process used last, shared by its threads."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.slots: dict[int, _Slot] = {}  # in order of their last use

    def images(self, key: int, group: Group, column: str) -> Any:
        """The images of a row group; one thread reads them while others wait."""
        with self.lock:
            slot = self.slots.pop(key, None) or _Slot(group.size)
            self.slots[key] = slot
            while len(self.slots) > 1 and sum(slot.size for slot in self.slots.values()) > KEPT:
                del self.slots[next(iter(self.slots))]
        with slot.lock:
            if slot.images is None:
                slot.images = _column(group, column)
        return slot.images


class _Slot:
    """The images of a row group, None until they are read."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, Lock()
        self.images: Any = None


def parquet_images(
    paths: list[Path], names: tuple[str, ...] | None
) -> tuple[ParquetRows, Tensor, tuple[str, ...]]:
    """Images, labels and classes of parquet files with a column of each.

    Args:
        paths: files in order.
        names: names of the classes in order of their numbers, used if the files have none.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ValueError: a file is damaged, empty or without one of the columns, or
            an image has no usable label.
    """
    require("data")
    import pyarrow.parquet

    groups: list[Group] = []
    labels: list[Any] = []
    first: Columns | None = None
    for path in paths:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = _columns(file.schema_arrow, path)
                groups += _groups(file.metadata, path, columns.image)
                labels += file.read([columns.label], use_threads=False).column(0).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is not a parquet file that can be read: {_said(error)}; copy it again"
            ) from error
        if columns != (first := first or columns):
            raise ValueError(f"{path} has other columns or classes than {paths[0]}")
    assert first is not None
    rows = ParquetRows(groups, first)
    if None in labels:
        where = rows.where(labels.index(None))
        raise ValueError(f"{where} has no value in the column {first.label!r}")
    if isinstance(labels[0], str):
        classes = tuple(sorted(set(labels)))
        number = {name: number for number, name in enumerate(classes)}
        return rows, *labels_and_classes([number[label] for label in labels], classes, rows.where)
    return rows, *labels_and_classes(labels, first.classes or names, rows.where)


def _columns(schema: Any, path: Path) -> Columns:
    """Find the columns of a file by their types, and by their names if several have the type."""
    import pyarrow.types as types

    features = _features(schema, path)
    kinds = {field.name: features.get(field.name, {}).get("_type") for field in schema}
    images = {field.name: field.type for field in schema if _holds_bytes(field.type)}
    images = {name: kind for name, kind in images.items() if kinds[name] in (None, "Image")}
    image = _chosen(list(images), "image", path, schema)
    integers = [field.name for field in schema if types.is_integer(field.type)]
    labels = [name for name in integers if kinds[name] == "ClassLabel"] or integers
    if "label" in schema.names and (_is_text(schema.field("label").type) or "label" in integers):
        labels = ["label"]
    label = _chosen(labels, "label", path, schema)
    names = features.get(label, {}).get("names")
    is_struct = types.is_struct(images[image])
    has_file = is_struct and images[image].get_field_index("path") >= 0
    return Columns(
        image=f"{image}.bytes" if is_struct else image,
        file=f"{image}.path" if has_file else None,
        label=label,
        classes=tuple(names) if kinds[label] == "ClassLabel" and names else None,
    )


def _features(schema: Any, path: Path) -> dict[str, Any]:
    """The features that the datasets library recorded for the columns."""
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"] if about else {}
        found = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        for feature in found.values():
            names = feature.get("names")
            if names is not None and not all(isinstance(name, str) for name in names):
                raise TypeError("names of classes are not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} has metadata of the datasets library that cannot be read ({error!r}); write "
            "it again, or remove the metadata"
        ) from error
    return found


def _chosen(names: list[str], preferred: str, path: Path, schema: Any) -> str:
    """The only name, or the preferred one of several."""
    if len(names) == 1:
        return names[0]
    if preferred in names:
        return preferred
    problem = f"several columns of {preferred}s" if names else f"no column of {preferred}s"
    raise ValueError(
        f"{path} has {problem} among {names or schema.names}; name it {preferred!r} "
        f"({'class numbers or names' if preferred == 'label' else 'bytes of image files'})"
    )


def _holds_bytes(kind: Any) -> bool:
    """Whether a column holds bytes, or structs with a field `bytes`."""
    import pyarrow.types as types

    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _groups(metadata: Any, path: Path, column: str) -> list[Group]:
    """The row groups of a file."""
    if metadata.num_rows == 0:
        raise ValueError(f"{path} has no rows; take it out of the folder")
    groups: list[Group] = []
    start = 0
    for number in range(metadata.num_row_groups):
        about = metadata.row_group(number)
        parts = (about.column(i) for i in range(about.num_columns))
        size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)
        groups.append(Group(path, number, start, about.num_rows, size))
        start += about.num_rows
    return groups


def _column(group: Group, column: str) -> Any:
    """Read a column of a row group; OSError if that fails."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(group.path) as file:
            # threads of pyarrow do not survive a fork
            table = file.read_row_group(group.number, [column], use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        reason = f"its row group is damaged: {_said(error)}; copy the file again"
        raise OSError(errno.EIO, reason) from error
    return table.flatten().column(0)


def _said(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())
