"""Trained networks for other runtimes: ONNX and torch.export, checked on images."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cenet.checkpoints import load_state_, read_header, read_state
from cenet.evaluating import evaluating
from cenet.extras import require
from cenet.files import check_regular, replace_file, replacing
from cenet.folding import fold_ce
from cenet.formatting import percent
from cenet.nn import NormCE2d, ce_layers
from cenet.nn.norms import is_batch_norm
from cenet.run_folder import ABOUT, CONFIG, METRICS, read_metrics
from cenet.sharing import load, save

Format = Literal["onnx", "safetensors", "folded"]
FORMATS: dict[str, Format] = {".onnx": "onnx", ".pt2": "folded"}  # by ending of the file
WEIGHTS_FILES = (".safetensors", ".pth", ".pt")
# files that may already be in a folder to which `cenet.save` writes
OF_A_REPOSITORY = ("README.md", "LICENSE", ".git", ".gitattributes", ".gitignore")
METADATA = "cenet"  # entry of exported files about images and classes
SAMPLES = 8  # images on which an exported network is checked
TOLERANCE = 1e-3  # largest difference of its logits, relative to the largest logit


def load_weights_(model: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint file of exactly this network, in place.

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


def load_network(name: str, checkpoint: Path) -> nn.Module:
    """A CE network with its trained weights; its `pretrained_cfg` describes its images.

    Args:
        name: name of the network in timm's registry.
        checkpoint: a folder of `cenet.save`, a file of weights that `cenet train` wrote, or the
            weights of a network with default arguments; classes and start are read off them.

    Raises:
        ValueError: the checkpoint cannot be read, or is of another network.
    """
    require("models")
    if checkpoint.is_dir():
        network = load(checkpoint)
    else:
        state = read_state(checkpoint)
        network = _network_of_run(checkpoint) or _default_network(name, state)
    described: Any = network
    found = described.pretrained_cfg["architecture"]
    if found != name:
        raise ValueError(f"{checkpoint} holds {found}, not {name}")
    if checkpoint.is_dir():
        return network
    try:
        load_weights_(network, checkpoint)
    except ValueError as error:
        raise ValueError(
            f"{error}\nA network built with other arguments (block, norm, in_chans, ...) is read "
            "from a folder: cenet.save(model, FOLDER)"
        ) from error
    return network


def chosen_format(out: Path, format: Format | None) -> Format:
    """The format to write: `format` if it is given, otherwise that of the ending of the file.

    Raises:
        ValueError: the ending names no format or a different one, or the folder holds other files.
    """
    own = FORMATS.get(out.suffix)
    chosen = format or own
    if chosen is None:
        raise ValueError(
            "its ending does not say the format; end it in .onnx or .pt2, or add --format "
            "safetensors to write a folder"
        )
    if own not in (None, chosen) or (chosen == "safetensors" and out.suffix in WEIGHTS_FILES):
        ending = next((name for name, kind in FORMATS.items() if kind == chosen), None)
        wanted = "a folder" if ending is None else f"a file such as {out.stem}{ending}"
        raise ValueError(f"--format {chosen} writes {wanted}; choose another --out")
    if chosen == "safetensors" and out.is_dir() and not (out / CONFIG).is_file():
        others = sorted(path.name for path in out.iterdir() if path.name not in OF_A_REPOSITORY)
        if others:
            raise ValueError(f"the folder holds other files ({others[0]}); choose another --out")
    return chosen


def write_network(
    model: str,
    checkpoint: Path | None,
    out: Path,
    format: Format,
    *,
    size: int | None = None,
    data: Path | None = None,
) -> str:
    """Write a trained network in one of three formats, and return a line about its images.

    Args: as of `cenet export`.

    Raises:
        ValueError: there is no such network, or the exported network computes something different.
    """
    network: Any = _find_network(model, checkpoint)
    config = dict(network.pretrained_cfg)
    if size is not None:
        if size < 1:
            raise ValueError(f"--size {size} must be at least 1")
        config["input_size"] = (config["input_size"][0], size, size)
        _check_size(network, config["input_size"])
    network.pretrained_cfg = config
    mean, std = ((f"{value:.4g}" for value in config[key]) for key in ("mean", "std"))
    images = (
        f"images of {'×'.join(map(str, config['input_size']))}, mean {', '.join(mean)}, "
        f"std {', '.join(std)} (values from 0 to 1)"
    )
    if checkpoint is not None and checkpoint.is_file() and "inputs" not in read_header(checkpoint):
        images += f", the defaults of {model}, because {checkpoint.name} records none"
    if format == "safetensors":
        save(network, out, image_size=size, **_results(Path(model)))
        return images
    example = torch.zeros(1, *config["input_size"])
    check = sample_images(config, data)
    write = export_onnx if format == "onnx" else export_folded
    difference = write(network, out, example, check=check)
    return f"{images}; on {len(check)} images it differs from the network by {difference:.0e}"


def _check_size(network: nn.Module, size: tuple[int, ...]) -> None:
    """ValueError if the network cannot take an image of this size."""
    try:
        with torch.no_grad():
            network(torch.zeros(1, *size))
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"--size {size[-1]} does not suit this network: {reason}") from error


def _find_network(model: str, checkpoint: Path | None) -> nn.Module:
    require("models")
    from cenet.models.factory import NETWORKS, SMALL_NETWORKS

    names = [f"ce{name}" for name in (*NETWORKS, *SMALL_NETWORKS)]
    if checkpoint is None:
        if not Path(model).is_dir():
            problem = "needs its weights" if model in names else "is not a folder"
            raise ValueError(
                f"{model} {problem}; give a run, a folder of cenet.save, or a network and weights"
            )
        return load(Path(model))
    if model not in names:
        raise ValueError(f"{model} is not a CE network; use one of {', '.join(names)}")
    return load_network(model, checkpoint).eval()


def _results(folder: Path) -> dict[str, Any]:
    """Data and results of a run, for the model card; empty for other folders."""
    if not (folder / ABOUT).is_file():
        return {}
    from cenet.train.recipes import Recipe, read_run

    rows = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    last = rows[-1] if rows else {}
    names = {"test_top1": "top-1", "test_top5": "top-5", "test_loss": "loss"}
    images = "held-out training images" if read_run(folder, Recipe)[0].holdout else "test images"
    found = {
        f"{words} on {images}": f"{last[name]:.4g}"
        if words == "loss"
        else percent(last[name], ".2f")
        for name, words in names.items()
        if isinstance(last.get(name), float)  # a row of another version may lack it
    }
    dataset = read_run(folder, Recipe)[0].dataset
    return {"data": "a folder of images" if dataset == "folder" else dataset, "metrics": found}


def _network_of_run(file: Path) -> nn.Module | None:
    """The network whose weights `cenet train` wrote to this file, not loaded yet."""
    about = read_header(file)
    if "recipe" not in about or "inputs" not in about:
        return None
    from cenet.data.datasets import InputSpec
    from cenet.train.recipes import Recipe
    from cenet.train.weights import build_network

    try:
        return build_network(
            Recipe.from_dict(about["recipe"]), InputSpec.from_dict(about["inputs"])
        )
    except (KeyError, TypeError, ValueError):  # of a detector, or of another version
        return None


def _default_network(name: str, state: dict[str, Tensor]) -> nn.Module:
    """The network with default arguments, and the classes and the start of these weights."""
    import timm

    config: Any = timm.get_pretrained_cfg(name)
    classifier = state.get(f"{config.classifier}.weight")
    classes = None if classifier is None or classifier.dim() != 2 else len(classifier)
    start = "identity" if any(key.endswith(".ce.blend") for key in state) else "paper"
    network: nn.Module = timm.create_model(name, num_classes=classes, start=start)
    return network


def export_onnx(
    model: nn.Module, path: str | Path, example: Tensor, *, check: Tensor | None = None
) -> float | None:
    """Write an ONNX file for any batch size, folded if the norms of the network are batch norms.

    The file's metadata has an entry `cenet`: size, normalization and classes as JSON, if the
    network knows them (`pretrained_cfg`).

    Args:
        model: the network.
        path: file to write.
        example: images of the size to export for.
        check: normalized images on which onnxruntime must give the network's logits before the
            file is written.

    Returns the largest difference on these images, relative to the largest logit.

    Raises:
        ValueError: the logits differ by more than 1e-3.
    """

    def run(file: Path) -> Callable[[Tensor], Tensor]:
        from onnxruntime import InferenceSession

        session: Any = InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])

    require("export")
    with replacing(path := Path(path)) as room:
        write_onnx(_deployed(model), room / path.name, example, ["logits"], image_metadata(model))
        return _checked(model, run(room / path.name), check)


def write_onnx(
    module: nn.Module,
    path: str | Path,
    example: Tensor,
    output_names: list[str],
    metadata: str | None = None,
) -> None:
    """Write an ONNX file of a module of images for any batch size and the image size of `example`.

    Raises:
        MissingExtraError: onnx, onnxruntime or onnxscript is not installed.
    """
    require("export")
    with replacing(path := Path(path)) as room:
        program: Any = torch.onnx.export(
            module,
            (_two(example),),
            dynamo=True,
            dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
            input_names=["images"],
            output_names=output_names,
            verbose=False,
        )
        if metadata is not None:
            program.model.metadata_props[METADATA] = metadata
        program.save(str(room / path.name), external_data=False)


def export_folded(
    model: nn.Module, path: str | Path, example: Tensor, *, check: Tensor | None = None
) -> float | None:
    """Write a program for `torch.export.load`, for any batch size and folded like `export_onnx`.

    Its extra file `cenet` has what an ONNX file has as metadata.

    Args and Returns: as of `export_onnx`.
    """
    batch = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(_deployed(model), (_two(example),), dynamic_shapes=batch)
    metadata = image_metadata(model)
    content = BytesIO()  # in memory, because torch aborts the process if the disk is full
    extra = {} if metadata is None else {METADATA: metadata}
    torch.export.save(program, content, extra_files=extra)
    content.seek(0)
    difference = None
    if check is not None:
        difference = _checked(model, torch.export.load(content).module(), check)
    replace_file(Path(path), content.getvalue())
    return difference


def image_metadata(model: nn.Module) -> str | None:
    """Size, normalization and classes of a network as JSON; None if it does not know them."""
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict):
        return None
    keys = ("input_size", "mean", "std", "crop_pct", "interpolation", "label_names")
    return json.dumps({key: config[key] for key in keys if config.get(key) is not None})


def sample_images(config: dict[str, Any], folder: Path | None, count: int = SAMPLES) -> Tensor:
    """Images as a network with this configuration takes them.

    Args:
        config: `pretrained_cfg` of the network.
        folder: where image files are; None for parts of the photographs of scikit-learn.
        count: number of images, at most.

    Raises:
        ValueError: there are no image files.
    """
    transform = image_transform(config)
    found = photographs() if folder is None else _images_in(folder)
    return torch.stack([transform(image) for image in islice(found, count)])


def image_transform(config: dict[str, Any]) -> Callable[[Any], Tensor]:
    """Function from a PIL image in RGB to the normalized input of a network of this configuration.

    If the network takes more or fewer channels than three, they are red, green, blue, red, …
    """
    from timm.data.transforms_factory import create_transform

    channels, *size = config["input_size"]
    create: Any = create_transform
    pixels = create(
        input_size=(3, *size), crop_pct=config["crop_pct"],
        interpolation=config["interpolation"], mean=(0.0,) * 3, std=(1.0,) * 3,
    )  # fmt: skip
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    colours = [channel % 3 for channel in range(channels)]
    return lambda image: (pixels(image)[colours] - mean) / std


def photographs() -> Iterator[Any]:
    """Parts of the two photographs of scikit-learn, as PIL images."""
    require("export")
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for pixels in load_sample_images().images:
        height, width = (side // 2 for side in pixels.shape[:2])
        for top in (0, height):
            for left in (0, width):
                yield Image.fromarray(pixels[top : top + height, left : left + width])


def _images_in(folder: Path) -> Iterator[Any]:
    from PIL import Image
    from torchvision.datasets.folder import IMG_EXTENSIONS

    from cenet.data.datasets import TEST, encoded, find_part
    from cenet.data.decoding import decode

    if not folder.is_dir():
        raise ValueError(f"--data {folder} is not a folder")
    packed = find_part(folder, TEST)
    if packed is not None and packed.form != "folder":
        source = encoded(packed).source
        for place in range(0, len(source), max(1, len(source) // SAMPLES)):
            yield decode(source, place)
        return
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMG_EXTENSIONS]
    if not files:
        raise ValueError(
            f"--data {folder} has no image files ({', '.join(IMG_EXTENSIONS)}), and no test-*.tar "
            "or test-*.parquet"
        )
    # evenly, so that all classes of a sorted folder may occur
    for path in files[:: max(1, len(files) // SAMPLES)]:
        check_regular(path)
        with Image.open(path) as image:
            yield image.convert("RGB")


@torch.no_grad()
def _checked(
    model: nn.Module, exported: Callable[[Tensor], Tensor], images: Tensor | None
) -> float | None:
    """The largest difference between the logits of both; ValueError if it is more than rounding."""
    if images is None:
        return None
    with evaluating(model):
        expected = model(images)
    # all images at once and one alone, because any batch size must work
    difference = max(
        float((exported(part) - expected[: len(part)]).abs().max() / expected.abs().max())
        for part in (images, images[:1])
    )
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the exported network does not compute the same: on {len(images)} images its logits "
            f"differ by {difference:.1e} of the largest one"
        )
    return difference


def _deployed(model: nn.Module) -> nn.Module:
    """A copy in its fastest form: folded, if all CE in it follows batch norms."""
    model = deepcopy(model).eval()
    layers = dict(ce_layers(model))
    wrappers = [module for module in model.modules() if isinstance(module, NormCE2d)]
    foldable = bool(layers) and len(wrappers) == len(layers)
    foldable = foldable and all(is_batch_norm(wrapper.norm) for wrapper in wrappers)
    return (fold_ce(model) if foldable else model).requires_grad_(False)


def _two(example: Tensor) -> Tensor:
    """A batch of two: programs traced with one sample accept only one sample."""
    return example[:1].repeat(2, 1, 1, 1)
