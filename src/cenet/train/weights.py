"""The network of a recipe or a run: built, and its weights written and read."""

import json
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

import cenet.train.checkpoint as checkpoint
from cenet.checkpoints import SHOWN, load_state_, read_state
from cenet.data.datasets import InputSpec
from cenet.data.views import TEST_CROP
from cenet.files import digest, read_json, replace_file, replacing
from cenet.internals import timm_config_writer
from cenet.models import create_model
from cenet.models.lookup import (
    DownloadError,
    check_image_config,
    create_named,
    image_config,
    weights_name,
)
from cenet.nn import NormCE2d
from cenet.run_folder import ABOUT, CONFIG, SAVED_WEIGHTS, WEIGHTS
from cenet.surgery import LAYERS, WITH_CE, Settings, insert_ce_, restore_ce_
from cenet.train.recipes import RD_RATIO, Recipe, TrainingRecipe, read_run

_write_config = timm_config_writer()


def build_network(recipe: Recipe, inputs: InputSpec, ce: list[Settings] | None = None) -> nn.Module:
    """The network of a recipe, for images and classes of this input spec.

    Its `pretrained_cfg` describes its images, in the format of timm. `ce` has sites and settings of
    CE in a stock network, if they are not the default ones.
    """
    layer_args = None if recipe.rd_ratio == RD_RATIO else {"rd_ratio": recipe.rd_ratio}
    network: Any
    if recipe.stock:
        network = _stock_network(recipe, len(inputs.classes), layer_args or {}, ce)
        # the rest is about the weights of the library
        kept = ("architecture", "classifier", "first_conv", "fixed_input_size")
        config = {key: value for key, value in network.pretrained_cfg.items() if key in kept}
    else:
        network = create_model(
            recipe.network,
            None if recipe.block == "plain" else recipe.block,
            norm=recipe.norm,
            norm_places=recipe.norm_places,
            ce_position=recipe.ce_position,
            start=recipe.ce_start,
            layer_args=layer_args,
            act=None if recipe.act == "default" else recipe.act,
            num_classes=len(inputs.classes),
            in_chans=inputs.channels,
        )
        config = network.pretrained_cfg
    network.pretrained_cfg = {**config, **_image_config(recipe.image_size, inputs)}
    built: nn.Module = network
    return built


def _stock_network(
    recipe: Recipe, classes: int, layer_args: dict[str, Any], ce: list[Settings] | None
) -> nn.Module:
    """A network of timm or torchvision with random weights, and CE at these or default sites."""
    network: nn.Module = timm.create_model(
        WITH_CE, network=recipe.network, num_classes=classes, ce=[]
    )
    if recipe.block == "plain":
        restore_ce_(network, [])  # so that its configuration has its own name
        return network
    if ce is not None:
        try:
            restore_ce_(network, ce)
        except Exception as error:  # whatever is raised on settings that do not fit
            raise ValueError(
                f"CE cannot be put into {recipe.network} as {CONFIG} or {ABOUT} says; was the "
                f"file changed? {' '.join(str(error).split())}"
            ) from error
        return network
    example = torch.zeros(2, 3, recipe.image_size, recipe.image_size)
    with warnings.catch_warnings():
        # norms that begin at zero: trained weights replace them, and docs/finetuning.md says so
        warnings.filterwarnings("ignore", "the weight of .* norms was all zero")
        try:
            insert_ce_(
                network, layer=LAYERS[recipe.block], start=recipe.ce_start, example_input=example,
                **layer_args,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(
                f"CE cannot be put into {recipe.network}: {error}; --block plain trains without CE"
            ) from error
    return network


def _image_config(size: int, inputs: InputSpec) -> dict[str, Any]:
    """Preprocessing of test images, and the classes, in the format of timm."""
    crop = 1.0 if inputs.in_memory else TEST_CROP  # images in memory have the right size
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
            network, str(room / path.name), model_config=names, model_args=network._model_args
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
    network = build_network(recipe, inputs, _ce_of_run(Path(run)) if recipe.stock else None)
    load_state_(network, read_weights(Path(run))[0])
    return network.eval()


class Beginning(NamedTuple):
    """Images and CE of a stock network, as given by the weights it starts from.

    Attributes:
        size: height and width of the images.
        mean, std: of each channel, for values from 0 to 255.
        source: where mean and std come from, in words.
        ce: sites and settings of CE as `ce_settings` returns them; None for the default sites.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    ce: list[Settings] | None


def find_beginning(recipe: Recipe, weights: Path | None, run: Path | None) -> Beginning:
    """Images and CE of a stock network: those of the run to resume, or of its weights.

    Args:
        recipe: its recipe.
        weights: what the run starts from. A folder of `cenet.save` or of a run describes images and
            CE; for a file, or without weights, the library's configuration of the network is used.
        run: folder of the run to resume, or None.

    Raises:
        ValueError: there is no such network, or a folder cannot be read or is of another network.
    """
    if run is not None:
        before, inputs = read_run(run, Recipe)
        # anything else is refused when the checkpoint is loaded
        if (before.stock, before.network) == (True, recipe.network):
            return Beginning(
                before.image_size, inputs.mean, inputs.std, inputs.normalization, _ce_of_run(run)
            )
    config, source = image_config(recipe.network), f"of the network {recipe.network}"
    ce = None
    if weights is not None and weights.is_dir():
        path = weights / CONFIG
        try:
            about = read_json(path)
            name, args = about["architecture"], about.get("model_args", {})
            if name == WITH_CE:
                name, ce = args["network"], args["ce"]
            config, source = about["pretrained_cfg"], f"of {path}"
            check_image_config(config)
            name = " ".join(name.split())
            is_same = _without_tag(name) == _without_tag(recipe.network)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--weights {weights} is neither a finished run nor a folder of cenet.save: {path} "
                f"cannot be used ({error!r})"
            ) from error
        if not is_same:
            raise ValueError(f"--weights {weights} holds {name}; use --model {name}")
        channels = config["input_size"][0]
        if channels != 3:
            raise ValueError(f"--weights {weights} takes images of {channels} channels, and not 3")
    mean, std = (tuple(255 * float(value) for value in config[key]) for key in ("mean", "std"))
    return Beginning(config["input_size"][-1], mean, std, source, ce or None)


def _without_tag(name: str) -> str:
    """The name of a network without that of its pretrained weights."""
    return name.removeprefix("timm/").partition(".")[0]


def _ce_of_run(run: Path) -> list[Settings] | None:
    """Sites and settings of CE in a stock network; another version may have other defaults."""
    path = run / ABOUT
    try:
        settings: list[Settings] | None = read_json(path).get("environment", {}).get("ce")
    except AttributeError as error:
        raise ValueError(f"{path} is not of this version of `cenet train`: {error!r}") from error
    return settings


class InitialWeights(NamedTuple):
    """The weights that a run started from.

    Attributes:
        weights: path of the file, or the name of pretrained weights.
        digest: digest of the content.
        fresh: names of tensors that it does not have, which keep their random values.
    """

    weights: str
    digest: str
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        """The message for the user."""
        parts = {name.split(".ce.")[0] for name in self.fresh if ".ce." in name}
        left = [name for name in self.fresh if ".ce." not in name]
        new = [f"{len(parts)} CE layers"] * bool(parts) + left
        return f"starting from {self.weights}" + (f"; new: {', '.join(new)}" if new else "")


def load_initial_weights_(network: nn.Module, path: Path, classes: int) -> InitialWeights:
    """Load the weights of a trained network, in place.

    That network may have been trained without CE, and for other classes: CE layers and the
    classifier then keep their initial values.

    Args:
        network: the network to be trained.
        path: a .safetensors or .pth file, or the folder of a finished run or of `cenet.save`.
        classes: number of classes of `network`.

    Raises:
        ValueError: the weights are of another network, or not finite.
    """
    file = path
    if not path.exists():
        raise ValueError(f"--weights {path} does not exist; give a file, or a folder of a run")
    if path.is_dir():
        file = next(
            (f for f in (path / WEIGHTS, path / SAVED_WEIGHTS) if f.is_file()), path / WEIGHTS
        )
    return _load_(network, read_state(file), str(file), classes)


def load_pretrained_(network: nn.Module, name: str, classes: int) -> InitialWeights:
    """Load the weights that timm or torchvision have for the network of this name, in place.

    CE layers, and the classifier if the network has other classes, keep their initial values.

    Raises:
        ValueError: there are none, or they cannot be downloaded.
    """
    try:
        trained = create_named(name, pretrained=True)
    except DownloadError as error:
        raise ValueError(
            f"{error}; instead of --pretrained, give a file that you have with --weights FILE"
        ) from error
    return _load_(network, trained.state_dict(), weights_name(name, trained), classes)


def _load_(
    network: nn.Module, state: dict[str, Tensor], source: str, classes: int
) -> InitialWeights:
    own = network.state_dict()
    broken = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{source} has values that are not finite: {', '.join(broken[:SHOWN])}")
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
        raise ValueError(f"--weights {source}: {error}") from error
    return InitialWeights(source, known, tuple(fresh))


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
        and own[0].numel() == own.shape[1:2].numel()  # a bias, a matrix, or a 1×1 convolution
        and own.shape[0] == classes
        and found.shape[1:] == own.shape[1:]
    )
