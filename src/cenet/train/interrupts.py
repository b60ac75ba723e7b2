"""SIGTERM and SIGINT: ask the run to save and stop; a second SIGINT stops it at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# of the process, when a run was interrupted and has been saved: try again later
INTERRUPTED = 75


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""


class Interrupts:
    """While this context lasts, signals are noted instead of killing the process."""

    def __init__(self) -> None:
        """Nothing has been asked yet."""
        self.asked: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():  # others are not told
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def reclaim(self) -> None:
        """Take them over again, if none has come yet.

        Triton's compiler puts handlers of its own before Python's. They pass the first signal on,
        but the second of two in a row, as `timeout` sends them, kills.
        """
        if self.asked is None:
            for number in self._before:
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def answered() -> Iterator[None]:
    """Answer SIGTERM as a run does that was saved, also while a command is starting or ending.

    There is nothing to save then: what had been saved is whole.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _leave:  # who has saved is deaf until the end
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # those who ask twice get the same answer
    with suppress(RuntimeError, OSError):  # told in the middle of a line, or nobody reads
        sys.stdout.flush()
    os.write(2, b"interrupted; the same command with --resume auto goes on\n")
    os._exit(INTERRUPTED)  # an exception may fall where nobody passes it on


def ignore() -> None:
    """Be deaf to them from now on, also to those held back."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def held_back() -> Iterator[None]:
    """Have them wait until this context ends; processes that are started in it are born so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
