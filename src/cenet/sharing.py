"""A network as a folder: `save` writes it, and `load` and timm's `local-dir:` build it again.

    config.json         the network, its arguments, CE's sites and settings, size and normalization
                        of images, classes; in the format of timm
    model.safetensors   the weights
    README.md           a model card

Reading runs no code of the folder: tensors and JSON only, and a class of your own is used only if
you pass it.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import inf
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from cenet.analysis.activations import unwrapped
from cenet.checkpoints import load_state_, read_state
from cenet.extras import require
from cenet.files import check_regular, digest, read_json, replacing
from cenet.internals import timm_config_writer
from cenet.nn import ce_layers
from cenet.run_folder import ABOUT, CONFIG
from cenet.run_folder import SAVED_WEIGHTS as WEIGHTS
from cenet.run_folder import WEIGHTS as RUN_WEIGHTS
from cenet.surgery import WITH_CE, ce_settings, restore_ce_

CARD = "README.md"
REASON = 200  # letters of another library's message that are shown
# entries of timm's configurations about the weights that the network began with
ABOUT_OTHER_WEIGHTS = (
    *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "license"),
    *("description", "origin_url", "paper_name", "paper_ids", "notes", "custom_load"),
)
# attributes of modules that may differ between equal networks
CHANGEABLE = (
    *("training", "grad_checkpointing", "num_classes", "num_features", "had_zero_weight"),
    "process_group",  # of a norm that works over processes
)

Build = Callable[..., nn.Module]


class Origin(NamedTuple):
    """What a network is built from before CE is inserted.

    Attributes:
        name: of a timm model, torchvision/NAME, or module:name of another class or function.
        args: its keyword arguments.
        build: the class or function, if neither timm nor torchvision have it.
    """

    name: str
    args: dict[str, Any]
    build: Build | None = None

    def make(self) -> nn.Module:
        """Build it, on the meta device where that is possible."""
        from cenet.models.lookup import create_named

        def build() -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self.build is not None:
                    return self.build(**self.args)
                return create_named(self.name, **self.args)

        try:
            with torch.device("meta"):
                return build()
        except Exception:  # constructors that read values, which meta tensors do not have
            with torch.random.fork_rng():
                return build()


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    network: str | Build | None = None,
    network_args: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    data: str | None = None,
    metrics: Mapping[str, float | str] | None = None,
) -> None:
    """Write a network, with CE or without, to a folder that others can load.

    `cenet.load(folder)` and, after `import cenet.models`,
    `timm.create_model("local-dir:FOLDER", pretrained=True)` build it again. Afterwards timm's
    `save_for_hf` and `push_to_hf_hub` take the network, too. A README.md that was edited is
    kept, with a warning.

    Args:
        model: the network.
        folder: the folder; it is created if it does not exist.
        network: how to build the network before CE is inserted: a timm name, torchvision/NAME, or
            the class or function. Networks of timm, `cenet.models` and torchvision are recognized;
            for others the default is their class.
        network_args: keyword arguments that it was built with, in types of JSON.
        classes: names of the classes in the order of the logits.
        image_size: height and width of the images that it was trained for.
        mean: mean of each channel, for values from 0 to 1.
        std: standard deviation of each channel. Size and normalization are by default those that
            timm or torchvision have for the network; for your own class they must be given.
        data: the data that it was trained on, in words, for the model card.
        metrics: results by name, as numbers or in words, for the model card.

    Raises:
        ValueError: the network could not be built again from what is known about it.

    >>> import tempfile, timm, cenet
    >>> model = timm.create_model("test_resnet")
    >>> sites = cenet.insert_ce_(model, start="identity")
    >>> folder = tempfile.mkdtemp()
    >>> cenet.save(model, folder)
    >>> again = cenet.load(folder)
    """
    require("models")
    import timm
    from safetensors.torch import save_file

    from cenet.models.inserted import complete_

    model = unwrapped(model)
    if any(getattr(module, "is_deploy_form", False) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} is folded and cannot be saved; save the network before "
            "fold_ce, and fold it again after cenet.load"
        )
    if hasattr(model, "feature_info") and not hasattr(model, "num_classes"):
        raise ValueError(
            f"{type(model).__name__} has no classifier (features_only?); save the whole network"
        )
    settings = ce_settings(model)
    origin, base = _rebuilt(model, _origins(model, network, network_args), settings)
    complete_(model)
    known: Any = model
    if timm.is_model(origin.name) and base == settings:
        name, args = origin.name, origin.args
    else:
        name = WITH_CE
        args = {"network": origin.name, "network_args": origin.args, "ce": settings}
    config = {
        **_image_config(known, origin, classes, image_size, mean, std),
        "architecture": name,
        "num_classes": known.num_classes,
    }
    known.pretrained_cfg, known._model_args = config, args
    state = {
        key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()
    }
    folder = Path(folder)
    if (folder / ABOUT).exists():
        raise ValueError(
            f"{folder} is the folder of a run, which has its own weights; choose another"
        )
    files = [folder / WEIGHTS, folder / CONFIG]
    keeps_card = (folder / CARD).exists() and not _is_own_card(folder / CARD)
    if not keeps_card:
        files.append(folder / CARD)
    with replacing(*files) as room:
        about = {"format": "pt", "cenet": json.dumps({"digest": digest(state, "")})}
        save_file(state, room / WEIGHTS, about)
        labels = {"label_names": list(config["label_names"])} if config.get("label_names") else {}
        timm_config_writer()(known, str(room / CONFIG), model_config=labels, model_args=args)
        card = _card(folder.resolve().name, config, origin, settings, data, metrics)
        (room / CARD).write_text(f"{card}{_signature(card.encode())}\n")
        # safetensors writes files that only their owner can read
        (room / WEIGHTS).chmod((room / CONFIG).stat().st_mode)
    if keeps_card:
        warnings.warn(
            f"{folder / CARD} was kept, because somebody edited it; check that it describes these "
            "weights",
            stacklevel=2,
        )


def load(folder: str | Path, network: Build | None = None) -> nn.Module:
    """The network of a folder, in evaluation mode on the CPU.

    Args:
        folder: a folder of `cenet.save`, of timm's `save_for_hf(..., safe_serialization=True)`, or
            a run of `cenet train`.
        network: the class or function that the network was built with, if it is your own. It is
            not imported by the name in the folder, which may come from anybody.

    Raises:
        ValueError: it is not such a folder, it is damaged, or `network` is missing.
    """
    require("models")
    from cenet.models.lookup import check_image_config

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; to load from the hub, download it first: "
            "cenet.load(huggingface_hub.snapshot_download(NAME))"
        )
    if not (folder / CONFIG).is_file() and (folder / ABOUT).is_file():
        from cenet.train.weights import load_run

        return load_run(folder)
    try:
        config = read_json(folder / CONFIG)
        args = config.get("model_args", {})
        own = config["architecture"] == WITH_CE and ":" in args["network"]
        check_image_config(config.get("pretrained_cfg"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{folder} is not a folder of cenet.save: {CONFIG} cannot be used ({reason})"
        ) from error
    if own and network is None:
        raise ValueError(
            f"{folder} holds a network of the class {args['network']}, which is not imported from "
            "there; pass it: cenet.load(FOLDER, network=...)"
        )
    if network is not None and not own:
        raise ValueError(f"{folder} says how its network is built; remove network={network!r}")
    model = _build(folder, config, network)
    file = next((f for f in (folder / WEIGHTS, folder / RUN_WEIGHTS) if f.is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has no {WEIGHTS}; other files of weights are not read")
    try:
        load_state_(model, read_state(file))
    except ValueError as error:
        raise ValueError(f"{folder} cannot be loaded, was it changed? {error}") from error
    described: Any = model
    labels = described.pretrained_cfg.get("label_names")
    are_names = isinstance(labels, list | tuple) and all(isinstance(one, str) for one in labels)
    if labels and not (are_names and len(labels) == described.num_classes):
        names = f"{len(labels)} classes" if are_names else repr(labels)
        raise ValueError(
            f"{folder} cannot be loaded, was {CONFIG} changed? Its label_names are {names}, and "
            f"the network has {described.num_classes} classes"
        )
    return model.eval()


def _build(folder: Path, config: dict[str, Any], network: Build | None) -> nn.Module:
    """The network that config.json describes, with random weights."""
    import timm

    from cenet.models.inserted import complete_

    try:
        if network is None:
            built: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False)
            return built
        args = config["model_args"]
        model: Any = network(**args["network_args"])
        restore_ce_(model, args["ce"])
        complete_(model)
        model.pretrained_cfg = {**config["pretrained_cfg"], "architecture": WITH_CE}
        model._model_args = {key: args[key] for key in ("network", "network_args", "ce")}
    except Exception as error:  # whatever is raised on arguments that do not fit
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{folder} cannot be read, was config.json changed? {reason[:REASON]}"
        ) from error
    own: nn.Module = model
    return own


# what a network was built from


def _origins(
    model: Any, network: str | Build | None, network_args: Mapping[str, Any] | None
) -> Iterator[Origin]:
    """Possible origins of the network, the most likely first."""
    given = None if network_args is None else dict(network_args)
    if isinstance(network, str):
        yield _current(model, Origin(network, given or {}))
        return
    config, args = getattr(model, "pretrained_cfg", None), getattr(model, "_model_args", {})
    name = config.get("architecture") if isinstance(config, dict) else None
    if name == WITH_CE:
        name, args = args.get("network"), args.get("network_args", {})
    if network is None and name is not None and ":" not in name:
        yield _current(model, Origin(name, dict(args) if given is None else given))
        return
    module = type(model).__module__
    if network is None and module.startswith("torchvision.models"):
        from torchvision.models import get_model_builder, list_models

        for short in list_models():
            if get_model_builder(short).__module__ == module:
                yield _current(model, Origin(f"torchvision/{short}", given or {}))
        return
    build = type(model) if network is None else network
    args = given if given is not None else dict(args) if name is not None else {}
    yield Origin(f"{build.__module__}:{build.__qualname__}", args, build)


def _current(model: Any, origin: Origin) -> Origin:
    """The origin with the classes and the pooling that the network has now."""
    from cenet.models.inserted import complete_

    args = dict(origin.args)
    complete_(model)
    args["num_classes"] = model.num_classes
    pools = (getattr(part, "global_pool", None) for part in (model, getattr(model, "head", None)))
    pooling = next((p.pool_type for p in pools if p is not None and hasattr(p, "pool_type")), None)
    if pooling is not None and args.get("global_pool", "avg") != pooling:
        args["global_pool"] = pooling
    return origin._replace(args=args)


def _rebuilt(
    model: nn.Module, origins: Iterator[Origin], settings: list[dict[str, Any]]
) -> tuple[Origin, list[dict[str, Any]]]:
    """The origin that rebuilds exactly this network, and the settings of the CE it has already.

    Raises:
        ValueError: no origin does.
    """
    wanted, problem, fewest = _structure(model), "", 0
    for origin in origins:
        try:
            json.dumps(origin.args)
            again = origin.make()
            base = ce_settings(again)
            restore_ce_(again, settings)
        except (TypeError, ValueError, RuntimeError) as error:
            if not fewest:
                problem = f"{origin.name} cannot be built: {' '.join(str(error).split())[:REASON]}"
            continue
        own = _structure(again)
        differ = [key for key in {**wanted, **own} if own.get(key) != wanted.get(key)]
        if not differ:
            return origin, base
        if fewest and len(differ) >= fewest:
            continue
        fewest = len(differ)
        problem = (
            f"{origin.name} with the arguments {origin.args} differs from it in {fewest} "
            f"places, such as {differ[0]}"
        )
    raise ValueError(
        f"this {type(model).__name__} could not be built again: {problem}; say how it was built by "
        "network= and network_args=, and save it before it is folded or otherwise changed"
    )


def _structure(model: nn.Module) -> dict[str, Any]:
    """Classes and plain attributes of all modules, and the shapes of all tensors."""
    inside = {id(part) for _, layer in ce_layers(model) for part in layer.modules()}
    found: dict[str, Any] = {f"{name} (CE)": layer.arguments() for name, layer in ce_layers(model)}
    for name, module in model.named_modules():
        if id(module) not in inside:
            found[f"{name} ({_class_name(module)})"] = {
                key: _plain(value)
                for key, value in vars(module).items()
                if not key.startswith("_") and key not in CHANGEABLE and _is_plain(value)
            }
    return {**found, **{key: tuple(value.shape) for key, value in model.state_dict().items()}}


def _class_name(module: nn.Module) -> str:
    """The class; a norm that was converted to work over processes has the class it had before."""
    return re.sub(r"^(?:Sync)?(BatchNorm(?:Act)?)(?:\dd)?$", r"\1", type(module).__name__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str | FunctionType | type | None)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.__qualname__ if isinstance(value, FunctionType | type) else value


# images and the card


def _image_config(
    model: Any,
    origin: Origin,
    classes: Sequence[str] | None,
    image_size: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> dict[str, Any]:
    """Preprocessing of images, and names of the outputs, in timm's format."""
    from cenet.models.inserted import complete_
    from cenet.models.lookup import check_image_config, image_config

    config = dict(getattr(model, "pretrained_cfg", None) or {})
    if not config and origin.build is None:
        config = image_config(origin.name)
    if not config and None in (image_size, mean, std):
        raise ValueError(
            f"size and normalization of images for {origin.name} are not known; give image_size=, "
            "mean= and std="
        )
    config = {key: value for key, value in config.items() if key not in ABOUT_OTHER_WEIGHTS}
    if config.get("num_classes") != model.num_classes:
        config.pop("label_names", None)
        config.pop("label_descriptions", None)
    size = config.get("input_size", (len(mean or ()),))
    channels = getattr(model, "in_chans", size[0])
    if "input_size" in config:
        config["input_size"] = (channels, *size[1:])
    for key in ("mean", "std"):  # of grey images: the average, as timm takes it
        if len(config.get(key, ())) not in (0, channels):
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    for name, given in (("mean", mean), ("std", std)):
        if isinstance(given, int | float):
            raise ValueError(f"{name}={given} must have a value for every channel ({channels})")
    mean = tuple(float(value) for value in (config["mean"] if mean is None else mean))
    std = tuple(float(value) for value in (config["std"] if std is None else std))
    if not len(mean) == len(std) == channels or not all(value > 0 for value in std):
        raise ValueError(
            f"mean={mean} and std={std} must have a value each for every channel ({channels}), "
            "std > 0"
        )
    if 1 < max(mean) < inf:
        raise ValueError(f"mean={mean} must be for pixels from 0 to 1; divide mean and std by 255")
    if image_size is not None:
        if isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1:
            raise ValueError(f"image_size={image_size!r} must be an integer, at least 1")
        for key in ("test_input_size", "test_crop_pct", "pool_size", "test_pool_size"):
            config.pop(key, None)
        config["input_size"] = (channels, image_size, image_size)
    if classes is not None:
        if len(classes) != model.num_classes:
            raise ValueError(
                f"classes has {len(classes)} names, the network {model.num_classes} outputs"
            )
        if not all(isinstance(name, str) for name in classes):
            raise ValueError(f"classes={list(classes)[:10]} must be names; use map(str, classes)")
        config["label_names"] = tuple(classes)
    config.setdefault("crop_pct", 1.0)
    config.setdefault("interpolation", "bilinear")
    classifier = config.get("classifier") or complete_(model)
    config = {**config, "mean": mean, "std": std, "classifier": classifier}
    check_image_config(config)
    return config


def _is_own_card(path: Path) -> bool:
    """Whether a model card is as `save` wrote it: then its last line is the digest of the rest."""
    check_regular(path)
    text, _, last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    return last.decode(errors="replace") == _signature(text + b"\n")


def _signature(text: bytes) -> str:
    return f"<!-- cenet.save replaces this card unless it is edited: {sha256(text).hexdigest()} -->"


def _card(
    name: str,
    config: dict[str, Any],
    origin: Origin,
    settings: list[dict[str, Any]],
    data: str | None,
    metrics: Mapping[str, float | str] | None,
) -> str:
    """The model card. It names no licence, which the publisher of the weights has to choose."""
    sites = sum(len(entry["sites"]) for entry in settings)
    starts = sorted({entry["start"] for entry in settings})
    with_ce = f" with channel equilibrium (CE) after {sites} norms, start {' and '.join(starts)}"
    labels = config.get("label_names")
    rows = {
        "network": f"{origin.name}{with_ce if sites else ''}",
        "images": "×".join(str(side) for side in config["input_size"]),
        "mean, std": f"{config['mean']}, {config['std']} for values from 0 to 1",
        "scaled and cropped": f"shorter side to size / {config['crop_pct']:g}, middle; "
        f"{config['interpolation']}",
        "classes": f"{config['num_classes']}"
        + (f": {', '.join(labels[:10])}{', …' * (len(labels) > 10)}" if labels else ""),
        "trained on": data or "not said",
        **{
            key: value if isinstance(value, str) else f"{value:.4g}"
            for key, value in (metrics or {}).items()
        },
    }
    call = f'cenet.load("{name}")'
    if origin.build is not None:
        short = origin.name.split(":")[1]
        call = f'cenet.load("{name}", network={short})  # {origin.name}'
    hub = (
        ""
        if origin.build is not None
        else (
            "\nWith timm, after `import cenet.models`: "
            f'`timm.create_model("local-dir:{name}", pretrained=True)`, or `hf-hub:OWNER/NAME`.\n'
        )
    )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
tags:
- image-classification
- timm
- channel-equilibrium
library_name: timm
pipeline_tag: image-classification
---
# {name}

| | |
|---|---|
{table}

```python
import cenet

model = {call}
```
{hub}
Licence: not chosen yet. Add `license:` to the head of this file before you publish the weights.
"""
