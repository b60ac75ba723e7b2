"""A few images of a stream, each as likely as any other, for what needs more than one pass."""

import random

import torch
from torch import Tensor

BATCH = 64  # images that go together at least
PIXELS = 2**18  # small images go together until they have so many pixels


class Sample:
    """At most `size` labelled images of those added, drawn evenly, and the same in every run."""

    def __init__(self, size: int) -> None:
        """Hold none yet."""
        self.size = size
        self._seen = 0
        self._chance = random.Random(0)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Offer a batch."""
        for image, label in zip(images, labels, strict=True):
            self._seen += 1
            if len(self._kept) < self.size:
                self._kept.append((image.clone(), label))
                continue
            place = self._chance.randrange(self._seen)
            if place < self.size:
                self._kept[place] = (image.clone(), label)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """What is held; images of one size go together."""
        by_size: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for image, label in self._kept:
            by_size.setdefault(image.shape, []).append((image, label))
        found = []
        for kept in by_size.values():
            count = max(BATCH, PIXELS // kept[0][0][0].numel())
            for start in range(0, len(kept), count):
                images, labels = zip(*kept[start : start + count], strict=True)
                found.append((torch.stack(images), torch.stack(labels)))
        return found
