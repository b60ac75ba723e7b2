"""The verdict of a diagnosis: what its measurements say, and what to do next.

It rests on measures that rescaling a layer cannot move. The limits are conventions, not results:
300 images bound the firing of a silent channel by 1 % (the rule of three), pruning is worth its
trouble from 1 % of a network's channels on, and a layer whose channels vary in fewer than a quarter
as many dimensions as it has channels is called redundant.
"""

from collections.abc import Callable, Sequence

from cenet.analysis.channels import DORMANT, DORMANT_STRICT, RARE
from cenet.analysis.diagnosis import Layer, Removal, Verdict

ENOUGH_IMAGES = 300
WORTH_PRUNING = 0.01
REDUNDANT = 0.25
HARMLESS = 0.01  # relative rise of the loss that is not worth speaking of
NAMED = 4  # layers that a sentence names

UNTRAINED = Verdict(
    "untrained",
    "The weights are random: what the channels do now says nothing about the trained network.",
    (),
    "give the trained weights, with --checkpoint FILE or --pretrained",
)
PRUNE = (
    "prune the channels that diagnosis.json lists as layers[].prunable (in Python "
    "`diagnosis.prunable`); docs/diagnose.md shows how under \"Pruning\""
)  # fmt: skip
MEASURE_CE = (
    "CE decorrelates the channels of a layer, which raises this number. Accuracy may rise with it "
    "or not (docs/results.md): train with and without, and compare."
)


def judge(
    layers: Sequence[Layer],
    images: int,
    *,
    untrained: bool,
    removal: Removal | None,
    try_ce: str | None = None,
) -> Verdict:
    """The verdict on measured layers.

    Args:
        layers: in the order of execution.
        images: on how many images they were measured.
        untrained: whether the weights are those the network was made with.
        removal: what happened without all prunable channels, if that was measured.
        try_ce: the command that trains this network with CE; by default a line of Python.
    """
    if untrained:
        return UNTRAINED
    evidence = (*_evidence(layers), _confidence(layers, images))
    prunable = [layer for layer in layers if layer.prunable]
    if _count(layers, "prunable") >= WORTH_PRUNING * _channels(layers):
        what = (
            f"{_count(layers, 'prunable')} of {_channels(layers)} channels contribute next to "
            f"nothing ({_named(prunable, lambda layer: len(layer.prunable))})"
        )
        if images < ENOUGH_IMAGES:
            return Verdict(
                "more images", f"{what}, but {images} images are too few to be sure.", evidence,
                f"measure again on at least {ENOUGH_IMAGES} images",
            )  # fmt: skip
        measured = () if removal is None else (_removed(removal),)
        if removal is None or _is_harmless(removal):
            reasons = (*measured, *_shared(prunable), *evidence)
            return Verdict("prune", f"{what}: prune them.", reasons, PRUNE)
        evidence = (f"{what}, but together they matter. {_removed(removal)}", *evidence)
    places = [layer for layer in layers if _is_redundant(layer) and _takes_ce(layer)]
    if places:
        headline = (
            f"No channel needs pruning. {len(places)} of {len(layers)} layers are redundant and "
            "have no CE: their channels vary in fewer than a quarter as many dimensions "
            f"({_named(places, _dimensions)}). Try CE there."
        )
        norms = [layer.norm for layer in places]
        python = (
            f'cenet.insert_ce_(model, lambda norm, name: name in {norms}, start="identity"), '
            "then fine-tune"
        )
        return Verdict("try CE", headline, (MEASURE_CE, *evidence), try_ce or python)
    held = sum(layer.has_ce for layer in layers)
    ce = f" CE is in {held} of {len(layers)} layers already." if held else ""
    return Verdict("nothing to do", f"No channel needs pruning.{ce}", evidence, None)


def _evidence(layers: Sequence[Layer]) -> list[str]:
    lines = [
        f"{_share(layers, 'dormant')} are dormant: at most {DORMANT:g} of the mean activation of "
        f"their layer{_where(layers, 'dormant')}.",
        f"{_share(layers, 'dormant_strict')} are at most {DORMANT_STRICT:g} of it.",
        f"{_share(layers, 'rare')} fire in less than {_percent(RARE, 0)} of the images.",
    ]
    for name, meaning in (
        ("saturated", "are active but stuck at one value"),
        ("duplicates", "repeat another channel of their layer"),
    ):
        if _count(layers, name):
            lines.append(f"{_share(layers, name)} {meaning}{_where(layers, name)}.")
    shares = [
        layer.participation_ratio / layer.channels
        for layer in layers
        if layer.participation_ratio is not None
    ]
    if shares:
        mean = _percent(sum(shares) / len(shares), 0)
        lines.append(
            f"The channels of a layer vary in {mean} as many dimensions as there are channels "
            "(participation ratio, mean over layers)."
        )
    return lines


def _confidence(layers: Sequence[Layer], images: int) -> str:
    bound = min(1.0, 3 / max(images, 1))
    undecided = sum(layer.undecided for layer in layers)
    return (
        f"Measured on {images} images: a channel that fired in none of them fires in at most "
        f"{_percent(bound)} of such images (95 % confidence); {undecided} of {_channels(layers)} "
        "channels are within two standard errors of the limit of dormancy."
    )


def _removed(removal: Removal) -> str:
    before, after = _percent(removal.top1), _percent(removal.top1_without)
    return (
        f"Without all {removal.channels} at once, top-1 goes from {before} to {after} (standard "
        f"error of the difference {_percent(removal.top1_error)}, {removal.images} images)."
    )


def _is_harmless(removal: Removal) -> bool:
    rise = removal.loss_without - removal.loss
    return rise <= max(2 * removal.loss_error, HARMLESS * removal.loss)


def _shared(prunable: Sequence[Layer]) -> tuple[str, ...]:
    names = [layer.name for layer in prunable if layer.shared]
    if not names:
        return ()
    return (f"{_listed(names)}: added to other layers, which must lose the same channels.",)


def _is_redundant(layer: Layer) -> bool:
    ratio = layer.participation_ratio
    return ratio is not None and ratio < REDUNDANT * layer.channels


def _takes_ce(layer: Layer) -> bool:
    return layer.ce_site and not layer.has_ce


def _dimensions(layer: Layer) -> str:
    return f"{layer.participation_ratio:.1f} of {layer.channels}"


def _channels(layers: Sequence[Layer]) -> int:
    return sum(layer.channels for layer in layers)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _count(layers: Sequence[Layer], name: str) -> int:
    return sum(len(getattr(layer, name)) for layer in layers)


def _share(layers: Sequence[Layer], name: str) -> str:
    count, channels = _count(layers, name), _channels(layers)
    return f"{count} of {channels} channels ({_percent(count / channels)})"


def _where(layers: Sequence[Layer], name: str) -> str:
    found = [layer for layer in layers if getattr(layer, name)]
    return f" ({_named(found, lambda layer: len(getattr(layer, name)))})" if found else ""


def _named(layers: Sequence[Layer], number: Callable[[Layer], object]) -> str:
    return _listed([f"{layer.name}: {number(layer)}" for layer in layers])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
