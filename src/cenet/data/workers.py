"""Worker processes that read images. They end with the run and ignore signals, which it handles."""

import gc
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import cenet.signals as signals
from cenet.internals import Finalize, shut_down_workers


def loaded(
    dataset: Dataset[Any], batches: Iterable[Any], workers: int, seed: int, collate: Any = None
) -> Generator[Any, None, None]:
    """Batches of a data set from `workers` processes; a ValueError of a worker is raised again."""
    make: Any = partial(
        DataLoader,
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=collate,
        worker_init_fn=_leave_signals_to_the_run,
        pin_memory=torch.cuda.is_available(),
        # otherwise it uses the global generator, and a resumed run would differ
        generator=torch.Generator().manual_seed(seed),
    )
    found, started = _started(make)
    # also if Python exits while a traceback still refers to this iterator; before the priority (10)
    # at which multiprocessing closes the queues that tell workers to stop
    end = Finalize(None, _end, (found, started), exitpriority=20) if workers else None
    try:
        yield from found
    except ValueError as error:  # the message of a worker's error is a traceback
        reason = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")
        raise ValueError(reason) from error
    except RuntimeError as error:
        explain(error)
        raise
    finally:
        if end is not None:
            end()


def _started(make: Callable[[], Iterable[Any]]) -> tuple[Any, set[Any]]:
    """An iterator and the workers that it started; if one dies meanwhile, the others are killed."""
    before = set(multiprocessing.active_children())
    try:
        # workers inherit the block of signals, and then ignore them
        with signals.held_back(), untouched(), warnings.catch_warnings():
            # a slow disk may need more processes than cores
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            found = iter(make())
        return found, set(multiprocessing.active_children()) - before
    except BaseException as error:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        explain(error)
        raise


@contextmanager
def untouched() -> Iterator[None]:
    """Processes forked inside this context never garbage-collect objects that they inherit.

    Such objects may be on a GPU, where freeing them would crash the process.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _end(found: Any, workers: Iterable[Any]) -> None:
    """Kill the workers of an iterator.

    They ignore the signal with which Python ends processes, and a worker that died may hold a lock
    that the others wait for.
    """
    shut_down_workers(found)
    for worker in workers:
        worker.kill()


def explain(error: BaseException) -> None:
    """Raise ValueError with advice if `error` reports the death of a worker.

    Torch raises such errors anywhere in the code of the run.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        raise ValueError(
            f"a process that reads images has died ({str(error).strip()}); is there enough memory? "
            "Use fewer by --workers"
        ) from error


def _leave_signals_to_the_run(_worker: int) -> None:
    """Ignore signals: one to the whole process group must not end workers before the run saved."""
    signals.ignore()
