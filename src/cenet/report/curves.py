"""How training went: loss and accuracy by epoch."""

from collections.abc import Sequence

from cenet.report.charts import Series, line_chart
from cenet.report.parts import Cell, Column, Figure, Kind, Panel, Table
from cenet.report.scales import Axis, around
from cenet.report.sources import Source
from cenet.report.words import compare

PANELS = (("training", "train"), ("test", "test"))


def training_figures(sources: Sequence[Source]) -> list[Figure]:
    """Loss and top-1 accuracy of training and test, as far as they were written down."""
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
    epochs = [row["epoch"] for row in rows]
    low, high = min(epochs), max(epochs)
    x = Axis("epoch", low, high if high > low else low + 1, whole=True)
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
        _table(sources, names, kind), columns=2,
    )  # fmt: skip


def _caption(sources: Sequence[Source], key: str, name: str, kind: Kind) -> str:
    """The last and the best value of the test."""
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


def _table(sources: Sequence[Source], names: Sequence[str], kind: Kind) -> Table:
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
