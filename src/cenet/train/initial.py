"""Weights that a run begins with instead of random ones."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from cenet.checkpoints import SHOWN, digest, load_state_, read_state
from cenet.nn import NormCE2d
from cenet.run_folder import WEIGHTS


class Initial(NamedTuple):
    """What a run began with.

    Attributes:
        weights: the file.
        digest: of its content.
        fresh: names of the tensors that it does not have.
    """

    weights: str
    digest: str
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        """For the user."""
        parts = {name.split(".ce.")[0] for name in self.fresh if ".ce." in name}
        left = [name for name in self.fresh if ".ce." not in name]
        new = [f"{len(parts)} CE layers"] * bool(parts) + left
        return f"beginning with {self.weights}" + (f"; new are {', '.join(new)}" if new else "")


def load_initial_(network: nn.Module, path: Path, classes: int) -> Initial:
    """Load the weights of a trained network, in place.

    It may have been trained without CE, and for other classes: CE layers and the classifier then
    stay as they are.

    Args:
        network: that is to be trained.
        path: a .safetensors or .pth file, or the folder of a finished run.
        classes: how many the network tells apart.

    Raises:
        ValueError: the weights are of another network, or not finite.
    """
    file = path / WEIGHTS if path.is_dir() else path
    state, own = read_state(file), network.state_dict()
    broken = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{file} has values that are not finite: {', '.join(broken[:SHOWN])}")
    known = digest(state, "")
    state = _with_norms_inside(network, state)
    fresh = [name for name in own if ".ce." in name and name not in state]
    if len(fresh) < sum(".ce." in name for name in own):
        fresh = []  # of some CE layers: all must be there
    fresh += [
        name
        for name, value in own.items()
        if name in state and _is_of_other_classes(state[name], value, classes)
    ]
    try:
        load_state_(network, {**state, **{name: own[name] for name in fresh}})
    except ValueError as error:
        raise ValueError(f"--weights {file}: {error}") from error
    return Initial(str(file), known, tuple(fresh))


def _with_norms_inside(network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a network without CE, by the names that they have behind `NormCE2d`."""
    wrapped = {name for name, module in network.named_modules() if isinstance(module, NormCE2d)}

    def inside(name: str) -> str:
        place, _, last = name.rpartition(".")
        return f"{place}.norm.{last}" if place in wrapped else name

    return {inside(name): value for name, value in state.items()}


def _is_of_other_classes(found: Tensor, own: Tensor, classes: int) -> bool:
    return (
        found.shape != own.shape
        and own.dim() in (1, 2)
        and own.shape[0] == classes
        and found.shape[1:] == own.shape[1:]
    )
