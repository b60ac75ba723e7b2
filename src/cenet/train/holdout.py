"""Training images that are held out, to choose settings without looking at the test images."""

from collections.abc import Sequence

import torch
from torch import Tensor

# of the shuffle that decides; the same for all runs, which are compared on the same images
SEED = 2020


def held_out(labels: Tensor, share: float, classes: Sequence[str]) -> Tensor:
    """Which images are held out: a mask, (N,) in bool.

    The N places of the training set are shuffled in an order that depends on N alone. Of a class
    with n images, the first round(share · n) in that order are held out, and one at least. A larger
    share holds out the same images and more.

    Args:
        labels: class numbers of the training images in their order, (N,).
        share: of each class to hold out, more than 0 and less than 1.
        classes: their names, for the message.

    Raises:
        ValueError: a class would have no image left to train on.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    by_class = order[labels[order].argsort(stable=True)]
    counts = labels.bincount(minlength=len(classes)).tolist()
    held = torch.zeros(len(labels), dtype=torch.bool)
    for name, places in zip(classes, torch.split(by_class, counts), strict=True):
        count = len(places)
        chosen = max(1, round(share * count))
        if 0 < count <= chosen:
            raise ValueError(
                f"holdout={share:g} would hold out all {count} training images of class {name!r} "
                "(at least one of each class is held out); lower it, or add images to the class"
            )
        held[places[:chosen]] = True
    return held
