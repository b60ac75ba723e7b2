"""Figures of single channels: how strong they are, how they go together, what they are worth."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from cenet.report.charts import Rule, Series, heat_map, line_chart
from cenet.report.parts import Cell, Column, Figure, Panel, Table
from cenet.report.scales import Axis, around
from cenet.report.sources import Source
from cenet.report.words import compare, count, show

FIRST, WEAKEST = 1e-4, 1e-9  # where the axis begins, and where at the lowest
SMALLEST = 4  # places along the side of a map that is worth drawing
PER_DECADE = 20
MAPS = 4  # layers whose maps are drawn
LAYER = ("run", "layer")


def strength_figure(sources: Sequence[Source]) -> Figure | None:
    """How many channels are weaker than a value, over all layers."""
    known = {
        run: sorted(v for layer in source.layers for v in layer["mean_abs"] if v is not None)
        for run, source in enumerate(sources)
    }
    known = {run: values for run, values in known.items() if values}
    if not known:
        return None
    middles = {run: median(values) for run, values in known.items()}
    weakest = max(WEAKEST, min([FIRST, *(value for value in middles.values() if value > 0)]))
    first = math.floor(math.log10(weakest) + 1e-9)
    largest = max(FIRST * 10, *(values[-1] for values in known.values()))
    decades = math.ceil(math.log10(largest) - 1e-9) - first
    grid = [10 ** (first + i / PER_DECADE) for i in range(decades * PER_DECADE + 1)]
    threshold = max(s.diagnosis["threshold"] for s in sources if s.diagnosis)
    grid = sorted({*(float(f"{x:.9g}") for x in grid), threshold})
    series = [Series(run, grid, [below(values, x) for x in grid]) for run, values in known.items()]
    x = Axis("mean absolute activation of a channel", grid[0], grid[-1], log=True)
    runs = [source.name for source in sources]
    label = "Share of channels that are weaker than a value; the numbers are in the table below"
    drawing = line_chart(
        label, series, runs, x, Axis("channels below", 0.0, 1.0, "percent"),
        rule=Rule(x=threshold, text=f"inhibited below {threshold:g}"),
    )  # fmt: skip
    unknown: dict[str, float | None] = dict.fromkeys(runs)
    shares = unknown | {runs[run]: below(values, threshold) for run, values in known.items()}
    medians = unknown | {runs[run]: value for run, value in middles.items()}
    caption = (
        "Share of all channels whose mean absolute activation is below a value. Where a curve "
        f"crosses the dashed line, its height is the share of inhibited channels: "
        f"{compare(shares, 'percent')}. Median channel: {compare(medians)}."
    )
    rows = [x for x in grid if x == threshold or abs(math.log10(x) - round(math.log10(x))) < 1e-9]
    columns = [Column("channels below", "number")]
    columns += [Column(runs[run], "percent", run) for run in known]
    table = Table(
        tuple(columns),
        tuple((x, *(below(values, x) for values in known.values())) for x in rows),
    )
    everything = tuple(
        (source.name, layer["name"], channel, value)
        for source in sources
        for layer in source.layers
        for channel, value in enumerate(layer["mean_abs"])
    )
    return Figure(
        "strength", "Strength of channels", caption, (Panel("", drawing),), table,
        _table(everything, LAYER, ("channel", "mean_abs")),
    )  # fmt: skip


def below(values: Sequence[float], limit: float) -> float:
    """Share of sorted values that are smaller than a limit."""
    return bisect_left(values, limit) / len(values)


def matrix_figure(sources: Sequence[Source]) -> Figure | None:
    """Correlations between the channels of a few layers."""
    panels, rows, everything = [], [], []
    grey = False
    means: dict[str, list[float]] = {}
    for source in sources:
        for matrix in source.part("matrices") or []:
            values, channels = matrix["values"], matrix["channels"]
            if not channels:
                continue
            strength = [[None if v is None else abs(v) for v in row] for row in values]
            grey = grey or any(v is None for row in values for v in row)
            pairs = [v for i, row in enumerate(strength) for v in row[:i] if v is not None]
            name = matrix["layer"] if len(sources) == 1 else f"{source.name}: {matrix['layer']}"
            label = f"Correlations of {name}; the numbers are summed up in the table below"
            panels.append(Panel(name, heat_map(label, strength, 0.0, 1.0)))
            mean = fmean(pairs) if pairs else None
            if mean is not None:
                means.setdefault(source.name, []).append(mean)
            strong = fmean(v > 0.5 for v in pairs) if pairs else None
            rows.append(
                (
                    source.name,
                    matrix["layer"],
                    len(channels),
                    mean,
                    max(pairs, default=None),
                    strong,
                )
            )
            everything += [
                (source.name, matrix["layer"], a, b, value)
                for a, row in zip(channels, values, strict=True)
                for b, value in zip(channels, row, strict=True)
            ]
    if not panels:
        return None
    average = {s.name: fmean(means[s.name]) if s.name in means else None for s in sources}
    caption = (
        "Absolute correlation of every pair of channels, dark for none and light for full; the "
        "light diagonal is each channel with itself, and light blocks beside it are channels "
        "that repeat each other."
    )
    if grey:
        caption += " Grey lines are channels that are constant and have no correlation."
    if means:
        caption += f" Mean beside the diagonal over these layers: {compare(average)}."
    return Figure(
        "matrices", "Correlation matrices", caption, tuple(panels),
        _table(rows, LAYER, ("channels", "mean |correlation|", "largest"), ("pairs above 0.5",)),
        _table(everything, LAYER, ("channel", "other channel", "correlation")),
        columns=max(len(source.part("matrices") or []) for source in sources), maps=True,
    )  # fmt: skip


def map_figure(sources: Sequence[Source]) -> Figure | None:
    """Where in the image a few layers respond, with one scale per place in the network."""
    chosen = [(source, _spread_out(source)) for source in sources]
    panels: list[Panel] = []
    rows: list[tuple[Cell, ...]] = []
    everything: list[tuple[Cell, ...]] = []
    for source, layers in chosen:
        for place, layer in enumerate(layers):
            together = [
                value
                for _, others in chosen
                if place < len(others)
                for value in _known(others[place])
            ]
            own = _known(layer)
            name = layer["name"] if len(sources) == 1 else f"{source.name}: {layer['name']}"
            label = f"Magnitude map of {name}; the numbers are summed up in the table below"
            scale = min(together), max(together)
            panels.append(Panel(name, heat_map(label, layer["magnitude"], *scale)))
            rows.append((source.name, layer["name"], min(own), fmean(own), max(own)))
            everything += [
                (source.name, layer["name"], y, x, value)
                for y, row in enumerate(layer["magnitude"])
                for x, value in enumerate(row)
            ]
    if not panels:
        return None
    caption = (
        "Length of the vector of all channels at every place of the image, mean over the images, "
        "for layers from early to late."
    )
    if len(sources) > 1:
        caption += " Layers at the same place share a scale, so that runs can be compared."
    return Figure(
        "maps", "Magnitude maps", caption, tuple(panels),
        _table(rows, LAYER, ("smallest", "mean", "largest")),
        _table(everything, LAYER, ("row", "column", "magnitude")),
        columns=max(len(layers) for _, layers in chosen), maps=True,
    )  # fmt: skip


def ablation_figure(sources: Sequence[Source]) -> Figure | None:
    """Accuracy when more and more channels are set to zero, with the spread of the repeats."""
    found = [(run, s.name, s.part("ablation")) for run, s in enumerate(sources)]
    found = [item for item in found if ablation_area(item[2]) is not None]
    if not found:
        return None
    series, rows = [], []
    for run, name, one in found:
        repeats = [[v for v in values if v is not None] for values in one["top1"]]
        mean = [fmean(values) if values else None for values in repeats]
        low = [min(values, default=None) for values in repeats]
        high = [max(values, default=None) for values in repeats]
        notes = [f"{name}: {show(v, 'percent')}" for v in mean]
        series.append(Series(run, one["ratios"], mean, low, high, notes))
        rows += [
            (name, len(values), ratio, *numbers)
            for ratio, *numbers, values in zip(one["ratios"], mean, low, high, repeats, strict=True)
        ]
    runs = [source.name for source in sources]
    x = Axis("channels set to zero", 0.0, max(max(s.x) for s in series) or 1.0, "percent")
    values = [v for s in series for v in (*s.low, *s.high) if v is not None]
    y = around("top-1 accuracy", values, "percent", zero=True)
    label = "Accuracy by share of channels set to zero; the numbers are in the table below"
    areas = dict.fromkeys(runs) | {name: ablation_area(one) for _, name, one in found}
    layers = " and ".join(dict.fromkeys(one["layer"] for _, _, one in found))
    repeats_ = max(len(values) for _, _, one in found for values in one["top1"])
    caption = (
        f"Top-1 accuracy when random channels of {layers} are set to zero: mean and range of "
        f"{count(repeats_, 'draw')}. It is measured on a sample of the images, so "
        "that its left end may differ from the accuracy above. A network that shares its work "
        "among channels falls later. "
        f"Mean height of the curve (area): {compare(areas, 'percent')}."
    )
    heads = ("channels set to zero", "mean top-1", "lowest", "highest")
    return Figure(
        "ablation", "Cumulative ablation", caption,
        (Panel("", line_chart(label, series, runs, x, y, marks=True)),),
        _table(rows, ("run",), ("draws",), heads),
    )  # fmt: skip


def ablation_area(ablation: dict[str, Any] | None) -> float | None:
    """Area under the mean curve divided by its width, by the trapezoidal rule."""
    if ablation is None:
        return None
    known = [
        (ratio, fmean(v for v in values if v is not None))
        for ratio, values in zip(ablation["ratios"], ablation["top1"], strict=True)
        if any(v is not None for v in values)
    ]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    steps = pairwise(known)
    area: float = sum((b - a) * (height + other) / 2 for (a, height), (b, other) in steps)
    width: float = known[-1][0] - known[0][0]
    return area / width


def importance_figure(sources: Sequence[Source]) -> Figure | None:
    """What each channel is worth: the accuracy lost without it, from most to least."""
    series, rows, everything = [], [], []
    ginis: dict[str, float | None] = dict.fromkeys(source.name for source in sources)
    for run, source in enumerate(sources):
        one = source.part("importance")
        drops = (
            [] if one is None else sorted((v for v in one["drop"] if v is not None), reverse=True)
        )
        if not drops:
            continue
        ginis[source.name] = one.get("gini")
        places = [i / max(1, len(drops) - 1) for i in range(len(drops))]
        series.append(Series(run, places, drops))
        rows.append(
            (
                source.name,
                one["layer"],
                len(drops),
                one.get("gini"),
                drops[0],
                median(drops),
                drops[-1],
            )
        )
        everything += [(source.name, one["layer"], i, v) for i, v in enumerate(one["drop"])]
    if not series:
        return None
    runs = [source.name for source in sources]
    y = around(
        "accuracy lost", [v for s in series for v in s.y if v is not None], "percent", zero=True
    )
    x = Axis("channels, from most to least important", 0.0, 1.0, "percent")
    label = "Accuracy lost without each channel; the numbers are summed up in the table below"
    layers = " and ".join(dict.fromkeys(str(row[1]) for row in rows))
    caption = f"Top-1 accuracy lost when one channel of {layers} is set to zero."
    if any(value is not None for value in ginis.values()):
        caption += (
            " The Gini coefficient is 0 when all channels matter the same and 1 when one matters "
            f"alone: {compare(ginis)}. It counts losses below zero as zero."
        )
    losses = ("largest loss", "median loss", "smallest loss")
    return Figure(
        "importance", "Importance of single channels", caption,
        (Panel("", line_chart(label, series, runs, x, y)),),
        _table(rows, LAYER, ("channels", "Gini"), losses),
        _table(everything, LAYER, ("channel", "drop")),
    )  # fmt: skip


def _table(
    rows: Iterable[tuple[Cell, ...]],
    text: Sequence[str],
    number: Sequence[str] = (),
    percent: Sequence[str] = (),
) -> Table:
    """A table whose columns come in this order."""
    columns = [Column(name) for name in text]
    columns += [Column(name, "number") for name in number]
    columns += [Column(name, "percent") for name in percent]
    return Table(tuple(columns), tuple(rows))


def _known(layer: dict[str, Any]) -> list[float]:
    return [value for row in layer["magnitude"] for value in row if value is not None]


def _spread_out(source: Source) -> list[dict[str, Any]]:
    """A few layers from the first to the last of those with a map that shows something."""
    layers = [
        layer
        for layer in source.layers
        if len(layer.get("magnitude") or []) >= SMALLEST
        and len(layer["magnitude"][0]) >= SMALLEST
        and len(_known(layer)) > 1
    ]
    if len(layers) <= MAPS:
        return layers
    return [layers[round(i * (len(layers) - 1) / (MAPS - 1))] for i in range(MAPS)]
