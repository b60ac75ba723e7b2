"""Versions and hardware, as results record them."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import cenet


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """Versions and hardware."""
    import timm
    import torchvision

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "cenet": cenet.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "device": f"{device.type} {name}",
        "processes": world,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    """The commit of the source, if it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
