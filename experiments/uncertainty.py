"""Means over seeds, and differences with their uncertainty."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple


class Difference(NamedTuple):
    """Of two means, with a 95 % confidence interval; it is None for a single pair."""

    mean: float
    low: float | None
    high: float | None


def paired(one: Sequence[float], other: Sequence[float]) -> Difference:
    """other − one, pair by pair (Student's t)."""
    from scipy.stats import t

    apart = [b - a for a, b in zip(one, other, strict=True)]
    mean = fmean(apart)
    if len(apart) < 2:
        return Difference(mean, None, None)
    half = t.ppf(0.975, len(apart) - 1) * stdev(apart) / sqrt(len(apart))
    return Difference(mean, mean - half, mean + half)


def spread(values: Sequence[float], factor: float, digits: int, unit: str = "") -> str:
    """Mean ± standard deviation; the value alone if there is one."""
    scaled = [factor * value for value in values]
    text = f"{fmean(scaled):.{digits}f}"
    if len(scaled) > 1:
        text += f" ± {stdev(scaled):.{digits}f}"
    return f"{text} {unit}".strip()


def difference(one: Sequence[float], other: Sequence[float], factor: float, digits: int) -> str:
    """+0.12 (−0.30 to +0.54)."""
    found = paired([factor * v for v in one], [factor * v for v in other])
    text = f"{found.mean:+.{digits}f}"
    if found.low is not None:
        text += f" ({found.low:+.{digits}f} to {found.high:+.{digits}f})"
    return text.replace("-", "−")
