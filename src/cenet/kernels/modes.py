"""Names that operators and kernels share. Imports nothing, so that operators need no triton."""

from typing import NamedTuple

# where norm, decorrelation and reweighting take their statistics from
ABSENT, BATCH, RUNNING = 0, 1, 2
# with LeakyReLU's slope or ELU's α beside them
ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 2, "elu": 3}


class Mode(NamedTuple):
    """Which statistics the norm, decorrelation and reweighting use: ABSENT, BATCH or RUNNING."""

    norm: int
    bd: int
    ir: int
