"""Run a recipe in a folder, or evaluate a finished run."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

import cenet.distributed as distributed
import cenet.train.checkpoint as checkpoint
from cenet.data.datasets import different_classes, load, load_test
from cenet.data.order import Shard
from cenet.files import check_is_folder, in_words
from cenet.ops import start_gpu
from cenet.run_folder import WEIGHTS, locked
from cenet.train.options import Options, RunOptions
from cenet.train.recipes import Recipe, read_run
from cenet.train.times import DATA, LIBRARIES, NETWORK, Clock

if TYPE_CHECKING:
    from cenet.train.classifier import Trainer
    from cenet.train.loop import Loop
    from cenet.train.weights import Beginning

Device = Literal["auto", "cpu", "cuda"]
SMALL = 32  # pixels


@dataclass(frozen=True)
class Job:
    """Settings of a training run: its recipe, folders and device.

    Attributes:
        recipe: settings that decide what the network learns; each of them changes the results,
            except accuracy, which is a note.
        options: where and how the run is executed; results change by rounding only, except by the
            pixels that a GPU decodes (--decode).
        data: folder of the images: train/CLASS/* and test/CLASS/* (or val), train-*.tar and
            test-*.tar of WebDataset, train-*.parquet and test-*.parquet of the Hugging Face hub,
            or CIFAR-10 as torchvision stores it. The digits are built in.
        weights: weights to start from instead of random ones: the folder of a finished run or of
            `cenet.save`, or a .safetensors or .pth file. They may be those of a network without CE
            or with other classes. A run that is resumed continues from its own checkpoint.
        pretrained: with a stock network (the recipe finetune), start from the weights that timm or
            torchvision have for it, which are downloaded.
        device: cpu, cuda, or auto for cuda where there is one.
    """

    recipe: Recipe
    options: Annotated[Options, tyro.conf.arg(name="run")] = field(
        default_factory=lambda: Options(Path("runs/run"))
    )
    data: Path | None = None
    weights: Path | None = None
    pretrained: bool = False
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
    job, beginning = _settled(job)

    def build(own: distributed.Processes) -> "Loop":
        # libraries take seconds to import; meanwhile images are read and the GPU is started
        with ThreadPoolExecutor(2) as beside:
            reading = beside.submit(load, job.recipe, job.data)
            has_ce = job.recipe.block not in ("plain", "se")
            starting = beside.submit(start_gpu, own.device, kernels=has_ce)
            from cenet.train.classifier import Trainer

            starting.result()
            clock.enter(DATA)
            data = reading.result()
        clock.enter(NETWORK)
        is_new = not _goes_on(job)
        trainer = Trainer(
            job.recipe, data, job.options, own, job.weights if is_new else None,
            pretrained=job.pretrained and is_new, beginning=beginning,
        )  # fmt: skip
        if own.is_first:
            for line in _first_words(trainer, is_new=is_new):
                print(line)
        return trainer

    if job.options.threads is None and job.recipe.image_size < SMALL:
        torch.set_num_threads(1)
    return run_loop(build, job.options, job.device, clock)


def _goes_on(job: Job) -> bool:
    return job.options.resume == "auto" and bool(checkpoint.checkpoints(job.options.out))


def _settled(job: Job) -> "tuple[Job, Beginning | None]":
    """The job with an image size, and the `Beginning` of a stock network.

    Raises:
        ValueError: weights that exclude each other, or no such network.
    """
    if job.pretrained and job.weights is not None:
        raise ValueError(f"--weights {job.weights} and --pretrained exclude each other")
    if not job.recipe.stock:
        if job.pretrained:
            raise ValueError(
                f"--pretrained is for networks of timm and torchvision, and {job.recipe.network} "
                "is one of the paper; use the recipe finetune, or --weights FILE"
            )
        return job, None
    from cenet.train.weights import find_beginning

    run = job.options.out if _goes_on(job) else None
    beginning = find_beginning(job.recipe, job.weights, run)
    recipe = replace(job.recipe, image_size=job.recipe.image_size or beginning.size)
    return replace(job, recipe=recipe), beginning


def _first_words(trainer: "Trainer", *, is_new: bool) -> Iterator[str]:
    """Lines about the start of a run: weights, images, learning rate."""
    recipe, inputs = trainer.recipe, trainer.inputs
    if trainer.initial is not None:
        yield str(trainer.initial)
    elif recipe.stock and is_new:
        yield (
            f"{recipe.network} starts from random weights; --pretrained or --weights FILE gives "
            "trained ones"
        )
        if recipe.ce_start == "identity" and recipe.block != "plain":
            yield (
                "CE that starts as the identity hardly moves in a network with random weights; use "
                "--ce-start paper to train from scratch"
            )
    if recipe.stock:
        yield (
            f"images of {recipe.image_size}×{recipe.image_size}, normalized by mean and deviation "
            f"{inputs.normalization}"
        )
        images = recipe.batch_size * recipe.accumulate * trainer.processes.world
        yield (
            f"learning rate {recipe.lr * images / recipe.lr_batch:g} after the warm-up "
            f"({recipe.lr:g} × {images} images per update / {recipe.lr_batch}), "
            f"{trainer.updates_per_epoch} updates per epoch"
        )


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
    """Resume a loop if asked to, and run it; a function, so that no reference to it remains."""
    loop.clock = clock
    if options.resume == "auto":
        said = loop.resume()
        if said and own.is_first:
            print(said)
    said = loop.recipe.about_warmup()
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
                problem = in_words(error)
        problem = distributed.gathered(problem, own)[0]
        if problem is not None:
            raise ValueError(problem)
        yield


def _check_folder(options: RunOptions) -> None:
    out = options.out
    check_is_folder(out)
    saved = checkpoint.checkpoints(out)
    if not saved and (out / WEIGHTS).exists():
        raise ValueError(
            f"{out} holds {WEIGHTS} of a finished run, which would be replaced, and no checkpoint "
            "to continue from; choose another --out"
        )
    if options.resume == "never" and saved:
        raise ValueError(
            f"{out} holds a run already; continue it with --resume auto, or choose another --out"
        )


def _check_file(save: Path, run: Path) -> None:
    """Raise ValueError before the work if recalibrated weights may not be written there."""
    if save.resolve() in {own.resolve() for own in (run / WEIGHTS, *checkpoint.checkpoints(run))}:
        raise ValueError(f"--save {save} is a file of the run itself; choose another name")
    if save.suffix != ".safetensors" or save.is_dir():
        raise ValueError(f"--save {save} must be a file that ends in .safetensors")
    if not save.parent.is_dir():
        raise ValueError(
            f"--save {save}: {save.parent} is not a folder; make it, or choose another"
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
            batch norm and CE again before the test. Averaged weights need it.
        save: file for the recalibrated weights, NAME.safetensors.
    """
    if save is not None and recalibrate == 0:
        raise ValueError(f"--save {save} is for recalibrated weights; add --recalibrate BATCHES")
    if save is not None:
        _check_file(save, run)
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
            differ = different_classes("the run", inputs.classes, "the data", test.classes)
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
