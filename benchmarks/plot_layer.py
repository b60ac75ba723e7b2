"""Time of norm + CE + ReLU over the memory floor, from the rows of bench_layer.py.

    python benchmarks/plot_layer.py benchmarks/results/layer.csv --out layer.png

There is one group per shape and one bar per provider: median time divided by the floor, with the
20th to 80th percentile as a whisker. Needs matplotlib. If a row was measured twice, the last
counts.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, str]

# provider: label, colour (Okabe and Ito's, told apart by the colour-blind too)
STYLES = {
    "bn_relu": ("BN + ReLU", "#999999"),
    "bn_relu_compiled": ("BN + ReLU, compiled", "#444444"),
    "bn_se_relu": ("BN + SE + ReLU", "#E69F00"),
    "ce_torch": ("BN + CE + ReLU, plain PyTorch", "#56B4E9"),
    "ce_torch_compiled": ("BN + CE + ReLU, plain PyTorch compiled", "#0072B2"),
    "ce": ("BN + CE + ReLU, kernels", "#D55E00"),
    "ce_compiled": ("BN + CE + ReLU, kernels compiled", "#CC79A7"),
}


def read_rows(paths: list[Path], **wanted: str) -> dict[str, dict[str, Row]]:
    """Rows by shape and provider."""
    rows: dict[str, dict[str, Row]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if all(row[column] == value for column, value in wanted.items()):
                    rows.setdefault(row["shape"], {})[row["provider"]] = row
    # without a floor there is nothing to compare with
    return {shape: by_provider for shape, by_provider in rows.items() if "copy" in by_provider}


def over_floor(row: Row, floor: Row) -> tuple[float, float, float]:
    """Median ratio, and how far the percentiles lie below and above it."""
    p20, p50, p80 = (float(row[f"ms_{p}"]) / float(floor["ms_p50"]) for p in ("p20", "p50", "p80"))
    return p50, max(0.0, p50 - p20), max(0.0, p80 - p50)


def draw(axes: Axes, rows: dict[str, dict[str, Row]]) -> None:
    present = [name for name in STYLES if any(name in group for group in rows.values())]
    width = 0.8 / len(present)
    for index, provider in enumerate(present):
        label, colour = STYLES[provider]
        for place, group in enumerate(rows.values()):
            if provider not in group:
                continue
            ratio, below, above = over_floor(group[provider], group["copy"])
            at = place + (index - (len(present) - 1) / 2) * width
            axes.bar(at, ratio, 0.9 * width, color=colour, label=label)
            axes.errorbar(at, ratio, [[below], [above]], color="black", linewidth=0.8)
            axes.annotate(
                f"{ratio:.1f}",
                (at, ratio + above),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
            label = None
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="memory floor")


def label_axes(axes: Axes, rows: dict[str, dict[str, Row]]) -> None:
    axes.set_yscale("log")
    axes.set_ylabel("time / time of the memory floor")
    axes.yaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), 1.3 * high)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick < 1.3 * high]
    axes.set_yticks(ticks)
    axes.minorticks_off()
    floors = (float(group["copy"]["ms_p50"]) for group in rows.values())
    shapes = [
        f"{shape.replace('x', '×')}\nfloor {ms:.3g} ms"
        for shape, ms in zip(rows, floors, strict=True)
    ]
    axes.set_xticks(range(len(shapes)), shapes)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small"
    )


def caption(rows: dict[str, dict[str, Row]], mode: str) -> str:
    row = next(iter(rows.values()))["copy"]
    return (
        f"{mode}, {row['dtype']}, {row['layout']}; {row['gpu']}, torch {row['torch']}, "
        f"triton {row['triton']}, cenet {row['version']} ({row['commit']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="forward+backward")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default="channels_last")
    parser.add_argument("--shapes", nargs="+", help="shapes as in the CSV file; default: all")
    parser.add_argument("--providers", nargs="+", choices=STYLES, default=list(STYLES))
    options = parser.parse_args()
    rows = read_rows(options.csv, mode=options.mode, dtype=options.dtype, layout=options.layout)
    keep = {*options.providers, "copy"}
    rows = {
        shape: {name: row for name, row in group.items() if name in keep}
        for shape, group in rows.items()
        if options.shapes is None or shape in options.shapes
    }
    if not any(len(group) > 1 for group in rows.values()):
        parser.error("no rows with a copy floor match the mode, dtype, layout and shapes")
    figure, axes = plt.subplots(figsize=(max(7.0, 2.4 * len(rows)), 4.5), layout="constrained")
    draw(axes, rows)
    label_axes(axes, rows)
    axes.set_xlabel(caption(rows, options.mode), fontsize="small")
    figure.savefig(options.out, dpi=160)


if __name__ == "__main__":
    main()
