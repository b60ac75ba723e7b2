"""A recipe from beginning to end, and what can go wrong on the way, in one line each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

import cenet.train.processes as processes
import cenet.train.saving as saving
import cenet.train.snapshot as snapshot
from cenet.calibration import update_ce_stats
from cenet.train.data import load
from cenet.train.engine import WEIGHTS, Trainer
from cenet.train.evaluation import evaluate
from cenet.train.loaders import Shard, training_loader
from cenet.train.logbook import read_recipe
from cenet.train.options import Options
from cenet.train.recipes import Recipe
from cenet.train.setup import build_network

Device = Literal["auto", "cpu", "cuda"]
SMALL = 32  # pixels


@dataclass(frozen=True)
class Job:
    """A recipe, and where it runs.

    Attributes:
        recipe: what moves a number.
        options: what does not.
        data: folder of the images: train/CLASS/* and test/CLASS/* (or val), or CIFAR-10 as
            torchvision stores it. Digits need none.
        device: cpu, cuda, or auto for cuda where there is one.
    """

    recipe: Recipe
    options: Options = field(default_factory=lambda: Options(Path("runs/run")))
    data: Path | None = None
    device: Device = "auto"


def train(job: Job) -> dict[str, Any]:
    """Run a job, alone or as one of torchrun's processes, and return the last row of metrics.

    Raises:
        ValueError: the data, the checkpoint or the device are not what the job needs.
        Interrupted, NonFiniteLoss: see `Trainer.run`.
    """
    own = processes.start(job.device)
    _set_threads(job)
    try:
        _check_folder(job.options, own)
        trainer = Trainer(job.recipe, load(job.recipe, job.data), job.options, own)
        if job.options.resume == "auto":
            said = trainer.resume()
            if said and own.is_first:
                print(said)
        return trainer.run()
    finally:
        processes.finish()


def _set_threads(job: Job) -> None:
    if job.options.threads is not None:
        torch.set_num_threads(job.options.threads)
    elif job.recipe.image_size < SMALL:
        torch.set_num_threads(1)


def _check_folder(options: Options, own: processes.Processes) -> None:
    out = options.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    if options.resume == "never" and own.is_first and saving.checkpoints(out):
        raise ValueError(
            f"{out} holds a run already; go on with it by --resume auto, or choose another --out"
        )


def evaluate_run(
    run: Path, data: Path | None = None, device: Device = "auto", *, recalibrate: int = 0
) -> dict[str, float]:
    """Test loss and accuracy of a run: of its final weights, or of its newest checkpoint.

    Args:
        run: folder of the run.
        data: as in `Job`.
        device: as in `Job`.
        recalibrate: estimate the running statistics of CE from so many training batches first,
            which averaged weights want.
    """
    recipe = read_recipe(run)
    split = load(recipe, data)
    own = processes.start(device)
    network = build_network(recipe, split)
    snapshot.load_module_(network, _weights(run))
    network.to(own.device)
    if recalibrate:
        shard = Shard(len(split.train.labels), recipe.batch_size)
        loader = training_loader(recipe, split.train, shard, device=own.device)
        update_ce_stats(network, loader.epoch(0), num_batches=recalibrate)
    return evaluate(network, split, recipe, own)


def _weights(run: Path) -> dict[str, Any]:
    final = run / WEIGHTS
    if final.is_file():
        try:
            return dict(load_file(final))
        except Exception as error:  # the reader raises several kinds
            raise ValueError(f"{final} cannot be read: {error}") from error
    found = saving.newest(run)
    if found is None:
        raise ValueError(f"{run} has neither {WEIGHTS} nor a checkpoint yet")
    tensors = found[1]
    return snapshot.under("ema", tensors) or snapshot.under("model", tensors)
