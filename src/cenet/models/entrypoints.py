"""The CE networks of the paper in timm's registry: `timm.create_model("ceresnet50")`."""

from functools import partial
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from cenet.models.factory import create_model
from cenet.run_folder import WEIGHTS


def _cfg(first_conv: str, classifier: str, **other: Any) -> dict[str, Any]:
    """The configuration that timm needs. There are no weights to download."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": classifier,
        **other,
    }


_SMALL = {"input_size": (3, 32, 32), "pool_size": (1, 1), "num_classes": 10, "crop_pct": 1.0}
default_cfgs = generate_default_cfgs(
    {
        "ceresnet18.untrained": _cfg("conv1", "fc"),
        "ceresnet50.untrained": _cfg("conv1", "fc"),
        "ceresnet101.untrained": _cfg("conv1", "fc"),
        "cemobilenetv2_100.untrained": _cfg("conv_stem", "classifier"),
        "ceshufflenetv2_x0_5.untrained": _cfg("conv1.0", "fc"),
        "ceshufflenetv2_x1_0.untrained": _cfg("conv1.0", "fc"),
        "cevgg16.untrained": _cfg("features.0", "fc", **_SMALL),
        "cevgg6.untrained": _cfg(
            "features.0", "fc", **{**_SMALL, "input_size": (3, 8, 8), "pool_size": (2, 2)}
        ),
    }
)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any], **feature_cfg: Any) -> nn.Module:
    kwargs["pretrained_cfg"] = final_weights(kwargs.get("pretrained_cfg"))
    network: nn.Module = build_model_with_cfg(
        partial(create_model, name), f"ce{name}", pretrained, feature_cfg=feature_cfg, **kwargs
    )
    return network


def final_weights(config: Any) -> Any:
    """A configuration that timm read from a folder; for a run, with its file of final weights.

    Otherwise timm would load the first file of the folder, which is a checkpoint.
    """
    if not isinstance(config, dict) or config.get("source") != "local-dir":
        return config
    file = Path(config["file"]) / WEIGHTS
    return {**config, "source": "", "file": str(file)} if file.is_file() else config


@register_model
def ceresnet18(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-18 with CE in the stem and in every residual block."""
    return _create("resnet18", pretrained, kwargs)


@register_model
def ceresnet50(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-50 with CE in the stem and in every block with fewer than 2048 channels."""
    return _create("resnet50", pretrained, kwargs)


@register_model
def ceresnet101(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ResNet-101 with CE in the stem and in the first seven blocks."""
    return _create("resnet101", pretrained, kwargs)


@register_model
def cemobilenetv2_100(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MobileNetV2 with CE after every depthwise convolution."""
    return _create("mobilenetv2_100", pretrained, kwargs, feature_cls="getter")


@register_model
def ceshufflenetv2_x0_5(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ShuffleNetV2 0.5× with CE after the last convolution of every unit."""
    return _create(
        "shufflenetv2_x0_5", pretrained, kwargs, feature_cls="getter", out_indices=(0, 1, 2, 3)
    )


@register_model
def ceshufflenetv2_x1_0(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ShuffleNetV2 1× with CE after the last convolution of every unit."""
    return _create(
        "shufflenetv2_x1_0", pretrained, kwargs, feature_cls="getter", out_indices=(0, 1, 2, 3)
    )


@register_model
def cevgg16(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VGG-16 for 32×32 images with CE after every norm."""
    return _create("vgg16", pretrained, kwargs, feature_cls="getter")


@register_model
def cevgg6(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A small VGG for images of 8×8 pixels and more, with CE after every norm."""
    return _create("vgg6", pretrained, kwargs, feature_cls="getter", out_indices=(0, 1, 2))
