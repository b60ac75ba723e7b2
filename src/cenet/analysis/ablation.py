"""How much a network relies on its channels: accuracy and loss while channels are set to zero.

This takes many passes over the same images, so a diagnosis runs it on a `Sample` of them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from cenet.analysis.activations import ActivationObserver, Site

RATIOS = tuple(tenth / 10 for tenth in range(10))
REPEATS = 5
BATCH = 64  # least number of images in a batch of a sample
PIXELS = 2**18  # small images are batched up to this number of pixels

Batches = Sequence[tuple[Tensor, Tensor]]
Report = Callable[[int, int], None]  # steps done, number of steps


class Outcome(NamedTuple):
    """Results of a network by image, (N,)."""

    right: Tensor  # 1 if the predicted class is the label, else 0
    loss: Tensor  # cross-entropy
    log_probabilities: Tensor  # (N, classes)


class Mean(NamedTuple):
    """A mean over images, and its standard error; infinite for one image."""

    mean: float
    error: float


class ChannelImportance(NamedTuple):
    """How far predictions move without each channel, and the standard error of that, (C,)."""

    divergence: Tensor
    error: Tensor


class Ablation(ActivationObserver):
    """Runs a classifier with some channels set to zero after their activation."""

    def __init__(self, model: nn.Module) -> None:
        """Start with no channel off."""
        super().__init__(model)
        self.off: Mapping[str, Tensor] = {}
        self.channels: dict[str, int] = {}

    @override
    def after(self, site: Site, y: Tensor) -> None:
        """Set those channels of this layer to zero that are off."""
        self.channels[site.name] = site.channels
        if site.name in self.off:
            y.movedim(site.dim, 0)[self.off[site.name].to(y.device)] = 0

    @torch.no_grad()
    def run(self, batches: Batches, off: Mapping[str, Tensor] | None = None) -> Outcome:
        """Classify the images with these channels of these layers off."""
        self.off = off or {}
        parts = []
        with self:
            for images, labels in batches:
                logits = self.root(images.clone()).double()
                right = (logits.argmax(1) == labels).double()
                loss = cross_entropy(logits, labels, reduction="none")
                parts.append((right, loss, logits.log_softmax(1)))
        return Outcome(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))

    def count(self, layer: str) -> int:
        """Channels of a layer; ValueError if it was not seen."""
        if layer not in self.channels:
            known = ", ".join(self.channels)
            raise ValueError(f"layer {layer!r} was not seen; the network has {known}")
        return self.channels[layer]


class Sample:
    """A uniform random sample of the labelled images that are added, the same in every run."""

    def __init__(self, size: int) -> None:
        """Start empty; hold at most `size` images."""
        self.size = size
        self._seen = 0
        self._random = random.Random(0)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Offer a batch."""
        for image, label in zip(images, labels, strict=True):
            self._seen += 1
            if len(self._kept) < self.size:
                self._kept.append((image.clone(), label))
                continue
            place = self._random.randrange(self._seen)
            if place < self.size:
                self._kept[place] = (image.clone(), label)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The sample, in batches of images of one size."""
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


def mean_and_error(values: Tensor) -> Mean:
    """The mean of one value per image, (N,), and its standard error."""
    count = len(values)
    error = values.std().item() / count**0.5 if count > 1 else float("inf")
    return Mean(values.mean().item(), error)


def cumulative_ablation(
    model: nn.Module,
    batches: Batches,
    layer: str,
    *,
    ratios: Sequence[float] = RATIOS,
    repeats: int = REPEATS,
    seed: int = 0,
    order: Tensor | None = None,
    report: Report | None = None,
) -> Tensor:
    """Top-1 accuracy when a growing share of the channels is zero, (ratios, repeats).

    Each repeat has one random order, so a larger ratio removes the same channels and more.

    Args:
        model: a classifier in evaluation mode.
        batches: images and labels on its device; they are run once per ratio and repeat.
        layer: name of the layer whose channels are ablated (a key of `Recorder.layers`).
        ratios: shares of channels.
        repeats: number of random orders.
        seed: seed of the random orders.
        order: take the channels in this order instead, (C,); there is then one repeat.
        report: called with the steps done and the number of steps.
    """
    _check(model, batches)
    ablation = Ablation(model)
    whole = ablation.run(batches).right.mean().item()
    channels = ablation.count(layer)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(channels, generator=generator) for _ in range(repeats)]
    orders = orders if order is None else [order]
    found = torch.full((len(ratios), len(orders)), whole, dtype=torch.float64)
    for i, ratio in enumerate(ratios):
        count = round(ratio * channels)
        for j, each in enumerate(orders):
            if count:
                found[i, j] = ablation.run(batches, {layer: each[:count]}).right.mean()
            if report is not None:
                report(i * len(orders) + j + 1, len(ratios) * len(orders))
    return found


def channel_importance(
    model: nn.Module, batches: Batches, layer: str, *, report: Report | None = None
) -> ChannelImportance:
    """How far the predictions move when each channel alone is zero.

    Measured by the Kullback-Leibler divergence of the predicted classes, in nats, mean over images:
    0 if nothing changes, never negative, and not in steps of one image as accuracy is.

    Args:
        model: as in `cumulative_ablation`.
        batches: as in `cumulative_ablation`; they run once for each channel.
        layer: as in `cumulative_ablation`.
        report: as in `cumulative_ablation`.
    """
    _check(model, batches)
    ablation = Ablation(model)
    whole = ablation.run(batches).log_probabilities
    channels = ablation.count(layer)
    found = []
    for channel in range(channels):
        without = ablation.run(batches, {layer: torch.tensor([channel])}).log_probabilities
        # a class of probability zero does not count, whatever becomes of it
        terms = torch.where(whole.isneginf(), 0.0, whole.exp() * (whole - without))
        found.append(mean_and_error(terms.sum(1)))
        if report is not None:
            report(channel + 1, channels)
    means, errors = zip(*found, strict=True)
    return ChannelImportance(
        torch.tensor(means, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64)
    )


def _check(model: Any, batches: Batches) -> None:
    if model.training:
        raise ValueError("ablation measures a network in evaluation mode; call model.eval() first")
    if not sum(len(labels) for _, labels in batches):
        raise ValueError("ablation needs labelled images; batches has none")
