"""The network of a recipe or a run: built, and its weights written and read."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor, nn

import cenet.train.checkpoint as checkpoint
from cenet.checkpoints import SHOWN, digest, load_state_, read_state
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec
from cenet.data.views import TEST_CROP
from cenet.files import replace_file, replacing
from cenet.internals import timm_config_writer
from cenet.models import create_model
from cenet.nn import NormCE2d
from cenet.run_folder import WEIGHTS
from cenet.train.recipes import RD_RATIO, Recipe, TrainingRecipe, read_run

_write_config = timm_config_writer()


def build_network(recipe: Recipe, inputs: InputSpec) -> nn.Module:
    """The network of a recipe, for images and classes of this input spec.

    Its `pretrained_cfg` says how it takes images, in the format of timm.
    """
    network: Any = create_model(
        recipe.network,
        None if recipe.block == "plain" else recipe.block,
        norm=recipe.norm,
        norm_places=recipe.norm_places,
        ce_position=recipe.ce_position,
        start=recipe.ce_start,
        layer_args=None if recipe.rd_ratio == RD_RATIO else {"rd_ratio": recipe.rd_ratio},
        act=None if recipe.act == "default" else recipe.act,
        num_classes=len(inputs.classes),
        in_chans=inputs.channels,
    )
    network.pretrained_cfg = {**network.pretrained_cfg, **_image_config(recipe.image_size, inputs)}
    built: nn.Module = network
    return built


def _image_config(size: int, inputs: InputSpec) -> dict[str, Any]:
    """How the images of a test become input, and the classes, in the format of timm."""
    # images in memory have the right size, and statistics of their own
    is_of_files = (inputs.mean, inputs.std) == (FILES_MEAN, FILES_STD)
    crop = TEST_CROP if is_of_files else 1.0
    scaled = round(size / crop)
    if math.floor(size / crop) < scaled:  # timm rounds down
        crop = math.nextafter(size / scaled, 0)
    return {
        "input_size": (inputs.channels, size, size),
        "mean": tuple(value / 255 for value in inputs.mean),
        "std": tuple(value / 255 for value in inputs.std),
        "crop_pct": crop,
        "interpolation": "bilinear",
        "num_classes": len(inputs.classes),
        "label_names": inputs.classes,
        "pool_size": None,
    }


def write_config(path: Path, network: Any) -> None:
    """Write config.json, from which `cenet.load` and timm's `local-dir:` build the network."""
    names = {"label_names": list(network.pretrained_cfg["label_names"])}
    with replacing(path) as room:
        _write_config(
            network, str(room / path.name), model_config=names, model_args=network.model_args
        )


def write_weights(
    path: Path, network: nn.Module, recipe: TrainingRecipe, inputs: InputSpec
) -> None:
    """Write the state dict of a network, with recipe and input spec in the header of the file."""
    state = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in network.state_dict().items()
    }
    # a single entry, because safetensors writes several in random order: equal runs must write
    # equal files
    about = {"recipe": recipe.as_dict(), "inputs": inputs.as_dict(), "digest": digest(state, "")}
    replace_file(path, save(state, {"cenet": json.dumps(about)}))


def read_weights(run: Path) -> tuple[dict[str, Tensor], str]:
    """The final weights of a run, or those of its newest checkpoint, and the name of their file."""
    final = run / WEIGHTS
    if final.is_file():
        return read_state(final), final.name
    found = checkpoint.newest(run)
    if found is None:
        raise ValueError(f"{run} has neither {WEIGHTS} nor a checkpoint yet")
    path, tensors, *_ = found
    averaged = checkpoint.strip_prefix("ema", tensors)
    return averaged or checkpoint.strip_prefix("model", tensors), path.name


def load_run(run: Path | str) -> nn.Module:
    """The network of a run of `cenet train`, in evaluation mode on the CPU."""
    recipe, inputs = read_run(Path(run), Recipe)
    network = build_network(recipe, inputs)
    load_state_(network, read_weights(Path(run))[0])
    return network.eval()


class InitialWeights(NamedTuple):
    """The weights that a run started from.

    Attributes:
        weights: path of the file.
        digest: digest of its content.
        fresh: names of tensors that the file does not have, which keep their random values.
    """

    weights: str
    digest: str
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        """The message for the user."""
        parts = {name.split(".ce.")[0] for name in self.fresh if ".ce." in name}
        left = [name for name in self.fresh if ".ce." not in name]
        new = [f"{len(parts)} CE layers"] * bool(parts) + left
        return f"beginning with {self.weights}" + (f"; new are {', '.join(new)}" if new else "")


def load_initial_weights_(network: nn.Module, path: Path, classes: int) -> InitialWeights:
    """Load the weights of a trained network, in place.

    That network may have been trained without CE, and for other classes: CE layers and the
    classifier then keep their initial values.

    Args:
        network: the network to be trained.
        path: a .safetensors or .pth file, or the folder of a finished run.
        classes: number of classes of `network`.

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
        fresh = []  # the file has some CE layers, so all must be there
    fresh += [
        name
        for name, value in own.items()
        if name in state and _is_of_other_classes(state[name], value, classes)
    ]
    try:
        load_state_(network, {**state, **{name: own[name] for name in fresh}})
    except ValueError as error:
        raise ValueError(f"--weights {file}: {error}") from error
    return InitialWeights(str(file), known, tuple(fresh))


def _with_norms_inside(network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a network without CE, under the names that they have inside `NormCE2d`."""
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
