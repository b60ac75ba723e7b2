"""From what was recorded of a layer to its record in a diagnosis."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import cenet.analysis.channels as measures
from cenet.analysis.diagnosis import BatchNorm, Beta, Gamma, Layer, Matrix, Spectrum
from cenet.analysis.equilibrium import decorrelation_spectrum, mixing_ratio
from cenet.analysis.recorder import Recorder
from cenet.analysis.statistics import shown_channels
from cenet.nn import BatchDecorrelation2d, ChannelEquilibrium2d, NormCE2d
from cenet.nn.base import EquilibriumLayer
from cenet.nn.norms import BATCH_NORMS

THRESHOLD = 1e-2  # of the paper's inhibited channels
MATRICES = 3
MATRIX_CHANNELS = 64
GROUP_SIZE = 16  # of the paper, where a layer has no groups of its own


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
    spectrum = None if ce is None else decorrelation_spectrum(ce)
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
        mix=None if ce is None else mixing_ratio(ce),
        spectrum=None if spectrum is None else _extremes(spectrum),
    )


def _weak(strength: Tensor, reads: Tensor | None, *, shared: bool) -> Tensor:
    """Channels that contribute next to nothing, (C,) of bool.

    By the root mean square, so that a channel counts that is strong in few images. What a residual
    connection carries is read by no weight, so there the activity must be weak too.
    """
    weak = torch.ones_like(strength, dtype=torch.bool)
    if reads is None or shared:
        weak &= measures.relative_activity(strength) <= measures.DORMANT_STRICT
    if reads is not None:
        weak &= measures.contribution(strength, reads) <= measures.DORMANT_STRICT
    return weak


def batch_norms(network: nn.Module, recorder: Recorder) -> tuple[BatchNorm, ...]:
    """β of every batch norm, and the activation that takes the norm's output as it is."""
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
    """Channels that the layer decorrelates together."""
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
