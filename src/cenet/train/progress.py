"""Progress of a run: a bar on a terminal; in a log file, a line per epoch and one per minute."""

import sys
import time
from contextlib import ExitStack
from datetime import timedelta

from rich.progress import BarColumn, TextColumn

from cenet.arguments import progress_bar

SILENCE = 60.0  # longest time without a line in a log, in seconds


class TrainingProgress:
    """Shows the progress of a run inside its context.

    Args:
        shown: False prints nothing; only the first process prints.
        epochs: number of epochs of the run.
        steps: number of steps of an epoch.
    """

    def __init__(self, *, shown: bool, epochs: int, steps: int) -> None:
        """Print nothing yet."""
        self.shown, self.epochs, self.steps = shown, epochs, steps
        self._active = False
        self._begun: tuple[float, int] | None = None  # time, steps done
        self._last = 0.0  # time of the last line
        self._stack = ExitStack()

    def __enter__(self) -> "TrainingProgress":
        """Start the bar."""
        self._active, self._begun, self._last = self.shown, None, time.monotonic()
        # in a log file, lines of a bar are noise
        self._terminal = self.shown and sys.stderr.isatty()
        self._bar = progress_bar(
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}"), shown=self._terminal,
        )  # fmt: skip
        total = self.epochs * self.steps
        self._task = self._bar.add_task("training", total=total, epoch=1, note="")
        self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the bar."""
        self._active = False
        self._stack.close()

    def step(self, epoch: int, step: int, note: str) -> None:
        """Show that `step` steps of an epoch (counted from 0) are done, with a note."""
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
        """Show a note beside the bar."""
        if self._active:
            self._bar.update(self._task, note=note)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self._active:
            return
        self._last = time.monotonic()
        if self._terminal:
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)
        else:
            print(line, flush=True)
