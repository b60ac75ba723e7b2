"""Figures of training: loss and accuracy by epoch, measures of channels by update."""

from collections.abc import Sequence
from statistics import fmean

from cenet.formatting import Cell, Kind, compare
from cenet.report.charts import Axis, Series, around, by_epoch, line_chart
from cenet.report.elements import Column, Figure, Panel, Table
from cenet.report.sources import Source

PANELS = (("training", "train"), ("test", "test"))


def training_figures(sources: Sequence[Source]) -> list[Figure]:
    """Loss and top-1 accuracy of training and test, where metrics have them."""
    found = [
        _figure(sources, "loss", "Loss", "loss", "number"),
        _figure(sources, "accuracy", "Accuracy", "top1", "percent"),
    ]
    return [figure for figure in found if figure is not None]


def _figure(
    sources: Sequence[Source], key: str, title: str, column: str, kind: Kind
) -> Figure | None:
    runs = [source.name for source in sources]
    names = [f"{short}_{column}" for _, short in PANELS]
    rows = [row for source in sources for row in source.metrics]
    values = [row[name] for row in rows for name in names if row.get(name) is not None]
    if not values:
        return None
    x = by_epoch([row["epoch"] for row in rows])
    y = around("top-1 accuracy" if kind == "percent" else "loss", values, kind)
    panels = []
    for (panel, _), name in zip(PANELS, names, strict=True):
        series = [
            Series(
                run, [row["epoch"] for row in source.metrics], [r.get(name) for r in source.metrics]
            )
            for run, source in enumerate(sources)
            if any(row.get(name) is not None for row in source.metrics)
        ]
        if series:
            label = f"{title} of {panel} by epoch; the numbers are in the table below"
            panels.append(Panel(panel, line_chart(label, series, runs, x, y)))
    return Figure(
        key, title, _caption(sources, key, names[1], kind), tuple(panels),
        _epoch_table(sources, names, kind), columns=2,
    )  # fmt: skip


def _caption(sources: Sequence[Source], key: str, name: str, kind: Kind) -> str:
    """The caption: last and best test value of each run."""
    known = {
        source.name: [row[name] for row in source.metrics if row.get(name) is not None]
        for source in sources
    }
    known = {run: values for run, values in known.items() if values}
    both = "The two panels have the same scale."
    if not known:
        return both
    pick = max if key == "accuracy" else min
    last = compare({run: values[-1] for run, values in known.items()}, kind)
    best = compare({run: pick(values) for run, values in known.items()}, kind)
    word = "highest" if key == "accuracy" else "lowest"
    return f"Test {key} after the last epoch: {last}; {word} of all epochs: {best}. {both}"


def _epoch_table(sources: Sequence[Source], names: Sequence[str], kind: Kind) -> Table:
    shown = [(run, source) for run, source in enumerate(sources) if source.metrics]
    columns = [Column("epoch", "number")]
    for run, source in shown:
        columns += [Column(f"{source.name}, {panel}", kind, run) for panel, _ in PANELS]
    by_epoch = [{row["epoch"]: row for row in source.metrics} for _, source in shown]
    epochs = sorted({epoch for rows in by_epoch for epoch in rows})
    table: list[tuple[Cell, ...]] = []
    for epoch in epochs:
        found = (rows.get(epoch, {}).get(name) for rows in by_epoch for name in names)
        table.append((epoch, *found))
    return Table(tuple(columns), tuple(table))


def watched_figures(sources: Sequence[Source]) -> list[Figure]:
    """Measures of the channels by update, of runs with `--monitor-every`."""
    found = [
        _watched(
            sources, "watched-dormant", "Dormant channels by update", "dormant_ratio",
            "Mean over layers of the share of dormant channels", "dormant channels", "percent",
        ),
        _watched(
            sources, "watched-participation", "Participation ratio by update",
            "participation_share",
            "Mean over layers of the participation ratio as a share of the channels",
            "share of the channels", "percent",
        ),
        _watched(
            sources, "watched-correlation", "Correlation by update", "correlation",
            "Mean over layers of the absolute correlation between two channels",
            "mean |correlation|", "number",
        ),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def _watched(
    sources: Sequence[Source],
    key: str,
    title: str,
    column: str,
    words: str,
    what: str,
    kind: Kind,
) -> Figure | None:
    curves = {run: _by_update(source, column) for run, source in enumerate(sources)}
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
        f"{words}, in training batches. First measurement: {compare(first, kind)}; "
        f"last: {compare(last, kind)}."
    )
    columns = [Column("update", "number"), *(Column(runs[run], kind, run) for run in curves)]
    rows = tuple((step, *(curve.get(step) for curve in curves.values())) for step in steps)
    everything: list[tuple[Cell, ...]] = [
        (source.name, row["step"], row["layer"], row[column])
        for source in sources
        for row in source.watched
    ]
    heads = (Column("run"), Column("update", "number"), Column("layer"), Column(column, kind))
    # a curve at 0 says no more than the caption
    panels = (Panel("", line_chart(label, series, runs, x, y)),) if any(values) else ()
    return Figure(
        key, title, caption, panels, Table(tuple(columns), rows), Table(heads, tuple(everything))
    )


def _by_update(source: Source, column: str) -> dict[int, float]:
    """Mean over the layers that have a value."""
    found: dict[int, list[float]] = {}
    for row in source.watched:
        if row[column] is not None:
            found.setdefault(row["step"], []).append(row[column])
    return {step: fmean(values) for step, values in sorted(found.items())}
