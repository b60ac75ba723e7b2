"""The images of a folder in other forms, in the same order."""

import io
import tarfile
from pathlib import Path

from torchvision.datasets import ImageFolder

PARTS = ("train", "test")


def files_of(folder, part):
    """Bytes and class number of each image, as torchvision orders them; and the classes."""
    found = ImageFolder(folder / part)
    return [(Path(path).read_bytes(), label) for path, label in found.samples], found.classes


def write_tar(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_shards(folder, place, per_shard=9, pattern="{}-{:04d}.tar"):
    """Tar files by Python's own writer, the last first."""
    for part in PARTS:
        files, classes = files_of(folder, part)
        for start in reversed(range(0, len(files), per_shard)):
            members = []
            for i, (content, label) in enumerate(files[start : start + per_shard], start):
                members += [(f"{i:05d}.png", content), (f"{i:05d}.cls", str(label).encode())]
            write_tar(place / pattern.format(part, start // per_shard), members)
    (place / "classes.txt").write_text("\n".join(classes) + "\n")
    return place


def write_parquet(folder, place, per_file=25, per_group=4):
    """Parquet files by pyarrow, with class names in the label column."""
    for part in PARTS:
        files, classes = files_of(folder, part)
        for start in range(0, len(files), per_file):
            rows = [
                {"image": {"bytes": content, "path": f"{i}.png"}, "label": classes[label]}
                for i, (content, label) in enumerate(files[start : start + per_file], start)
            ]
            write_rows(place / f"{part}-{start:04d}.parquet", rows, row_group_size=per_group)
    return place


def write_rows(path, rows, schema=None, **options):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows, schema)
    pyarrow.parquet.write_table(table, path, **options)
