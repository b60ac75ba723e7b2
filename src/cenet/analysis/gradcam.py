"""Grad-CAM: evidence for a class by position in an image, as numbers and as pictures."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from cenet.analysis.activations import unwrapped
from cenet.analysis.diagnosis import Cam, data_uri
from cenet.extras import require

PICTURES = 4
FIELDS = 7  # rows and columns of the grid over which the evidence of a picture is averaged


def gradcam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Grad-CAM of the last feature map, in [0, 1]: (N, 3, H, W) -> (N, H, W).

    Args:
        model: a classifier in evaluation mode.
        images: input of the model.
        classes: classes whose evidence is shown, (N,); by default the predicted ones.

    Raises:
        MissingExtraError: the extra `gradcam` is not installed.
    """
    require("gradcam")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    network = unwrapped(model)
    kept = [(parameter, parameter.grad) for parameter in network.parameters()]
    # later operations may be in place, so the map is copied by the hook
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


def overlays(
    model: nn.Module, images: Tensor, labels: Tensor | None, classes: tuple[str, ...] | None
) -> tuple[Cam, ...]:
    """The first few images with their Grad-CAM; none if grad-cam is not installed.

    The evidence is that for the label, so that networks with different predictions can be compared
    on one image; without labels, it is that for the predicted class.

    Args:
        model: network in evaluation mode. Without logits, there are no pictures.
        images: normalized images, (N, 1 or 3, H, W).
        labels: class numbers of the images, if known.
        classes: names of the classes, in the order of the logits.
    """
    images = images[:PICTURES]
    with torch.no_grad():
        logits = model(images)
    if find_spec("pytorch_grad_cam") is None or logits.dim() != 2:
        return ()
    predicted = logits.argmax(1)
    targets = predicted if labels is None else labels[:PICTURES]
    maps = gradcam(model, images, targets).to(images.device)
    side = (min(FIELDS, maps.shape[1]), min(FIELDS, maps.shape[2]))
    fields = adaptive_avg_pool2d(maps, side).tolist()

    def name(label: Tensor) -> str:
        return f"class {int(label)}" if classes is None else classes[int(label)]

    found = []
    for i, (image, heat) in enumerate(zip(images, maps, strict=True)):
        # each picture uses the whole range, because the normalization is not known
        picture = (image - image.min()) / (image.max() - image.min()).clamp_min(1e-12)
        picture = picture.expand(3, -1, -1)
        red = torch.tensor([1.0, 0.0, 0.0], device=image.device)[:, None, None]
        blend = picture * (1 - 0.6 * heat) + red * 0.6 * heat
        label = None if labels is None else name(labels[i])
        evidence = tuple(map(tuple, fields[i]))
        names = (label, name(predicted[i]), name(targets[i]))
        found.append(Cam(_png(picture), _png(blend), *names, evidence))
    return tuple(found)


def _png(picture: Tensor) -> str:
    from torchvision.transforms.functional import to_pil_image

    return data_uri(to_pil_image(picture.clamp(0, 1).float().cpu()))
