"""Read checkpoint files of any origin, and load those of the authors' released CE layer."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from cenet.extras import require
from cenet.files import digest
from cenet.nn import ChannelEquilibrium2d, InstanceReweighting2d

RELEASED_KEYS = {
    "x_weight": "mix_logit",
    "running_wm": "bd.running_inv_sqrt",
    "AR.fc.0.weight": "ir.fc1.weight",
    "AR.fc.1.weight": "ir.norm.weight",
    "AR.fc.1.bias": "ir.norm.bias",
    "AR.fc.3.weight": "ir.fc2.weight",
    "AR.running_scale": "ir.running_inv_std",
}
# tracked by the released code and never read
RELEASED_UNUSED = ("running_mean",)
SHOWN = 3  # number of keys of each kind that a message lists


@torch.no_grad()
def load_released_ce_(layer: ChannelEquilibrium2d, state: Mapping[str, Tensor]) -> None:
    """Load one CE layer saved by the authors' released code into `layer`, in place.

    That code differs from the paper: instance variances are unbiased, and the gate gets them
    without division by s. `layer` computes the same afterwards (`layer.ir.released`, saved in its
    state dict). The running √s becomes the running s^{-1/2}. The counters are set so that the next
    training batch weighs no more than any other.

    Args:
        layer: built with the group size of the checkpoint.
        state: the layer's entries, keys without the layer's own prefix.

    Raises:
        ValueError: keys are missing or unknown, or a shape or value does not fit; the message names
            all of them.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state is {state!r:.40}, not a state dict; read it with torch.load")
    own = layer.state_dict()
    problems = [f"missing key {key}" for key in RELEASED_KEYS if key not in state]
    known = (*RELEASED_KEYS, *RELEASED_UNUSED)
    problems += [f"unknown key {key}" for key in state if key not in known]
    new: dict[str, Tensor] = {}
    for key, name in RELEASED_KEYS.items():
        if key not in state:
            continue
        value = state[key]
        if not isinstance(value, Tensor):
            problems.append(f"{key} is {value!r:.40}, not a tensor")
            continue
        if value.numel() == own[name].numel() == 1:
            value = value.reshape(own[name].shape)
        if value.shape != own[name].shape:
            problems.append(
                f"{key} is {tuple(state[key].shape)}, the layer has {tuple(own[name].shape)}"
            )
        elif not bool(value.isfinite().all()):
            problems.append(f"{key} is not finite")
        elif key == "AR.running_scale" and not bool(value > 0):
            problems.append(f"{key}={value.item()} must be positive; was the layer ever trained?")
        new[name] = 1 / value if key == "AR.running_scale" else value
    if problems:
        raise ValueError(
            f"this is not a released CE layer for {layer.num_features} channels in groups of "
            f"{layer.bd.group_size}: {'; '.join(problems)}"
        )
    for name, value in new.items():
        own[name].copy_(value)
    for branch in (layer.bd, layer.ir):
        branch.num_batches_tracked.fill_(round(1 / (branch.momentum or 0.1)))
    layer.ir.released = True


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a .safetensors or .pth file, without executing code from it.

    A state dict under "state_dict" or "model" is used, and the prefixes that DataParallel and
    torch.compile add to its keys are removed.

    Raises:
        MissingExtraError: safetensors is not installed.
        ValueError: the file is missing, damaged, or does not hold tensors only.
    """
    path = Path(path)
    state: Any
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix == ".safetensors":
        require("models")
    try:
        if path.suffix == ".safetensors":
            state = _read_safetensors(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is damaged or holds code, which is not run;"
            " save the state dict alone"
        ) from error
    except Exception as error:  # the readers raise a dozen kinds, most about their own code
        speaks = isinstance(error, OSError | ValueError | RuntimeError) and " " in str(error)
        reason = str(error).splitlines()[0] if speaks else "its format is not known"
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not is_state(state):
        raise ValueError(f"{path} does not hold a state dict of tensors")
    return {_plain(key): value for key, value in state.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    about = read_header(path)
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # only files that cenet wrote have a digest
    if about.get("digest", whole := digest(state, "")) != whole:
        raise ValueError("it is damaged: its content does not match its digest")
    return state


def read_header(path: Path) -> dict[str, Any]:
    """The metadata that cenet wrote into the header of a file; empty for files of others."""
    from safetensors import safe_open

    if path.suffix != ".safetensors":
        return {}
    with safe_open(path, framework="pt") as file:
        about: dict[str, Any] = json.loads((file.metadata() or {}).get("cenet", "{}"))
    return about


def load_state_(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict, in place; ValueError that lists what does not fit."""
    own, state = module.state_dict(), OrderedDict(state)
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, InstanceReweighting2d):
            layer.upgrade_state_(state, f"{name}." if name else "")
    problems = {
        "missing": [name for name in own if name not in state],
        "unknown": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} instead of {tuple(value.shape)}"
            for name, value in own.items()
            if name in state and state[name].shape != value.shape
        ],
    }
    found = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', …' * (len(names) > SHOWN)})"
        for what, names in problems.items()
        if names
    ]
    if found:
        raise ValueError(f"these weights are of another network: {', '.join(found)}")
    # versions of the layout, which files do not keep and torchvision's MNASNet needs
    state._metadata = getattr(own, "_metadata", {})  # type: ignore[attr-defined]
    module.load_state_dict(state)


def is_state(state: Any) -> bool:
    """Whether this is a state dict: tensors by name."""
    return isinstance(state, Mapping) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    )


def _plain(key: str) -> str:
    """A key without the prefixes of DataParallel and torch.compile."""
    while key.startswith(("module.", "_orig_mod.")):
        key = key.split(".", 1)[1]
    return key
