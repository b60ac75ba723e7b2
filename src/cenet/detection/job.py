"""Run a detection recipe in a folder, evaluate a run, or write its page."""

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import nn

import cenet.distributed as distributed
import cenet.train.checkpoint as checkpoint
from cenet.checkpoints import load_state_
from cenet.data.datasets import different_classes
from cenet.detection.data import Scenes, SceneSplit, load
from cenet.detection.evaluation import Scores, evaluate, predict
from cenet.detection.freezing import STAGES
from cenet.detection.page import build_page, read_source
from cenet.detection.predictions import choose, predictions_section
from cenet.detection.recipes import DetectionRecipe
from cenet.detection.trainer import DetectionOptions, DetectionTrainer, build_detector
from cenet.files import harmless, replace_file
from cenet.report.pages import save_page
from cenet.train.job import Device, run_loop
from cenet.train.loop import Loop
from cenet.train.recipes import read_run
from cenet.train.times import DATA, LIBRARIES, NETWORK, Clock
from cenet.train.weights import read_weights

PAGE = "detection.html"
LEFT_OUT = "left_out.csv"


@dataclass(frozen=True)
class DetectionJob:
    """Settings of a training run: its recipe, folders and device.

    Attributes:
        recipe: settings that decide what the network learns; each of them changes the results.
        options: where and how the run is executed; results change by rounding only.
        data: folder in the layout of COCO: annotations/instances_train2017.json with train2017/,
            and the same for val2017; or instances.json with images/, to train and test on the same
            images. The recipe shapes needs none.
        checkpoint: weights of the backbone as a classifier, for example weights.safetensors of a
            run of `cenet train`.
        device: cpu, cuda, or auto for cuda where there is one.
    """

    recipe: DetectionRecipe
    options: Annotated[DetectionOptions, tyro.conf.arg(name="run")] = field(
        default_factory=lambda: DetectionOptions(Path("runs/run"))
    )
    data: Path | None = None
    checkpoint: Path | None = None
    device: Device = "auto"


def train(job: DetectionJob, clock: Clock | None = None) -> dict[str, Any]:
    """Run a job, alone or as one of torchrun's processes, and return the last row of metrics.

    Args:
        job: the recipe and where it runs.
        clock: measures the wall time; pass one to include the time before this call.

    Raises:
        ValueError: data, checkpoint or device cannot be used for the job.
        Interrupted, NonFiniteLoss: see `Loop.run`.
    """
    clock = clock or Clock(LIBRARIES)
    untrained = job.checkpoint is None and not checkpoint.checkpoints(job.options.out)
    setting, layers = job.recipe.setting, job.recipe.trainable_layers
    if untrained and (setting != "scratch" or layers < len(STAGES)):
        raise ValueError(
            f"setting={setting} and trainable_layers={layers} freeze parts of the backbone, whose "
            "weights are random; pass a classifier's weights by --checkpoint FILE, or "
            f"train everything by --setting scratch --trainable-layers {len(STAGES)}"
        )

    def build(own: distributed.Processes) -> Loop:
        clock.enter(DATA)
        data = load(job.recipe, job.data)
        clock.enter(NETWORK)
        parts = {part.name: part for part in data}  # train and test may be the same
        if own.is_first:
            print(*(part.report() for part in parts.values()), sep="\n", flush=True)
        trainer = DetectionTrainer(job.recipe, data, job.options, own, job.checkpoint)
        if own.is_first:  # a start that is refused leaves no file
            write_left_out(job.options.out / LEFT_OUT, parts)
        return trainer

    return run_loop(build, job.options, job.device, clock)


def write_left_out(path: Path, parts: dict[str, Scenes]) -> None:
    """Write the images and objects that are not used, and why; no file if all are used."""
    rows = [
        (name, fault, harmless(one))
        for name, part in parts.items()
        for fault, names in part.faults.items()
        for one in names
    ]
    if rows:
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([("part", "fault", "which"), *rows])
        replace_file(path, table.getvalue().encode())


def load_detector(run: Path | str) -> nn.Module:
    """The network of a run of `cenet detect train`, in evaluation mode on the CPU."""
    return _load(Path(run))[0]


def _load(run: Path) -> tuple[nn.Module, str]:
    """The network of a run, and the name of the file of its weights."""
    recipe, inputs = read_run(run, DetectionRecipe)
    network = build_detector(recipe, inputs)
    weights, name = read_weights(run)
    load_state_(network, weights)
    return network.eval(), name


def evaluate_run(run: Path, data: Path | None = None, device: Device = "auto") -> Scores:
    """Average precision of the final weights of a run, or of its newest checkpoint."""
    own = distributed.start(device)
    try:
        network = load_detector(run).to(own.device)
        return evaluate(network, _data_of(run, data).test, own)
    finally:
        distributed.finish()


def show_run(
    run: Path, data: Path | None = None, device: Device = "auto", *, images: int = 8
) -> Path:
    """Write a page of a run: average precision, curves, and predictions on some test images.

    Args:
        run: folder of the run.
        data: folder of the images; not needed if `images` is 0.
        device: cpu, cuda, or auto for cuda where there is one.
        images: number of test images to draw.

    Raises:
        ValueError: `images` is negative, the run has no epoch yet, or the data are not its own.
    """
    if images < 0:
        raise ValueError(f"images={images} must be at least 0")
    recipe, _ = read_run(run, DetectionRecipe)
    source = read_source(run)
    predictions, weights = None, ""
    if images:
        own = distributed.start(device)
        try:
            scenes = _data_of(run, data).test
            network, weights = _load(run)
            indices = choose(scenes, images)
            found = predict(network.to(own.device), scenes, indices, device=own.device, workers=0)
        finally:
            distributed.finish()
        masks = recipe.detector == "mask_rcnn"
        predictions = predictions_section(scenes, indices, found, masks=masks, weights=weights)
    return save_page(build_page(source, recipe, predictions, weights), run / PAGE)


def _data_of(run: Path, data: Path | None) -> SceneSplit:
    recipe, inputs = read_run(run, DetectionRecipe)
    split = load(recipe, data)
    if split.test.classes != inputs.classes:
        differ = different_classes("the run", inputs.classes, "the data", split.test.classes)
        raise ValueError(f"{run} was trained on other classes than {data} has: {differ}")
    return split
