"""Networks by name: timm's, ours among them, and torchvision's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def create_named(
    name: str, num_classes: int | None = None, *, pretrained: bool = False
) -> nn.Module:
    """A network by name.

    Args:
        name: name of a timm model such as resnet50, or torchvision/NAME.
        num_classes: number of classes; by default the network's own.
        pretrained: load the weights of the library; otherwise they are random.

    Raises:
        ValueError: there is no such network, or its weights cannot be loaded.
    """
    classes: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if name.startswith("torchvision/"):
        import torchvision

        short = name.removeprefix("torchvision/")
        if short not in torchvision.models.list_models(module=torchvision.models):
            raise ValueError(
                f"{name} is not a classification network of torchvision; see "
                "torchvision.models.list_models(module=torchvision.models)"
            )
        weights = "DEFAULT" if pretrained else None
        return _made(name, partial(torchvision.models.get_model, short, weights=weights, **classes))
    import timm

    import cenet.models  # noqa: F401, registers

    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        raise ValueError(f"{name} is not a timm model; use torchvision/NAME for torchvision's")
    return _made(name, partial(timm.create_model, short, pretrained=pretrained, **classes))


def _made(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    # no network, no such file, no weights at all: each library has its own errors
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name} cannot be made: {reason}") from error
