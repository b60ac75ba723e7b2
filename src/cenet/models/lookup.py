"""Networks by name: timm's, ours among them, and torchvision's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def create_named(
    name: str, num_classes: int | None = None, *, pretrained: bool = False, **args: Any
) -> nn.Module:
    """A network by name.

    Args:
        name: name of a timm model such as resnet50, or torchvision/NAME.
        num_classes: number of classes; by default the network's own.
        pretrained: load the weights of the library; otherwise they are random.
        **args: other arguments of the network.

    Raises:
        ValueError: there is no such network, or its weights cannot be loaded.
    """
    if num_classes is not None:
        args["num_classes"] = num_classes
    if name.startswith("torchvision/"):
        import torchvision

        short = name.removeprefix("torchvision/")
        if short not in torchvision.models.list_models(module=torchvision.models):
            raise ValueError(
                f"{name} is not a classification network of torchvision; see "
                "torchvision.models.list_models(module=torchvision.models)"
            )
        weights = "DEFAULT" if pretrained else None
        return _made(name, partial(torchvision.models.get_model, short, weights=weights, **args))
    import timm

    short = name.removeprefix("timm/")
    if ":" in short or not timm.is_model(short):  # hf-hub:NAME would be downloaded
        raise ValueError(f"{name} is not a timm model; use torchvision/NAME for torchvision's")
    return _made(name, partial(timm.create_model, short, pretrained=pretrained, **args))


def image_config(name: str) -> dict[str, Any]:
    """Size, normalization and cropping of images for a network by name, as timm writes them."""
    if not name.startswith("torchvision/"):
        import timm

        found: Any = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        own: dict[str, Any] = found.to_dict()
        return own
    import torchvision

    short = name.removeprefix("torchvision/")
    preset = torchvision.models.get_model_weights(short).DEFAULT.transforms()
    size, resized = preset.crop_size[0], preset.resize_size[0]
    return {
        "input_size": (3, size, size),
        "crop_pct": size / resized,
        "interpolation": preset.interpolation.value,
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "num_classes": 1000,
    }


def _made(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    # no network, no such file, no such argument: each library has its own errors
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name} cannot be made: {reason}") from error
