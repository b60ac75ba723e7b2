"""Grad-CAM as pictures: PNG files in text, for a page."""

import base64
import io
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from cenet.analysis.attribution import gradcam
from cenet.analysis.diagnosis import Cam

PICTURES = 4
FIELDS = 7  # by side, over which the evidence of a picture is averaged


def overlays(
    model: nn.Module, images: Tensor, labels: Tensor | None, classes: tuple[str, ...] | None
) -> tuple[Cam, ...]:
    """The first few images with what Grad-CAM says of them; none if grad-cam is not installed.

    The evidence is that for the label, so that networks can be compared on one image whatever each
    of them predicts; without labels it is that for the predicted class.

    Args:
        model: in evaluation mode. If it is no classifier there are no pictures.
        images: normalized, (N, 1 or 3, H, W).
        labels: their classes, if known.
        classes: names, in the order of the logits.
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
        # whatever the normalization was, each picture uses the whole range
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

    content = io.BytesIO()
    image: Any = to_pil_image(picture.clamp(0, 1).float().cpu())
    image.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
