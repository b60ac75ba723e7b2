"""Symbolic tracing: a CE layer is one node of a torch.fx graph.

Its forward pass looks at shapes and modes, which a proxy does not have.
"""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy


def is_proxy(x: Any) -> bool:
    """Whether x stands for a tensor while a graph is traced."""
    return isinstance(x, Proxy)


def call_as_leaf(module: nn.Module, x: Any, residual: Any = None, act: Any = None) -> Tensor:
    """Record a call of `module`, and one of the activation that the caller handed over."""
    name = x.tracer.path_of_module(module)
    args = (x,) if residual is None else (x, residual)
    y: Tensor = x.tracer.create_proxy("call_module", name, args, {})
    return y if act is None else act(y)
