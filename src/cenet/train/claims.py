"""One run at a time writes to a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the system forgets the claim if this process is killed.

    Raises:
        ValueError: another process has it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            # of this process alone: workers that outlive it do not keep the claim
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"another process is writing to {folder}; wait for it, or choose another --out"
            ) from error
        yield
