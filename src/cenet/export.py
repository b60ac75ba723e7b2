"""Trained networks for other runtimes: ONNX, torch.export, safetensors with timm's config."""

import json
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cenet.checkpoints import load_state_, read_state
from cenet.extras import require
from cenet.files import check_regular, read_json, replace_file, replacing
from cenet.folding import fold_ce
from cenet.nn import NormCE2d, ce_layers
from cenet.nn.norms import is_batch_norm

REASON = 200  # letters of another library's message that are shown


def load_weights_(model: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint file of this very network, in place.

    Raises:
        ValueError: the file cannot be read, or keys or shapes do not fit; the message lists them.
    """
    state = read_state(checkpoint)
    broken = [key for key, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{checkpoint} has values that are not finite: {', '.join(broken)}")
    try:
        load_state_(model, state)
    except ValueError as error:
        raise ValueError(f"{checkpoint} does not fit {type(model).__name__}: {error}") from error


def load_network(name: str, checkpoint: Path) -> Any:
    """A CE network with its trained weights.

    Args:
        name: name of the network in timm's registry.
        checkpoint: a folder of `export_safetensors`, or the weights of a network with default
            arguments; classes and start are read off them.

    Raises:
        ValueError: the checkpoint cannot be read, or is of another network.
    """
    require("models")
    import timm

    if checkpoint.is_dir():
        return _load_folder(name, checkpoint)
    state = read_state(checkpoint)
    config: Any = timm.get_pretrained_cfg(name)
    classifier = state.get(f"{config.classifier}.weight")
    classes = None if classifier is None or classifier.dim() != 2 else len(classifier)
    start = "identity" if any(key.endswith(".ce.blend") for key in state) else "paper"
    network = timm.create_model(name, num_classes=classes, start=start)
    try:
        load_weights_(network, checkpoint)
    except ValueError as error:
        raise ValueError(
            f"{error}\nA network built with other arguments (block, norm, in_chans, ...) is read "
            "from a folder: cenet.export.export_safetensors(model, FOLDER)"
        ) from error
    return network


def _load_folder(name: str, folder: Path) -> Any:
    import timm

    try:
        config = read_json(folder / "config.json")
        found = config["architecture"]
        check_regular(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a folder of export_safetensors: {error}") from error
    if found != name:
        raise ValueError(f"{folder} holds {found}, not {name}")
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # whatever timm raises on arguments that do not fit
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{folder} cannot be read, was config.json changed? {reason[:REASON]}"
        ) from error


def export_onnx(model: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write an ONNX file for any batch size, folded if the norms of the network are batch norms."""
    write_onnx(_deployed(model), path, example, ["logits"])


def write_onnx(
    module: nn.Module, path: str | Path, example: Tensor, output_names: list[str]
) -> None:
    """Write an ONNX file of a module of images for any batch size and the image size of `example`.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
    """
    require("export")
    with replacing(path := Path(path)) as room:
        torch.onnx.export(
            module,
            (_two(example),),
            str(room / path.name),
            dynamo=True,
            dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
            input_names=["images"],
            output_names=output_names,
            external_data=False,
            verbose=False,
        )


def export_folded(model: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write a program for `torch.export.load`, for any batch size and folded like `export_onnx`."""
    batch = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(_deployed(model), (_two(example),), dynamic_shapes=batch)
    content = BytesIO()  # writing to a full disk, torch ends the process
    torch.export.save(program, content)
    replace_file(Path(path), content.getvalue())


def export_safetensors(model: nn.Module, path: str | Path) -> None:
    """Write a folder that `timm.create_model("local-dir:PATH", pretrained=True)` reads.

    Raises:
        ValueError: timm could not build this network again.
    """
    require("models")
    import timm
    from timm.models import save_for_hf

    name = f"ce{getattr(model, 'network_name', None)}"
    if not timm.is_model(name):
        raise ValueError(
            f"{type(model).__name__} was not built by cenet.models.create_model or by "
            'timm.create_model("ceresnet50", ...), so timm cannot build it again'
        )
    args = _arguments(model)
    _check_rebuilt(model, name, args)
    network: Any = model
    config: Any = timm.get_pretrained_cfg(name)
    network.pretrained_cfg = config.to_dict()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors", folder / "config.json") as room:
        save_for_hf(model, str(room), model_args=args, safe_serialization=True)
        # the writer of the weights lets nobody else read them
        (room / "model.safetensors").chmod((room / "config.json").stat().st_mode)


def _arguments(model: Any) -> dict[str, Any]:
    """Arguments that build this network again; ValueError if a file cannot hold them."""
    if not hasattr(model, "num_classes"):
        raise ValueError(
            f"{type(model).__name__} has no classifier (features_only?); save the whole network"
        )
    args = {**getattr(model, "model_args", {}), "num_classes": model.num_classes}
    pooling = getattr(getattr(model, "global_pool", None), "pool_type", None)
    if pooling is not None and args.get("global_pool", "avg") != pooling:
        args["global_pool"] = pooling
    try:
        json.dumps(args)
    except TypeError as error:
        raise ValueError(f"a file cannot hold the arguments of this network: {error}") from error
    return args


def _check_rebuilt(model: Any, name: str, args: dict[str, Any]) -> None:
    """Raise ValueError unless timm, given these arguments, builds a network of these weights."""
    import timm

    with torch.device("meta"):
        again = timm.create_model(name, **args)
    shapes = [{k: tuple(v.shape) for k, v in m.state_dict().items()} for m in (model, again)]
    differ = sorted(
        key for key in {*shapes[0], *shapes[1]} if shapes[0].get(key) != shapes[1].get(key)
    )
    if differ:
        raise ValueError(
            f"timm.create_model({name!r}) builds another network than this one, which was changed "
            f"afterwards (CE inserted, removed or folded?): {len(differ)} keys differ, such as "
            f"{differ[0]}; save its state dict instead"
        )


def _deployed(model: nn.Module) -> nn.Module:
    """A copy in its fastest form: folded, if all CE in it follows batch norms."""
    model = deepcopy(model).eval()
    layers = dict(ce_layers(model))
    wrappers = [module for module in model.modules() if isinstance(module, NormCE2d)]
    foldable = bool(layers) and len(wrappers) == len(layers)
    foldable = foldable and all(is_batch_norm(wrapper.norm) for wrapper in wrappers)
    return (fold_ce(model) if foldable else model).requires_grad_(False)


def _two(example: Tensor) -> Tensor:
    """A batch of two: programs traced with one sample hold for one sample."""
    return example[:1].repeat(2, 1, 1, 1)
