"""Versions and hardware, as results record them."""

import os
import platform
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cenet.version import VERSION

SECONDS = 10  # time limit of git


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """Versions and hardware, for the files that a run writes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "cenet": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "timm": _version("timm"),
        "device": f"{device.type} {name}",
        "processes": world,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    """The version of a package of an extra, if it is installed."""
    if find_spec(package) is None:
        return None
    version: str = import_module(package).__version__
    return version


def commit() -> str | None:
    """The commit of the source, if this file is part of a checkout of cenet.

    An installed copy has none, even if it is inside of the checkout of another project.
    """
    source = Path(__file__).resolve()
    root = _git(source.parent, "rev-parse", "--show-toplevel")
    if root is None or Path(root) != source.parents[2]:
        return None
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "rev-parse", "--short", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails, is missing or takes too long."""
    # variables such as GIT_DIR would lead to another repository
    variables = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], env=variables, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=True, timeout=SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
