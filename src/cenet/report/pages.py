"""Build the pages of `cenet report` and `cenet diagnose`, and write pages with their figures."""

import csv
import io
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import cenet.report.channels as channels
import cenet.report.layers as layers
import cenet.report.tables as tables
from cenet.analysis.diagnosis import FILE, Diagnosis
from cenet.files import harmless, replace_files
from cenet.formatting import count, show
from cenet.report.charts import DARK, LIGHT, MARKS, STYLE, standalone
from cenet.report.curves import training_figures, watched_figures
from cenet.report.elements import Figure, Page, Section, Table
from cenet.report.sources import Source, from_diagnosis, printable, read_sources
from cenet.version import VERSION

LOOKS = (
    "Grad-CAM: red marks the evidence for the class that the caption names. Where prediction and "
    "label differ, the caption says which of them is explained."
)
NOT_DIAGNOSED = (
    "has no diagnosis, so the page shows nothing about its channels; `cenet diagnose RUN --data "
    "FOLDER` measures them (a run on digits needs no --data)"
)
THEME = """const root = document.documentElement, button = document.getElementById("theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const tell = () => button.setAttribute("aria-pressed", dark());
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; tell(); });
button.hidden = false; tell();"""


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
        title: title of the page; by default the name of the run, or the number of runs.
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


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> tuple[Path, Path]:
    """Write diagnosis.json and diagnosis.html into a folder: either both are replaced, or none."""
    file, page = folder / FILE, page_path(folder / "diagnosis.html")
    save_page(
        build_page([from_diagnosis(diagnosis)], kind="cenet diagnose"), page,
        {file: diagnosis.as_bytes()},
    )  # fmt: skip
    return file, page


def build_page(
    sources: Sequence[Source],
    *,
    title: str | None = None,
    lead: Sequence[str] = (),
    kind: str = "cenet report",
) -> Page:
    """Build the page, with all sections for which the sources have numbers."""
    drawn = [
        ("channels", "Channels", (
            layers.dormant_figure, channels.activity_figure, layers.participation_figure,
            layers.correlation_figure, channels.contribution_figure, layers.gamma_figure,
            channels.matrix_figure, layers.inhibited_figure,
        )),
        ("ablation", "Ablation", (channels.ablation_figure, channels.importance_figure)),
        ("equilibrium", "Inside CE", (layers.lambda_figure, layers.spectrum_figure)),
        ("maps", "Magnitude maps", (channels.map_figure,)),
    ]  # fmt: skip
    said = {"ablation": channels.removal_words(sources)}
    sections = [Section("training", "Training", tuple(training_figures(sources)))]
    sections.append(Section("watched", "During training", tuple(watched_figures(sources))))
    for key, heading, makers in drawn:
        figures = (make(sources) for make in makers)
        shown = tuple(figure for figure in figures if figure)
        sections.append(Section(key, heading, shown, words=said.get(key, "")))
    looks = tables.pictures(sources)
    sections += [
        Section("gradcam", "Grad-CAM", pictures=looks, words=LOOKS if looks else ""),
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
        tuple(f"{source.name} {NOT_DIAGNOSED}." for source in sources if not source.diagnosis),
        verdicts=tables.verdicts(sources),
        kind=kind,
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


def page_path(out: Path | str) -> Path:
    """The path of a page; ValueError if it does not end in .html or is a folder."""
    path = Path(out)
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"the page {path} must be a file that ends in .html")
    return path


def save_page(page: Page, path: Path, beside: Mapping[Path, bytes] | None = None) -> Path:
    """Write a page, its figures, and other files beside it: either all are replaced, or none.

    The page comes last, so that an existing page is complete.
    """
    folder = path.with_name(f"{path.stem}_files")
    figures = [figure for section in page.sections for figure in section.figures]
    drawn = {
        folder / name: content.encode() for figure in figures for name, content in _files(figure)
    }
    replace_files({**drawn, **(beside or {}), path: render(page, folder.name).encode()})
    return path


def _files(figure: Figure) -> list[tuple[str, str]]:
    found = [(f"{figure.key}.csv", table_csv(figure.numbers or figure.table))]
    for number, panel in enumerate(figure.panels, start=1):
        name = figure.key if len(figure.panels) == 1 else f"{figure.key}-{number}"
        found.append((f"{name}.svg", standalone(panel.svg)))
    if figure.scale:
        found.append((f"{figure.key}-scale.svg", standalone(figure.scale)))
    return found


def table_csv(table: Table) -> str:
    """A table as CSV, with unformatted numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([harmless(column.name) for column in table.columns])
    writer.writerows([harmless(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def render(page: Page, files: str) -> str:
    """The page as HTML.

    Args:
        page: its content.
        files: name of the folder with its figures.
    """
    environment = Environment(
        loader=PackageLoader("cenet.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["show"] = show
    environment.filters["breakable"] = _breakable
    digest = b64encode(sha256(THEME.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        page=page,
        files=files,
        light=LIGHT,
        dark=DARK,
        chart_style=Markup(STYLE),
        marks=MARKS,
        script=Markup(THEME),
        digest=digest,
        svg=Markup,
        version=VERSION,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _breakable(text: str) -> Markup:
    """The text with possible line breaks after underscores, hyphens and dots."""
    is_name = text[:1].isalpha()
    return Markup("<wbr>").join(re.split(r"(?<=[_.-])(?=\w)", text) if is_name else [text])
