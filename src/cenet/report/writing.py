"""The page put together, drawn and written."""

import csv
import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import cenet.report.channels as channels
import cenet.report.layers as layers
import cenet.report.tables as tables
from cenet import __version__
from cenet.analysis.diagnosis import Diagnosis
from cenet.report.charts import MARKS, STYLE, standalone
from cenet.report.colours import DARK, LIGHT
from cenet.report.curves import training_figures, watched_figures
from cenet.report.parts import Cell, Figure, Page, Section, Table
from cenet.report.sources import (
    DIAGNOSIS,
    Source,
    from_diagnosis,
    printable,
    read_diagnosis,
    read_sources,
)
from cenet.report.words import count, show
from cenet.train.saving import replace_file

THEME = """const root = document.documentElement, button = document.getElementById("theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const tell = () => button.setAttribute("aria-pressed", dark());
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; tell(); });
button.hidden = false; tell();"""
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would run


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
        title: of the page; by default the name of the run, or how many there are.
        lead: paragraphs of plain text under the title.

    Returns:
        The page.

    Raises:
        ValueError: a source cannot be read, or `out` does not end in .html.
    """
    target = _target(out)
    found = read_sources([s if isinstance(s, Diagnosis) else Path(s) for s in sources])
    return _write(build_page(found, title=title, lead=lead), target)


def write_diagnosis_page(
    diagnosis: Diagnosis | Mapping[str, Any] | Path | str, out_path: Path | str
) -> Path:
    """Write a page from one diagnosis: itself, its content, or the path of its file or folder.

    Raises:
        ValueError: as `write_page`.
    """
    target = _target(out_path)
    if isinstance(diagnosis, Diagnosis):
        source = from_diagnosis(diagnosis.as_dict())
    elif isinstance(diagnosis, Mapping):
        source = from_diagnosis(dict(diagnosis))
    else:
        path = Path(diagnosis)
        source = from_diagnosis(read_diagnosis(path / DIAGNOSIS if path.is_dir() else path))
    return _write(build_page([source]), target)


def build_page(
    sources: Sequence[Source], *, title: str | None = None, lead: Sequence[str] = ()
) -> Page:
    """Everything that can be said about the sources; sections without numbers are left out."""
    drawn = [
        ("channels", "What channels do", (
            layers.inhibited_figure, channels.strength_figure, layers.gamma_figure,
            layers.correlation_figure, channels.matrix_figure,
        )),
        ("ablation", "What can be lost", (channels.ablation_figure, channels.importance_figure)),
        ("equilibrium", "Inside CE", (layers.lambda_figure, layers.spectrum_figure)),
        ("maps", "Where layers respond", (channels.map_figure,)),
    ]  # fmt: skip
    sections = [Section("training", "Training", tuple(training_figures(sources)))]
    sections.append(Section("watched", "While it trained", tuple(watched_figures(sources))))
    for key, heading, makers in drawn:
        figures = (make(sources) for make in makers)
        sections.append(Section(key, heading, tuple(figure for figure in figures if figure)))
    sections += [
        Section(
            "gradcam", "Where the network looks", pictures=tables.pictures(sources), words=LOOKS
        ),
        Section("layers", "Layers", tables=tables.layer_tables(sources)),
        _listed("skipped", "Skipped files", tables.skipped_table(sources), SKIPPED),
        _listed("recipe", "Recipe", tables.differing(sources, "recipe"), DIFFER),
        _listed("environment", "Environment", tables.differing(sources, "environment"), DIFFER),
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
        tables.notes(sources),
    )


LOOKS = "Grad-CAM: where the colour is strong, the image speaks for the predicted class."
SKIPPED = "These files could not be read as images and are not in any number above."
DIFFER = "Rows that differ between runs come first and are marked."


def render(page: Page, files: str) -> str:
    """The page as HTML.

    Args:
        page: what it says.
        files: name of the folder of its figures.
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
        version=__version__,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def table_csv(table: Table) -> str:
    """A table as CSV, with numbers as they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_harmless(column.name) for column in table.columns])
    writer.writerows([_harmless(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def _harmless(cell: Cell) -> Cell:
    """Text that a spreadsheet takes for text."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def _target(out: Path | str) -> Path:
    path = Path(out)
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"the page {path} must be a file that ends in .html")
    return path


def _write(page: Page, path: Path) -> Path:
    """Figures first: a page that is there is whole."""
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    for section in page.sections:
        for figure in section.figures:
            for name, content in _files(figure):
                replace_file(folder / name, content.encode())
    replace_file(path, render(page, folder.name).encode())
    return path


def _files(figure: Figure) -> list[tuple[str, str]]:
    found = [(f"{figure.key}.csv", table_csv(figure.numbers or figure.table))]
    for number, panel in enumerate(figure.panels, start=1):
        name = figure.key if len(figure.panels) == 1 else f"{figure.key}-{number}"
        found.append((f"{name}.svg", standalone(panel.svg)))
    return found


def _breakable(name: str) -> Markup:
    """A name that may go on in the next line after an underscore."""
    return Markup("_<wbr>").join(name.split("_"))


def _listed(key: str, title: str, table: Table | None, words: str) -> Section:
    if table is None:
        return Section(key, title)
    return Section(
        key, title, tables=(table,), words=words if table.marked or key == "skipped" else ""
    )


def _about(source: Source) -> str:
    """What it is, how long it was trained and on how many images it was measured."""
    data, model = source.part("data") or {}, source.part("model")
    said = []
    if source.recipe:
        said.append(f"{source.recipe.get('network')} ({source.recipe.get('block')})")
    elif model:
        said.append(str(model["name"]))
    if source.metrics:
        said.append(f"{count(len(source.metrics), 'epoch')} of training")
    if data.get("images"):
        said.append(f"measured on {count(data['images'], 'image')}")
    return ", ".join(said)
