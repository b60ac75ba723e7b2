"""Draw the block diagrams of docs/paper.md: the CE block, and its place in three networks.

    python docs/figures/draw_blocks.py              # writes ce_block.svg and ce_in_networks.svg

The same version of matplotlib writes the same bytes each time.
"""

import argparse
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

Point = tuple[float, float]

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",  # the same picture whatever fonts the reader has
    "svg.hashsalt": "cenet",
}
INK = "#222222"
PLAIN = "#f2f2f2"  # parts every network has
BATCH = "#cfe3f5"  # batch decorrelation
INSTANCE = "#fbe0c3"  # instance reweighting
EQUILIBRIUM = "#d5ecd0"  # CE as a whole
RADIUS = 0.17


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty sheet measured in inches."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(axes: Axes, center: Point, text: str, color: str, size: Point = (1.5, 0.62)) -> None:
    """A labelled rectangle with round corners."""
    (x, y), (width, height) = center, size
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=shape, fc=color, ec=INK, lw=1, zorder=2)
    )
    axes.text(x, y, text, ha="center", va="center", color=INK, zorder=3, linespacing=1.35)


def operator(axes: Axes, center: Point, symbol: str) -> None:
    """A circle with a sign in it."""
    axes.add_patch(Circle(center, RADIUS, fc="white", ec=INK, lw=1, zorder=2))
    x, y = center
    half = RADIUS * 0.62
    if symbol == "dot":  # element by element
        axes.add_patch(Circle(center, 0.045, fc=INK, ec=INK, zorder=3))
        return
    lines = {
        "plus": ([(x - half, y), (x + half, y)], [(x, y - half), (x, y + half)]),
        "times": (
            [(x - half * 0.8, y - half * 0.8), (x + half * 0.8, y + half * 0.8)],
            [(x - half * 0.8, y + half * 0.8), (x + half * 0.8, y - half * 0.8)],
        ),
    }
    for line in lines[symbol]:
        axes.plot(*zip(*line, strict=True), color=INK, lw=1.2, zorder=3)


def arrow(axes: Axes, *points: Point, head: bool = True) -> None:
    """A line through the points, with a head at the last one."""
    if len(points) > 2:
        axes.plot(*zip(*points[:-1], strict=True), color=INK, lw=1.1, zorder=1)
    style = {"arrowstyle": "-|>" if head else "-", "color": INK, "lw": 1.1}
    axes.annotate(
        "",
        points[-1],
        points[-2],
        arrowprops={**style, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11},
        zorder=1,
    )


def label(axes: Axes, point: Point, text: str, **kwargs: object) -> None:
    """Free text."""
    given = {"ha": "center", "va": "center", "color": INK, "zorder": 3, **kwargs}
    axes.text(*point, text, **given)


def draw_block() -> Figure:
    """The CE block between norm and activation, in training."""
    figure, axes = canvas(11.4, 5.3)
    top, middle, bottom, low = 4.3, 2.95, 1.6, 0.55
    split, meet, gained, end = 1.95, 7.75, 8.6, 9.45

    # x -> norm -> x̃
    label(axes, (0.15, middle), "$x$")
    arrow(axes, (0.3, middle), (0.5, middle))
    box(axes, (1.05, middle), "norm\n" r"$\gamma,\ \beta$", PLAIN, (1.1, 0.7))
    arrow(axes, (1.6, middle), (split, middle), head=False)
    axes.add_patch(Circle((split, middle), 0.045, fc=INK, ec=INK, zorder=3))
    label(axes, (split + 0.3, middle + 0.2), r"$\tilde{x}$")

    # batch decorrelation
    axes.text(2.35, 4.92, "batch decorrelation (BD)", color="#1f5f99", weight="bold", va="center")
    arrow(axes, (split, middle), (split, top), (2.35, top))
    box(axes, (3.2, top), "covariance " r"$\Sigma$" "\nof the batch", BATCH, (1.7, 0.7))
    arrow(axes, (4.05, top), (4.4, top))
    box(axes, (4.95, top), r"$\Sigma\,/\,\mathrm{tr}\,\Sigma$", BATCH, (1.1, 0.7))
    arrow(axes, (5.5, top), (5.85, top))
    box(axes, (6.5, top), "3 Newton\nsteps", BATCH, (1.3, 0.7))
    arrow(axes, (7.15, top), (meet - RADIUS, top))
    label(axes, (7.36, top + 0.2), "$W$")
    operator(axes, (meet, top), "times")

    # x̃ goes to both products
    arrow(axes, (split, middle), (meet, middle), head=False)
    arrow(axes, (meet, middle), (meet, top - RADIUS))
    arrow(axes, (meet, middle), (meet, bottom + RADIUS))
    axes.add_patch(Circle((meet, middle), 0.045, fc=INK, ec=INK, zorder=3))

    # instance reweighting
    axes.text(2.35, 2.22, "instance reweighting (IR)", color="#a35a00", weight="bold", va="center")
    arrow(axes, (split, middle), (split, bottom), (2.35, bottom))
    box(
        axes,
        (3.2, bottom),
        "variances " r"$\tilde{\sigma}_n^2$" "\nof the image",
        INSTANCE,
        (1.7, 0.7),
    )
    arrow(axes, (4.05, bottom), (4.4, bottom))
    box(axes, (5.3, bottom), r"$W_1$, LN, ReLU," "\n" r"$W_2$, sigmoid", INSTANCE, (1.8, 0.7))
    arrow(axes, (6.2, bottom), (6.75 - RADIUS, bottom))
    operator(axes, (6.75, bottom), "dot")
    arrow(axes, (6.75 + RADIUS, bottom), (meet - RADIUS, bottom))
    label(axes, (7.27, bottom + 0.2), "$a_n$")
    operator(axes, (meet, bottom), "dot")
    arrow(axes, (3.2, bottom - 0.35), (3.2, low), (4.4, low))
    box(
        axes,
        (5.3, low),
        r"$s^{-1/2}$, " r"$s$" ": mean over\nimages and channels",
        INSTANCE,
        (1.8, 0.7),
    )
    arrow(axes, (6.2, low), (6.75, low), (6.75, bottom - RADIUS))

    # weighted sum, activation
    for y, weight, color in ((top, r"$\lambda$", BATCH), (bottom, r"$1-\lambda$", INSTANCE)):
        arrow(axes, (meet + RADIUS, y), (gained - 0.35, y))
        box(axes, (gained, y), weight, color, (0.7, 0.5))
        sign = 1 if y > middle else -1
        arrow(axes, (gained + 0.35, y), (end, y), (end, middle + sign * RADIUS))
    operator(axes, (end, middle), "plus")
    arrow(axes, (end + RADIUS, middle), (9.95, middle))
    label(axes, (9.76, middle + 0.2), "$p$")
    box(axes, (10.4, middle), "ReLU", PLAIN, (0.9, 0.6))
    arrow(axes, (10.85, middle), (11.1, middle))
    label(axes, (11.24, middle), "$y$")

    # legend of signs
    for y, symbol, text in (
        (0.72, "times", "matrix product over channels, at each position"),
        (0.3, "dot", "product channel by channel"),
    ):
        operator(axes, (7.35, y), symbol)
        axes.text(7.62, y, text, va="center", color=INK, fontsize=9)
    return figure


def stack(axes: Axes, x: float, top: float, rows: Sequence[tuple[str, str]], gap: float) -> float:
    """Boxes below one another, joined by arrows; returns the lower edge of the last."""
    height = 0.4
    for index, (text, color) in enumerate(rows):
        y = top - index * gap
        box(axes, (x, y), text, color, (2.0, height))
        if index:
            arrow(axes, (x, y + gap - height / 2), (x, y + height / 2))
    return top - (len(rows) - 1) * gap - height / 2


def draw_networks() -> Figure:
    """Where CE stands in a ResNet, MobileNetV2 and ShuffleNetV2 block."""
    figure, axes = canvas(11.4, 6.9)
    ce = ("CE", EQUILIBRIUM)
    conv = [(f"{size} conv, BN", PLAIN) for size in ("1×1", "3×3", "1×1")]
    first, gap = 5.55, 0.62

    def start(x: float, skip: float, title: str) -> None:
        axes.text((x + skip) / 2, 6.65, title, ha="center", va="center", weight="bold", color=INK)
        arrow(axes, (x, 6.38), (x, first + 0.2))
        axes.add_patch(Circle((x, 6.15), 0.045, fc=INK, ec=INK, zorder=3))

    # ResNet: CE after the last norm, before the addition
    x, skip, add = 2.4, 0.75, 1.55
    start(x, skip, "ResNet, bottleneck")
    rows = [conv[0], ("ReLU", PLAIN), conv[1], ("ReLU", PLAIN), conv[2], ce]
    low = stack(axes, x, first, rows, gap)
    arrow(axes, (x, low), (x, add + RADIUS))
    arrow(axes, (x, 6.15), (skip, 6.15), (skip, add), (x - RADIUS, add))
    operator(axes, (x, add), "plus")
    arrow(axes, (x, add - RADIUS), (x, 1.15))
    box(axes, (x, 0.95), "ReLU", PLAIN, (2.0, 0.4))
    arrow(axes, (x, 0.75), (x, 0.4))
    label(axes, (skip + 0.08, 3.7), "shortcut", rotation=90, ha="left", fontsize=9)

    # MobileNetV2: CE after the norm of the depthwise convolution
    x, skip, add = 6.2, 4.55, 0.95
    start(x, skip, "MobileNetV2, inverted residual")
    rows = [
        conv[0],
        ("ReLU6", PLAIN),
        ("3×3 depthwise, BN", PLAIN),
        ce,
        ("ReLU6", PLAIN),
        conv[2],
    ]
    low = stack(axes, x, first, rows, gap)
    arrow(axes, (x, low), (x, add + RADIUS))
    arrow(axes, (x, 6.15), (skip, 6.15), (skip, add), (x - RADIUS, add))
    operator(axes, (x, add), "plus")
    arrow(axes, (x, add - RADIUS), (x, 0.4))
    label(axes, (skip + 0.08, 3.7), "shortcut", rotation=90, ha="left", fontsize=9)

    # ShuffleNetV2: CE after the last norm of the branch that convolves
    x, skip = 10.0, 8.35
    axes.text((x + skip) / 2, 6.65, "ShuffleNetV2, basic unit", ha="center", va="center",
              weight="bold", color=INK)  # fmt: skip
    middle = (x + skip) / 2
    arrow(axes, (middle, 6.47), (middle, 6.33))
    box(axes, (middle, 6.13), "split channels in halves", PLAIN, (2.3, 0.4))
    rows = [
        conv[0],
        ("ReLU", PLAIN),
        ("3×3 depthwise, BN", PLAIN),
        conv[2],
        ce,
        ("ReLU", PLAIN),
    ]
    arrow(axes, (x, 5.93), (x, first + 0.2))
    low = stack(axes, x, first, rows, gap)
    arrow(axes, (x, low), (x, 1.75))
    arrow(axes, (skip, 5.93), (skip, 1.75))
    box(axes, (middle, 1.55), "concatenate", PLAIN, (2.3, 0.4))
    arrow(axes, (middle, 1.35), (middle, 1.15))
    box(axes, (middle, 0.95), "shuffle channels", PLAIN, (2.3, 0.4))
    arrow(axes, (middle, 0.75), (middle, 0.4))
    label(axes, (skip + 0.08, 3.7), "one half, unchanged", rotation=90, ha="left", fontsize=9)
    return figure


DRAWINGS = {"ce_block": draw_block, "ce_in_networks": draw_networks}


def write(folder: Path, suffix: str = "svg") -> list[Path]:
    """Draw both diagrams into the folder."""
    paths = []
    with mpl.rc_context(STYLE):
        for name, draw in DRAWINGS.items():
            path = folder / f"{name}.{suffix}"
            if suffix == "svg":
                text = StringIO()
                draw().savefig(text, format="svg", metadata={"Date": None, "Creator": None})
                # matplotlib ends lines with spaces, which a commit hook would remove
                path.write_text(
                    "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()),
                    encoding="utf-8",
                )
            else:
                draw().savefig(path)
            paths.append(path)
    return paths


def main() -> None:
    """Write both diagrams beside this file, or where --out says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in write(arguments.out, arguments.format):
        print(path)


if __name__ == "__main__":
    main()
