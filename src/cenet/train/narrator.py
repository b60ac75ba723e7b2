"""How a run goes, for whoever watches: a bar and a line per epoch, in a log a line now and then."""

import sys
import time
from contextlib import ExitStack
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SILENCE = 60.0  # seconds without a line in a log, at most


class Narrator:
    """Tells nothing outside of its context, nor where it is not `shown`.

    Args:
        shown: whether this process talks.
        epochs: of the run.
        steps: of an epoch.
    """

    def __init__(self, *, shown: bool, epochs: int, steps: int) -> None:
        """Nothing is told yet."""
        self.shown, self.epochs, self.steps = shown, epochs, steps
        self._active = False
        self._begun: tuple[float, int] | None = None  # time, steps done
        self._last = 0.0  # when something was said
        self._stack = ExitStack()

    def __enter__(self) -> "Narrator":
        """Begin."""
        self._active, self._begun, self._last = self.shown, None, time.monotonic()
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        # in a log file, lines of a bar are noise
        self._terminal = self.shown and sys.stderr.isatty()
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not self._terminal)
        total = self.epochs * self.steps
        self._task = self._bar.add_task("training", total=total, epoch=1, note="")
        self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._active = False
        self._stack.close()

    def step(self, epoch: int, step: int, note: str) -> None:
        """So many steps of an epoch (from 0) are done, and what there is to note."""
        if not self._active:
            return
        now, done = time.monotonic(), epoch * self.steps + step
        self._bar.update(self._task, completed=done, epoch=epoch + 1, note=note)
        if self._begun is None:
            self._begun = now, done
        elif not self._terminal and now - self._last > SILENCE:
            since, before = self._begun
            left = (now - since) / (done - before) * (self.epochs * self.steps - done)
            self.say(
                f"epoch {epoch + 1} of {self.epochs}, step {step} of {self.steps}: {note}, "
                f"{timedelta(seconds=round(left))} left"
            )

    def note(self, note: str) -> None:
        """What goes on beside the steps."""
        if self._active:
            self._bar.update(self._task, note=note)

    def say(self, line: str) -> None:
        """A line of its own, above the bar if there is one."""
        if not self._active:
            return
        self._last = time.monotonic()
        if self._terminal:
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)
        else:
            print(line, flush=True)
