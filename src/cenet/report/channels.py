"""Figures of single channels: activity, contribution, correlation, maps, ablation, importance."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from cenet.analysis.channels import DORMANT, DORMANT_STRICT
from cenet.analysis.diagnosis import AblationCurve, Importance, Layer, Matrix, Removal
from cenet.formatting import Cell, brief, compare, count, show
from cenet.report.charts import Axis, Rule, Series, around, colour_bar, heat_map, line_chart
from cenet.report.elements import Column, Figure, Panel, Table
from cenet.report.sources import Source

LEAST = 1e-3  # where the axes of relative values begin
PER_DECADE = 20
SMALLEST = 4  # places along the side of a map that is worth drawing
MAPS = 4  # layers whose maps are drawn
LAYER = ("run", "layer")
RULES = (
    Rule(x=DORMANT_STRICT, text=f"strictly {DORMANT_STRICT:g}", anchor="end"),
    Rule(x=DORMANT, text=f"dormant {DORMANT:g}"),
)

ByChannel = Callable[[Layer], Sequence[float] | None]


def activity_figure(sources: Sequence[Source]) -> Figure | None:
    """Cumulative distribution of the activity of channels relative to their layer."""
    caption = (
        "Share of all channels whose activity is at most a value. Activity is the mean absolute "
        "activation divided by its mean over the layer. The height of a curve at the dashed lines "
        f"is the share of dormant channels: at most {DORMANT:g}, and strictly at most "
        f"{DORMANT_STRICT:g}."
    )
    return _cumulative(
        sources, "activity", "Activity of channels", caption, "activity relative to the layer",
        lambda layer: layer.activity, RULES,
    )  # fmt: skip


def contribution_figure(sources: Sequence[Source]) -> Figure | None:
    """Cumulative distribution of the contribution of channels relative to their layer."""
    layers = [layer for source in sources for layer in source.layers]
    unknown = sum(layer.contribution is None for layer in layers)
    caption = (
        "Share of channels whose contribution is at most a value. Contribution is the activity "
        "times the norm of the weights that read the channel, divided by its mean over the layer."
    )
    if unknown:
        caption += f" For {count(unknown, 'layer')} the weights that read the channels are unknown."
    return _cumulative(
        sources, "contribution", "Contribution of channels", caption,
        "contribution relative to the layer", lambda layer: layer.contribution,
    )  # fmt: skip


def _cumulative(
    sources: Sequence[Source],
    key: str,
    title: str,
    caption: str,
    what: str,
    measure: ByChannel,
    rules: Sequence[Rule] = (),
) -> Figure | None:
    """Cumulative distribution over the channels of all layers, on a logarithmic axis."""
    known = {
        run: sorted(value for layer in source.layers for value in measure(layer) or ())
        for run, source in enumerate(sources)
    }
    known = {run: values for run, values in known.items() if values}
    if not known:
        return None
    first = round(math.log10(LEAST))
    largest = max(10.0, *(values[-1] for values in known.values()))
    decades = math.ceil(math.log10(largest) - 1e-9) - first
    powers = [10.0 ** (first + i / PER_DECADE) for i in range(decades * PER_DECADE + 1)]
    limits = {DORMANT, DORMANT_STRICT}
    grid = sorted({*(float(f"{x:.9g}") for x in powers), *limits})
    series = [Series(run, grid, [up_to(values, x) for x in grid]) for run, values in known.items()]
    runs = [source.name for source in sources]
    drawing = line_chart(
        f"{title}; the numbers are in the table below", series, runs,
        Axis(what, grid[0], grid[-1], log=True), Axis("channels up to", 0.0, 1.0, "percent"),
        rules=rules,
    )  # fmt: skip
    medians: dict[str, float | None] = dict.fromkeys(runs)
    medians |= {runs[run]: median(values) for run, values in known.items()}
    rows = [x for x in grid if x in limits or abs(math.log10(x) - round(math.log10(x))) < 1e-9]
    columns = [Column("at most", "number"), *(Column(runs[r], "percent", r) for r in known)]
    shares = tuple((x, *(up_to(values, x) for values in known.values())) for x in rows)
    everything = [
        (source.name, layer.name, channel, value)
        for source in sources
        for layer in source.layers
        for channel, value in enumerate(measure(layer) or ())
    ]
    return Figure(
        key, title, f"{caption} Median channel: {compare(medians)}.", (Panel("", drawing),),
        Table(tuple(columns), shares), _as_table(everything, LAYER, ("channel", key)),
    )  # fmt: skip


def up_to(values: Sequence[float], limit: float) -> float:
    """Share of sorted values that are at most a limit."""
    return bisect_right(values, limit) / len(values)


def matrix_figure(sources: Sequence[Source]) -> Figure | None:
    """Correlations between the channels of a few layers."""
    shown = [
        (run, source.name, matrix)
        for run, source in enumerate(sources)
        for matrix in (source.diagnosis.matrices if source.diagnosis else ())
        if matrix.channels
    ]
    if not shown:
        return None
    panels, rows, everything = [], [], []
    means: dict[str, list[float]] = {}
    for run, name, matrix in shown:
        strength = [[None if v is None else abs(v) for v in row] for row in matrix.values]
        label = f"Correlations of {name}: {matrix.layer}; the table below sums them up"
        panels.append(Panel(matrix.layer, heat_map(label, strength, 0.0, 1.0), run))
        pairs = [v for i, row in enumerate(strength) for v in row[:i] if v is not None]
        if pairs:
            means.setdefault(name, []).append(fmean(pairs))
        rows.append((name, matrix.layer, len(matrix.channels), *_sums(pairs)))
        everything += _entries(name, matrix)
    caption = (
        "Absolute correlation of every pair of channels, one scale for all matrices. The light "
        "diagonal is each channel with itself, and light blocks beside it are channels that "
        "repeat each other."
    )
    if any(value is None for _, _, matrix in shown for row in matrix.values for value in row):
        caption += " Grey lines are channels that are constant and have no correlation."
    if means:
        average = {s.name: fmean(means[s.name]) if s.name in means else None for s in sources}
        caption += f" Mean off the diagonal over these layers: {compare(average)}."
    return Figure(
        "matrices", "Correlation matrices", caption, tuple(panels),
        _as_table(rows, LAYER, ("channels", "mean |correlation|", "largest"), ("pairs above 0.5",)),
        _as_table(everything, LAYER, ("channel", "other channel", "correlation")),
        columns=max(len(s.diagnosis.matrices) for s in sources if s.diagnosis), maps=True,
        scale=colour_bar("0", "1"),
    )  # fmt: skip


def _sums(pairs: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean, largest and the share above 0.5."""
    if not pairs:
        return None, None, None
    return fmean(pairs), max(pairs), fmean(value > 0.5 for value in pairs)


def _entries(name: str, matrix: Matrix) -> list[tuple[Cell, ...]]:
    return [
        (name, matrix.layer, one, other, value)
        for one, row in zip(matrix.channels, matrix.values, strict=True)
        for other, value in zip(matrix.channels, row, strict=True)
    ]


def map_figure(sources: Sequence[Source]) -> Figure | None:
    """Where in the image a few layers respond, each map on its own scale from 0."""
    shown = [
        (run, source.name, layer)
        for run, source in enumerate(sources)
        for layer in _spread_out(source)
    ]
    if not shown:
        return None
    panels, rows, everything = [], [], []
    for run, name, layer in shown:
        known = _known(layer)
        label = f"Magnitude map of {name}: {layer.name}; the table below sums it up"
        title = f"{layer.name}, up to {brief(max(known))}"
        panels.append(Panel(title, heat_map(label, layer.magnitude, 0.0, max(known)), run))
        rows.append((name, layer.name, min(known), fmean(known), max(known)))
        everything += [
            (name, layer.name, y, x, value)
            for y, row in enumerate(layer.magnitude)
            for x, value in enumerate(row)
        ]
    caption = (
        "ℓ2 norm over the channels after the activation at every position, averaged over the "
        "images, for layers from early to late. Each map has its own scale, from 0 "
        "to its largest value: compare positions within a map, not the colours of two maps."
    )
    return Figure(
        "maps", "Magnitude maps", caption, tuple(panels),
        _as_table(rows, LAYER, ("smallest", "mean", "largest")),
        _as_table(everything, LAYER, ("row", "column", "magnitude")),
        columns=max(len(_spread_out(source)) for source in sources), maps=True,
        scale=colour_bar("0", "largest of each map"),
    )  # fmt: skip


def ablation_figure(sources: Sequence[Source]) -> Figure | None:
    """Accuracy over the share of channels set to zero, in two orders; one panel per run."""
    found = [
        (run, source.name, source.diagnosis.ablation)
        for run, source in enumerate(sources)
        if source.diagnosis and source.diagnosis.ablation
    ]
    found = [item for item in found if len(item[2].ratios) > 1]
    if not found:
        return None
    runs = [source.name for source in sources]
    x = Axis("channels set to zero", 0.0, max(max(c.ratios) for _, _, c in found), "percent")
    values = [v for _, _, c in found for v in (*c.least_important_first, *sum(c.top1, ()))]
    y = around("top-1 accuracy", values, "percent", zero=True)
    panels, rows = [], []
    for run, name, curve in found:
        means = [fmean(draws) for draws in curve.top1]
        label = f"Accuracy of {name} by share of channels set to zero; the numbers are in the table"
        series = _orders(run, curve, means)
        panels.append(Panel(name, line_chart(label, series, runs, x, y, marks=True)))
        for at, draws in enumerate(curve.top1):
            row = (means[at], min(draws), max(draws), curve.least_important_first[at])
            rows.append((name, len(draws), curve.ratios[at], *row))
    heads = ("channels set to zero", "random: mean top-1", "lowest", "highest", "least first")
    return Figure(
        "ablation", "Cumulative ablation", _ablation_words([c for _, _, c in found]),
        tuple(panels) if len(sources) > 1 else (Panel("", panels[0].svg),),
        _as_table(rows, ("run",), ("draws",), heads), columns=2 if len(panels) > 1 else 1,
    )  # fmt: skip


def _orders(run: int, curve: AblationCurve, means: Sequence[float]) -> list[Series]:
    def notes(order: str, values: Sequence[float]) -> list[str]:
        return [f"{order}: {show(value, 'percent')}" for value in values]

    low, high = [min(draws) for draws in curve.top1], [max(draws) for draws in curve.top1]
    least, random, first = curve.least_important_first, "random order", "least important first"
    return [
        Series(run, curve.ratios, means, low, high, notes(random, means), random, 0),
        Series(run, curve.ratios, least, notes=notes(first, least), name=first, look=1),
    ]


def _ablation_words(curves: Sequence[AblationCurve]) -> str:
    """The caption: an explanation of the curves, and their standard error."""
    layers = _listed(curve.layer for curve in curves)
    draws = max(len(one) for curve in curves for one in curve.top1)
    images = min(curve.images for curve in curves)
    accuracies = [v for c in curves for v in (*c.least_important_first, *sum(c.top1, ()))]
    error = max(math.sqrt(p * (1 - p) / max(1, images)) for p in accuracies)
    return (
        f"Top-1 accuracy while channels of {layers} are set to zero, in random order (mean and "
        f"range of {count(draws, 'draw')}) and in order of increasing importance. Measured on "
        f"{count(images, 'image')}: the binomial standard error of a point is at most "
        f"{show(error, 'percent', brief=True)}. A curve that stays high says that the network "
        "does not rely on particular channels of this layer, because they are redundant or "
        "inactive; it is not a measure of quality."
    )


def importance_figure(sources: Sequence[Source]) -> Figure | None:
    """Divergence of the predictions without each channel, in descending order."""
    found = [
        (run, source.name, source.diagnosis.importance)
        for run, source in enumerate(sources)
        if source.diagnosis and source.diagnosis.importance
    ]
    found = [item for item in found if item[2].divergence]
    if not found:
        return None
    series, rows, everything = [], [], []
    for run, name, one in found:
        series.append(_importances(run, one))
        values = sorted(one.divergence, reverse=True)
        sums = (len(values), one.gini, values[0], median(values), values[-1])
        rows.append((name, one.layer, *sums))
        pairs = zip(one.divergence, one.standard_error, strict=True)
        everything += [(name, one.layer, channel, *pair) for channel, pair in enumerate(pairs)]
    runs = [source.name for source in sources]
    drawn = [v for s in series for v in (*s.low, *s.y, *s.high) if v is not None]
    y = around("divergence of the predictions (nats)", drawn, zero=True)
    x = Axis("channels, from most to least important", 0.0, 1.0, "percent")
    label = "Divergence without each channel; the table below sums the numbers up"
    ginis: dict[str, float | None] = dict.fromkeys(runs)
    ginis |= {name: one.gini for _, name, one in found}
    caption = (
        "Change of the predicted class probabilities when one channel of "
        f"{_listed(one.layer for _, _, one in found)} is set to zero: Kullback-Leibler divergence, "
        f"mean over {count(min(one.images for _, _, one in found), 'image')}, with a band of two "
        "standard errors. The Gini coefficient is 0 if all channels matter equally and 1 if "
        f"a single one matters: {compare(ginis)}."
    )
    heads = ("channels", "Gini", "largest", "median", "smallest")
    return Figure(
        "importance", "Importance of single channels", caption,
        (Panel("", line_chart(label, series, runs, x, y)),),
        _as_table(rows, LAYER, heads),
        _as_table(everything, LAYER, ("channel", "divergence", "standard_error")),
    )  # fmt: skip


def _importances(run: int, found: Importance) -> Series:
    pairs = zip(found.divergence, found.standard_error, strict=True)
    order = sorted(pairs, key=lambda pair: -pair[0])
    places = [index / max(1, len(order) - 1) for index in range(len(order))]
    low = [None if error is None else max(0.0, value - 2 * error) for value, error in order]
    high = [None if error is None else value + 2 * error for value, error in order]
    return Series(run, places, [value for value, _ in order], low, high)


def removal_words(sources: Sequence[Source]) -> str:
    """Accuracy without all prunable channels, one sentence per run."""
    found = {s.name: s.diagnosis.removal for s in sources if s.diagnosis and s.diagnosis.removal}
    said = {name: _removal(one) for name, one in found.items() if one.channels}
    return "\n".join(f"{name}: {one}" if len(sources) > 1 else one for name, one in said.items())


def _removal(found: Removal) -> str:
    one = found.channels == 1
    which = "the one prunable channel" if one else f"all {found.channels} prunable channels"
    before, after = show(found.top1, "percent"), show(found.top1_without, "percent")
    return (
        f"Removing {which} at once changes top-1 from {before} to {after} (standard error of the "
        f"difference {show(found.top1_error, 'percent')}, on {count(found.images, 'image')})."
    )


def _as_table(
    rows: Iterable[tuple[Cell, ...]],
    text: Sequence[str],
    number: Sequence[str] = (),
    percent: Sequence[str] = (),
) -> Table:
    """A table with these columns, in the order text, number, percent."""
    columns = [Column(name) for name in text]
    columns += [Column(name, "number") for name in number]
    columns += [Column(name, "percent") for name in percent]
    return Table(tuple(columns), tuple(rows))


def _listed(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _known(layer: Layer) -> list[float]:
    return [value for row in layer.magnitude for value in row if value is not None]


def _spread_out(source: Source) -> list[Layer]:
    """Evenly spaced layers among those whose map is large enough to draw."""
    layers = [
        layer
        for layer in source.layers
        if len(layer.magnitude) >= SMALLEST
        and len(layer.magnitude[0]) >= SMALLEST
        and len(_known(layer)) > 1
    ]
    if len(layers) <= MAPS:
        return layers
    return [layers[round(i * (len(layers) - 1) / (MAPS - 1))] for i in range(MAPS)]
