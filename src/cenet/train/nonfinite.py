"""Find the layer in which a loss that is not finite has its origin."""

import torch
from torch import Tensor, nn

from cenet.internals import tree_leaves

# exit status of a run whose loss is not finite; EX_DATAERR
DIVERGED = 65


class NonFiniteLoss(ArithmeticError):
    """The loss is not finite; the message names the first layer with such an output."""


@torch.no_grad()
def first_non_finite(model: nn.Module, *inputs: object) -> str:
    """Name the first value that is not finite: a parameter, the images, or the output of a layer.

    The network runs once more in its present mode; its running statistics are restored afterwards.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"parameter {name} is not finite"
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        return "the images are not finite"
    found: list[str] = []

    def look(name: str) -> object:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    buffers = [buffer.clone() for buffer in model.buffers()]
    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(look(n)) for n, m in leaves]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    if found:
        return f"the output of layer {found[0]} is the first that is not finite"
    return "all layers are finite for these images: the loss or its gradient overflowed"
