"""Where a network looks: Grad-CAM by the grad-cam package."""

from typing import Any

import torch
from torch import Tensor, nn

from cenet.analysis.watching import unwrapped
from cenet.extras import require


def gradcam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Grad-CAM of the last feature map, in [0, 1]: (N, 3, H, W) -> (N, H, W).

    Args:
        model: a classifier in evaluation mode.
        images: as the model takes them.
        classes: whose evidence is shown, (N,); by default those it predicts.

    Raises:
        MissingExtraError: the extra `gradcam` is not installed.
    """
    require("gradcam")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    network = unwrapped(model)
    kept = [(parameter, parameter.grad) for parameter in network.parameters()]
    # what comes after may be in place, so the map is copied when it is seen
    tool: Any = GradCAM(network, [last_feature_map(network, images[:1])], lambda x: x.clone())
    for parameter, _ in kept:
        parameter.grad = None
    targets = None
    if classes is not None:
        targets = [ClassifierOutputTarget(int(label)) for label in classes]
    try:
        with torch.enable_grad():
            maps = tool(input_tensor=images, targets=targets)
    finally:
        tool.activations_and_grads.release()
        for parameter, grad in kept:
            parameter.grad = grad
    return torch.from_numpy(maps)


@torch.no_grad()
def last_feature_map(model: nn.Module, images: Tensor) -> nn.Module:
    """The module that is the last to return a map of more than one pixel."""
    found: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output[0, 0].numel() > 1:
            found.append(module)

    handles = [module.register_forward_hook(look) for module in model.modules()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ValueError(f"{type(model).__name__} has no feature map of more than one pixel")
    return found[-1]
