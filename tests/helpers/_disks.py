"""Disks on which files do not fit: a limit on the size of files, and a small file system."""

import resource
import shutil
import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def file_size_limit(size):
    """Writing more bytes than this to any file fails (RLIMIT_FSIZE)."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, free[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)


@contextmanager
def small_disk(folder, size):
    """A file system of this many bytes at `folder`; skips the test where none may be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "cenet", str(folder)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options]).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # files may be open


def fill(folder):
    """Leave no room on the disk of a folder."""
    with suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def files_in(folder):
    """The content of every file, hidden ones and folders included."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
