"""Render a page as HTML, and write it with its figures as SVG and CSV."""

import csv
import io
import re
from base64 import b64encode
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cenet.files import harmless, replace_file
from cenet.report.charts import DARK, LIGHT, MARKS, STYLE, standalone
from cenet.report.elements import Figure, Page, Table
from cenet.report.formatting import show
from cenet.version import VERSION

THEME = """const root = document.documentElement, button = document.getElementById("theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const tell = () => button.setAttribute("aria-pressed", dark());
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; tell(); });
button.hidden = false; tell();"""


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


def table_csv(table: Table) -> str:
    """A table as CSV, with unformatted numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([harmless(column.name) for column in table.columns])
    writer.writerows([harmless(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def page_path(out: Path | str) -> Path:
    """The path of a page; ValueError if it does not end in .html or is a folder."""
    path = Path(out)
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"the page {path} must be a file that ends in .html")
    return path


def save_page(page: Page, path: Path) -> Path:
    """Write the figures first and then the page, so that an existing page is complete."""
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
    if figure.scale:
        found.append((f"{figure.key}-scale.svg", standalone(figure.scale)))
    return found


def _breakable(text: str) -> Markup:
    """The text with possible line breaks after underscores, hyphens and dots."""
    is_name = text[:1].isalpha()
    return Markup("<wbr>").join(re.split(r"(?<=[_.-])(?=\w)", text) if is_name else [text])
