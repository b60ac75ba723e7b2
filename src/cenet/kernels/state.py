"""What a forward pass leaves to its backward pass, in one tensor.

One tensor is allocated, handed through autograd and saved in less time than eight.
"""

from math import prod
from typing import NamedTuple

from torch import Tensor

from cenet.kernels.gate import GateState
from cenet.kernels.modes import ABSENT, BATCH, Mode
from cenet.kernels.statistics import Statistics

ALIGNMENT = 4  # elements: 16 bytes, by which kernels load


class Shape(NamedTuple):
    """All that sizes depend on."""

    samples: int
    channels: int
    units: int  # of the gate, 0 without one
    group_size: int
    steps: int
    mode: Mode


class Saved(NamedTuple):
    """What the backward pass needs besides x (and y, if there was a residual)."""

    found: Statistics
    gate: GateState | None


def size(shape: Shape) -> int:
    """Elements of the tensor, of float32."""
    return sum(_room(part) for part in _parts(shape))


def unpack(state: Tensor, shape: Shape) -> Saved:
    """Its parts, which share its memory."""
    begin, views = 0, []
    for part in _parts(shape):
        views.append(state[begin : begin + prod(part)].view(part))
        begin += _room(part)
    return Saved(Statistics(*views[:4]), GateState(*views[4:]) if shape.units else None)


def _parts(shape: Shape) -> list[tuple[int, ...]]:
    """Shapes of what `Statistics` and `GateState` hold."""
    samples, channels, units, group_size, steps, mode = shape
    groups = -(-channels // group_size)
    side = group_size if mode.bd != ABSENT else 0
    parts: list[tuple[int, ...]] = [
        (10, channels),
        (2, samples if mode.ir != ABSENT else 0, channels),
        (3, groups, side, side),
        (groups if mode.bd == BATCH else 0, 3 * steps, group_size, group_size),
    ]
    if units:
        parts += [(samples, units), (samples,), (2, samples, channels), ()]
    return parts


def _room(part: tuple[int, ...]) -> int:
    return -(-prod(part) // ALIGNMENT) * ALIGNMENT
