"""`diagnose`: one pass over images, and what it says about every layer of a network."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import cenet.analysis.channels as measures
from cenet.analysis.ablation import (
    RATIOS,
    Ablation,
    channel_importance,
    cumulative_ablation,
    mean_and_error,
)
from cenet.analysis.diagnosis import (
    AblationCurve,
    Accuracy,
    Diagnosis,
    Images,
    Importance,
    Layer,
    Removal,
    Subject,
)
from cenet.analysis.layer_records import (
    THRESHOLD,
    batch_norms,
    layer_record,
    matrices,
    plain,
)
from cenet.analysis.recorder import Recorder
from cenet.analysis.sample import Sample
from cenet.analysis.verdict import Evidence, judge
from cenet.analysis.watching import Site, unwrapped
from cenet.environment import environment
from cenet.nn.norms import BATCH_NORMS
from cenet.surgery import ce_sites

# images that are ablated by default: a network takes them 60 times, and once for each channel
ABLATION_IMAGES, ABLATION_IMAGES_SLOW = 512, 128
SMALL = 64 * 64  # pixels of an image that is quick on a CPU too

Report = Callable[[str, int, int | None], None]  # what, steps done, of how many if known


def diagnose(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layer: str | None = None,
    ablation_images: int | Literal["all"] | None = None,
    report: Report | None = None,
) -> Diagnosis:
    """Examine the channels of a network on the images of `loader`.

    Every image is seen once, and memory does not grow with their number. The accuracy under
    ablation needs many passes, so it is measured on a random sample of the images (always the same
    for the same images). The network runs in evaluation mode, and is left as it was.

    Args:
        model: a classifier, or with unlabelled images any network that takes (N, C, H, W).
        loader: batches of images, or of (images, labels); moved to the device of the model.
        layer: to ablate, by the name of the layer or of the norm before it. By default that of the
            paper: the third of a VGG, elsewhere the first that follows a norm.
        ablation_images: size of that sample; 0 leaves ablation out, "all" takes every labelled
            image and keeps them on the device. By default 512, and 128 for images of more than
            64×64 pixels on a CPU, where ablation takes long.
        report: called as it goes with what is done, how many steps, and of how many (None: not
            known).

    Raises:
        ValueError: there are no images, no activations were seen, or `layer` is not one of them.
    """
    if ablation_images == "all":
        ablation_images = sys.maxsize
    if isinstance(ablation_images, str) or (ablation_images is not None and ablation_images < 0):
        raise ValueError(f'ablation_images={ablation_images!r} must be 0 or more, or "all"')
    tell = report or (lambda what, done, of: None)
    started = time.perf_counter()
    network = unwrapped(model)
    with evaluating(network):
        recorder, sample, seen = _run(network, loader, layer, ablation_images, tell)
        if not recorder.layers:
            raise ValueError(
                f"{type(network).__name__} applies no activation to feature maps of more than one "
                "pixel; are the images too small, or is it no convolutional network?"
            )
        for name, seen_of in recorder.layers.items():
            if not bool(seen_of.mean_abs.isfinite().all()):
                raise ValueError(
                    f"layer {name} gives values that are not finite on these images: the weights "
                    "or the images hold NaN or infinity, or the network overflows"
                )
        sites, untrained = _sites(network), is_untrained(network)
        layers = tuple(layer_record(network, recorder, name, sites) for name in recorder.layers)
        if untrained:
            layers = without_prunable(layers)
        target = find_layer(network, recorder.sites, layer)
        batches = sample.batches()
        ablation, importance = _ablate(network, batches, target, tell)
        removal = _remove(network, batches, layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Diagnosis(
        model=Subject(type(network).__name__, None, parameters, untrained),
        environment=_environment(network, time.perf_counter() - started),
        data=Images(None, seen.images, seen.size, None, ()),
        accuracy=seen.accuracy(),
        verdict=judge(
            Evidence(layers, seen.images, untrained, seen.accuracy(), removal, tuple(sites))
        ),
        layers=layers,
        threshold=THRESHOLD,
        first_six=measures.first_layers_ratio([each.inhibited_ratio for each in layers]),
        batch_norms=batch_norms(network, recorder),
        matrices=matrices(recorder),
        ablation=ablation,
        importance=importance,
        removal=removal,
        sites=tuple(sites),
        gradcam=(),
    )


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """The network in evaluation mode; every module is then back in its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Seen:
    """Counts of the stream."""

    def __init__(self) -> None:
        self.images = self.labelled = self.top1 = self.top5 = self.classes = 0
        self.size = (0, 0)

    def add(self, images: Tensor, labels: Tensor | None, output: Any) -> None:
        self.images += len(images)
        self.size = (images.shape[2], images.shape[3])
        if labels is None:
            return
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise ValueError(
                "with labels the network must return one row of logits per image, got "
                f"{tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__}; "
                "give it images alone"
            )
        if bool(output.isnan().any()):
            raise ValueError("the network returns NaN on these images")
        low, high, classes = int(labels.min()), int(labels.max()), output.shape[1]
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels must be from 0 to {classes - 1}, as the network has {classes} outputs; "
                f"got {low if low < 0 else high}"
            )
        best = output.topk(min(5, output.shape[1]), 1).indices == labels[:, None]
        self.labelled += len(labels)
        self.classes = output.shape[1]
        self.top1 += int(best[:, 0].sum())
        self.top5 += int(best.any(1).sum())

    def accuracy(self) -> Accuracy | None:
        if not self.labelled:
            return None
        return Accuracy(self.top1 / self.labelled, self.top5 / self.labelled, self.classes)


@torch.no_grad()
def _run(
    network: nn.Module,
    loader: Iterable[Any],
    layer: str | None,
    sample_size: int | None,
    tell: Report,
) -> tuple[Recorder, Sample, _Seen]:
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    recorder, sample, seen = Recorder(network), Sample(sample_size or 0), _Seen()
    for batch in loader:
        images, labels = _parts(batch)
        if not len(images):
            continue
        images = images.to(device, non_blocking=True)
        labels = None if labels is None else labels.to(device)
        if not seen.images and sample_size is None:
            quick = device.type != "cpu" or images[0, 0].numel() <= SMALL
            sample = Sample(ABLATION_IMAGES if quick else ABLATION_IMAGES_SLOW)
        if labels is not None:
            sample.add(images, labels)  # before the network, which may write into them
        with recorder:
            output = network(images)
        if layer is not None and not seen.images:
            find_layer(network, recorder.sites, layer)  # an error now, not after all images
        seen.add(images, labels, output)
        tell("images", seen.images, None)
    if not seen.images:
        raise ValueError("there are no images to show to the network")
    return recorder, sample, seen


def _parts(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Images and labels of a batch; ValueError if it is none."""
    parts = batch if isinstance(batch, tuple | list) and len(batch) in (1, 2) else (batch,)
    images, labels = (*parts, None)[:2]
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor | None):
        raise ValueError(
            "batches must be images, or pairs of images and labels, as tensors; got "
            f"{type(batch).__name__}"
        )
    if images.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W), got shape {tuple(images.shape)}")
    if labels is not None and (labels.shape != (len(images),) or labels.is_floating_point()):
        raise ValueError(
            f"{len(images)} images need as many classes, integers of shape ({len(images)},); got "
            f"labels of shape {tuple(labels.shape)}, {labels.dtype}"
        )
    return images, None if labels is None else labels.long()


def find_layer(model: nn.Module, sites: dict[str, Site], wanted: str | None) -> str:
    """The name of the layer to ablate."""
    names = list(sites)
    if wanted is None:
        if "vgg" in type(model).__name__.lower():
            return names[min(2, len(names) - 1)]
        return next((name for name in names if sites[name].norms), names[0])
    for name, site in sites.items():
        if wanted in (name, *site.norms):
            return name
    raise ValueError(f"layer {wanted!r} is not one of the layers seen: {', '.join(names)}")


def is_untrained(network: nn.Module) -> bool:
    """Whether every batch norm is as it was made: no statistics yet, γ constant, β zero.

    A network without batch norms cannot be told by this and counts as trained.
    """
    norms: list[Any] = [module for module in network.modules() if isinstance(module, BATCH_NORMS)]
    kept = [norm for norm in norms if norm.running_mean is not None]
    return bool(kept) and all(
        not norm.running_mean.any()
        and bool((norm.running_var == 1).all())
        and (norm.weight is None or bool((norm.weight == norm.weight[0]).all()))
        and (norm.bias is None or not norm.bias.any())
        for norm in kept
    )


def without_prunable(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The same layers, none of whose channels is called prunable: they are not trained yet."""
    return tuple(replace(layer, prunable=()) for layer in layers)


def _ablate(
    network: nn.Module, batches: list[tuple[Tensor, Tensor]], target: str, tell: Report
) -> tuple[AblationCurve | None, Importance | None]:
    if not batches:
        return None, None
    seed, images = 0, sum(len(labels) for _, labels in batches)
    curve = cumulative_ablation(
        network, batches, target, seed=seed, report=lambda i, n: tell("ablation", i, n)
    )
    divergence, error = channel_importance(
        network, batches, target, report=lambda i, n: tell("importance", i, n)
    )
    by_importance = cumulative_ablation(
        network, batches, target, order=divergence.argsort(stable=True),
        report=lambda i, n: tell("by importance", i, n),
    )  # fmt: skip
    top1 = tuple(tuple(row) for row in curve.tolist())
    ordered = tuple(by_importance.flatten().tolist())
    return (
        AblationCurve(target, images, RATIOS, top1, ordered, seed),
        Importance(target, images, plain(divergence), plain(error), measures.gini(divergence)),
    )


def _remove(
    network: nn.Module, batches: list[tuple[Tensor, Tensor]], layers: tuple[Layer, ...]
) -> Removal | None:
    """Accuracy and loss without all prunable channels at once."""
    off = {layer.name: torch.tensor(layer.prunable) for layer in layers if layer.prunable}
    if not off or sum(len(labels) for _, labels in batches) < 2:
        return None
    ablation = Ablation(network)
    whole, without = ablation.run(batches), ablation.run(batches, off)
    return Removal(
        sum(map(len, off.values())), len(whole.right),
        whole.right.mean().item(), without.right.mean().item(),
        mean_and_error(without.right - whole.right).error,
        whole.loss.mean().item(), without.loss.mean().item(),
        mean_and_error(without.loss - whole.loss).error,
    )  # fmt: skip


def _sites(network: nn.Module) -> dict[str, None]:
    """Names of the norms that insert_ce_ chooses; none if the network cannot be traced."""
    try:
        return {site.name: None for site in ce_sites(network) if site.default}
    except ValueError:
        return {}


def _environment(network: nn.Module, seconds: float) -> dict[str, Any]:
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    facts = environment(device, 1)
    wanted = ("cenet", "commit", "torch", "timm", "torchvision", "device", "command")
    return {**{name: facts[name] for name in wanted}, "seconds": round(seconds, 3)}
