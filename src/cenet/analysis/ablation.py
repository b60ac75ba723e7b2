"""How much a network relies on single channels: accuracy while channels are set to zero."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cenet.analysis.watching import ActivationWatch, Site

RATIOS = tuple(tenth / 10 for tenth in range(10))
REPEATS = 5

Batches = Sequence[tuple[Tensor, Tensor]]
Report = Callable[[int, int], None]  # steps done, of all


class Ablation(ActivationWatch):
    """Inside the context, `off` channels of one layer are zero after its activation."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        """No channel is off yet."""
        super().__init__(model)
        self.layer = layer
        self.off: Tensor | None = None
        self.channels: int | None = None
        self.seen: list[str] = []

    def after(self, site: Site, y: Tensor) -> None:
        """See `ActivationWatch`."""
        if site.name != self.layer:
            if self.channels is None:
                self.seen.append(site.name)
            return
        self.channels = site.channels
        if self.off is not None:
            y.movedim(site.dim, 0)[self.off.to(y.device)] = 0

    @torch.no_grad()
    def top1(self, batches: Batches, off: Tensor | None = None) -> float:
        """Accuracy with these channels off."""
        self.off = off
        right = count = 0
        with self:
            for images, labels in batches:
                right += int((self.root(images.clone()).argmax(1) == labels).sum())
                count += len(labels)
        if self.channels is None:
            raise ValueError(
                f"layer {self.layer!r} was not seen; the network has {', '.join(self.seen)}"
            )
        return right / count


def cumulative_ablation(
    model: nn.Module,
    batches: Batches,
    layer: str,
    *,
    ratios: Sequence[float] = RATIOS,
    repeats: int = REPEATS,
    seed: int = 0,
    report: Report | None = None,
) -> Tensor:
    """Top-1 accuracy when a growing share of random channels is zero, (ratios, repeats).

    In each repeat the channels go in one random order, so that larger ratios take more of the same.

    Args:
        model: a classifier in evaluation mode.
        batches: images and labels on its device; they are run once per ratio and repeat.
        layer: whose post-activation output is ablated (a name of `Recorder.layers`).
        ratios: shares of channels.
        repeats: orders that are tried.
        seed: of the orders.
        report: told how far it is.
    """
    _check(model, batches)
    ablation = Ablation(model, layer)
    whole = ablation.top1(batches)
    assert ablation.channels is not None
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(ablation.channels, generator=generator) for _ in range(repeats)]
    found = torch.full((len(ratios), repeats), whole, dtype=torch.float64)
    for i, ratio in enumerate(ratios):
        count = round(ratio * ablation.channels)
        for j, order in enumerate(orders):
            if count:
                found[i, j] = ablation.top1(batches, order[:count])
            if report is not None:
                report(i * repeats + j + 1, len(ratios) * repeats)
    return found


def channel_importance(
    model: nn.Module, batches: Batches, layer: str, *, report: Report | None = None
) -> Tensor:
    """How much top-1 accuracy falls when each channel alone is zero, (C,).

    Args:
        model, batches, layer, report: as in `cumulative_ablation`; one run per channel.
    """
    _check(model, batches)
    ablation = Ablation(model, layer)
    whole = ablation.top1(batches)
    assert ablation.channels is not None
    drops = []
    for channel in range(ablation.channels):
        drops.append(whole - ablation.top1(batches, torch.tensor([channel])))
        if report is not None:
            report(channel + 1, ablation.channels)
    return torch.tensor(drops, dtype=torch.float64)


def _check(model: Any, batches: Batches) -> None:
    if model.training:
        raise ValueError("ablation measures a network in evaluation mode; call model.eval() first")
    if not sum(len(labels) for _, labels in batches):
        raise ValueError("ablation needs labelled images; batches has none")
