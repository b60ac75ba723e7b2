"""What a diagnosis says, on a terminal: one row per layer, the verdict, and what it rests on."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cenet.analysis.diagnosis import Diagnosis, Layer

CAPTION = (
    "dormant: channels with at most 0.1 of their layer's mean activation. rare: channels that fire "
    "in less than 1 % of the images. prunable: channels that contribute next to nothing. "
    "dimensions: in how many the channels vary (participation ratio). corr.: mean |correlation| of "
    "two channels. λ: share of decorrelation in CE. CE: in place, or a site where `insert_ce_` "
    "would put it."
)


def print_summary(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> None:
    """Print the table, other findings, `notes`, and last the verdict."""
    console = Console()
    console.print(_table(diagnosis))
    for line in (*findings(diagnosis), *notes):
        console.print(line, highlight=False, markup=False)
    verdict = diagnosis.verdict
    console.print()
    console.print(f"Verdict: {verdict.headline}", style="bold", highlight=False, markup=False)
    for reason in verdict.reasons:
        console.print(f"  - {reason}", highlight=False, markup=False)
    if verdict.next_step is not None:
        console.print(f"Next step: {verdict.next_step}", highlight=False, markup=False)


def _table(diagnosis: Diagnosis) -> Table:
    found = diagnosis
    height, width = found.data.size
    table = Table(
        title=escape(f"{found.model.name} on {found.data.images} images of {height}×{width}"),
        caption=CAPTION,
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("layer", overflow="fold")
    numbers = ("map", "channels", "dormant", "rare", "prunable", "dimensions", "corr.", "λ")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("CE", no_wrap=True)
    for layer in found.layers:
        table.add_row(
            escape(layer.name), f"{layer.height}×{layer.width}", str(layer.channels),
            _count(layer, layer.dormant), str(len(layer.rare) or ""),
            str(len(layer.prunable) or ""), _number(layer.participation_ratio, ".1f"),
            _number(layer.correlation), _number(layer.mix),
            "in place" if layer.has_ce else "site" if layer.ce_site else "",
        )  # fmt: skip
    return table


def findings(diagnosis: Diagnosis) -> list[str]:
    """Accuracy, ablation, importance and files: what the verdict does not say."""
    found, lines = diagnosis, []
    if found.accuracy is not None:
        lines.append(f"Top-1 {found.accuracy.top1:.2%}, top-5 {found.accuracy.top5:.2%}.")
    if found.ablation is not None:
        curve = found.ablation
        whole, half = fmean(curve.top1[0]), fmean(curve.top1[5])
        lines.append(
            f"Without half of the channels of {curve.layer}, top-1 goes from {whole:.1%} to "
            f"{half:.1%} (random channels) or {curve.least_important_first[5]:.1%} (the least "
            f"important ones), on {curve.images} images."
        )
    if found.importance is not None:
        one = found.importance
        lines.append(
            f"Importance is spread over the {len(one.divergence)} channels of {one.layer} with a "
            f"Gini coefficient of {one.gini:.2f} (0: all equally important)."
        )
    lines.append(
        f"Inhibited channels by the paper's absolute threshold (mean activation below "
        f"{found.threshold:g}), mean of the first six layers: {_number(found.first_six, '.1%')}. "
        "This figure depends on the scale of the layers; the others do not."
    )
    if found.data.skipped:
        first = found.data.skipped[0]
        lines.append(
            f"{len(found.data.skipped)} files were skipped, the first {first.path}: {first.reason}."
        )
    return lines


def _count(layer: Layer, channels: tuple[int, ...]) -> str:
    return f"{len(channels)} ({len(channels) / layer.channels:.0%})" if channels else ""


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"
