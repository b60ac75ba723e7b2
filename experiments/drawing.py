"""Style of the figures, their legends and files."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222", "#999999")
plt.rcParams.update(
    {
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle":
        plt.cycler(color=COLOURS), "figure.constrained_layout.use": True, "font.size": 10,
        "legend.frameon": False, "svg.hashsalt": "cenet", "svg.fonttype": "none",
    }
)  # fmt: skip


def legend(axes: Any, **options: Any) -> None:
    """Of what has a label, if anything has."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**options)


def drawn(figure: Any) -> Any:
    """The figure, or None if nothing was drawn in it."""
    if any(axes.lines or axes.patches or axes.images for axes in figure.axes):
        return figure
    plt.close(figure)
    return None


def save(figure: Any, path: Path, *, smoke: bool) -> None:
    """Write a figure, the same bytes for the same numbers; a smoke test says what it is."""
    if smoke:
        figure.text(
            0.5, 0.5, "SMOKE TEST\ndigits, one epoch", rotation=20, fontsize=26, color="#D55E00",
            alpha=0.35, ha="center", va="center",
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
