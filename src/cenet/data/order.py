"""Which images each step takes; it depends on seed and epoch alone, from any position on."""

from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

Item = tuple[int, int]  # epoch, and number of an image


def seed_of(*parts: int | str) -> int:
    """A seed that depends on all parts."""
    digest = sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the images."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(count, generator=generator)


class Shard:
    """Which images a process takes in each step."""

    def __init__(self, count: int, batch: int, *, rank: int = 0, world: int = 1) -> None:
        """Of `count` images, `batch` per process and step; the rest of an epoch is left out."""
        self.count, self.batch, self.rank, self.world = count, batch, rank, world
        if count < batch * world:
            raise ValueError(
                f"{count} training images do not fill one step of {batch} images"
                f"{f' in each of {world} processes' if world > 1 else ''}; lower --batch-size"
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.count // (self.batch * self.world)

    def places(self, step: int) -> slice:
        """Places in the order of an epoch that this process takes in a step."""
        start = (step * self.world + self.rank) * self.batch
        return slice(start, start + self.batch)


class Plan(NamedTuple):
    """The steps of a whole run, epoch after epoch.

    Attributes:
        shard: the images of each step.
        seed: of the order.
        epochs: of the run.
        steps: of an epoch that the run takes, at most those of the shard.
    """

    shard: Shard
    seed: int
    epochs: int
    steps: int

    def batches(self, epoch: int, step: int) -> Iterator[list[Item]]:
        """The images of each step from this one to the end of the run."""
        for number in range(epoch, max(self.epochs, epoch + 1)):
            order = epoch_order(self.shard.count, self.seed, number)
            for place in range(step if number == epoch else 0, self.steps):
                yield [(number, index) for index in order[self.shard.places(place)].tolist()]

    def after(self, epoch: int, step: int) -> tuple[int, int] | None:
        """Epoch and step that come next; None at the end of the run."""
        if step + 1 < self.steps:
            return epoch, step + 1
        return (epoch + 1, 0) if epoch + 1 < self.epochs else None
