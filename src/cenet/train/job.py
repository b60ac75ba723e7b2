"""Run a recipe in a folder, or evaluate a finished run."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

import cenet.distributed as distributed
import cenet.train.checkpoint as checkpoint
from cenet.data.datasets import load, load_test
from cenet.data.order import Shard
from cenet.run_folder import locked
from cenet.train.options import Options, RunOptions
from cenet.train.recipes import Recipe, read_run
from cenet.train.times import DATA, LIBRARIES, NETWORK, Clock

if TYPE_CHECKING:
    from cenet.train.loop import Loop

Device = Literal["auto", "cpu", "cuda"]
SMALL = 32  # pixels


@dataclass(frozen=True)
class Job:
    """A recipe with the folders and the device of a run.

    Attributes:
        recipe: settings that decide what the network learns; each changes numbers.
        options: where and how the run is executed; none changes a number by more than rounding.
        data: folder of the images: train/CLASS/* and test/CLASS/* (or val), train-*.tar and
            test-*.tar of WebDataset, train-*.parquet and test-*.parquet of the Hugging Face hub,
            or CIFAR-10 as torchvision stores it. The digits are built in.
        weights: weights to start from instead of random ones: the folder of a finished run, or a
            .safetensors or .pth file. It may be without CE, and of other classes. A run that is
            resumed continues from its own checkpoint.
        device: cpu, cuda, or auto for cuda where there is one.
    """

    recipe: Recipe
    options: Annotated[Options, tyro.conf.arg(name="run")] = field(
        default_factory=lambda: Options(Path("runs/run"))
    )
    data: Path | None = None
    weights: Path | None = None
    device: Device = "auto"


def train(job: Job, clock: Clock | None = None) -> dict[str, Any]:
    """Run a job, alone or as one of torchrun's processes, and return the last row of metrics.

    Args:
        job: the recipe and where it runs.
        clock: measures the wall time; pass one to include the time before this call.

    Raises:
        ValueError: data, checkpoint or device cannot be used for the job.
        Interrupted, NonFiniteLoss: see `Loop.run`.
    """

    clock = clock or Clock(LIBRARIES)

    def build(own: distributed.Processes) -> "Loop":
        # libraries take seconds to import, in which the images can be read
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(load, job.recipe, job.data)
            from cenet.train.classifier import Trainer

            clock.enter(DATA)
            data = reading.result()
        clock.enter(NETWORK)
        goes_on = job.options.resume == "auto" and checkpoint.checkpoints(job.options.out)
        trainer = Trainer(job.recipe, data, job.options, own, None if goes_on else job.weights)
        if trainer.initial is not None and own.is_first:
            print(trainer.initial)
        return trainer

    if job.options.threads is None and job.recipe.image_size < SMALL:
        torch.set_num_threads(1)
    return run_loop(build, job.options, job.device, clock)


def run_loop(
    build: Callable[[distributed.Processes], "Loop"],
    options: RunOptions,
    device: Device,
    clock: Clock,
) -> dict[str, Any]:
    """Join the processes, lock the folder, build a loop, resume it if asked to, and run it.

    Args:
        build: builds the loop in this process.
        options: options of the run.
        device: cpu, cuda, or auto for cuda where there is one.
        clock: measures the wall time.
    """
    own = distributed.start(device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        with _folder(options, own):
            return _run(build(own), options, own, clock)
    except BaseException as error:
        clear_frames(error.__traceback__)  # they hold the loop, which holds the process group
        from cenet.data.workers import explain

        explain(error)
        raise
    finally:
        distributed.finish()


def _run(
    loop: "Loop", options: RunOptions, own: distributed.Processes, clock: Clock
) -> dict[str, Any]:
    """Resume a loop if asked to, and run it; in a function that lets go of it at its end."""
    loop.clock = clock
    if options.resume == "auto":
        said = loop.resume()
        if said and own.is_first:
            print(said)
    return loop.run()


@contextmanager
def _folder(options: RunOptions, own: distributed.Processes) -> Iterator[None]:
    """Lock the folder of the run; ValueError in all processes if it cannot be used."""
    problem = None
    with ExitStack() as claim:
        if own.is_first:  # the process that writes
            try:
                _check_folder(options)
                claim.enter_context(locked(options.out))
            except (ValueError, OSError) as error:
                problem = str(error)
        problem = distributed.gathered(problem, own)[0]
        if problem is not None:
            raise ValueError(problem)
        yield


def _check_folder(options: RunOptions) -> None:
    out = options.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    if options.resume == "never" and checkpoint.checkpoints(out):
        raise ValueError(
            f"{out} holds a run already; go on with it by --resume auto, or choose another --out"
        )


def evaluate_run(
    run: Path,
    data: Path | None = None,
    device: Device = "auto",
    *,
    recalibrate: int = 0,
    save: Path | None = None,
) -> dict[str, float]:
    """Test loss and accuracy of the final weights of a run, or of its newest checkpoint.

    The test images are used even if the run was tested on held-out training images. Held-out images
    are not used for `recalibrate` either.

    Args:
        run: folder of the run.
        data: as in `Job`; training images are needed for `recalibrate` only.
        device: as in `Job`.
        recalibrate: number of training batches from which to estimate the running statistics of
            batch norm and CE first. Averaged weights need it.
        save: file for the recalibrated weights.
    """
    if save is not None and recalibrate == 0:
        raise ValueError(f"--save {save} is for recalibrated weights; add --recalibrate BATCHES")
    if recalibrate < 0:
        raise ValueError(f"recalibrate={recalibrate} must be at least 1")
    from torch.optim.swa_utils import update_bn

    from cenet.calibration import update_ce_stats
    from cenet.data.loaders import training_loader
    from cenet.nn import ce_layers
    from cenet.train.evaluation import Tester
    from cenet.train.weights import load_run, write_weights

    recipe, inputs = read_run(run, Recipe)
    own = distributed.start(device)
    try:
        network = load_run(run).to(own.device)
        test = load_test(recipe, data)
        if test.classes != inputs.classes:
            differ = sorted({*test.classes} ^ {*inputs.classes})
            raise ValueError(f"{run} was trained on other classes than {data} has: {differ}")
        if recalibrate:
            images = load(recipe, data).train
            shard = Shard(len(images.labels), recipe.batch_size)
            loader = training_loader(
                recipe, images, inputs, shard, device=own.device, decode="auto"
            )
            update_bn(islice(loader.epoch(0), recalibrate), network)
            network.eval()
            if dict(ce_layers(network)):
                update_ce_stats(network, loader.epoch(0), num_batches=recalibrate)
        if save is not None and own.is_first:
            write_weights(save, network, recipe, inputs)
        return Tester(network, test, inputs, recipe, own)()
    finally:
        distributed.finish()
