"""The verdict of a diagnosis: a conclusion from its measurements, and the next step.

It rests on measures that rescaling a layer cannot move. The limits are conventions, not results:
300 images bound the firing of a silent channel by 1 % (the rule of three), a covariance needs ten
values for each channel, pruning is worthwhile from 1 % of a network's channels on, and a
layer with fewer effective dimensions than a quarter of its channels is called redundant.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from cenet.analysis.channels import DORMANT, DORMANT_STRICT, RARE
from cenet.analysis.diagnosis import Accuracy, Layer, Removal, Verdict
from cenet.formatting import percent

ENOUGH_IMAGES = 300
VALUES_PER_CHANNEL = 10
WORTH_PRUNING = 0.01
REDUNDANT = 0.25
HARMLESS = 0.01  # relative rise of the loss that counts as none
NAMED = 4  # layers that a sentence names

UNTRAINED = Verdict(
    "untrained",
    "The weights are random: what the channels do now says nothing about the trained network.",
    (),
    "Give the trained weights, with --checkpoint FILE or --pretrained.",
    None,
)
CUT = (
    "Cut them out of the layers that are not on a residual connection, with torch-pruning for "
    'example ("Pruning" in docs/diagnose.md). The command lists them.'
)
LIST = 'cenet.analysis.Diagnosis.read(Path("diagnosis.json")).prunable'
MEASURE_CE = (
    "CE decorrelates channels, so that they vary in more dimensions. That does not have to raise "
    "accuracy: in our runs of VGG-16 on CIFAR-10 it did not (docs/results.md)."
)


@dataclass(frozen=True)
class Evidence:
    """The measurements that a verdict is drawn from.

    Attributes:
        layers: the layers in the order of execution.
        images: number of images they were measured on.
        untrained: whether the weights are the initial ones.
        accuracy: accuracy on the labelled images.
        removal: accuracy and loss without all prunable channels, if they were measured.
        sites: norms after which insert_ce_ puts CE by default.
        train_with_ce: the command that trains this network with CE, if there is one.
    """

    layers: Sequence[Layer]
    images: int
    untrained: bool
    accuracy: Accuracy | None
    removal: Removal | None
    sites: Sequence[str]
    train_with_ce: str | None = None


def judge(found: Evidence) -> Verdict:
    """The first verdict that applies."""
    if found.untrained:
        return UNTRAINED
    for rule in (_at_chance, _prune, _try_ce):
        verdict = rule(found)
        if verdict is not None:
            return verdict
    held = sum(layer.has_ce for layer in found.layers)
    ce = f" CE is in {held} of {len(found.layers)} layers already." if held else ""
    return Verdict("nothing to do", f"{_pruning(found)}{ce}", _reasons(found), None, None)


def _at_chance(found: Evidence) -> Verdict | None:
    """Whether the network does no better than guessing, within two standard errors."""
    if found.accuracy is None or found.accuracy.classes < 2:
        return None
    chance = 1 / found.accuracy.classes
    if found.accuracy.top1 > chance + 2 * sqrt(chance * (1 - chance) / found.images):
        return None
    return Verdict(
        "at chance",
        f"Top-1 is {percent(found.accuracy.top1)} with {found.accuracy.classes} classes, no "
        "better than guessing: what the channels do says little yet.",
        _reasons(found),
        "Check the weights, the order of the classes and the preprocessing of the images.",
        None,
    )


def _prune(found: Evidence) -> Verdict | None:
    if not _is_worth_pruning(found):
        return None
    prunable = [layer for layer in found.layers if layer.prunable]
    headline = f"{_share(found.layers, 'prunable')} contribute next to nothing"
    where = f"Prunable: {_named(prunable, lambda layer: len(layer.prunable))}."
    if found.images < ENOUGH_IMAGES:
        return _more_images(f"{headline}, but {found.images} images are too few to be sure.",
                            (where, *_reasons(found)))  # fmt: skip
    if found.removal is not None and not _is_harmless(found.removal):
        return None
    measured = () if found.removal is None else (_removed(found.removal),)
    reasons = (where, *measured, *_dead(prunable), *_shared(prunable), *_reasons(found))
    return Verdict("prune", f"{headline}: prune them.", reasons, CUT, LIST)


def _try_ce(found: Evidence) -> Verdict | None:
    open_sites = [layer for layer in found.layers if layer.ce_site and not layer.has_ce]
    low = [layer for layer in open_sites if _is_redundant(layer)]
    known = [layer for layer in low if _is_measured(layer, found.images)]
    if not low:
        return None
    if not known or found.images < ENOUGH_IMAGES:
        few = min(low, key=lambda layer: layer.height * layer.width / layer.channels)
        values = found.images * few.height * few.width
        return _more_images(
            f"{_pruning(found)} {found.images} images are too few to say whether channels are "
            f"redundant: {few.name} has {values} values for each of {few.channels} channels.",
            _reasons(found),
        )
    headline = (
        f"{_pruning(found)} CE has something to decorrelate in {len(known)} of the "
        f"{len(open_sites)} layers where it could be inserted."
    )
    where = f"Effective dimensions below a quarter of the channels: {_named(known, _dimensions)}."
    step = "Train with and without CE, and compare."
    command = found.train_with_ce
    if command is None:
        norms = [layer.norm for layer in known]
        choice = f", lambda norm, name: name in {norms}" if set(norms) != set(found.sites) else ""
        step = "Insert CE, which leaves the outputs as they are, fine-tune, and compare."
        command = f'cenet.insert_ce_(model{choice}, start="identity")'
    reasons = (where, MEASURE_CE, *_reasons(found))
    return Verdict("try CE", f"{headline} Try it there.", reasons, step, command)


def _more_images(headline: str, reasons: Sequence[str]) -> Verdict:
    step = f"Measure again on at least {ENOUGH_IMAGES} images."
    return Verdict("more images", headline, tuple(reasons), step, None)


def _pruning(found: Evidence) -> str:
    if not _count(found.layers, "prunable"):
        return "No channel is prunable."
    share = _share(found.layers, "prunable")
    if not _is_worth_pruning(found):
        return f"Pruning is not worth it: {share} contribute next to nothing."
    assert found.removal is not None
    return f"{share} contribute next to nothing alone, but not together. {_removed(found.removal)}"


def _reasons(found: Evidence) -> tuple[str, ...]:
    """The measurements in sentences, and their uncertainty."""
    layers = found.layers
    lines = [
        f"{_share(layers, 'dormant')} are dormant: their mean activation is at most {DORMANT:g} of "
        f"their layer's mean{_where(layers, 'dormant')}; {_count(layers, 'dormant_strict')} of "
        f"them are at most {DORMANT_STRICT:g}. {_share(layers, 'rare')} fire in less than "
        f"{percent(RARE, 'g')} of the images.",
    ]
    for name, meaning in (
        ("saturated", "are active but stuck at one value"),
        ("duplicates", "repeat another channel of their layer"),
    ):
        if _count(layers, name):
            lines.append(f"{_share(layers, name)} {meaning}{_where(layers, name)}.")
    known = (layer.participation_share for layer in layers)
    shares = [share for share in known if share is not None]
    if shares:
        mean = percent(sum(shares) / len(shares), ".0f")
        lines.append(
            f"Effective dimensions (participation ratio) / channels: {mean} on average over layers."
        )
    bound = percent(min(1.0, 3 / max(found.images, 1)))
    undecided = sum(layer.undecided for layer in layers)
    lines.append(
        f"Measured on {found.images} images: a channel that fired in none of them fires in at "
        f"most {bound} of such images (95 % confidence); {undecided} of {_channels(layers)} "
        "channels are within two standard errors of the limit of dormancy."
    )
    return tuple(lines)


def _removed(removal: Removal) -> str:
    before, after = percent(removal.top1), percent(removal.top1_without)
    return (
        f"Without all {removal.channels} at once, top-1 goes from {before} to {after} (standard "
        f"error of the difference {percent(removal.top1_error)}, {removal.images} images)."
    )


def _dead(prunable: Sequence[Layer]) -> tuple[str, ...]:
    names = [layer.name for layer in prunable if len(layer.prunable) == layer.channels]
    return (f"Nothing passes through {_listed(names)} at all: remove it.",) if names else ()


def _shared(prunable: Sequence[Layer]) -> tuple[str, ...]:
    names = [layer.name for layer in prunable if layer.shared]
    if not names:
        return ()
    return (
        f"On a residual connection, where all layers that are added must lose the same channels: "
        f"{_listed(names)}.",
    )


def _is_worth_pruning(found: Evidence) -> bool:
    count = _count(found.layers, "prunable")
    return count > 0 and count >= WORTH_PRUNING * _channels(found.layers)


def _is_harmless(removal: Removal) -> bool:
    rise = removal.loss_without - removal.loss
    return rise <= max(2 * removal.loss_error, HARMLESS * removal.loss)


def _is_redundant(layer: Layer) -> bool:
    share = layer.participation_share
    return share is not None and share < REDUNDANT


def _is_measured(layer: Layer, images: int) -> bool:
    """Whether there are enough values for a covariance of so many channels."""
    return images * layer.height * layer.width >= VALUES_PER_CHANNEL * layer.channels


def _dimensions(layer: Layer) -> str:
    return f"{layer.participation_ratio:.1f} of {layer.channels}"


def _channels(layers: Sequence[Layer]) -> int:
    return sum(layer.channels for layer in layers)


def _count(layers: Sequence[Layer], name: str) -> int:
    return sum(len(getattr(layer, name)) for layer in layers)


def _share(layers: Sequence[Layer], name: str) -> str:
    count, channels = _count(layers, name), _channels(layers)
    return f"{count} of {channels} channels ({percent(count / channels)})"


def _where(layers: Sequence[Layer], name: str) -> str:
    found = [layer for layer in layers if getattr(layer, name)]
    return f" ({_named(found, lambda layer: len(getattr(layer, name)))})" if found else ""


def _named(layers: Sequence[Layer], number: Callable[[Layer], object]) -> str:
    return _listed([f"{layer.name} {number(layer)}" for layer in layers])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
