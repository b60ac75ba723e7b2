"""Everything on a page that is not a chart: verdicts, facts, tables and Grad-CAM pictures."""

from collections.abc import Callable, Sequence, Sized
from pathlib import PurePath
from typing import Any

from cenet.analysis.channels import DORMANT, DORMANT_STRICT, RARE
from cenet.analysis.diagnosis import Accuracy, Layer
from cenet.formatting import MISSING, NARROW, Cell, Kind, percent, short, show
from cenet.report.elements import Column, Fact, Picture, RunVerdict, Section, Table
from cenet.report.layers import (
    mean_correlation,
    mean_lambda,
    mean_participation,
    small_gamma,
)
from cenet.report.sources import Source

PICTURES = 8  # Grad-CAMs shown of each run
SMALLEST = 32  # side of an image in which Grad-CAM shows something
LONGEST = 14  # letters of a checkpoint
SKIPPED = "These files could not be read as images, and all numbers above are without them."
LAYERS = (
    "Numbers of channels. Rare: they fire in less than 1 % of the images. Dims / ch.: effective "
    "dimensions (participation ratio) / channels. Corr.: mean absolute correlation of two "
    "channels. CE: in place, or a site where insert_ce_ would put it by default."
)
DIFFER = "Rows that differ between runs come first and are marked."


def verdicts(sources: Sequence[Source]) -> tuple[RunVerdict, ...]:
    """The verdict of each diagnosis, and where CE is or would be put."""
    found = []
    for run, source in enumerate(sources):
        if source.diagnosis is None:
            continue
        taken = {layer.norm for layer in source.layers if layer.has_ce}
        sites = tuple(site for site in source.diagnosis.sites if site not in taken)
        with_ce = tuple(layer.name for layer in source.layers if layer.has_ce)
        found.append(RunVerdict(run, source.diagnosis.verdict, sites, with_ce))
    return tuple(found)


def facts(sources: Sequence[Source]) -> tuple[Fact, ...]:
    """The table at the top of the page; rows without a value in any run are left out."""
    rows = [
        _fact(
            "test top-1", "after the last epoch of training", sources,
            lambda s: _last(s, "test_top1"), "percent",
        ),
        _fact(
            "top-1", "on the images measured", sources,
            _accuracy(lambda found: found.top1), "percent",
        ),
        _fact(
            "top-5", "on the images measured", sources,
            _accuracy(lambda found: found.top5), "percent",
        ),
        _fact(
            "dormant channels", f"activity at most {DORMANT:g} of the layer's mean", sources,
            _share(lambda layer: layer.dormant), "percent",
        ),
        _fact(
            "dormant, strictly", f"activity at most {DORMANT_STRICT:g}", sources,
            _share(lambda layer: layer.dormant_strict), "percent",
        ),
        _fact(
            f"fire in < {percent(RARE, 'g', space=NARROW)} of images",
            "positive at one pixel or more", sources, _share(lambda layer: layer.rare), "percent",
        ),
        _fact(
            "prunable", "contribute next to nothing", sources,
            _share(lambda layer: layer.prunable), "percent",
        ),
        _fact(
            "duplicates", "repeat another channel", sources,
            _share(lambda layer: layer.duplicates), "percent",
        ),
        _fact(
            "saturated", "active, but stuck at one value", sources,
            _share(lambda layer: layer.saturated), "percent",
        ),
        _fact(
            "effective dimensions / channels", "participation ratio, mean of layers",
            sources, mean_participation, "percent",
        ),
        _fact(
            "mean correlation", "absolute, between channels, over layers", sources,
            mean_correlation, "number",
        ),
        _fact("mean λ", "1: decorrelation, 0: reweighting", sources, mean_lambda, "number"),
        _fact("layers with CE", "of all layers measured", sources, _with_ce, "number"),
        _fact("million parameters", "of the network", sources, _millions, "number"),
        _weights(sources),
        _fact(
            "inhibited, first six layers (the paper's figure)",
            "depends on the scale of the layers", sources,
            lambda s: s.diagnosis.first_six if s.diagnosis else None, "percent",
        ),
    ]  # fmt: skip
    trained, measured = rows[0], rows[1]
    if trained is not None and measured is not None and trained.values == measured.values:
        rows[0] = None  # the same images, so one row is enough
    return tuple(row for row in rows if row is not None)


def differing(sources: Sequence[Source], part: str) -> Section:
    """Recipe or environment of all runs; rows that differ come first and are highlighted."""
    found = [getattr(source, part) for source in sources]
    shown = [(run, values) for run, values in enumerate(found) if values]
    if not shown:
        return Section(part, part.capitalize())
    names = list(dict.fromkeys(name for _, values in shown for name in values))
    rows: list[tuple[Cell, ...]] = [
        (name.replace("_", " "), *(_plain(values.get(name)) for _, values in shown))
        for name in names
    ]
    # rows that differ between runs
    apart = [row for row in rows if len(set(row[1:])) > 1]
    same = [row for row in rows if len(set(row[1:])) == 1]
    columns = [Column(""), *(Column(sources[run].name, "text", run) for run, _ in shown)]
    table = Table(tuple(columns), (*apart, *same), "", frozenset(range(len(apart))))
    return Section(part, part.capitalize(), tables=(table,), words=DIFFER if apart else "")


def layers(sources: Sequence[Source]) -> Section:
    """The measures of each layer, one table per run."""
    found = tuple(_layers(source) for source in sources if source.layers)
    return Section("layers", "Layers", tables=found, words=LAYERS if found else "")


def skipped(sources: Sequence[Source]) -> Section:
    """Files that could not be read as images."""
    rows = [
        (source.name, item.path, item.reason)
        for source in sources
        for item in (source.diagnosis.data.skipped if source.diagnosis else ())
    ]
    table = Table((Column("run"), Column("file"), Column("reason")), tuple(rows))
    return Section(
        "skipped", "Skipped files", tables=(table,) if rows else (), words=SKIPPED if rows else ""
    )


def pictures(sources: Sequence[Source]) -> tuple[Picture, ...]:
    """The first Grad-CAMs of each trained run, unless its images are too small to recognise."""
    found = []
    for run, source in enumerate(sources):
        of = source.diagnosis
        if of is None or of.model.untrained or min(of.data.size) < SMALLEST:
            continue
        for cam in of.gradcam[:PICTURES]:
            predicted = _class_name(cam.predicted, of.data.classes)
            words = f"predicted {predicted}"
            if cam.label is not None:
                label = _class_name(cam.label, of.data.classes)
                target = _class_name(cam.target, of.data.classes)
                right = cam.label == cam.predicted
                wrong = f"{label}, {words}; evidence for {target}"
                words = f"{label}, recognised" if right else wrong
            found.append(Picture(run, cam.image, cam.overlay, words))
    return tuple(found)


def _class_name(name: str, classes: Sequence[str] | None) -> str:
    """The name of a class; `class 7` if only its number is known."""
    return f"class {name}" if name.isdecimal() and name not in (classes or ()) else name


def _fact(
    name: str,
    meaning: str,
    sources: Sequence[Source],
    measure: Callable[[Source], float | None],
    kind: Kind,
) -> Fact | None:
    values = [measure(source) for source in sources]
    known = [value for value in values if value is not None]
    if not known:
        return None
    brief = kind == "number"
    shown = tuple(show(value, kind, brief=brief) for value in values)
    return Fact(name, meaning, shown)


def _last(source: Source, name: str) -> float | None:
    known: list[float] = [row[name] for row in source.metrics if row.get(name) is not None]
    return known[-1] if known else None


def _accuracy(value: Callable[[Accuracy], float]) -> Callable[[Source], float | None]:
    def measure(source: Source) -> float | None:
        found = source.diagnosis.accuracy if source.diagnosis else None
        return None if found is None else value(found)

    return measure


def _share(channels: Callable[[Layer], Sized]) -> Callable[[Source], float | None]:
    """Share of the channels of all layers."""

    def measure(source: Source) -> float | None:
        total = sum(layer.channels for layer in source.layers)
        return sum(len(channels(layer)) for layer in source.layers) / total if total else None

    return measure


def _millions(source: Source) -> float | None:
    return None if source.diagnosis is None else source.diagnosis.model.parameters / 1e6


def _weights(sources: Sequence[Source]) -> Fact | None:
    """The checkpoint of each run."""
    if not any(source.diagnosis for source in sources):
        return None
    return Fact("checkpoint", "the weights that were measured", tuple(map(_checkpoint, sources)))


def _checkpoint(source: Source) -> str:
    """Name of the checkpoint without folder and ending, short enough for a narrow screen."""
    if source.diagnosis is None or source.diagnosis.model.checkpoint is None:
        return MISSING
    return short(PurePath(source.diagnosis.model.checkpoint).stem, LONGEST)


def _with_ce(source: Source) -> int | None:
    return sum(layer.has_ce for layer in source.layers) if source.layers else None


def _plain(value: Any) -> str | None:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return None if value is None else str(value)


def _layers(source: Source) -> Table:
    columns = (Column("#", "number"), *(Column(name, kind) for name, kind, _ in LAYER_COLUMNS))
    rows = tuple(
        (number, *(value(layer) for _, _, value in LAYER_COLUMNS))
        for number, layer in enumerate(source.layers, start=1)
    )
    return Table(columns, rows, source.name)


# columns of the table of layers, one row of this list each
LAYER_COLUMNS: tuple[tuple[str, Kind, Callable[[Layer], Cell]], ...] = (
    ("layer", "text", lambda layer: layer.name),
    ("norm", "text", lambda layer: layer.norm),
    ("channels", "number", lambda layer: layer.channels),
    ("size", "text", lambda layer: f"{layer.height}{NARROW}×{NARROW}{layer.width}"),
    ("dormant", "number", lambda layer: len(layer.dormant)),
    ("rare", "number", lambda layer: len(layer.rare)),
    ("saturated", "number", lambda layer: len(layer.saturated)),
    ("duplicates", "number", lambda layer: len(layer.duplicates)),
    ("prunable", "number", lambda layer: len(layer.prunable)),
    ("dims / ch.", "percent", lambda layer: layer.participation_share),
    ("corr.", "number", lambda layer: layer.correlation),
    ("|γ| < 0.01", "percent", small_gamma),
    ("CE", "text", lambda layer: layer.ce_state),
    ("λ", "number", lambda layer: layer.mix),
    ("inhibited", "number", lambda layer: len(layer.inhibited)),
)
