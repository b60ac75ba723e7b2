"""Build and write the pages of `cenet report` and `cenet diagnose`."""

from collections.abc import Sequence
from pathlib import Path

import cenet.report.channels as channels
import cenet.report.layers as layers
import cenet.report.tables as tables
from cenet.analysis.diagnosis import FILE, Diagnosis
from cenet.report.curves import training_figures, watched_figures
from cenet.report.elements import Page, Section
from cenet.report.formatting import count
from cenet.report.render import page_path, save_page
from cenet.report.sources import (
    Source,
    from_diagnosis,
    printable,
    read_sources,
)


def write_page(
    sources: Sequence[Path | str | Diagnosis],
    out: Path | str,
    *,
    title: str | None = None,
    lead: Sequence[str] = (),
) -> Path:
    """Write a page from runs, and its figures as SVG and CSV into `NAME_files` beside it.

    Args:
        sources: folders of `cenet train` or `cenet diagnose`, diagnosis.json files, or diagnoses.
        out: the page, NAME.html.
        title: of the page; by default the name of the run, or the number of runs.
        lead: paragraphs of plain text under the title.

    Returns:
        The page.

    Raises:
        ValueError: a source cannot be read, or `out` does not end in .html.
    """
    target = page_path(out)
    found = read_sources([s if isinstance(s, Diagnosis) else Path(s) for s in sources])
    return save_page(build_page(found, title=title, lead=lead), target)


def write_diagnosis_page(diagnosis: Diagnosis | Path | str, out_path: Path | str) -> Path:
    """Write the page of one diagnosis: itself, or the path of its file or folder.

    Raises:
        ValueError: as `write_page`.
    """
    target = page_path(out_path)
    if not isinstance(diagnosis, Diagnosis):
        path = Path(diagnosis)
        diagnosis = Diagnosis.read(path / FILE if path.is_dir() else path)
    return save_page(build_page([from_diagnosis(diagnosis)], kind="cenet diagnose"), target)


def build_page(
    sources: Sequence[Source],
    *,
    title: str | None = None,
    lead: Sequence[str] = (),
    kind: str = "cenet report",
) -> Page:
    """All sections for which the sources have numbers."""
    drawn = [
        ("channels", "What channels do", (
            layers.dormant_figure, channels.activity_figure, layers.participation_figure,
            layers.correlation_figure, channels.contribution_figure, layers.gamma_figure,
            channels.matrix_figure, layers.inhibited_figure,
        )),
        ("ablation", "What can be lost", (channels.ablation_figure, channels.importance_figure)),
        ("equilibrium", "Inside CE", (layers.lambda_figure, layers.spectrum_figure)),
        ("maps", "Where layers respond", (channels.map_figure,)),
    ]  # fmt: skip
    said = {"ablation": channels.removal_words(sources)}
    sections = [Section("training", "Training", tuple(training_figures(sources)))]
    sections.append(Section("watched", "While it trained", tuple(watched_figures(sources))))
    for key, heading, makers in drawn:
        figures = (make(sources) for make in makers)
        shown = tuple(figure for figure in figures if figure)
        sections.append(Section(key, heading, shown, words=said.get(key, "")))
    looks = tables.pictures(sources)
    sections += [
        Section("gradcam", "Where the network looks", pictures=looks, words=LOOKS if looks else ""),
        tables.layers(sources),
        tables.skipped(sources),
        tables.differing(sources, "recipe"),
        tables.differing(sources, "environment"),
    ]
    names = tuple(source.name for source in sources)
    usual = names[0] if len(names) == 1 else f"{count(len(names), 'run')} compared"
    return Page(
        usual if title is None else printable(title),
        names,
        tuple(_about(source) for source in sources),
        tables.facts(sources),
        tuple(section for section in sections if section),
        tuple(printable(paragraph) for paragraph in lead),
        verdicts=tables.verdicts(sources),
        kind=kind,
    )


LOOKS = (
    "Grad-CAM: red marks the evidence for the class that the caption names. Where prediction and "
    "label differ, it says for which of them."
)


def _about(source: Source) -> str:
    """Network, epochs of training and number of images of the diagnosis, in one line."""
    said, found = [], source.diagnosis
    if source.recipe:
        said.append(f"{source.recipe.get('network')} ({source.recipe.get('block')})")
    elif found and found.model.name != source.name:
        said.append(found.model.name)
    if source.metrics:
        said.append(f"{count(len(source.metrics), 'epoch')} of training")
        if source.recipe and source.recipe.get("holdout"):
            said.append("tested on held-out training images")
    if found:
        said.append(f"measured on {count(found.data.images, 'image')}")
    return ", ".join(said)
