"""`cenet train RECIPE [--field value ...]`: parse, run, and say in one line what went wrong."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

import cenet.signals as signals
from cenet.distributed import is_first_process, rank
from cenet.signals import Interrupted
from cenet.train.diagnosis import NonFiniteLoss
from cenet.train.options import Options
from cenet.train.recipes import RECIPES, find_recipe
from cenet.train.run import Job, train
from cenet.train.times import LIBRARIES, Clock, process_age

EXAMPLE = "digits_ce"
# disk, or quota of a user
FULL = (errno.ENOSPC, errno.EDQUOT)
# what gloo and NCCL say when a process they talk to has ended
GONE = ("losed by peer", "onnection reset", "roken pipe", "remote process exited", "NCCL")
J = TypeVar("J")


def parse(arguments: list[str]) -> Job:
    """The job that the command line asks for."""
    return parse_job(
        arguments,
        lambda name: Job(find_recipe(name), Options(Path("runs") / name)),
        command="cenet train",
        recipes=f"{len(RECIPES)}: `cenet recipes`",
        example=EXAMPLE,
    )


def parse_job(
    arguments: list[str], default: Callable[[str], J], *, command: str, recipes: str, example: str
) -> J:
    """RECIPE [--field value ...]: the default job of the recipe, with fields changed.

    Args:
        arguments: of the command.
        default: the job of a recipe by its name; ValueError if there is none.
        command: what the user typed before the recipe.
        recipes: which there are, in words.
        example: the recipe whose fields --help shows.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {command} RECIPE [--field value ...]  ({recipes})")
        print(f"The fields, with the values of {example}:\n")
        name, rest = example, ["--help"]
    try:
        job = default(name)
        flat: Any = Annotated[type(job), tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff]
        found: J = tyro.cli(flat, default=job, args=rest, prog=f"{command} {name}")
    except ValueError as error:
        # all processes have the same arguments
        raise SystemExit(str(error) if is_first_process() else 1) from error
    return found


def run(job: Job) -> None:
    """Run a job to its end; exit with a line and a code that say how it ended."""
    clock = Clock(LIBRARIES, process_age())
    row = ended(lambda: train(job, clock), job.options.out)
    if row and is_first_process():
        images, note = "test", ""
        if share := job.recipe.holdout:
            images, note = "held-out", f"of training images held out by --holdout {share:g}; "
        print(
            f"epoch {row['epoch']}: {images} top-1 {row['test_top1']:.2%}, top-5 "
            f"{row['test_top5']:.2%}, loss {row['test_loss']:.4f}; {note}everything is in "
            f"{job.options.out}"
        )


def ended(run: Callable[[], dict[str, Any]], out: Path) -> dict[str, Any]:
    """The result of a run; if it did not come to its end, exit and say why."""
    try:
        return run()
    except Interrupted:
        signals.ignore()  # those who ask twice get the same answer
        if is_first_process():
            print(f"interrupted and saved; the same command with --resume auto goes on in {out}")
        sys.exit(signals.INTERRUPTED)
    except KeyboardInterrupt:  # the second, which does not wait
        print(f"interrupted; --resume auto goes on from the newest checkpoint in {out}, if any")
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, NonFiniteLoss) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.errno in FULL:
            reason += "; make room, and the same command with --resume auto goes on"
        raise SystemExit(reason if is_first_process() else f"process {rank()}: {reason}") from error
    except RuntimeError as error:
        if "WORLD_SIZE" not in os.environ or not any(text in str(error) for text in GONE):
            raise
        raise SystemExit(
            f"process {rank()}: another process has ended; its message says why"
        ) from None
