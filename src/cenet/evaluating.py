"""Evaluation of a network: its mode, and the images that it classifies correctly."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode; at the end, every module gets back its own mode."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def top_hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of images whose label has the largest logit, and one of the five largest; scalars."""
    best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
    return best[:, 0].sum(), best.any(1).sum()
