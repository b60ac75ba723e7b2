"""The authors' released CE-ResNet-50, from its checkpoint.

It differs from the paper: the stem's covariance is that of one group of 64 channels, not pooled,
and its layers have the released variant of the gate (`load_released_ce_`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cenet.checkpoints import is_state, load_released_ce_, read_state
from cenet.models.factory import create_model
from cenet.nn import ChannelEquilibrium2d, NormCE2d
from cenet.surgery import insert_ce_

STEM_GROUP_SIZE = 64


def released_ceresnet50(checkpoint: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """Build the network of the authors' released checkpoint, in evaluation mode.

    Args:
        checkpoint: a .pth or .safetensors file, or its state dict. Files are read without executing
            code.

    Raises:
        ValueError: keys are unknown or missing, or a shape does not fit; the message lists them.
    """
    state = read_state(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    if not is_state(state):
        raise ValueError(f"checkpoint={type(state).__name__} must be a file or a state dict")
    state = {key.removeprefix("module."): value for key, value in state.items()}
    weight = state.get("fc.weight", torch.empty(1000, 0))
    classes = len(weight) if weight.dim() == 2 else 1000
    model = create_model("resnet50", stem=False, num_classes=classes)
    insert_ce_(model, lambda _, name: name == "bn1", group_size=STEM_GROUP_SIZE)
    layers = {
        _released_name(name): module.ce
        for name, module in model.named_modules()
        if isinstance(module, NormCE2d) and isinstance(module.ce, ChannelEquilibrium2d)
    }
    own = {
        key.replace(".norm.", "."): value
        for key, value in model.state_dict().items()
        if ".ce." not in key
    }
    plain, parts = _split(state, layers)
    problems = _problems(plain, own)
    for name, layer in layers.items():
        try:
            load_released_ce_(layer, parts[name])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError(
            "this is not a checkpoint of the released CE-ResNet-50:\n  " + "\n  ".join(problems)
        )
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(plain[key])
    return model.eval()


def _released_name(site: str) -> str:
    """bn1 -> ce1, layer1.0.bn3 -> layer1.0.ce."""
    return "ce1" if site == "bn1" else site.removesuffix("bn3") + "ce"


def _split(
    state: Mapping[str, Tensor], layers: Mapping[str, nn.Module]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Entries of the plain network, and those of each CE layer without its prefix."""
    plain: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for key, value in state.items():
        owner = next((name for name in layers if key.startswith(f"{name}.")), None)
        if owner is None:
            plain[key] = value
        else:
            parts[owner][key.removeprefix(f"{owner}.")] = value
    return plain, parts


def _problems(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    problems = [f"missing key {key}" for key in own if key not in given]
    problems += [f"unknown key {key}" for key in given if key not in own]
    problems += [
        f"{key} is {tuple(given[key].shape)}, the network has {tuple(value.shape)}"
        for key, value in own.items()
        if key in given and given[key].shape != value.shape
    ]
    problems += [f"{key} is not finite" for key in given if not bool(given[key].isfinite().all())]
    problems += [
        f"{key} is negative"
        for key in given
        if key.endswith("running_var") and bool((given[key] < 0).any())
    ]
    return problems
