"""What channels did while a network trained: means over layers, by update."""

from collections.abc import Sequence
from statistics import fmean

from cenet.report.charts import Series, line_chart
from cenet.report.parts import Cell, Column, Figure, Kind, Panel, Table
from cenet.report.scales import Axis, around
from cenet.report.sources import Source
from cenet.report.words import compare

Curve = dict[int, float]  # by update


def watched_figures(sources: Sequence[Source]) -> list[Figure]:
    """Inhibited channels and correlation by update, of the runs that were watched."""
    found = [
        _figure(
            sources, "watched-inhibited", "Inhibited channels by update", "inhibited_ratio",
            "Mean over layers of the share of inhibited channels", "inhibited channels", "percent",
        ),
        _figure(
            sources, "watched-correlation", "Correlation by update", "correlation",
            "Mean over layers of the absolute correlation between two channels",
            "mean |correlation|", "number",
        ),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def _figure(
    sources: Sequence[Source],
    key: str,
    title: str,
    column: str,
    words: str,
    what: str,
    kind: Kind,
) -> Figure | None:
    curves = {run: _curve(source, column) for run, source in enumerate(sources)}
    curves = {run: curve for run, curve in curves.items() if curve}
    if not curves:
        return None
    steps = sorted({step for curve in curves.values() for step in curve})
    x = Axis("update", steps[0], max(steps[-1], steps[0] + 1), whole=True)
    values = [value for curve in curves.values() for value in curve.values()]
    y = around(what, values, kind, zero=True)
    series = [Series(run, list(curve), list(curve.values())) for run, curve in curves.items()]
    runs = [source.name for source in sources]
    label = f"{title}; the numbers are in the table below"
    unknown: dict[str, float | None] = dict.fromkeys(runs)
    first = unknown | {runs[run]: next(iter(curve.values())) for run, curve in curves.items()}
    last = unknown | {runs[run]: list(curve.values())[-1] for run, curve in curves.items()}
    caption = (
        f"{words}, in the batches of training. At the first look: {compare(first, kind)}; "
        f"at the last: {compare(last, kind)}."
    )
    columns = [Column("update", "number"), *(Column(runs[run], kind, run) for run in curves)]
    rows = tuple((step, *(curve.get(step) for curve in curves.values())) for step in steps)
    everything: list[tuple[Cell, ...]] = [
        (source.name, row["step"], row["layer"], row[column])
        for source in sources
        for row in source.watched
    ]
    heads = (Column("run"), Column("update", "number"), Column("layer"), Column(column, kind))
    return Figure(
        key, title, caption, (Panel("", line_chart(label, series, runs, x, y)),),
        Table(tuple(columns), rows), Table(heads, tuple(everything)),
    )  # fmt: skip


def _curve(source: Source, column: str) -> Curve:
    """Mean over the layers that have a value."""
    found: dict[int, list[float]] = {}
    for row in source.watched:
        if row[column] is not None:
            found.setdefault(row["step"], []).append(row[column])
    return {step: fmean(values) for step, values in sorted(found.items())}
