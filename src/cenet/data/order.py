"""The order of the images: which ones a step uses, as a function of seed, epoch and step only."""

from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

Item = tuple[int, int]  # epoch and number of an image


def seed_of(*parts: int | str) -> int:
    """A seed computed from all parts."""
    digest = sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The permutation of the images in an epoch."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(count, generator=generator)


class Shard:
    """The part of each epoch that one of several processes uses."""

    def __init__(self, count: int, batch: int, *, rank: int = 0, world: int = 1) -> None:
        """Divide `count` images into steps of `batch` images per process; a rest is not used."""
        self.count, self.batch, self.rank, self.world = count, batch, rank, world
        if count < batch * world:
            raise ValueError(
                f"{count} training images do not fill one step of {batch} images"
                f"{f' in each of {world} processes' if world > 1 else ''}; lower --batch-size"
            )

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        return self.count // (self.batch * self.world)

    def places(self, step: int) -> slice:
        """Positions in the order of an epoch that this process uses in a step."""
        start = (step * self.world + self.rank) * self.batch
        return slice(start, start + self.batch)


class Plan(NamedTuple):
    """All steps of a run.

    Attributes:
        shard: the images of each step.
        seed: seed of the order.
        epochs: number of epochs of the run.
        steps: number of steps per epoch that the run uses, at most those of the shard.
    """

    shard: Shard
    seed: int
    epochs: int
    steps: int

    def batches(self, epoch: int, step: int) -> Iterator[list[Item]]:
        """The images of each step, from this one to the end of the run."""
        for number in range(epoch, max(self.epochs, epoch + 1)):
            order = epoch_order(self.shard.count, self.seed, number)
            for place in range(step if number == epoch else 0, self.steps):
                yield [(number, index) for index in order[self.shard.places(place)].tolist()]

    def after(self, epoch: int, step: int) -> tuple[int, int] | None:
        """The next epoch and step; None at the end of the run."""
        if step + 1 < self.steps:
            return epoch, step + 1
        return (epoch + 1, 0) if epoch + 1 < self.epochs else None
