"""Figures that go through the layers of a network in the order of execution."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from cenet.report.charts import Rule, Series, line_chart, range_chart
from cenet.report.parts import Cell, Column, Figure, Kind, Panel, Table
from cenet.report.scales import Axis, around
from cenet.report.sources import Source
from cenet.report.words import compare, show

Measure = Callable[[dict[str, Any]], float | None]


def inhibited_figure(sources: Sequence[Source]) -> Figure | None:
    """Share of inhibited channels by layer."""
    if not any(source.layers for source in sources):
        return None
    worst = {
        source.name: max(source.layers, key=lambda layer: layer["inhibited_ratio"])
        for source in sources
        if source.layers
    }
    words = "; ".join(
        (f"{name}: " if len(sources) > 1 else "")
        + (
            f"most in {layer['name']}, {show(layer['inhibited_ratio'], 'percent', brief=True)}"
            if layer["inhibited_ratio"]
            else "none in any layer"
        )
        for name, layer in worst.items()
    )
    caption = (
        "Share of the channels of a layer whose mean absolute activation is below "
        f"{_thresholds(sources)}: they hardly take part; {words}."
    )
    return _by_layer(
        sources, "inhibited", "Inhibited channels by layer", caption,
        "inhibited channels", "percent", lambda layer: layer["inhibited_ratio"],
    )  # fmt: skip


def gamma_figure(sources: Sequence[Source]) -> Figure | None:
    """Share of channels by layer whose norm scales them to almost nothing."""
    means = {source.name: _mean(map(_small_gamma, source.layers)) for source in sources}
    if all(value is None for value in means.values()):
        return None
    caption = (
        "Share of channels that their norm multiplies by less than 0.01: what the norm adds hardly "
        "depends on the image (behind an addition, the shortcut still does). Mean over layers: "
        f"{compare(means, 'percent')}."
    )
    return _by_layer(
        sources, "gamma", "Small γ by layer", caption, "channels with |γ| < 0.01", "percent",
        _small_gamma,
    )  # fmt: skip


def correlation_figure(sources: Sequence[Source]) -> Figure | None:
    """Mean absolute correlation by layer."""
    means = {source.name: mean_correlation(source) for source in sources}
    if all(value is None for value in means.values()):
        return None
    left_out = sum(layer.get("constant") or 0 for source in sources for layer in source.layers)
    caption = (
        "Mean absolute correlation between two channels of a layer, before the activation; lower "
        f"means that channels say different things. Mean over layers: {compare(means)}."
    )
    if left_out:
        caption += f" Constant channels have none and were left out ({show(left_out)})."
    return _by_layer(
        sources, "correlation", "Correlation by layer", caption, "mean |correlation|", "number",
        lambda layer: layer.get("correlation"),
    )  # fmt: skip


def lambda_figure(sources: Sequence[Source]) -> Figure | None:
    """λ by layer: how much of CE is decorrelation."""
    means = {source.name: mean_lambda(source) for source in sources}
    if all(value is None for value in means.values()):
        return None
    caption = (
        "λ weighs batch decorrelation (1) against instance reweighting (0); training starts at "
        f"0.5. Mean over the layers with CE: {compare(means)}."
    )
    return _by_layer(
        sources, "lambda", "λ by layer", caption, "λ (dashed: the start)", "number",
        lambda layer: layer.get("lambda"), limits=(0.0, 1.0), rule=Rule(y=0.5),
    )  # fmt: skip


def spectrum_figure(sources: Sequence[Source]) -> Figure | None:
    """Eigenvalues of W by layer, from the smallest to the largest."""
    series, values = [], []
    for run, source in enumerate(sources):
        layers = [(i, layer) for i, layer in enumerate(source.layers, 1) if _has_spectrum(layer)]
        if not layers:
            continue
        found = [layer["spectrum"] for _, layer in layers]
        values += [number for one in found for number in (one["min"], one["median"], one["max"])]
        notes = [
            f"{layer['name']}: {show(one['min'])} to {show(one['max'])}, "
            f"median {show(one['median'])} ({source.name})"
            for (_, layer), one in zip(layers, found, strict=True)
        ]
        series.append(
            Series(
                run, [index for index, _ in layers], [one["median"] for one in found],
                [one["min"] for one in found], [one["max"] for one in found], notes,
            )
        )  # fmt: skip
    if not series:
        return None
    means = {source.name: _mean(map(_spread, source.layers)) for source in sources}
    caption = (
        "Eigenvalues of the decorrelating matrix W of every layer with CE: from the smallest to "
        "the largest, with a mark at the median. How far apart they are is how much W "
        "decorrelates: equal eigenvalues only rescale, at whatever height. The largest belong to "
        "directions in which channels vary little."
    )
    if any(value is not None for value in means.values()):
        caption += f" Largest divided by smallest, mean over layers: {compare(means)}."
    y = around("eigenvalues of W", values)
    runs = [source.name for source in sources]
    label = "Eigenvalues of W by layer; the numbers are in the table below"
    drawing = range_chart(label, series, runs, _layer_axis(sources), y)
    parts = ("min", "median", "max")
    table = layer_table(
        sources,
        [
            *((part, "number", _of("spectrum", part)) for part in parts),
            ("max / min", "number", _spread),
        ],
        keep=_has_spectrum,
    )
    return Figure("spectrum", "Spectrum of W by layer", caption, (Panel("", drawing),), table)


def mean_correlation(source: Source) -> float | None:
    """Mean over the layers that have one."""
    return _mean(layer.get("correlation") for layer in source.layers)


def mean_lambda(source: Source) -> float | None:
    """Mean over the layers with CE."""
    return _mean(layer.get("lambda") for layer in source.layers)


def layer_table(
    sources: Sequence[Source],
    measures: Sequence[tuple[str, Kind, Measure]],
    *,
    keep: Callable[[dict[str, Any]], bool] = lambda layer: True,
) -> Table:
    """A row per place in the network, with the names of the layers once where all runs agree."""
    shown = [
        (run, source.name, [(i, layer) for i, layer in enumerate(source.layers, 1) if keep(layer)])
        for run, source in enumerate(sources)
    ]
    shown = [item for item in shown if item[2]]
    names = [[(index, layer["name"]) for index, layer in found] for _, _, found in shown]
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
        row: list[Cell] = [at[0][0], at[0][1]["name"]] if same else []
        for place in at:
            if not same:
                row += [None, None] if place is None else [place[0], place[1]["name"]]
            row += [None if place is None else measure(place[1]) for _, _, measure in measures]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def _by_layer(
    sources: Sequence[Source],
    key: str,
    title: str,
    caption: str,
    what: str,
    kind: Kind,
    measure: Measure,
    *,
    limits: tuple[float, float] | None = None,
    rule: Rule | None = None,
) -> Figure:
    series, values = [], []
    for run, source in enumerate(sources):
        layers = [(i, layer) for i, layer in enumerate(source.layers, 1)]
        layers = [(i, layer) for i, layer in layers if measure(layer) is not None]
        if not layers:
            continue
        found = [measure(layer) for _, layer in layers]
        values += [value for value in found if value is not None]
        notes = [
            f"{layer['name']}: {show(value, kind)} ({source.name})"
            for (_, layer), value in zip(layers, found, strict=True)
        ]
        series.append(Series(run, [index for index, _ in layers], found, notes=notes))
    y = Axis(what, *limits, kind) if limits else around(what, values, kind, zero=True)
    label = f"{title}; the numbers are in the table below"
    runs = [source.name for source in sources]
    drawing = line_chart(label, series, runs, _layer_axis(sources), y, marks=True, rule=rule)
    table = layer_table(
        sources, [(what, kind, measure)], keep=lambda layer: measure(layer) is not None
    )
    return Figure(key, title, caption, (Panel("", drawing),), table)


def _layer_axis(sources: Sequence[Source]) -> Axis:
    most = max(len(source.layers) for source in sources)
    return Axis("layer, in order of execution", 0.5, most + 0.5, whole=True)


def _small_gamma(layer: dict[str, Any]) -> float | None:
    found: float | None = (layer.get("gamma") or {}).get("abs_below_1e-2")
    return found


def _thresholds(sources: Sequence[Source]) -> str:
    found = {source.diagnosis["threshold"] for source in sources if source.diagnosis}
    return " or ".join(f"{value:g}" for value in sorted(found))


def _has_spectrum(layer: dict[str, Any]) -> bool:
    found = layer.get("spectrum") or {}
    return all(found.get(name) is not None for name in ("min", "median", "max"))


def _spread(layer: dict[str, Any]) -> float | None:
    """Largest divided by smallest eigenvalue: 1 if W only rescales."""
    found = layer.get("spectrum") or {}
    low, high = found.get("min"), found.get("max")
    return high / low if low and high is not None else None


def _of(part: str, name: str) -> Measure:
    def measure(layer: dict[str, Any]) -> float | None:
        found: float | None = layer[part][name]
        return found

    return measure


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
