"""The elements of a page (tables, figures, sections) as plain values, without HTML."""

from dataclasses import dataclass

from cenet.analysis.diagnosis import Verdict
from cenet.formatting import Cell, Kind


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: heading of the column.
        kind: how values are formatted; a percentage is stored as a share of 1.
        run: number of the run that the column belongs to, for its colour.
    """

    name: str
    kind: Kind = "text"
    run: int | None = None


@dataclass(frozen=True)
class Table:
    """Unformatted numbers in columns.

    Attributes:
        columns: with headings and formats.
        rows: one cell per column; None for unknown values.
        title: above the table.
        marked: indices of highlighted rows.
        foldable: whether a reader can fold the table; otherwise it is always open.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    marked: frozenset[int] = frozenset()
    foldable: bool = True


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure: title, SVG, and the number of the run it is grouped with."""

    name: str
    svg: str
    run: int | None = None


@dataclass(frozen=True)
class Figure:
    """Drawings with a caption and their numbers.

    Attributes:
        key: name of its files, without the ending.
        title: above the drawings.
        caption: explanation of the drawings.
        panels: the drawings; empty if the caption says everything.
        table: numbers shown on the page.
        numbers: numbers of the CSV file, if they are more than the table.
        columns: drawings side by side on a wide screen; a single one fills half of it.
        maps: whether the drawings are small maps, with the caption beside them.
        scale: colour bar of the maps, as SVG.
    """

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    table: Table
    numbers: Table | None = None
    columns: int = 1
    maps: bool = False
    scale: str = ""

    @property
    def groups(self) -> list[tuple[int | None, list[Panel]]]:
        """The panels of each run, in the order of the runs."""
        found: dict[int | None, list[Panel]] = {}
        for panel in self.panels:
            found.setdefault(panel.run, []).append(panel)
        return list(found.items())

    @property
    def narrow(self) -> bool:
        """Whether two such figures stand side by side on a wide screen."""
        return bool(self.panels) and self.columns == 1 and not self.maps


@dataclass(frozen=True)
class Picture:
    """An image beside its Grad-CAM overlay, as data URIs, with a caption in `words`."""

    run: int
    image: str
    overlay: str
    words: str


@dataclass(frozen=True)
class Fact:
    """A row of the headline table.

    Attributes:
        name: name of the measure.
        meaning: explanation in a few words.
        values: formatted values, one per run.
    """

    name: str
    meaning: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading with text, figures, tables and pictures."""

    key: str
    title: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    words: str = ""

    def __bool__(self) -> bool:
        """Whether the section has content."""
        return bool(self.figures or self.tables or self.pictures or self.words)

    @property
    def unpaired(self) -> frozenset[str]:
        """Keys of the narrow figures that have no narrow one beside them."""
        found: list[str] = []
        waiting = False  # whether the last figure is narrow and has no neighbour yet
        for figure in self.figures:
            if figure.narrow and not waiting:
                found.append(figure.key)
            elif figure.narrow:
                found.pop()
            waiting = figure.narrow and not waiting
        return frozenset(found)


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run.

    Attributes:
        run: number of the run.
        verdict: verdict of its diagnosis.
        sites: norms after which insert_ce_ would put CE.
        with_ce: layers that have CE already.
    """

    run: int
    verdict: Verdict
    sites: tuple[str, ...] = ()
    with_ce: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    title: str
    runs: tuple[str, ...]
    about: tuple[str, ...]  # one line per run
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    lead: tuple[str, ...] = ()  # paragraphs under the title
    notes: tuple[str, ...] = ()  # warnings above everything else
    verdicts: tuple[RunVerdict, ...] = ()
    kind: str = "cenet report"
