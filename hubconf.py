"""torch.hub entry points: `torch.hub.load("cenet/cenet", "ceresnet50", source="github")`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

dependencies = ["torch", "torchvision", "timm"]

from cenet.models import (  # noqa: E402, F401
    cemobilenetv2_100,
    ceresnet18,
    ceresnet50,
    ceresnet101,
    ceshufflenetv2_x0_5,
    ceshufflenetv2_x1_0,
    cevgg16,
)
