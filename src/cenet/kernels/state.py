"""What a forward pass leaves to its backward pass, in one tensor.

One tensor is allocated, handed through autograd and saved in less time than eight.
"""

from math import prod
from typing import NamedTuple

from torch import Tensor

from cenet.kernels.call import ABSENT, BATCH, NormCECall
from cenet.kernels.gate import GateState
from cenet.kernels.statistics import Statistics

ALIGNMENT = 4  # elements: 16 bytes, by which kernels load


class Saved(NamedTuple):
    """What the backward pass needs besides x (and y, if there was a residual)."""

    found: Statistics
    gate: GateState | None


def state_size(call: NormCECall) -> int:
    """Elements of the tensor, of float32."""
    return sum(_room(part) for part in _parts(call))


def unpack(state: Tensor, call: NormCECall) -> Saved:
    """The parts of the tensor, which share its memory."""
    begin, views = 0, []
    for part in _parts(call):
        views.append(state[begin : begin + prod(part)].view(part))
        begin += _room(part)
    return Saved(Statistics(*views[:4]), GateState(*views[4:]) if call.units else None)


def _parts(call: NormCECall) -> list[tuple[int, ...]]:
    """Shapes of the fields of `Statistics` and `GateState`."""
    samples, channels = call.x.shape[:2]
    units, group_size, mode = call.units, call.group_size, call.mode
    groups = -(-channels // group_size)
    side = group_size if mode.bd != ABSENT else 0
    parts: list[tuple[int, ...]] = [
        (10, channels),
        (2, samples if mode.ir != ABSENT else 0, channels),
        (3, groups, side, side),
        (groups if mode.bd == BATCH else 0, 3 * call.steps, group_size, group_size),
    ]
    if units:
        parts += [(samples, units), (samples,), (2, samples, channels), ()]
    return parts


def _room(part: tuple[int, ...]) -> int:
    return -(-prod(part) // ALIGNMENT) * ALIGNMENT
