"""Layers for the tests of the kernels behind modules, and what they are compared by."""

import pytest
import torch
from torch import nn

from _checks import assert_close
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    freeze_ce_,
    ops,
)

HALF = (torch.float16, torch.bfloat16)


def block(channels=24, ce=ChannelEquilibrium2d, act=nn.ReLU, start="paper", seed=0, **kwargs):
    torch.manual_seed(seed)
    made = NormCE2d(nn.BatchNorm2d(channels), ce(channels, **kwargs), act(), start=start)
    for parameter in made.parameters():
        if parameter.dim() < 2:
            nn.init.normal_(parameter, 0.5, 0.3)
    return made


def images(n=3, c=24, h=3, w=5, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, h, w, generator=generator).add(0.3).to(device, dtype)


def gradients(module, x, residual=None, run=None):
    """y and every gradient of its square's mean; `run` is the module, compiled."""
    given = [t.detach().clone().requires_grad_() for t in (x, residual) if t is not None]
    module.zero_grad()
    y = (module if run is None else run)(*given)
    y.float().square().mean().backward()
    leaves = dict(zip(("x", "residual"), given, strict=False)) | dict(module.named_parameters())
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def assert_same(own, other, rtol):
    assert own.keys() == other.keys()
    for name, value in other.items():
        assert_close(name, own[name].double(), value.double(), rtol)


MODULES = {
    "relu": block,
    "elu": lambda: block(act=nn.ELU),
    "leaky relu": lambda: block(act=lambda: nn.LeakyReLU(0.2)),
    "silu": lambda: block(act=nn.SiLU),
    "no activation": lambda: block(act=lambda: None),
    "bd pool": lambda: block(ce=BatchDecorrelation2d, pool=2, group_size=10),
    "ir": lambda: block(ce=InstanceReweighting2d),
    "identity start": lambda: block(start="identity"),
    "group norm": lambda: NormCE2d(nn.GroupNorm(2, 24), ChannelEquilibrium2d(24), nn.ReLU()),
    "ce alone": lambda: ChannelEquilibrium2d(24),
    "frozen ce": lambda: frozen(block()),
    "norm in evaluation": lambda: evaluated(block()),
    "no tracking": lambda: untracked(block()),
}
each_module = pytest.mark.parametrize("name", MODULES)


def frozen(module):
    freeze_ce_(module)
    module.ce.requires_grad_()
    return module


def evaluated(module):
    with ops.backend("torch"):
        module(images(seed=4))
    module.norm.eval()
    return module


def untracked(module):
    module.norm.track_running_stats = False
    return module
