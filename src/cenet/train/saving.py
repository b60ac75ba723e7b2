"""Checkpoints that survive: written beside, synced, renamed; damage is found by their digest.

A checkpoint is a safetensors file. Numbers and names that are not tensors are in its metadata, with
a digest of everything else. Reading never executes code.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cenet.checkpoints import digest
from cenet.run_folder import beside, replacing

KEPT = 2
PATTERN = "step-*.safetensors"


class DamagedCheckpoint(ValueError):
    """A file that is not what was written."""


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint so that `path` holds all of it or what it held before.

    Args:
        path: the file.
        tensors: by name; on the CPU, dense, and no two in the same memory.
        facts: everything else, in types that JSON has.
    """
    text = json.dumps(facts, allow_nan=True, sort_keys=True)
    metadata = {"facts": text, "digest": digest(tensors, text)}
    # a folder of its own: safetensors makes files beside the one it writes, which a kill leaves
    room = beside(path)
    room.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path, room / path.name) as new:
            # other threads go on meanwhile
            _save(dict(tensors), new, metadata)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file; OSError if that fails, with the number of the system's error."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise OSError(str(error)) from error
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint; DamagedCheckpoint if one bit of it is not as written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedCheckpoint(f"{path} cannot be read as a checkpoint: {reason}") from error
    if "facts" not in metadata or "digest" not in metadata:
        raise DamagedCheckpoint(f"{path} was not written by `cenet train`: it has no digest")
    if digest(tensors, metadata["facts"]) != metadata["digest"]:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its digest")
    facts: dict[str, Any] = json.loads(metadata["facts"])
    return tensors, facts


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    return sorted(folder.glob(PATTERN), reverse=True)


def checkpoint_path(folder: Path, updates: int) -> Path:
    """Where the checkpoint after so many updates goes."""
    return folder / f"step-{updates:09d}.safetensors"


def forget_old(folder: Path) -> None:
    """Keep the newest checkpoints, and nothing that was left half written."""
    for path in checkpoints(folder)[KEPT:]:
        path.unlink(missing_ok=True)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def newest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any], list[str]] | None:
    """The newest checkpoint that is whole, and what was wrong with newer ones.

    Raises:
        DamagedCheckpoint: there are checkpoints, and none is whole.
    """
    problems: list[str] = []
    for path in checkpoints(folder):
        try:
            return path, *read(path), problems
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpoint(
            f"{'; '.join(problems)}. None is whole: start anew in another --out"
        )
    return None
