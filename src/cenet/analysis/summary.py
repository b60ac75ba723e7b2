"""What a diagnosis says, on a terminal: one row per layer, and the sentences a reader needs."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cenet.analysis.diagnosis import Diagnosis


def print_summary(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> None:
    """Print the table, what to make of it, and `notes`."""
    console = Console()
    console.print(_table(diagnosis))
    for line in (*sentences(diagnosis), *notes):
        console.print(line, highlight=False, markup=False)


def _table(diagnosis: Diagnosis) -> Table:
    found = diagnosis
    height, width = found.data.size
    table = Table(
        title=escape(f"{found.model.name} on {found.data.images} images of {height}×{width}"),
        caption=f"asleep: mean |activation| below {found.threshold:g}. corr.: mean |correlation| "
        "of two channels before the activation. λ: share of decorrelation in CE. CE?: a norm that "
        "`insert_ce_` would choose.",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("layer", overflow="fold")
    for column in ("map", "channels", "asleep", "share", "corr.", "λ"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("CE?", no_wrap=True)
    for layer in found.layers:
        mark = "has CE" if layer.has_ce else "CE" if layer.ce_site else ""
        table.add_row(
            escape(layer.name), f"{layer.height}×{layer.width}", str(layer.channels),
            str(len(layer.asleep)), f"{layer.inhibited_ratio:.1%}", _number(layer.correlation),
            _number(layer.mix), mark,
        )  # fmt: skip
    return table


def sentences(diagnosis: Diagnosis) -> list[str]:
    """Which channels sleep, how redundant the rest are, how accuracy falls, where CE would go."""
    found = diagnosis
    channels = sum(layer.channels for layer in found.layers)
    asleep = sum(len(layer.asleep) for layer in found.layers)
    worst = max(found.layers, key=lambda layer: layer.inhibited_ratio)
    where = f", most in {worst.name} ({len(worst.asleep)} of {worst.channels})" if asleep else ""
    lines = [
        f"{asleep} of {channels} channels ({asleep / channels:.1%}) are asleep{where}; the first "
        f"six layers have {_share(found.first_six)} on average."
    ]
    correlations = [layer.correlation for layer in found.layers if layer.correlation is not None]
    if correlations:
        lines.append(f"Two channels of a layer correlate by {fmean(correlations):.2f} on average.")
    if found.ablation is not None:
        whole, half, most = (fmean(found.ablation.top1[place]) for place in (0, 5, 9))
        lines.append(
            f"Without half of the channels of {found.ablation.layer}, accuracy goes from "
            f"{whole:.1%} to {half:.1%}, without nine tenths to {most:.1%}."
        )
    if found.importance is not None:
        lines.append(
            f"What its channels are worth one by one has a Gini coefficient of "
            f"{found.importance.gini:.2f} (0: all alike)."
        )
    if found.accuracy is not None:
        lines.append(f"Top-1 {found.accuracy.top1:.2%}, top-5 {found.accuracy.top5:.2%}.")
    held = sum(layer.has_ce for layer in found.layers)
    lines.append(
        (f"CE is in {held} of {len(found.layers)} layers. " if held else "")
        + f"insert_ce_ would put CE behind {len(found.sites) or 'no'} norms by default."
    )
    if found.data.skipped:
        first = found.data.skipped[0]
        lines.append(
            f"{len(found.data.skipped)} files were skipped, the first {first.path}: {first.reason}."
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
