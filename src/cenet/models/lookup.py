"""Networks by name: timm's, ours among them, and torchvision's."""

from typing import Any

from torch import nn


def create_named(name: str, num_classes: int | None = None) -> nn.Module:
    """A network with random weights.

    Args:
        name: of a timm model such as resnet50, or torchvision/NAME.
        num_classes: by default the network's own.

    Raises:
        ValueError: there is no such network.
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
        network: nn.Module = torchvision.models.get_model(short, weights=None, **classes)
        return network
    import timm

    import cenet.models  # noqa: F401, registers

    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        raise ValueError(f"{name} is not a timm model; use torchvision/NAME for torchvision's")
    model: nn.Module = timm.create_model(short, pretrained=False, **classes)
    return model
