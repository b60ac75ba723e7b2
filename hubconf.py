"""torch.hub entry points: `torch.hub.load("PATH", "ceresnet50", source="local")`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

dependencies = ["torch", "torchvision", "timm", "safetensors"]

from cenet.models.entrypoints import *  # noqa: E402, F403
