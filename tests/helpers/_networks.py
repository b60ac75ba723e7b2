"""The networks every tree edit is tried on."""

import copy
from functools import cache

import pytest
import timm
import torch
import torchvision
from torch import nn

TORCHVISION = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "shufflenet_v2_x1_0",
    "vgg16_bn",
    "densenet121",
    "efficientnet_b0",
    "regnet_y_400mf",
)
TIMM = (
    "resnet50",
    "seresnet50",
    "mobilenetv2_100",
    "efficientnet_b0",
    "regnety_002",
    "convnext_atto",
)
NETWORKS = (*(f"torchvision/{name}" for name in TORCHVISION), *(f"timm/{name}" for name in TIMM))
# norms that are not right behind a convolution, or not batch norms
UNFOLDABLE = {
    "torchvision/densenet121": "pre-activation order",
    "timm/convnext_atto": "LayerNorm2d",
}
# networks timm builds with a zero last weight in every residual block
ZERO_INITIALISED = {
    "timm/resnet50": 16,
    "timm/seresnet50": 16,
    "timm/regnety_002": 13,
}
# 138 million parameters: seconds in every test
HEAVY = "torchvision/vgg16_bn"
MOSTLY_FAST = [pytest.param(n, marks=pytest.mark.slow) if n == HEAVY else n for n in NETWORKS]


def create(name: str, seed: int = 0) -> nn.Module:
    made = _made(name, seed) if name == HEAVY else copy.deepcopy(_kept(name, seed))
    torch.manual_seed(seed)  # of what follows
    return made


@cache
def _kept(name: str, seed: int) -> nn.Module:
    """A copy takes a tenth of the time."""
    return _made(name, seed)


def _made(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    library, short = name.split("/")
    if library == "timm":
        return timm.create_model(short, num_classes=10)
    return torchvision.models.get_model(short, weights=None, num_classes=10)


def images(n: int = 4, size: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def settle(model: nn.Module, batches: int = 3) -> nn.Module:
    """Give every running statistic the average over a few batches, as training would."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    model.train()
    with torch.no_grad():
        for seed in range(batches):
            model(images(seed=100 + seed))
    return model.eval()
