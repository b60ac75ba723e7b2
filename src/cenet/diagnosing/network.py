"""The network of a diagnosis, by name or from a folder, and the preprocessing of its images."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from cenet.checkpoints import read_state
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec, is_for_files
from cenet.data.views import shown_in_test
from cenet.export import image_transform, load_network, load_weights_
from cenet.models import NETWORKS
from cenet.models.lookup import DownloadError, create_named
from cenet.run_folder import ABOUT, CONFIG, SAVED_WEIGHTS
from cenet.sharing import load
from cenet.train.recipes import Recipe, read_run
from cenet.train.weights import load_run, read_weights

TORCHVISION_SIZE = 224


class LoadedNetwork(NamedTuple):
    """A network with its weights, and the images it takes.

    Attributes:
        network: the module itself.
        name: the name or folder that was given.
        checkpoint: origin of the weights; None if they are random.
        size: default height and width of its images.
        transform: takes a size; returns a function from a PIL image to a normalized tensor.
        classes: names of the class folders in the order of the logits, if known.
        class_names: names in words, if those of the folders are codes (ImageNet).
        run: recipe and inputs, if it is a run of `cenet train`.
    """

    network: nn.Module
    name: str
    checkpoint: str | None
    size: int
    transform: Callable[[int], Callable[[Any], Tensor]]
    classes: tuple[str, ...] | None
    class_names: tuple[str, ...] | None
    run: tuple[Recipe, InputSpec] | None


def find_network(
    model: str, checkpoint: Path | None = None, *, pretrained: bool = False
) -> LoadedNetwork:
    """Load a network by name, or that of a run.

    Args:
        model: a timm model, torchvision/NAME, or a folder of `cenet train` or `cenet.save`.
        checkpoint: its weights; a folder brings its own.
        pretrained: use the weights of timm or torchvision instead. Without either, they are random.

    Raises:
        ValueError: there is no such network, or its weights cannot be read or do not fit.
    """
    if pretrained and checkpoint is not None:
        raise ValueError(f"--checkpoint {checkpoint} and --pretrained exclude each other")
    if Path(model).is_dir():
        if pretrained or checkpoint is not None:
            option = "--pretrained" if pretrained else "--checkpoint"
            raise ValueError(f"{model} is a folder with weights of its own; remove {option}")
        is_saved = (Path(model) / CONFIG).is_file() and not (Path(model) / ABOUT).is_file()
        return _of_saved(Path(model)) if is_saved else _of_run(Path(model))
    if "/" in model and not model.startswith(("torchvision/", "timm/")):
        raise ValueError(f"{model} is not a folder; give a run, a timm model or torchvision/NAME")
    if checkpoint is None:
        try:
            network = create_named(model, pretrained=pretrained)
        except DownloadError as error:
            raise ValueError(
                f"{error}; give a file that you have with --checkpoint FILE"
            ) from error
    else:
        network = _loaded(model, checkpoint)
    weights = "pretrained" if pretrained else None if checkpoint is None else str(checkpoint)
    if model.startswith("torchvision/"):
        inputs = InputSpec((), FILES_MEAN, FILES_STD)
        return LoadedNetwork(
            network, model, weights, TORCHVISION_SIZE,
            lambda size: _normalized(partial(shown_in_test, size=size), inputs),
            *_imagenet(network), None,
        )  # fmt: skip
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    resolve: Any = resolve_model_data_config
    create: Any = create_transform
    config = resolve(network)

    def transform(size: int) -> Callable[[Any], Tensor]:
        own: Callable[[Any], Tensor] = create(**{**config, "input_size": (3, size, size)})
        return own

    size = config["input_size"][-1]
    return LoadedNetwork(network, model, weights, size, transform, *_imagenet(network), None)


def _loaded(model: str, checkpoint: Path) -> nn.Module:
    if model.removeprefix("ce") in NETWORKS and model.startswith("ce"):
        network: nn.Module = load_network(model, checkpoint)
        return network
    matrices = [value for value in read_state(checkpoint).values() if value.dim() == 2]
    network = create_named(model, len(matrices[-1]) if matrices else None)
    load_weights_(network, checkpoint)
    return network


def _of_saved(folder: Path) -> LoadedNetwork:
    network: Any = load(folder)
    config = network.pretrained_cfg

    def transform(size: int) -> Callable[[Any], Tensor]:
        channels = config["input_size"][0]
        return image_transform({**config, "input_size": (channels, size, size)})

    names = config.get("label_names")
    own, in_words = _imagenet(network) if names is None else (tuple(names), None)
    return LoadedNetwork(
        network, str(folder), str(folder / SAVED_WEIGHTS), config["input_size"][-1], transform,
        own, in_words, None,
    )  # fmt: skip


def _of_run(run: Path) -> LoadedNetwork:
    recipe, inputs = read_run(run, Recipe)
    network = load_run(run)

    def transform(size: int) -> Callable[[Any], Tensor]:
        resize = partial(shown_in_test, size=size)
        plain = v2.PILToTensor()

        def fitted(image: Any) -> Tensor:
            # the run was trained on images of this size without resizing
            whole = not is_for_files(recipe.augment) and image.size == (size, size)
            grey = image.convert("L") if inputs.channels == 1 else image
            found: Tensor = (plain if whole else resize)(grey)
            return found

        return _normalized(fitted, inputs)

    return LoadedNetwork(
        network, str(run), str(run / read_weights(run)[1]), recipe.image_size, transform,
        inputs.classes, None, (recipe, inputs),
    )  # fmt: skip


def _normalized(resize: Callable[[Any], Tensor], inputs: InputSpec) -> Callable[[Any], Tensor]:
    mean, std = (values[:, None, None] for values in inputs.statistics(torch.device("cpu")))
    return lambda image: (resize(image).float() - mean) / std


def num_outputs(network: nn.Module) -> int:
    """The number of outputs of a classifier: the width of its last layer."""
    heads = [module for module in network.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return 0 if not heads else heads[-1].weight.shape[0]


Names = tuple[str, ...] | None


def _imagenet(network: nn.Module) -> tuple[Names, Names]:
    """ImageNet's folders and classes in words, if the network has as many outputs."""
    from timm.data.imagenet_info import ImageNetInfo

    info: Any = ImageNetInfo()
    if num_outputs(network) != info.num_classes():
        return None, None
    folders = tuple(info.label_names())
    return folders, tuple(info.label_name_to_description(name) for name in folders)
