"""Everything a run is made of as tensors and facts, and back: the content of a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names begin so, without that."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }


def named(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors with that before their names."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def module_state(module: nn.Module) -> Tensors:
    """A state dict: tensors only."""
    return dict(module.state_dict())


def optimizer_state(optimizer: Optimizer) -> tuple[Tensors, Facts]:
    """Tensors `INDEX.NAME`; everything else is facts."""
    state = optimizer.state_dict()
    tensors: Tensors = {}
    rest: dict[str, Facts] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                rest.setdefault(str(index), {})[name] = value
    return tensors, {"groups": state["param_groups"], "rest": rest}


def load_optimizer_(optimizer: Optimizer, tensors: Tensors, facts: Facts) -> None:
    """Undo `optimizer_state`."""
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in facts["rest"].items()
    }
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": facts["groups"]})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # Fused optimizers want strides like the parameter's: files know no channels_last.
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def seed_everything(seed: int) -> None:
    """Seed all random number generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002, timm uses it


def chance(device: torch.device) -> tuple[Tensors, Facts]:
    """The state of all random number generators of this process."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()  # noqa: NPY002
    version, internal, next_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "python": torch.tensor(internal),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors, {
        "numpy": [kind, int(position), int(has_gauss), float(gauss)],
        "python": [version, next_gauss],
    }


def set_chance(device: torch.device, tensors: Tensors, facts: Facts) -> None:
    """Undo `chance`."""
    torch.set_rng_state(tensors["torch"])
    kind, position, has_gauss, gauss = facts["numpy"]
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state((kind, keys, position, has_gauss, gauss))  # noqa: NPY002
    version, next_gauss = facts["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
