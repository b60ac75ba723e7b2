"""Versions and hardware, as results record them."""

import platform
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cenet.version import VERSION


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
    """The commit of the source, if it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
