"""Wall time of a run, divided among its parts: start, training, waiting, test, saving."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from cenet.formatting import percent

# parts that end with the first step, in this order
LIBRARIES, DATA, NETWORK, FIRST_STEP = "libraries", "data", "network", "first step"
START = (LIBRARIES, DATA, NETWORK, FIRST_STEP)
TRAINING, WAITING, TEST, SAVING = "training", "waiting for data", "test", "saving"
PARTS = (*START, TRAINING, WAITING, TEST, SAVING)
T = TypeVar("T")


class Clock:
    """Divides the time of a run among its parts, so that the parts add up to the wall time.

    Args:
        part: the first part.
        age: seconds that this part has lasted already.
    """

    def __init__(self, part: str = NETWORK, age: float = 0.0) -> None:
        """Start the clock."""
        self.part = part
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter() - age

    def enter(self, part: str) -> str:
        """Start another part, and return the one that ends."""
        now, before = time.perf_counter(), self.part
        self.spent[before] += now - self._since
        self.part, self._since = part, now
        return before

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count this context as another part, and then continue the part before."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one part to another."""
        self.spent[source] -= seconds
        self.spent[target] += seconds

    def summary(self, images: int) -> dict[str, Any]:
        """Wall time and its parts in seconds, and images per second of wall time."""
        self.enter(self.part)
        wall = sum(self.spent.values())
        return {
            "images": images,
            "wall_seconds": wall,
            "images_per_second": images / wall,
            "seconds": dict(self.spent),
        }


def show_speed(speed: float) -> str:
    """Images per second: whole numbers, and two digits after the point below 10."""
    return f"{speed:,.{0 if speed >= 10 else 2}f}"


def in_words(summary: dict[str, Any]) -> str:
    """The summary of a run in one line."""
    wall, spent = summary["wall_seconds"], summary["seconds"]
    parts = {"start": sum(spent[part] for part in START)}
    parts |= {part: spent[part] for part in (TRAINING, WAITING, TEST, SAVING)}
    shares = ", ".join(f"{name} {percent(part / wall, '.0f')}" for name, part in parts.items())
    return (
        f"{summary['images']:,} images in {wall:.1f} s of wall time: "
        f"{show_speed(summary['images_per_second'])} images/s ({shares})"
    )


def start_in_words(spent: dict[str, float]) -> str:
    """The time until the first step in one line."""
    parts = ", ".join(f"{part} {spent[part]:.1f}" for part in START)
    return f"first step after {sum(spent[part] for part in START):.1f} s ({parts})"


class Waits:
    """Time that a device waits for batches; the first batch belongs to the start and is left out.

    While the host waits, a GPU may still be busy with earlier steps. On a GPU the time is therefore
    measured by events, between the end of a step and the arrival of the next batch.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with no waiting time."""
        self._on_gpu = device.type == "cuda"
        self._gaps: list[tuple[Any, Any]] = []  # events

    def next(self, batches: Iterator[T], clock: Clock) -> T:
        """The next batch."""
        if clock.part == FIRST_STEP:
            return next(batches)
        if not self._on_gpu:
            with clock.on(WAITING):
                return next(batches)
        before = _mark()
        batch = next(batches)
        self._gaps.append((before, _mark()))
        return batch

    def settle(self, clock: Clock) -> None:
        """Enter the time into the clock; the GPU must have finished all steps."""
        gaps, self._gaps = self._gaps, []
        seconds = sum(before.elapsed_time(after) for before, after in gaps) / 1000
        clock.move(seconds, TRAINING, WAITING)


def _mark() -> Any:
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record()
    return event


def process_age() -> float:
    """Seconds since this process was started; 0 if the system does not provide it."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        born = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
