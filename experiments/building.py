"""Writes tables and figures from the rows into the pages that show them."""

import re
from os.path import relpath
from pathlib import Path

from experiments.result import Built, Result, Rows

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", DOCS / "results.md", DOCS / "guide.md", DOCS / "finetuning.md")
FIGURES = Path("docs/figures/results")
BLOCK = re.compile(r"(<!-- result: (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def markdown(table: list[dict[str, str]]) -> str:
    """A table of cells."""
    head = list(dict.fromkeys(column for row in table for column in row))
    lines = [
        head,
        ["---"] * len(head),
        *([row.get(column, "") for column in head] for row in table),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def built(results: dict[str, Result], rows: Rows) -> dict[str, Built]:
    """Results by name."""
    return {name: result.build(rows) for name, result in results.items()}


def write(made: dict[str, Built], out: Path, *, smoke: bool = False) -> list[Path]:
    """Write the figures, and of a smoke test the tables, below a folder; what was written."""
    from experiments.drawing import save

    written = []
    for name, result in made.items():
        if result.figure is not None:
            written.append(out / FIGURES / f"{name}.svg")
            save(result.figure, written[-1], smoke=smoke)
        if smoke:
            written.append(out / f"{name}.md")
            written[-1].write_text(f"Smoke test: digits, one epoch.\n\n{markdown(result.table)}\n")
    return written


def page_built(page: Path, text: str, made: dict[str, Built]) -> str:
    """The text of one of `PAGES` with its results."""
    return page_with(text, made, relpath(ROOT / FIGURES, page.parent))


def page_with(text: str, made: dict[str, Built], figures: str = "figures/results") -> str:
    """A page whose blocks hold the results: <!-- result: NAME --> … <!-- end of NAME -->.

    Args:
        text: of the page.
        made: results by name; blocks of others stay as they are.
        figures: folder of the figures, as seen from the page.
    """

    def block(found: re.Match[str]) -> str:
        start, name, end = found.groups()
        if name not in made:
            return found.group()
        picture = ""
        if made[name].figure is not None:
            picture = f"\n![{name}]({figures}/{name}.svg)\n"
        return f"{start}{_shown(name, made[name].table)}\n{picture}{end}"

    return BLOCK.sub(block, text)


def _shown(name: str, table: list[dict[str, str]]) -> str:
    """The table, or a line if it has no number, not even of the paper."""
    has_numbers = any("not run" not in row.values() for row in table)
    if has_numbers or any("paper" in column for row in table for column in row):
        return markdown(table)
    return f"Not run yet; `python -m experiments list {name}` says what it takes."
