"""The networks of the paper. Importing this package registers their CE variants in timm."""

from cenet.extras import require

require("models")

from cenet.models.entrypoints import (
    cemobilenetv2_100,
    ceresnet18,
    ceresnet50,
    ceresnet101,
    ceshufflenetv2_x0_5,
    ceshufflenetv2_x1_0,
    cevgg6,
    cevgg16,
)
from cenet.models.factory import NETWORKS, create_model
from cenet.models.inserted import with_ce

__all__ = [
    "NETWORKS",
    "cemobilenetv2_100",
    "ceresnet18",
    "ceresnet50",
    "ceresnet101",
    "ceshufflenetv2_x0_5",
    "ceshufflenetv2_x1_0",
    "cevgg6",
    "cevgg16",
    "create_model",
    "with_ce",
]
