"""`cenet diagnose`: find network and images, examine, say what was found, write diagnosis.json."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cenet.extras import require

require("report")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from cenet.analysis.diagnosis import Cam, Diagnosis, Images, Skipped, Subject
from cenet.analysis.examination import diagnose, without_prunable
from cenet.analysis.images import ImageStream, find_images
from cenet.analysis.overlays import overlays
from cenet.analysis.subjects import Examinee, find_examinee, num_outputs
from cenet.analysis.summary import print_summary
from cenet.analysis.verdict import Evidence, judge
from cenet.train.data import CIFAR10_FOLDER, Resident, load_test
from cenet.train.loaders import evaluation_batches
from cenet.train.processes import start
from cenet.train.recipes import RECIPES

FILE = "diagnosis.json"
SLOW = "ablation runs the network once for each channel; --ablation-images 0 skips it"


class Shown(NamedTuple):
    """What the network will see."""

    batches: Callable[[], Iterable[Any]]  # from the beginning
    total: int  # images, if all can be read
    classes: tuple[str, ...] | None  # in the order of the labels
    skipped: list[Skipped]  # while looking for images
    notes: list[str]  # why there is no accuracy, and what the images are not
    files: ImageStream | None  # knows which could not be read


def run(model: str, data: Path | None, out: Path, **options: Any) -> Diagnosis:
    """Examine a network as `examine` does, and print what was found."""
    diagnosis, notes = examine(model, data, out, **options)
    print_summary(diagnosis, notes)
    print(f"wrote {out / FILE}")
    return diagnosis


def examine(
    model: str,
    data: Path | None,
    out: Path,
    *,
    checkpoint: Path | None = None,
    pretrained: bool = False,
    **options: Any,
) -> tuple[Diagnosis, list[str]]:
    """Examine a network by name or run and write `out/diagnosis.json`; notes come beside.

    Args:
        model: as `find_examinee` takes it, and so `checkpoint` and `pretrained`.
        data: folder of images.
        out: folder of diagnosis.json.
        checkpoint: weights of the network.
        pretrained: take those of timm or torchvision instead.
        **options: as of `examine_network`.

    Raises:
        ValueError: network, checkpoint, images or an option cannot be used; the message says which.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    _check(**options)
    examinee = find_examinee(model, checkpoint, pretrained=pretrained)
    return examine_network(examinee, data, out, **options)


def examine_network(
    examinee: Examinee,
    data: Path | None,
    out: Path,
    *,
    limit: int | None = None,
    size: int | None = None,
    batch: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layer: str | None = None,
    ablation_images: int | Literal["all"] | None = None,
) -> tuple[Diagnosis, list[str]]:
    """Examine a network that is at hand; as `examine`."""
    place = start(device).device
    examinee.network.to(place).eval()
    shown = _shown(examinee, data, limit, size or examinee.size, batch)
    with _progress() as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, of: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=of or shown.total)
                if what == "ablation":
                    progress.console.print(SLOW)
            progress.update(tasks[what], completed=done)

        try:
            found = diagnose(
                examinee.network, shown.batches(), layer=layer, ablation_images=ablation_images,
                report=report,
            )  # fmt: skip
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{examinee.name} cannot be run on these images: {reason}") from error
    diagnosis = _completed(found, examinee, data, shown, place)
    diagnosis.write(out / FILE)
    return diagnosis, shown.notes


def _check(**options: Any) -> None:
    for name, least in {"limit": 1, "size": 1, "batch": 1, "ablation_images": 0}.items():
        value = options.get(name)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def _shown(
    examinee: Examinee, data: Path | None, limit: int | None, size: int, batch: int
) -> Shown:
    if examinee.run is not None:
        recipe, inputs = examinee.run
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
            notes = _notes(examinee, "the test images")
            return Shown(batches, len(chosen.labels), test.classes, [], notes, None)
    if data is None:
        raise ValueError(f"say which images to show to {examinee.name} with --data FOLDER")
    found = find_images(data, limit)
    labels, classes, note = _labels(found.labels, found.classes, examinee)
    stream = ImageStream(found.paths, labels, examinee.transform(size), batch)
    notes = [*([] if note is None else [note]), *_notes(examinee, f"the images in {found.folder}")]
    return Shown(lambda: stream, len(found.paths), classes, found.skipped, notes, stream)


def _notes(examinee: Examinee, images: str) -> list[str]:
    """Which images are measured, if those that the run tested itself on are others."""
    if examinee.run is None or examinee.run[0].holdout == 0:
        return []
    share = f"{examinee.run[0].holdout:g}"
    return [
        f"All figures are of {images}; the run tested itself on training images held out by "
        f"holdout={share}."
    ]


def _labels(
    names: list[str] | None, folders: tuple[str, ...] | None, examinee: Examinee
) -> tuple[list[int] | None, tuple[str, ...] | None, str | None]:
    """Classes of the images as places among the logits, their names, or why there are none."""
    if names is None or folders is None:
        return None, None, "The images have no labels (no class folders), so there is no accuracy."
    classes, outputs = examinee.classes, num_outputs(examinee.network)
    if classes is None or not set(folders) <= set(classes):
        if examinee.run is not None:
            unknown = sorted(set(folders) - set(classes or ()))
            return None, None, f"The run does not know the classes {unknown}: there is no accuracy."
        classes = folders
    if outputs != len(classes):
        return None, None, (
            f"The images have {len(folders)} classes and the network tells {outputs} apart, so "
            "there is no accuracy."
        )  # fmt: skip
    place = {name: i for i, name in enumerate(classes)}
    return [place[name] for name in names], classes, None


def _completed(
    found: Diagnosis, examinee: Examinee, data: Path | None, shown: Shown, device: torch.device
) -> Diagnosis:
    """The diagnosis with what only the command knows."""
    late = () if shown.files is None else tuple(shown.files.skipped)
    folder = None if data is None else str(data)
    # a name alone is a network as it was made, whatever its norms look like
    untrained = found.model.untrained or examinee.checkpoint is None
    removal = None if untrained else found.removal
    layers = without_prunable(found.layers) if untrained else found.layers
    evidence = Evidence(
        layers, found.data.images, untrained, found.accuracy, removal, found.sites,
        _training_with_ce(examinee),
    )  # fmt: skip
    return replace(
        found,
        model=Subject(examinee.name, examinee.checkpoint, found.model.parameters, untrained),
        verdict=judge(evidence),
        layers=layers,
        removal=removal,
        data=Images(
            folder, found.data.images, found.data.size, shown.classes, (*shown.skipped, *late)
        ),
        gradcam=() if untrained else _pictures(examinee, shown, device),
    )


def _training_with_ce(examinee: Examinee) -> str | None:
    """The command that trains the network of a run with CE, if there is a recipe for it."""
    if examinee.run is None:
        return None
    recipe, _ = examinee.run
    wanted = ("network", "dataset", "norm", "act")
    for name, other in RECIPES.items():
        same = all(getattr(other, field) == getattr(recipe, field) for field in wanted)
        if other.block == "ce" and same:
            return f"cenet train {name} --epochs {recipe.epochs} --seed {recipe.seed}"
    return None


def _pictures(examinee: Examinee, shown: Shown, device: torch.device) -> tuple[Cam, ...]:
    batch = next(iter(shown.batches()))
    images, labels = (batch, None) if isinstance(batch, Tensor) else batch
    names = shown.classes if examinee.class_names is None else examinee.class_names
    return overlays(examinee.network, images.to(device), labels, names)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # in a log file, lines of a bar are noise
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
