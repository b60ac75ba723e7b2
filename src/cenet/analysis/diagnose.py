"""`diagnose`: run a network over images once, and turn the statistics into a `Diagnosis`."""

import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import cenet.analysis.channels as measures
from cenet.analysis.ablation import (
    RATIOS,
    Ablation,
    Sample,
    channel_importance,
    cumulative_ablation,
    mean_and_error,
)
from cenet.analysis.activations import Site, unwrapped
from cenet.analysis.diagnosis import (
    AblationCurve,
    Accuracy,
    BatchNorm,
    Beta,
    Diagnosis,
    Gamma,
    Images,
    Importance,
    Layer,
    Matrix,
    Model,
    Removal,
    Spectrum,
)
from cenet.analysis.recorder import Recorder, shown_channels
from cenet.analysis.verdict import Evidence, judge
from cenet.environment import environment
from cenet.evaluating import evaluating, top_hits
from cenet.nn import BatchDecorrelation2d, ChannelEquilibrium2d, NormCE2d
from cenet.nn.base import EquilibriumLayer
from cenet.nn.norms import BATCH_NORMS
from cenet.surgery import ce_sites

# default number of images for ablation: a network runs on each 60 times, and once per channel
ABLATION_IMAGES, ABLATION_IMAGES_SLOW = 512, 128
THRESHOLD = 1e-2  # mean activation below which the paper calls a channel inhibited
MATRICES = 3
MATRIX_CHANNELS = 64
GROUP_SIZE = 16  # group size of the paper, for layers without CE
SMALL = 64 * 64  # largest number of pixels of an image for which ablation is quick on a CPU, too

Report = Callable[[str, int, int | None], None]  # phase, steps done, all steps if known


def diagnose(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layer: str | None = None,
    ablation_images: int | Literal["all"] | None = None,
    report: Report | None = None,
) -> Diagnosis:
    """Measure the channels of a network on the images of `loader`.

    The network runs on every image once, and memory does not grow with their number. The accuracy
    under ablation needs many passes, so it is measured on a random sample of the images (always the
    same for the same images). The network runs in evaluation mode, and is left as it was.

    Args:
        model: a classifier, or with unlabelled images any network that takes (N, C, H, W).
        loader: batches of images, or of (images, labels); moved to the device of the model.
        layer: layer to ablate, by its own name or that of the norm before it. By default the layer
            that the paper ablates: the third of a VGG, elsewhere the first that follows a norm.
        ablation_images: size of that sample; 0 leaves ablation out, "all" takes every labelled
            image and keeps them on the device. By default 512, and 128 for images of more than
            64×64 pixels on a CPU, where ablation takes long.
        report: called with the phase, the steps done, and the number of all steps (None if it is
            not known).

    Raises:
        ValueError: there are no images, the network applies no activation, or there is no such
            `layer`.
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
        model=Model(type(network).__name__, None, parameters, untrained),
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


class _Seen:
    """Numbers of images seen and classified correctly."""

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
        self.labelled += len(labels)
        self.classes = output.shape[1]
        top1, top5 = top_hits(output, labels)
        self.top1 += int(top1)
        self.top5 += int(top5)

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
        images, labels = _images_and_labels(batch)
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
        raise ValueError("there are no images to run the network on")
    return recorder, sample, seen


def _images_and_labels(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Images and labels of a batch; ValueError if it is of another form."""
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
    """Whether every batch norm has its initial values: no statistics yet, γ constant, β zero.

    A network without batch norms counts as trained.
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
    """The same layers without prunable channels, for networks that are not trained yet."""
    return tuple(replace(layer, prunable=()) for layer in layers)


def layer_record(
    network: nn.Module, recorder: Recorder, name: str, sites: dict[str, None]
) -> Layer:
    """The measures of one layer; `sites` are the norms that insert_ce_ would choose."""
    site, found, reads = recorder.sites[name], recorder.layers[name], recorder.reads.get(name)
    mean_abs, kept = found.mean_abs, shown_channels(found.channels)
    activity = measures.relative_activity(mean_abs)
    error = found.mean_abs_error / mean_abs.mean()
    contribution = None if reads is None else measures.contribution(mean_abs, reads)
    weak = _weak(found.root_mean_square, reads, shared=name in recorder.shared)
    correlation = measures.channel_correlation(found.mean, found.covariance)
    duplicates = measures.duplicates(found.mean, found.covariance).nonzero().flatten()
    # where branches are added, the norm of the longer one
    norm = next((name for name in site.norms if name in sites), next(iter(site.norms), None))
    ce = None if site.ce is None else network.get_submodule(site.ce)
    assert ce is None or isinstance(ce, EquilibriumLayer)
    spectrum = None if ce is None else measures.decorrelation_spectrum(ce)
    gamma, beta = _affine(None if norm is None else network.get_submodule(norm))
    return Layer(
        name=site.name,
        activation=site.activation,
        norm=norm,
        channels=site.channels,
        height=found.size[0],
        width=found.size[1],
        mean_abs=plain(mean_abs),
        activity=plain(activity),
        dormant=_places(activity <= measures.DORMANT),
        dormant_strict=_places(activity <= measures.DORMANT_STRICT),
        undecided=int(((activity - measures.DORMANT).abs() <= 2 * error).sum()),
        firing=plain(found.firing),
        rare=_places(found.firing < measures.RARE),
        saturated=_places(measures.saturated(mean_abs, found.deviation)),
        duplicates=tuple(kept[place] for place in duplicates.tolist()),
        contribution=None if contribution is None else plain(contribution),
        prunable=_places(weak),
        shared=name in recorder.shared,
        participation_ratio=measures.participation_ratio(found.covariance),
        correlation=correlation.mean,
        correlation_in_groups=measures.group_correlation(
            found.mean, found.covariance, kept, _group_size(ce)
        ),
        constant=correlation.constant,
        magnitude=tuple(map(plain, found.magnitude)),
        magnitude_before=tuple(map(plain, found.magnitude_before)),
        gamma=gamma,
        beta=beta,
        inhibited=_places(mean_abs < THRESHOLD),
        inhibited_ratio=measures.inhibited_ratio(mean_abs, THRESHOLD),
        ce_site=norm in sites,
        has_ce=ce is not None,
        mix=None if ce is None else measures.mixing_ratio(ce),
        spectrum=None if spectrum is None else _extremes(spectrum),
    )


def _weak(strength: Tensor, reads: Tensor | None, *, shared: bool) -> Tensor:
    """Channels that contribute next to nothing, (C,) of bool.

    Measured by the root mean square, which keeps channels that are strong in few images. A residual
    connection passes a channel on without weights, so there the activity itself must be weak too.
    """
    weak = torch.ones_like(strength, dtype=torch.bool)
    if reads is None or shared:
        weak &= measures.relative_activity(strength) <= measures.DORMANT_STRICT
    if reads is not None:
        weak &= measures.contribution(strength, reads) <= measures.DORMANT_STRICT
    return weak


def batch_norms(network: nn.Module, recorder: Recorder) -> tuple[BatchNorm, ...]:
    """β of every batch norm, and the activation that takes the norm's output unchanged."""
    activations = {
        site.norms[0]: site.activation for site in recorder.sites.values() if site.direct
    }
    found = []
    for name, module in network.named_modules():
        bias: Tensor | None = getattr(module, "bias", None)
        if isinstance(module, BATCH_NORMS) and bias is not None:
            nonpositive = int((bias <= 0).sum())
            found.append(BatchNorm(name, len(bias), nonpositive, activations.get(name)))
    return tuple(found)


def _group_size(ce: EquilibriumLayer | None) -> int:
    """Number of channels that the layer decorrelates together."""
    bd = ce.bd if isinstance(ce, ChannelEquilibrium2d) else ce
    return bd.group_size if isinstance(bd, BatchDecorrelation2d) else GROUP_SIZE


def _places(which: Tensor) -> tuple[int, ...]:
    return tuple(which.nonzero().flatten().tolist())


def plain(values: Tensor) -> tuple[Any, ...]:
    """Numbers, None for those that are not finite."""
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


def _extremes(spectrum: Tensor) -> Spectrum:
    return Spectrum(spectrum[0].item(), spectrum.median().item(), spectrum[-1].item())


def _affine(norm: nn.Module | None) -> tuple[Gamma | None, Beta | None]:
    norm = norm.norm if isinstance(norm, NormCE2d) else norm
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return (
        None if weight is None else Gamma(*measures.weight_statistics(weight)),
        None if bias is None else Beta(*measures.bias_statistics(bias)),
    )


def matrices(recorder: Recorder) -> tuple[Matrix, ...]:
    """Correlations of an early, a middle and a late layer."""
    names = list(recorder.layers)
    places = {round(i * (len(names) - 1) / (MATRICES - 1)) for i in range(MATRICES)}
    found = []
    for name in (names[place] for place in sorted(places)):
        layer = recorder.layers[name]
        kept = shown_channels(layer.channels)
        count = min(len(kept), MATRIX_CHANNELS)
        chosen = [place * len(kept) // count for place in range(count)]
        matrix = measures.correlation_matrix(layer.mean, layer.covariance)[chosen][:, chosen]
        shown = tuple(kept[place] for place in chosen)
        found.append(Matrix(name, shown, tuple(map(plain, matrix))))
    return tuple(found)


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
