"""Figures with one value per layer, in the order of execution."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from statistics import fmean

from cenet.analysis.channels import DORMANT, DORMANT_STRICT
from cenet.analysis.diagnosis import Layer
from cenet.formatting import Cell, Kind, compare, count, show
from cenet.report.charts import Axis, Rule, Series, around, line_chart, range_chart
from cenet.report.elements import Column, Figure, Panel, Table
from cenet.report.sources import Source

Measure = Callable[[Layer], float | None]
Measured = tuple[str, Kind, Measure]
NONE = "none in any layer"
SCALE = (
    "It depends on the scale of the layer: multiplying its output by a constant and dividing the "
    "weights that read it by the same constant changes this figure, but not what the network "
    "computes."
)


def dormant_figure(sources: Sequence[Source]) -> Figure | None:
    """Share of dormant channels by layer."""
    undecided = sum(layer.undecided for source in sources for layer in source.layers)
    caption = (
        "Share of the channels of a layer whose mean absolute activation is at most "
        f"{DORMANT:g} of the mean over the layer: {_most(sources, dormant_share)}."
    )
    if undecided:
        caption += (
            f" For {count(undecided, 'channel')} that limit is within two standard errors; more "
            "images would decide."
        )
    return _by_layer(
        sources, "dormant", "Dormant channels by layer", caption,
        (f"dormant, at most {DORMANT:g}", "percent", dormant_share),
        (f"at most {DORMANT_STRICT:g}", "percent", strictly_dormant_share),
    )  # fmt: skip


def participation_figure(sources: Sequence[Source]) -> Figure | None:
    """Effective number of dimensions by layer, as a share of its channels."""
    means = {source.name: mean_participation(source) for source in sources}
    if not _any(means):
        return None
    caption = (
        "Participation ratio: the number of dimensions in which the channels of a layer vary "
        "(before the activation), as a share of their number. 100 % when all directions vary "
        f"alike. Mean over layers: {compare(means, 'percent')}."
    )
    return _by_layer(
        sources, "participation", "Participation ratio by layer", caption,
        ("share of the channels", "percent", lambda layer: layer.participation_share),
        ("dimensions", "number", lambda layer: layer.participation_ratio),
    )  # fmt: skip


def gamma_figure(sources: Sequence[Source]) -> Figure | None:
    """Share of channels by layer whose norm scales them to almost nothing."""
    caption = (
        "Share of channels whose |γ| is below 0.01, so that the norm's output is almost constant; "
        f"{_most(sources, small_gamma)}."
    )
    return _by_layer(
        sources, "gamma", "Small γ by layer", caption,
        ("channels with |γ| < 0.01", "percent", small_gamma),
    )  # fmt: skip


def correlation_figure(sources: Sequence[Source]) -> Figure | None:
    """Mean absolute correlation by layer."""
    means = {source.name: mean_correlation(source) for source in sources}
    if not _any(means):
        return None
    left_out = sum(layer.constant for source in sources for layer in source.layers)
    caption = (
        "Mean absolute correlation between two channels of a layer, before the activation. Mean "
        f"over layers: {compare(means)}."
    )
    if left_out:
        caption += f" Constant channels have none and were left out ({show(left_out)})."
    return _by_layer(
        sources, "correlation", "Correlation by layer", caption,
        ("mean |correlation|", "number", lambda layer: layer.correlation),
    )  # fmt: skip


def inhibited_figure(sources: Sequence[Source]) -> Figure | None:
    """Share of inhibited channels by layer, as the paper counts them."""
    caption = (
        "Share of the channels of a layer whose mean absolute activation is below "
        f"{_thresholds(sources)}: {_most(sources, _inhibited)}. {SCALE}"
    )
    return _by_layer(
        sources, "inhibited", "The paper's figure: inhibited channels", caption,
        ("inhibited channels", "percent", _inhibited),
    )  # fmt: skip


def lambda_figure(sources: Sequence[Source]) -> Figure | None:
    """λ by layer: how much of CE is decorrelation."""
    means = {source.name: mean_lambda(source) for source in sources}
    if not _any(means):
        return None
    caption = (
        "λ weighs batch decorrelation (1) against instance reweighting (0); training starts at "
        f"0.5. Mean over the layers with CE: {compare(means)}."
    )
    return _by_layer(
        sources, "lambda", "λ by layer", caption,
        ("λ (dashed: the start)", "number", lambda layer: layer.mix),
        limits=(0.0, 1.0), rules=(Rule(y=0.5),),
    )  # fmt: skip


def spectrum_figure(sources: Sequence[Source]) -> Figure | None:
    """Eigenvalues of W by layer, from the smallest to the largest."""
    series = [_spectra(run, source) for run, source in enumerate(sources)]
    series = [item for item in series if item.x]
    if not series:
        return None
    means = {source.name: _mean(map(_spread, source.layers)) for source in sources}
    caption = (
        "Eigenvalues of the decorrelating matrix W of every layer with CE: from the smallest to "
        "the largest, with a mark at the median. Their spread shows how much W "
        "decorrelates: equal eigenvalues only rescale, whatever their size. The largest belong to "
        "directions in which channels vary little."
    )
    if _any(means):
        caption += f" Largest divided by smallest, mean over layers: {compare(means)}."
    values = [v for item in series for v in (*item.low, *item.y, *item.high) if v is not None]
    y = around("eigenvalues of W", values)
    runs = [source.name for source in sources]
    label = "Eigenvalues of W by layer; the numbers are in the table below"
    drawing = range_chart(label, series, runs, layer_axis(sources), y)
    measures: list[Measured] = [
        ("min", "number", _eigenvalue(0)),
        ("median", "number", _eigenvalue(1)),
        ("max", "number", _eigenvalue(2)),
        ("max / min", "number", _spread),
    ]
    table = layer_table(sources, measures, keep=lambda layer: _spectrum(layer) is not None)
    return Figure("spectrum", "Spectrum of W by layer", caption, (Panel("", drawing),), table)


def _spectra(run: int, source: Source) -> Series:
    known = [(i, layer.name, _spectrum(layer)) for i, layer in enumerate(source.layers, 1)]
    found = [(i, name, *one) for i, name, one in known if one is not None]
    notes = [
        f"{name}: {show(low)} to {show(high)}, median {show(median)} ({source.name})"
        for _, name, low, median, high in found
    ]
    places, _, low, median, high = zip(*found, strict=True) if found else ((),) * 5
    return Series(run, places, median, low, high, notes)


def dormant_share(layer: Layer) -> float:
    """Share of the channels that are dormant."""
    return len(layer.dormant) / layer.channels


def strictly_dormant_share(layer: Layer) -> float:
    """Share of the channels that are dormant by the stricter limit."""
    return len(layer.dormant_strict) / layer.channels


def mean_participation(source: Source) -> float | None:
    """Mean over layers of the participation ratio as a share of the channels."""
    return _mean(layer.participation_share for layer in source.layers)


def mean_correlation(source: Source) -> float | None:
    """Mean correlation over the layers that have one."""
    return _mean(layer.correlation for layer in source.layers)


def mean_lambda(source: Source) -> float | None:
    """Mean λ over the layers with CE."""
    return _mean(layer.mix for layer in source.layers)


def layer_table(
    sources: Sequence[Source],
    measures: Sequence[Measured],
    *,
    keep: Callable[[Layer], bool] = lambda layer: True,
) -> Table:
    """One row per layer; its name is in one column if all runs have the same layers."""
    shown = [
        (run, source.name, [(i, layer) for i, layer in enumerate(source.layers, 1) if keep(layer)])
        for run, source in enumerate(sources)
    ]
    shown = [item for item in shown if item[2]]
    names = [[(index, layer.name) for index, layer in found] for _, _, found in shown]
    same = all(other == names[0] for other in names)
    columns = [Column("#", "number"), Column("layer")] if same else []
    for run, name, _ in shown:
        if not same:
            columns += [Column(f"{name}, #", "number", run), Column(f"{name}, layer", "text", run)]
        columns += [
            Column(f"{name}, {title}" if len(measures) > 1 else name, kind, run)
            for title, kind, _ in measures
        ]
    rows: list[tuple[Cell, ...]] = []
    for at in zip_longest(*(found for _, _, found in shown)):
        row: list[Cell] = [at[0][0], at[0][1].name] if same else []
        for place in at:
            if not same:
                row += [None, None] if place is None else [place[0], place[1].name]
            row += [None if place is None else measure(place[1]) for _, _, measure in measures]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def layer_axis(sources: Sequence[Source]) -> Axis:
    """An axis of layer names; a number where the runs have different layers at one position."""
    places = zip_longest(*([layer.name for layer in source.layers] for source in sources))
    found = [{name for name in place if name is not None} for place in places]
    names = tuple(
        next(iter(each)) if len(each) == 1 else str(number) for number, each in enumerate(found, 1)
    )
    return Axis("layer, in order of execution", 0.5, len(names) + 0.5, names=names)


def _by_layer(
    sources: Sequence[Source],
    key: str,
    title: str,
    caption: str,
    drawn: Measured,
    *others: Measured,
    limits: tuple[float, float] | None = None,
    rules: Sequence[Rule] = (),
) -> Figure | None:
    """Draw one measure; others are in the table only. No drawing if all values are 0."""
    what, kind, measure = drawn
    series, values = [], []
    for run, source in enumerate(sources):
        known = [(i, layer.name, measure(layer)) for i, layer in enumerate(source.layers, 1)]
        found = [(i, name, value) for i, name, value in known if value is not None]
        if not found:
            continue
        values += [value for _, _, value in found]
        notes = [f"{name}: {show(value, kind)} ({source.name})" for _, name, value in found]
        series.append(Series(run, [i for i, _, _ in found], [v for _, _, v in found], notes=notes))
    if not series:
        return None
    table = layer_table(sources, [drawn, *others], keep=lambda layer: measure(layer) is not None)
    if not any(values) and limits is None:
        return Figure(key, title, caption, (), table)
    y = Axis(what, *limits, kind) if limits else around(what, values, kind, zero=True)
    label = f"{title}; the numbers are in the table below"
    runs = [source.name for source in sources]
    drawing = line_chart(label, series, runs, layer_axis(sources), y, marks=True, rules=rules)
    return Figure(key, title, caption, (Panel("", drawing),), table)


def _most(sources: Sequence[Source], measure: Measure) -> str:
    """Text that names the layer of each run where a share is largest."""
    said = {}
    for source in sources:
        shares = [(measure(layer) or 0.0, layer.name) for layer in source.layers]
        largest, name = max(shares, key=lambda item: item[0], default=(0.0, ""))
        words = f"most in {name}, {show(largest, 'percent', brief=True)}"
        if shares:
            said[source.name] = words if largest else NONE
    if len(sources) == 1 or set(said.values()) <= {NONE}:
        return next(iter(said.values()), NONE)
    return "; ".join(f"{name}: {words}" for name, words in said.items())


def _inhibited(layer: Layer) -> float:
    return layer.inhibited_ratio


def small_gamma(layer: Layer) -> float | None:
    """Share of channels with |γ| < 0.01."""
    return None if layer.gamma is None else layer.gamma.share_small


def _thresholds(sources: Sequence[Source]) -> str:
    found = {source.diagnosis.threshold for source in sources if source.diagnosis}
    return " or ".join(f"{value:g}" for value in sorted(found))


def _spectrum(layer: Layer) -> tuple[float, float, float] | None:
    """Smallest, median and largest eigenvalue of W, if all are known."""
    found = layer.spectrum
    if found is None or found.min is None or found.median is None or found.max is None:
        return None
    return found.min, found.median, found.max


def _eigenvalue(place: int) -> Measure:
    def measure(layer: Layer) -> float | None:
        found = _spectrum(layer)
        return None if found is None else found[place]

    return measure


def _spread(layer: Layer) -> float | None:
    """Largest divided by smallest eigenvalue: 1 if W only rescales."""
    found = _spectrum(layer)
    return found[2] / found[0] if found and found[0] else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _any(values: dict[str, float | None]) -> bool:
    return any(value is not None for value in values.values())
