"""A diagnosis on the terminal: a table with one row per layer, findings, and the verdict."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cenet.analysis.diagnosis import Diagnosis
from cenet.diagnosing.images import NOT_AN_IMAGE

CAPTION = (
    "ch.: channels. dormant: at most 0.1 of their layer's mean activation. rare: fire in less than "
    "1 % of the images. prune: contribute next to nothing. dims: effective dimensions, the "
    "participation ratio. corr.: mean |correlation| of two channels. λ: share of decorrelation in "
    "CE. CE: in place, or a site where `insert_ce_` would put it."
)


def print_summary(diagnosis: Diagnosis, notes: Sequence[str] = ()) -> None:
    """Print the table, the findings, `notes`, and the verdict last."""
    console = Console()
    console.print(_layer_table(diagnosis))
    for line in (*findings(diagnosis), *notes):
        console.print(line, highlight=False, markup=False)
    verdict = diagnosis.verdict
    console.print()
    console.print(f"Verdict: {verdict.headline}", style="bold", highlight=False, markup=False)
    for reason in verdict.reasons:
        console.print(f"  - {reason}", highlight=False, markup=False)
    if verdict.next_step is not None:
        console.print(f"Next step: {verdict.next_step}", highlight=False, markup=False)
    if verdict.command is not None:
        console.print(f"    {verdict.command}", highlight=False, markup=False, soft_wrap=True)


def _layer_table(diagnosis: Diagnosis) -> Table:
    found = diagnosis
    height, width = found.data.size
    table = Table(
        title=escape(f"{found.model.name} on {found.data.images} images of {height}×{width}"),
        caption=CAPTION,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("layer", overflow="fold", ratio=1)
    with_ce = any(layer.has_ce for layer in found.layers)
    numbers = ["map", "ch.", "dormant", "rare", "prune", "dims", "corr.", *(["λ"] * with_ce)]
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("CE", no_wrap=True)
    for layer in found.layers:
        table.add_row(
            escape(layer.name), f"{layer.height}×{layer.width}", str(layer.channels),
            str(len(layer.dormant)), str(len(layer.rare)), str(len(layer.prunable)),
            _number(layer.participation_ratio, ".1f"), _number(layer.correlation),
            *([_number(layer.mix)] * with_ce),
            "in place" if layer.has_ce else "site" if layer.ce_site else "",
        )  # fmt: skip
    return table


def findings(diagnosis: Diagnosis) -> list[str]:
    """Accuracy, ablation, importance and skipped files, a sentence each."""
    found, lines = diagnosis, []
    if found.accuracy is not None:
        top5 = f", top-5 {found.accuracy.top5:.2%}" if found.accuracy.classes > 5 else ""
        lines.append(f"Top-1 {found.accuracy.top1:.2%}{top5}.")
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
    images = [one for one in found.data.skipped if one.reason != NOT_AN_IMAGE]
    others = len(found.data.skipped) - len(images)
    if images:
        lines.append(
            f"{len(images)} images were skipped, the first {images[0].path}: {images[0].reason}."
        )
    if others:
        lines.append(f"{others} files that are not images were skipped.")
    return lines


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"
