"""Tables: the headline, the layers, recipe, environment and skipped files."""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from cenet.report.channels import ablation_area
from cenet.report.layers import mean_correlation, mean_lambda
from cenet.report.parts import Cell, Column, Fact, Kind, Picture, Section, Table
from cenet.report.sources import Source
from cenet.report.words import MISSING, NARROW, short, show

PICTURES = 8  # of each run
SMALLEST = 32  # side of an image in which Grad-CAM shows something
RANDOM = "The weights are random: no checkpoint was given."
UNNAMED = "No checkpoint was given: unless the network was trained before, its weights are random."
SKIPPED = "These files could not be read as images and are not in any number above."
DIFFER = "Rows that differ between runs come first and are marked."

Better = Callable[[list[float]], float]


def facts(sources: Sequence[Source]) -> tuple[Fact, ...]:
    """What a reader wants first; rows that no run has are left out."""
    rows = [
        _fact(
            "test top-1", "after the last epoch of training", sources,
            lambda s: _last(s, "test_top1"), "percent", max,
        ),
        _fact("top-1", "on the images measured", sources, _accuracy("top1"), "percent", max),
        _fact("top-5", "on the images measured", sources, _accuracy("top5"), "percent", max),
        _fact(
            "inhibited, first six layers", "mean share of channels that hardly respond", sources,
            lambda s: s.part("first_six"), "percent", min,
        ),
        _fact("inhibited, all layers", "share of all channels", sources, inhibited, "percent", min),
        _fact(
            "mean correlation", "absolute, between channels, over layers", sources,
            mean_correlation, "number", min,
        ),
        _fact("mean λ", "1: decorrelation, 0: reweighting", sources, mean_lambda, "number", None),
        _fact("layers with CE", "of all layers measured", sources, _with_ce, "number", None),
        _fact(
            "ablation area", "mean top-1 while channels are set to zero", sources,
            lambda s: ablation_area(s.part("ablation")),
            "percent", max,
        ),
        _fact(
            "Gini of importance", "0: all channels matter the same, or none does alone", sources,
            lambda s: (s.part("importance") or {}).get("gini"), "number", None,
        ),
        _fact(
            "parameters", "of the network, in millions", sources, _millions, "number", None,
        ),
        _weights(sources),
    ]  # fmt: skip
    trained, measured = rows[0], rows[1]
    if trained is not None and measured is not None and trained.values == measured.values:
        rows[0] = None  # the same images, said once
    return tuple(row for row in rows if row is not None)


def notes(sources: Sequence[Source]) -> tuple[str, ...]:
    """What a reader must know before any number: whose weights are random."""
    said = {"random": RANDOM, "not named": UNNAMED}
    found = [(source.name, said.get(_checkpoint(source))) for source in sources]
    return tuple(
        f"{name}: {words}" if len(sources) > 1 else words for name, words in found if words
    )


def inhibited(source: Source) -> float | None:
    """Share of all channels of all layers that are inhibited."""
    channels = sum(layer["channels"] for layer in source.layers)
    return sum(len(layer["asleep"]) for layer in source.layers) / channels if channels else None


def differing(sources: Sequence[Source], part: str) -> Section:
    """Recipe or environment of all runs; rows that differ come first and stand out."""
    found = [getattr(source, part) for source in sources]
    shown = [(run, values) for run, values in enumerate(found) if values]
    if not shown:
        return Section(part, part.capitalize())
    names = list(dict.fromkeys(name for _, values in shown for name in values))
    rows: list[tuple[Cell, ...]] = [
        (name.replace("_", " "), *(_plain(values.get(name)) for _, values in shown))
        for name in names
    ]
    # what is known of both, and not the same
    apart = [row for row in rows if len(set(row[1:])) > 1]
    same = [row for row in rows if len(set(row[1:])) == 1]
    columns = [Column(""), *(Column(sources[run].name, "text", run) for run, _ in shown)]
    table = Table(tuple(columns), (*apart, *same), "", frozenset(range(len(apart))))
    return Section(part, part.capitalize(), tables=(table,), words=DIFFER if apart else "")


def layer_tables(sources: Sequence[Source]) -> tuple[Table, ...]:
    """Everything that was measured of each layer, a table per run."""
    return tuple(_layers(source) for source in sources if source.layers)


def skipped(sources: Sequence[Source]) -> Section:
    """Files that could not be read as images."""
    rows = [
        (source.name, item["path"], item["reason"])
        for source in sources
        for item in (source.part("data") or {}).get("skipped") or []
    ]
    table = Table((Column("run"), Column("file"), Column("reason")), tuple(rows))
    return Section(
        "skipped", "Skipped files", tables=(table,) if rows else (), words=SKIPPED if rows else ""
    )


def pictures(sources: Sequence[Source]) -> tuple[Picture, ...]:
    """The first Grad-CAMs of each run, unless its images are too small to look at."""
    found = []
    for run, source in enumerate(sources):
        if min((source.part("data") or {}).get("size") or [SMALLEST]) < SMALLEST:
            continue
        for item in (source.part("gradcam") or [])[:PICTURES]:
            words = f"predicted {item['predicted']}"
            label = item.get("label")
            if label is not None:
                right = label == item["predicted"]
                words = f"{label}, recognised" if right else f"{label}, {words}"
            found.append(Picture(run, item["image"], item["overlay"], words))
    return tuple(found)


def _fact(
    name: str,
    meaning: str,
    sources: Sequence[Source],
    measure: Callable[[Source], float | None],
    kind: Kind,
    better: Better | None,
) -> Fact | None:
    values = [measure(source) for source in sources]
    known = [value for value in values if value is not None]
    if not known:
        return None
    brief = kind == "number"
    shown = tuple(show(value, kind, brief=brief) for value in values)
    best: frozenset[int] = frozenset()
    if better is not None and len({text for text in shown if text != MISSING}) > 1:
        top = show(better(known), kind, brief=brief)
        best = frozenset(run for run, text in enumerate(shown) if text == top)
    return Fact(name, meaning, shown, best)


def _last(source: Source, name: str) -> float | None:
    known: list[float] = [row[name] for row in source.metrics if row.get(name) is not None]
    return known[-1] if known else None


def _accuracy(name: str) -> Callable[[Source], float | None]:
    return lambda source: (source.part("accuracy") or {}).get(name)


def _millions(source: Source) -> float | None:
    parameters = (source.part("model") or {}).get("parameters")
    return None if parameters is None else parameters / 1e6


def _weights(sources: Sequence[Source]) -> Fact | None:
    """Where the weights that were measured come from."""
    found = [source.part("model") for source in sources]
    if not any(found):
        return None
    values = tuple(_checkpoint(source) for source in sources)
    return Fact("checkpoint", "the weights that were measured", values)


def _checkpoint(source: Source) -> str:
    model = source.part("model")
    if model is not None and model.get("checkpoint") is not None:
        return short(PurePath(model["checkpoint"]).name)
    if model is None or source.recipe is not None:
        return MISSING
    # without a folder it was measured from Python, where a network may come trained
    return "not named" if (source.part("data") or {}).get("folder") is None else "random"


def _with_ce(source: Source) -> int | None:
    return sum(bool(layer.get("has_ce")) for layer in source.layers) if source.layers else None


def _plain(value: Any) -> str | None:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return None if value is None else str(value)


def _layers(source: Source) -> Table:
    heads: tuple[tuple[str, Kind], ...] = (
        ("#", "number"), ("layer", "text"), ("norm", "text"), ("channels", "number"),
        ("size", "text"), ("inhibited", "percent"), ("|correlation|", "number"),
        ("mean γ", "number"), ("|γ| < 0.01", "percent"), ("mean β", "number"),
        ("β ≤ 0", "percent"), ("CE", "text"), ("λ", "number"),
    )  # fmt: skip
    rows = []
    for number, layer in enumerate(source.layers, start=1):
        gamma, beta = layer.get("gamma") or {}, layer.get("beta") or {}
        size = (
            f"{layer['height']}{NARROW}×{NARROW}{layer['width']}" if layer.get("height") else None
        )
        place = "yes" if layer.get("has_ce") else "default site" if layer.get("ce_site") else None
        rows.append(
            (
                number, layer["name"], layer.get("norm"), layer["channels"], size,
                layer["inhibited_ratio"], layer.get("correlation"), gamma.get("mean"),
                gamma.get("abs_below_1e-2"), beta.get("mean"), beta.get("share_nonpositive"),
                place, layer.get("lambda"),
            )
        )  # fmt: skip
    return Table(tuple(Column(name, kind) for name, kind in heads), tuple(rows), source.name)
