"""`cenet diagnose`: load a network, find images, diagnose, print and write the result."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from cenet.analysis.diagnose import diagnose, without_prunable
from cenet.analysis.diagnosis import Cam, Diagnosis, Images, Layer, Model, Skipped
from cenet.analysis.gradcam import overlays
from cenet.analysis.verdict import Evidence, judge
from cenet.arguments import progress_bar
from cenet.data.datasets import CIFAR10_FOLDER, Resident, load_test
from cenet.data.loaders import evaluation_batches
from cenet.diagnosing.images import NOT_AN_IMAGE, ImageStream, find_images
from cenet.diagnosing.network import LoadedNetwork, find_network, num_outputs
from cenet.distributed import start
from cenet.files import check_is_folder
from cenet.formatting import percent
from cenet.report import write_diagnosis
from cenet.train.recipes import RECIPES

SLOW = "ablation runs the network once for each channel; --ablation-images 0 skips it"
CAPTION = (
    "ch.: channels. dormant: at most 0.1 of their layer's mean activation. rare: fire in less than "
    "1 % of the images. prune: contribute next to nothing. dims: effective dimensions, the "
    "participation ratio. corr.: mean |correlation| of two channels. λ: share of decorrelation in "
    "CE. CE: in place, or a site where `insert_ce_` would put it."
)


class ImageSet(NamedTuple):
    """The images of a diagnosis.

    Attributes:
        batches: makes an iterator over all batches, from the first one.
        total: number of images, if all can be read.
        classes: their names in the order of the labels, if there are labels.
        skipped: files that were found not to be images.
        notes: for the terminal: why there is no accuracy, and which images these are.
        files: the stream that reads files and counts those it cannot read.
    """

    batches: Callable[[], Iterable[Any]]
    total: int
    classes: tuple[str, ...] | None
    skipped: list[Skipped]
    notes: list[str]
    files: ImageStream | None


def run(model: str, data: Path | None, out: Path, **options: Any) -> Diagnosis:
    """Diagnose a network as `diagnose_named` does, print the result and write it to a folder."""
    check_is_folder(out)
    diagnosis, notes = diagnose_named(model, data, show_progress=True, **options)
    print_summary(diagnosis, notes)
    for path in write_diagnosis(diagnosis, out):
        print(f"wrote {path}")
    return diagnosis


def diagnose_named(
    model: str,
    data: Path | None,
    *,
    checkpoint: Path | None = None,
    pretrained: bool = False,
    **options: Any,
) -> tuple[Diagnosis, list[str]]:
    """Diagnose a network given by name or by folder.

    Args:
        model: as for `find_network`, and so `checkpoint` and `pretrained`.
        data: folder of images.
        checkpoint: weights of the network.
        pretrained: take those of timm or torchvision instead.
        **options: as for `diagnose_loaded`.

    Returns:
        The diagnosis, and notes on the images for the terminal.

    Raises:
        ValueError: network, checkpoint, images or an option cannot be used; the message says which.
    """
    _check(**options)
    loaded = find_network(model, checkpoint, pretrained=pretrained)
    return diagnose_loaded(loaded, data, **options)


def diagnose_loaded(
    loaded: LoadedNetwork,
    data: Path | None,
    *,
    limit: int | None = None,
    size: int | None = None,
    batch: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layer: str | None = None,
    ablation_images: int | Literal["all"] | None = None,
    show_progress: bool = False,
) -> tuple[Diagnosis, list[str]]:
    """Diagnose a network that is loaded already; otherwise as `diagnose_named`."""
    place = start(device).device
    loaded.network.to(place).eval()
    images = find_image_set(loaded, data, limit, size or loaded.size, batch)
    with _progress(show_progress) as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, of: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=of or images.total)
                if what == "ablation" and show_progress:
                    progress.console.print(SLOW)
            progress.update(tasks[what], completed=done)

        try:
            found = diagnose(
                loaded.network, images.batches(), layer=layer, ablation_images=ablation_images,
                report=report,
            )  # fmt: skip
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{loaded.name} cannot be run on these images: {reason}") from error
    return complete(found, loaded, data, images, place), images.notes


def _check(**options: Any) -> None:
    for name, least in {"limit": 1, "size": 1, "batch": 1, "ablation_images": 0}.items():
        value = options.get(name)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def find_image_set(
    loaded: LoadedNetwork, data: Path | None, limit: int | None, size: int, batch: int
) -> ImageSet:
    """The test images of a run that has them built in or as CIFAR-10, or those of a folder."""
    if loaded.run is not None:
        recipe, inputs = loaded.run
        if data is None or (data / CIFAR10_FOLDER).is_dir():
            test = load_test(recipe, data)
            assert isinstance(test, Resident)
            order = torch.randperm(len(test.labels), generator=torch.Generator().manual_seed(0))
            chosen = test._replace(
                images=test.images[order[:limit]], labels=test.labels[order[:limit]]
            )
            batches = partial(
                evaluation_batches, chosen, inputs, size=size, batch=batch,
                device=torch.device("cpu"), channels_last=False,
            )  # fmt: skip
            notes = _notes(loaded, "the test images")
            return ImageSet(batches, len(chosen.labels), test.classes, [], notes, None)
    if data is None:
        raise ValueError(f"{loaded.name} needs images: --data FOLDER")
    found = find_images(data, limit)
    labels, classes, note = _labels(found.labels, found.classes, loaded)
    stream = ImageStream(found.source, labels, loaded.transform(size), batch)
    notes = [*([] if note is None else [note]), *_notes(loaded, f"the images in {found.folder}")]
    return ImageSet(lambda: stream, len(found.source), classes, found.skipped, notes, stream)


def _notes(loaded: LoadedNetwork, images: str) -> list[str]:
    """A note on which images are measured, if the run tested itself on others."""
    if loaded.run is None or loaded.run[0].holdout == 0:
        return []
    share = f"{loaded.run[0].holdout:g}"
    return [
        f"All figures are for {images}; the run tested itself on training images held out by "
        f"holdout={share}."
    ]


def _labels(
    names: list[str] | None, folders: tuple[str, ...] | None, loaded: LoadedNetwork
) -> tuple[list[int] | None, tuple[str, ...] | None, str | None]:
    """Labels as indices of the logits and the names of the classes, or why there are none."""
    if names is None or folders is None:
        return None, None, "The images have no labels (no class folders), so there is no accuracy."
    classes, outputs = loaded.classes, num_outputs(loaded.network)
    if classes is None or not set(folders) <= set(classes):
        if loaded.run is not None:
            unknown = sorted(set(folders) - set(classes or ()))
            return None, None, f"The run has no classes {unknown}, so there is no accuracy."
        classes = folders
    if outputs != len(classes):
        return None, None, (
            f"The images have {len(folders)} classes and the network has {outputs} outputs, so "
            "there is no accuracy."
        )  # fmt: skip
    place = {name: i for i, name in enumerate(classes)}
    return [place[name] for name in names], classes, None


def complete(
    found: Diagnosis,
    loaded: LoadedNetwork,
    data: Path | None,
    images: ImageSet,
    device: torch.device,
) -> Diagnosis:
    """Add what only the command knows: names, files, Grad-CAMs, and the verdict that follows."""
    late = () if images.files is None else tuple(images.files.skipped)
    folder = None if data is None else str(data)
    # without a checkpoint the weights are random, whatever the norms look like
    untrained = found.model.untrained or loaded.checkpoint is None
    removal = None if untrained else found.removal
    layers = without_prunable(found.layers) if untrained else found.layers
    evidence = Evidence(
        layers, found.data.images, untrained, found.accuracy, removal, found.sites,
        _training_with_ce(loaded),
    )  # fmt: skip
    return replace(
        found,
        model=Model(loaded.name, loaded.checkpoint, found.model.parameters, untrained),
        verdict=judge(evidence),
        layers=layers,
        removal=removal,
        data=Images(
            folder, found.data.images, found.data.size, images.classes, (*images.skipped, *late)
        ),
        gradcam=() if untrained else _pictures(loaded, images, device),
    )


def _training_with_ce(loaded: LoadedNetwork) -> str | None:
    """The command that trains the network of a run with CE, if there is a recipe for it."""
    if loaded.run is None:
        return None
    recipe, _ = loaded.run
    if recipe.stock:
        return f"cenet train finetune --model {recipe.network} --weights {loaded.name}"
    wanted = ("network", "dataset", "norm", "act")
    for name, other in RECIPES.items():
        same = all(getattr(other, field) == getattr(recipe, field) for field in wanted)
        if other.block == "ce" and same:
            return f"cenet train {name} --epochs {recipe.epochs} --seed {recipe.seed}"
    return None


def _pictures(loaded: LoadedNetwork, images: ImageSet, device: torch.device) -> tuple[Cam, ...]:
    batch = next(iter(images.batches()))
    first, labels = (batch, None) if isinstance(batch, Tensor) else batch
    names = images.classes if loaded.class_names is None else loaded.class_names
    return overlays(loaded.network, first.to(device), labels, names)


def _progress(wanted: bool) -> Progress:
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn())
    # in a log file, lines of a bar are noise
    return progress_bar(*columns, shown=wanted and sys.stderr.isatty())


def print_summary(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> None:
    """Print the table, the findings, `notes`, and the verdict last."""
    console = Console()
    console.print(_layer_table(diagnosis))
    for line in (*findings(diagnosis), *notes):
        console.print(line, highlight=False, markup=False)
    verdict = diagnosis.verdict
    console.print()
    console.print(f"Verdict: {verdict.headline}", style="bold", highlight=False, markup=False)
    for reason in verdict.reasons:
        console.print(f"  - {reason}", highlight=False, markup=False)
    if verdict.next_step is not None:
        console.print(f"Next step: {verdict.next_step}", highlight=False, markup=False)
    if verdict.command is not None:
        console.print(f"    {verdict.command}", highlight=False, markup=False, soft_wrap=True)


def _layer_table(diagnosis: Diagnosis) -> Table:
    found = diagnosis
    height, width = found.data.size
    table = Table(
        title=escape(f"{found.model.name} on {found.data.images} images of {height}×{width}"),
        caption=CAPTION,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    with_ce = any(layer.has_ce for layer in found.layers)
    columns = [column for column in COLUMNS if with_ce or column[0] != "λ"]
    table.add_column("layer", overflow="fold", ratio=1)
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "CE" else "right", no_wrap=True)
    for layer in found.layers:
        table.add_row(escape(layer.name), *(text(layer) for _, text in columns))
    return table


def findings(diagnosis: Diagnosis) -> list[str]:
    """Accuracy, ablation, importance and skipped files, a sentence each."""
    found, lines = diagnosis, []
    if found.accuracy is not None:
        top1, top5 = (percent(value, ".2f") for value in (found.accuracy.top1, found.accuracy.top5))
        lines.append(f"Top-1 {top1}" + (f", top-5 {top5}." if found.accuracy.classes > 5 else "."))
    if found.ablation is not None:
        curve = found.ablation
        whole, half = percent(fmean(curve.top1[0])), percent(fmean(curve.top1[5]))
        lines.append(
            f"With half of the channels of {curve.layer} at zero, top-1 goes from {whole} to "
            f"{half} (random channels) or {percent(curve.least_important_first[5])} (the least "
            f"important ones), on {curve.images} images."
        )
    if found.importance is not None:
        one = found.importance
        lines.append(
            f"Importance is spread over the {len(one.divergence)} channels of {one.layer} with a "
            f"Gini coefficient of {one.gini:.2f} (0: all equally important)."
        )
    inhibited = "" if found.first_six is None else percent(found.first_six)
    lines.append(
        f"Inhibited channels by the paper's absolute threshold (mean activation below "
        f"{found.threshold:g}), mean of the first six layers: {inhibited}. "
        "This figure depends on the scale of the layers; the others do not."
    )
    images = [one for one in found.data.skipped if one.reason != NOT_AN_IMAGE]
    others = len(found.data.skipped) - len(images)
    if images:
        lines.append(
            f"{len(images)} images were skipped, the first {images[0].path}: {images[0].reason}."
        )
    if others:
        lines.append(f"{others} files that are not images were skipped.")
    return lines


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"


# columns of the table after the name of the layer; λ only if a layer has CE
COLUMNS: tuple[tuple[str, Callable[[Layer], str]], ...] = (
    ("map", lambda layer: f"{layer.height}×{layer.width}"),
    ("ch.", lambda layer: str(layer.channels)),
    ("dormant", lambda layer: str(len(layer.dormant))),
    ("rare", lambda layer: str(len(layer.rare))),
    ("prune", lambda layer: str(len(layer.prunable))),
    ("dims", lambda layer: _number(layer.participation_ratio, ".1f")),
    ("corr.", lambda layer: _number(layer.correlation)),
    ("λ", lambda layer: _number(layer.mix)),
    ("CE", lambda layer: layer.ce_state or ""),
)
