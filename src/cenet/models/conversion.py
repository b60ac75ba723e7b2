"""Other norms and activations in the place of a network's own."""

import re
from collections.abc import Callable
from math import gcd

from torch import Tensor, nn

from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d
from cenet.nn.norms import inner_activation

# by name: a norm for so many channels; None leaves batch norm
NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "bn": None,
    "gn": lambda channels: nn.GroupNorm(gcd(32, channels), channels),
    "in": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "ln": lambda channels: nn.GroupNorm(1, channels),
    "sn": SwitchableNorm2d,
    "iternorm": IterNorm2d,
    "sw": SwitchableWhitening2d,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(inplace=True),
}


class NormAct2d(nn.Module):
    """A norm and its activation, where a network has both in one module."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        """Hold both."""
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: Tensor) -> Tensor:
        """act(norm(x))."""
        y: Tensor = self.act(self.norm(x))
        return y


def replace_norms_(model: nn.Module, norm: str, places: str = ".*") -> None:
    """Put a norm of this name in the place of every batch norm whose name matches, in place."""
    make = NORMS[norm]
    if make is None:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and re.fullmatch(places, name):
            new = make(module.num_features)
            act = inner_activation(module)
            model.set_submodule(name, new if act is None else NormAct2d(new, act))


def replace_activations_(model: nn.Module, act: str) -> None:
    """Put an activation of this name in the place of every ReLU and ReLU6, in place."""
    for name, module in list(model.named_modules()):
        if type(module) in (nn.ReLU, nn.ReLU6):
            model.set_submodule(name, ACTIVATIONS[act]())
