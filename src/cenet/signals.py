"""SIGTERM, SIGINT and SIGHUP ask a run to save and stop; a second SIGINT stops it
without a new checkpoint.
"""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

HANGUP = getattr(signal, "SIGHUP", None)  # the terminal was closed; not on Windows
SIGNALS = (signal.SIGTERM, signal.SIGINT, *((HANGUP,) if HANGUP else ()))
# exit status of a run that was interrupted and has been saved; EX_TEMPFAIL: try again later
INTERRUPTED = 75


class Interrupted(Exception):
    """The run was asked to stop, and a checkpoint has been written."""


class SignalWatch:
    """Inside this context, the signals are recorded instead of killing the process.

    SIGHUP stays ignored where it was, as under nohup.

    Attributes:
        asked: the last signal that arrived, or None.
        ever_asked: whether one arrived in the newest of these contexts of this process.
    """

    ever_asked: ClassVar[bool] = False

    def __init__(self) -> None:
        """No handler is installed yet."""
        self.asked: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalWatch":
        """Install the handlers; only the main thread receives signals."""
        SignalWatch.ever_asked = False
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != HANGUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def reclaim(self) -> None:
        """Install the handlers again, unless a signal has arrived.

        Triton's compiler installs handlers of its own in front of Python's. They pass on the first
        signal, but the second of two in a row, as `timeout` sends them, kills the process.
        """
        if self.asked is None:
            for number in self._before:
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        """Restore the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        SignalWatch.ever_asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == HANGUP:
            _forget_terminal()


def _forget_terminal() -> None:
    """Discard what is printed, unless to a file or a terminal that is still there.

    Writing to a terminal that was closed would be an error, and so would writing to a pipe: its
    reader, such as tee, ends with the terminal.
    """
    for stream in (1, 2):
        with suppress(OSError):  # a stream that is closed
            if not stat.S_ISREG(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM with the status of a saved run, also while a command starts or ends.

    Nothing needs to be saved at those times: every checkpoint on the disk is complete.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        # a run that was interrupted ignores signals until the process ends
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not change the status
    with suppress(RuntimeError, OSError):  # stdout is being written to, or is closed
        sys.stdout.flush()
    os.write(2, b"interrupted; the same command with --resume auto goes on\n")
    os._exit(INTERRUPTED)  # an exception could be raised in code that swallows it


def ignore() -> None:
    """Ignore these signals from now on, pending ones included."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def held_back() -> Iterator[None]:
    """Block these signals inside this context; processes started in it inherit the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
