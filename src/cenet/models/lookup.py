"""Networks by name: those of timm, with cenet's own, and those of torchvision."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from cenet.formatting import nearest

INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "box", "hamming", "random")
BEYOND = 2**24  # larger than any size, mean or deviation of images


class DownloadError(ValueError):
    """The weights of a library cannot be loaded."""


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
        ValueError: there is no such network; DownloadError if its weights cannot be loaded.
    """
    if num_classes is not None:
        args["num_classes"] = num_classes
    check_name(name)
    if name.startswith("torchvision/"):
        import torchvision

        short = name.removeprefix("torchvision/")
        weights = "DEFAULT" if pretrained else None
        make = partial(torchvision.models.get_model, short, weights=weights, **args)
        return _made(name, make, pretrained)
    import timm

    short = name.removeprefix("timm/")
    make = partial(timm.create_model, short, pretrained=pretrained, **args)
    return _made(name, make, pretrained)


def check_name(name: str) -> None:
    """Raise ValueError with the nearest names if neither library has a classifier of this name."""
    if name.startswith("torchvision/"):
        import torchvision

        short, known = name.removeprefix("torchvision/"), torchvision.models.list_models
        if short not in (valid := known(module=torchvision.models)):
            raise ValueError(
                f"{name} is not a classification network of torchvision"
                f"{nearest(name, [f'torchvision/{own}' for own in valid])}; "
                "see torchvision.models.list_models(module=torchvision.models)"
            )
        return
    import timm

    short = name.removeprefix("timm/")
    if ":" in short or not timm.is_model(short):  # hf-hub:NAME would be downloaded
        raise ValueError(
            f"{name} is not a timm model{nearest(short, timm.list_models())}; use "
            "torchvision/NAME for torchvision's"
        )


def weights_name(name: str, pretrained: nn.Module) -> str:
    """The name of the weights that `create_named(name, pretrained=True)` has loaded."""
    if name.startswith("torchvision/"):
        import torchvision

        short = name.removeprefix("torchvision/")
        return f"{name} {torchvision.models.get_model_weights(short).DEFAULT.name}"
    config: Any = getattr(pretrained, "pretrained_cfg", {})
    parts = (config.get("architecture"), config.get("tag"))
    return f"timm/{'.'.join(part for part in parts if part)}"


def image_config(name: str) -> dict[str, Any]:
    """Size, normalization and cropping of images for a network by name, as timm writes them."""
    check_name(name)
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


def check_image_config(config: Any) -> None:
    """Raise ValueError unless a configuration that was read describes the images.

    Without such entries, timm would use size and normalization of ImageNet.
    """

    def is_number(value: Any) -> bool:
        return type(value) in (int, float) and abs(value) < BEYOND

    def numbers(key: str) -> list[Any]:
        values = config.get(key) if isinstance(config, dict) else None
        fine = isinstance(values, list | tuple) and all(map(is_number, values))
        return list(values) if fine and values else []

    size, mean, std = (numbers(key) for key in ("input_size", "mean", "std"))
    if len(size) != 3 or not all(type(side) is int and side > 0 for side in size):
        problem = "input_size, which is three whole numbers: channels, height and width"
    elif len(mean) != size[0] or len(std) != size[0] or min(std) <= 0:
        problem = f"mean and std > 0, which have a number for each of {size[0]} channels"
    elif not is_number(crop := config.get("crop_pct", 1)) or crop <= 0:
        problem = "crop_pct, which is a positive number"
    elif config.get("interpolation", "bilinear") not in INTERPOLATIONS:
        problem = f"interpolation, which is one of {', '.join(INTERPOLATIONS)}"
    else:
        return
    raise ValueError(f"pretrained_cfg lacks {problem}")


def _made(name: str, make: Callable[[], nn.Module], pretrained: bool) -> nn.Module:
    try:
        return make()
    # an unknown network, file or argument: each library has its own errors
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if pretrained:
            raise DownloadError(f"the weights of {name} cannot be loaded: {reason}") from error
        raise ValueError(f"{name} cannot be made: {reason}") from error
