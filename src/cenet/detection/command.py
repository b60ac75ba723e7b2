"""`cenet detect train|eval|show`: parse, run, and explain failures in one line."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from cenet.arguments import run_command
from cenet.detection.job import DetectionJob, evaluate_run, show_run, train
from cenet.detection.recipes import RECIPES, find_recipe
from cenet.detection.trainer import DetectionOptions
from cenet.distributed import is_first_process
from cenet.files import in_words
from cenet.train.command import exit_with_reason, parse_job
from cenet.train.times import LIBRARIES, Clock, process_age

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Device = Literal["auto", "cpu", "cuda"]
EXAMPLE = "shapes"


def main(arguments: list[str]) -> None:
    """Train, evaluate or show a detector."""
    if arguments[:1] == ["train"]:
        run_train(parse(arguments[1:]))  # its arguments depend on the recipe
        return
    try:
        run_command(
            {"train": run_train, "eval": evaluate, "show": show},
            prog="cenet detect",
            args=arguments or ["--help"],
            description="Object detection and instance segmentation with CE.",
        )
    except (ValueError, OSError) as error:
        raise SystemExit(in_words(error) if is_first_process() else 1) from error


def parse(arguments: list[str]) -> DetectionJob:
    """The job of a command line."""
    return parse_job(
        arguments,
        lambda name: DetectionJob(
            find_recipe(name), DetectionOptions(Path("runs") / f"detect_{name}")
        ),
        command="cenet detect train",
        recipes=", ".join(RECIPES),
        example=EXAMPLE,
    )


def run_train(job: DetectionJob) -> None:
    """Train a detector by a recipe: `cenet detect train RECIPE [--field value ...]`."""
    clock = Clock(LIBRARIES, process_age())
    row = exit_with_reason(lambda: train(job, clock), job.options.out)
    if row and is_first_process():
        found = ", ".join(
            f"{name.replace('_', ' ')} {value:.3f}"
            for name, value in row.items()
            if "_ap" in name and isinstance(value, float)
        )
        found = f"{found}; " if found else ""
        print(f"epoch {row['epoch']}: {found}everything is in {job.options.out}")


def evaluate(run: Run, data: Path | None = None, device: Device = "auto") -> None:
    """Print COCO's evaluation of a run of `cenet detect train`.

    Args:
        run: folder of the run.
        data: folder of the images, as for `cenet detect train`.
        device: device to run on; auto is cuda where there is one.
    """
    scores = evaluate_run(run, data, device)
    if is_first_process():
        print(scores.table)
        for name, value in scores.numbers.items():
            print(f"{name} {value:.4f}")


def show(run: Run, data: Path | None = None, device: Device = "auto", images: int = 8) -> None:
    """Write a page about a run: average precision, curves, predictions beside the ground truth.

    Args:
        run: folder of the run.
        data: folder of the images, as for `cenet detect train`.
        device: device to run on; auto is cuda where there is one.
        images: number of test images to draw; 0 draws none and needs no data.
    """
    print(f"wrote {show_run(run, data, device, images=images)}")
