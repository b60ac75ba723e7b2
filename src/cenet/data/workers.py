"""Processes that read images; they end with the run, and leave signals to it."""

import gc
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import cenet.signals as signals


def loaded(
    dataset: Dataset[Any], batches: Iterable[Any], workers: int, seed: int, collate: Any = None
) -> Generator[Any, None, None]:
    """Batches of a data set, by worker processes if there are any; ValueError as it was raised."""
    make: Any = partial(
        DataLoader,
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=collate,
        worker_init_fn=_leave_signals_to_the_run,
        pin_memory=torch.cuda.is_available(),
        # else it draws from the global one, and a resumed run would go on differently
        generator=torch.Generator().manual_seed(seed),
    )
    found = _started(make)
    # also when Python ends while somebody, a traceback for one, keeps this iterator; before queues
    # are closed (10), by which workers hear of it
    end = Finalize(None, _end, (found,), exitpriority=20) if workers else None
    try:
        yield from found
    except ValueError as error:  # a worker's comes with its traceback as text
        reason = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")
        raise ValueError(reason) from error
    except RuntimeError as error:
        explain(error)
        raise
    finally:
        if end is not None:
            end()


def _started(make: Callable[[], Iterable[Any]]) -> Any:
    """An iterator whose workers run; one may die while the others are still being started."""
    before = set(multiprocessing.active_children())
    try:
        # workers inherit that signals are held back, until they are deaf
        with signals.held_back(), untouched(), warnings.catch_warnings():
            # more processes than cores may be what a slow disk needs
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return iter(make())
    except BaseException as error:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        explain(error)
        raise


@contextmanager
def untouched() -> Iterator[None]:
    """Have processes that are forked meanwhile never collect what they inherit.

    It may be on a GPU, and to free it there would kill them.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _end(found: Any) -> None:
    """End the workers of an iterator.

    They are deaf to the signal by which Python would end them, and one that has died may have taken
    with it what the others wait for.
    """
    with suppress(RuntimeError):  # of a worker that dies now
        found._shutdown_workers()
    for worker in found._workers:
        worker.kill()


def explain(error: BaseException) -> None:
    """Raise the death of a worker in words that help; torch reports it wherever the run is."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        raise ValueError(
            f"a process that reads images has died ({str(error).strip()}); is there enough memory? "
            "Use fewer by --workers"
        ) from error


def _leave_signals_to_the_run(_worker: int) -> None:
    """A signal to the whole group must not take the workers away before the run has saved."""
    signals.ignore()
