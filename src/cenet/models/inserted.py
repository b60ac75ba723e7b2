"""Any network of timm or torchvision with CE inserted, in timm's registry under one name.

`timm.create_model("with_ce", network="resnet34")` is the stock network after `insert_ce_`. A saved
folder has this name and all sites, so that timm can build the network again.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from cenet.models.entrypoints import final_weights
from cenet.models.lookup import create_named, image_config
from cenet.nn import ce_layers
from cenet.surgery import WITH_CE, Settings, ce_settings, insert_ce_, restore_ce_

default_cfgs = generate_default_cfgs({f"{WITH_CE}.untrained": {"url": "", "num_classes": 1000}})
# arguments of timm.create_model that load files, which a folder must not contain
LOADING = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


@register_model
def with_ce(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    *,
    network: str = "resnet18",
    network_args: Mapping[str, Any] | None = None,
    ce: Sequence[Settings] | None = None,
    start: Literal["paper", "identity"] = "paper",
    **kwargs: Any,
) -> nn.Module:
    """A network with CE inserted.

    Args:
        pretrained: load the weights of the folder; without a folder, those that timm or torchvision
            have for the network.
        pretrained_cfg: passed by timm.
        network: name of a timm model, or torchvision/NAME.
        network_args: its arguments.
        ce: sites and settings of CE, as `cenet.surgery.ce_settings` returns them; by default
            those of `insert_ce_`.
        start: of CE at the default sites.
        **kwargs: more arguments of the network: num_classes, in_chans, drop_rate, ...
    """
    has_folder = isinstance(pretrained_cfg, dict)
    if has_folder and ce is None:
        raise ValueError(
            "config.json does not say which network has CE, and where; cenet.save(model, FOLDER) "
            "writes that, and so does timm's save_for_hf from timm 1.0.31"
        )
    config = final_weights(pretrained_cfg) if has_folder else image_config(network)
    own_weights = pretrained and not has_folder
    model: Any = build_model_with_cfg(
        partial(_build, network, ce, start, own_weights), WITH_CE, pretrained and has_folder,
        {**config, "architecture": WITH_CE}, feature_cfg={"feature_cls": "getter"},
        pretrained_filter_fn=_with_versions, **{**(network_args or {}), **kwargs},
    )  # fmt: skip
    if not has_folder and hasattr(model, "num_classes"):
        classifier = model.pretrained_cfg.get("classifier") or complete_(model)
        model.pretrained_cfg = {**model.pretrained_cfg, "classifier": classifier}
    built: nn.Module = model
    return built


def _with_versions(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """The state with the versions of its layout, which files do not keep and MNASNet asks for."""
    found: Any = OrderedDict(state)
    found._metadata = getattr(model.state_dict(), "_metadata", {})
    kept: Mapping[str, Tensor] = found
    return kept


def _build(
    network: str,
    ce: Sequence[Settings] | None,
    start: Literal["paper", "identity"],
    pretrained: bool,
    /,
    **args: Any,
) -> nn.Module:
    loading = [name for name in args if name in LOADING]
    if loading or network == WITH_CE:
        raise ValueError(f"{network!r} cannot be made with {', '.join(loading) or 'CE in it'}")
    if network.startswith("torchvision/") and args.pop("in_chans", 3) != 3:
        raise ValueError(f"{network} takes images of 3 channels only")
    model = create_named(network, pretrained=pretrained, **args)
    if ce is None:
        insert_ce_(model, start=start)
    else:
        restore_ce_(model, ce)
    complete_(model)
    described: Any = model
    described._model_args = {"network": network, "network_args": args, "ce": ce_settings(model)}
    return model


def complete_(model: Any) -> str | None:
    """Set `num_classes` and `num_features` of a network, as timm's networks have them, in place.

    A classifier that was replaced by hand has another number of classes than the network says.

    Returns the name of its classifier: of its last linear layer or convolution.
    """
    inside = {id(part) for _, layer in ce_layers(model) for part in layer.modules()}
    linear = [
        (name, module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and id(module) not in inside
    ]
    classifier, shape = linear[-1] if linear else (None, (0, 0))
    for name, value in (("num_classes", shape[0]), ("num_features", shape[1])):
        if not hasattr(model, name):
            setattr(model, name, value)
    is_torchvisions = type(model).__module__.startswith("torchvision.models")
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    if isinstance(head, nn.Linear | nn.Conv2d) or is_torchvisions:
        model.num_classes = shape[0] if head is None else head.weight.shape[0]
    return classifier
