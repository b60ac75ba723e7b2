"""`cenet train RECIPE [--field value ...]`: parse, run, and explain failures in one line."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

import cenet.signals as signals
import cenet.train.checkpoint as checkpoint
from cenet.arguments import parse as arguments_of
from cenet.data.decoding import REMOVE
from cenet.distributed import is_first_process, rank
from cenet.files import in_words
from cenet.formatting import percent
from cenet.signals import Interrupted, SignalWatch
from cenet.train.job import Job, train
from cenet.train.nonfinite import DIVERGED, NonFiniteLoss
from cenet.train.options import Options
from cenet.train.recipes import RECIPES, find_recipe
from cenet.train.times import LIBRARIES, Clock, process_age

EXAMPLE = "digits_ce"
STOCK = "finetune"  # the recipe for any network
# the disk or the quota of the user is full
FULL = (errno.ENOSPC, errno.EDQUOT)
# parts of the errors of gloo and NCCL when another process has ended
GONE = ("losed by peer", "onnection reset", "roken pipe", "remote process exited", "NCCL")
J = TypeVar("J")


def parse(arguments: list[str]) -> Job:
    """The job of a command line."""
    name, *rest = arguments or [""]
    asked = [argument.partition("=")[0] for argument in rest]
    if name == STOCK and not {"--model", "--network", "-h", "--help"} & {*asked}:
        raise SystemExit(f"{name} needs a network: --model NAME, a timm model or torchvision/NAME")
    return parse_job(
        arguments,
        lambda name: Job(find_recipe(name), Options(Path("runs") / name)),
        command="cenet train",
        recipes=f"`cenet recipes` lists the {len(RECIPES)} recipes; for your own classifier: "
        "cenet train finetune --model NAME --pretrained",
        example=EXAMPLE,
    )


def parse_job(
    arguments: list[str], default: Callable[[str], J], *, command: str, recipes: str, example: str
) -> J:
    """Parse RECIPE [--field value ...] into the default job of the recipe with fields changed.

    Args:
        arguments: arguments after the command.
        default: makes the default job of a recipe; ValueError if there is no such recipe.
        command: the words before the recipe, for the usage line.
        recipes: the available recipes in words, for the usage line.
        example: the recipe whose fields --help shows.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {command} RECIPE [--field value ...]  ({recipes})")
        print(f"The fields, with the values of {example}:\n")
        name, rest = example, ["--help"]
    try:
        job = default(name)
        flat: Any = Annotated[type(job), tyro.conf.OmitArgPrefixes]
        found: J = arguments_of(flat, default=job, args=rest, prog=f"{command} {name}")
    except ValueError as error:
        # all processes have the same arguments; one message is enough
        raise SystemExit(str(error) if is_first_process() else 1) from error
    return found


def run(job: Job) -> None:
    """Run a job; exit with one line and a status that say how it ended."""
    clock = Clock(LIBRARIES, process_age())
    row = exit_with_reason(lambda: train(job, clock), job.options.out)
    if row and is_first_process():
        images, note = "test", ""
        if share := job.recipe.holdout:
            images, note = "held-out", f"of training images held out by --holdout {share:g}; "
        found = f"{known}; {note}" if (known := results_in_words(row, images)) else ""
        print(f"epoch {row['epoch']}: {found}everything is in {job.options.out}")


def results_in_words(results: Mapping[str, Any], images: str = "test") -> str:
    """Accuracies and loss of a test: `test top-1 98.67 %, top-5 99.78 %, loss 0.0512`."""
    columns: dict[str, Callable[[float], str]] = {
        "test_top1": lambda value: f"top-1 {percent(value, '.2f')}",
        "test_top5": lambda value: f"top-5 {percent(value, '.2f')}",
        "test_loss": lambda value: f"loss {value:.4f}",
    }
    # a row of another version may lack some
    known = [
        words(results[name])
        for name, words in columns.items()
        if isinstance(results.get(name), float)
    ]
    return f"{images} {', '.join(known)}" if known else ""


def exit_with_reason(run: Callable[[], dict[str, Any]], out: Path) -> dict[str, Any]:
    """The result of `run`; if it fails or is interrupted, exit with the reason in one line."""
    try:
        return run()
    except Interrupted:
        signals.ignore()  # a second signal must not change the exit status
        if is_first_process():
            print(f"interrupted and saved; the same command with --resume auto goes on in {out}")
        sys.exit(signals.INTERRUPTED)
    except KeyboardInterrupt:  # a second SIGINT does not wait for a checkpoint
        print(f"interrupted; --resume auto goes on from the newest checkpoint in {out}, if any")
        sys.exit(128 + signal.SIGINT)
    except NonFiniteLoss as error:
        print(error if is_first_process() else f"process {rank()}: {error}", file=sys.stderr)
        sys.exit(DIVERGED)
    except (ValueError, OSError) as error:
        reason = in_words(error)
        goes_on = ", and the same command with --resume auto goes on"
        if isinstance(error, OSError) and error.errno in FULL:
            reason += goes_on
        elif reason.endswith(REMOVE) and checkpoint.checkpoints(out):
            # without that image it would be another run, which is refused
            reason = reason.removesuffix(REMOVE) + "replace it" + goes_on
        raise SystemExit(reason if is_first_process() else f"process {rank()}: {reason}") from error
    except RuntimeError as error:
        if "WORLD_SIZE" not in os.environ or not any(text in str(error) for text in GONE):
            raise
        if SignalWatch.ever_asked:  # all were asked to stop, and another had not begun to train
            print(f"process {rank()}: interrupted; --resume auto goes on in {out}")
            sys.exit(signals.INTERRUPTED)
        raise SystemExit(
            f"process {rank()}: another process has ended; its message says why"
        ) from None
