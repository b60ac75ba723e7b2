"""From numbers to places in a drawing, and which numbers to write at an axis."""

import math
from dataclasses import dataclass

from cenet.report.parts import Kind
from cenet.report.words import show

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """An axis: what it is of, from where to where, and how its numbers are written.

    Attributes:
        title: of the quantity.
        low: first number.
        high: last number.
        kind: number or percent.
        log: logarithmic; low and high are then above 0.
        whole: only whole numbers are written.
        names: of the places 1, 2, …, to be written instead of numbers.
    """

    title: str
    low: float
    high: float
    kind: Kind = "number"
    log: bool = False
    whole: bool = False
    names: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one; beyond them, at the end."""
        low, high = self.low, self.high
        if self.log:
            low, high = math.log10(low), math.log10(high)
            value = math.log10(value) if value > 0 else low
        share = (value - low) / (high - low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """At most so many round numbers."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, step)]
        apart = nice_step((self.high - self.low) / (most - 1))
        if self.whole:
            apart = max(1.0, float(math.ceil(apart)))
        low = math.ceil(self.low / apart - 1e-9)
        high = math.floor(self.high / apart + 1e-9)
        found = [index * apart for index in range(low, high + 1)]
        if self.whole and self.low <= 1 < found[0]:
            found.insert(0, 1.0)
        return found

    def text(self, value: float) -> str:
        """A number of the axis."""
        if self.kind == "percent":
            return f"{100 * value:g} %" if abs(value) >= 1e-9 else "0 %"
        if self.log:
            return f"{value:g}" if 1e-3 <= value <= 1e3 else f"{value:.0e}".replace("e-0", "e-")
        return show(int(value)) if self.whole else f"{value:.6g}"


def by_epoch(epochs: list[int]) -> Axis:
    """The axis of epochs, from the first to the last; a single one lies in the middle."""
    low, high = min(epochs), max(epochs)
    margin = 0.0 if high > low else 0.5
    return Axis("epoch", low - margin, high + margin, whole=True)


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is no smaller than `least`."""
    if least <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in STEPS if power * step >= least * (1 - 1e-9))


def around(title: str, values: list[float], kind: Kind = "number", *, zero: bool = False) -> Axis:
    """An axis with room for all values, between round numbers; from 0 if asked for."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(low), abs(high))
    if high - low < max(1e-4 * largest, 1e-12):  # numbers at the axis would read the same
        high += largest if largest > 1e-6 else 1.0
    step = nice_step((high - low) / 5)
    return Axis(
        title, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, kind
    )
