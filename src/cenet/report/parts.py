"""What a page is made of: plain values, no HTML."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "number", "percent"]
Cell = str | float | int | None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: in the head.
        kind: how values are shown; a percent is stored as a share of 1.
        run: the number of the run that the column is of, for its colour.
    """

    name: str
    kind: Kind = "text"
    run: int | None = None


@dataclass(frozen=True)
class Table:
    """Numbers as they were read, under columns that say how to show them.

    Attributes:
        columns: the head.
        rows: one cell per column; None for what is not known.
        title: what the table holds.
        marked: rows to stand out, by number.
        foldable: whether a reader can fold it away; a short one that says it all stands open.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    marked: frozenset[int] = frozenset()
    foldable: bool = True


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure: its name, its SVG, and the run whose panels stand together."""

    name: str
    svg: str
    run: int | None = None


@dataclass(frozen=True)
class Figure:
    """Drawings with the words and the numbers that belong to them.

    Attributes:
        key: name of its files.
        title: a noun.
        caption: what to see.
        panels: the drawings; none where words say it all.
        table: their numbers.
        numbers: all of them, for the CSV file, where the table only sums up.
        columns: drawings side by side on a wide screen; one alone fills half of it.
        maps: whether the drawings are maps, which are small; the caption stands beside them.
        scale: the colour bar of all maps, as SVG.
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
    """An image of the test set beside what the network looked at, as data URIs."""

    run: int
    image: str
    overlay: str
    words: str


@dataclass(frozen=True)
class Fact:
    """A row of the headline table.

    Attributes:
        name: what is measured.
        meaning: in a few words.
        values: one per run, ready to read.
    """

    name: str
    meaning: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    key: str
    title: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    words: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.figures or self.tables or self.pictures or self.words)

    @property
    def unpaired(self) -> frozenset[str]:
        """Keys of the narrow figures that have no narrow one beside them."""
        found: list[str] = []
        waiting = False  # whether the last one is a narrow figure that needs a neighbour
        for figure in self.figures:
            if figure.narrow and not waiting:
                found.append(figure.key)
            elif figure.narrow:
                found.pop()
            waiting = figure.narrow and not waiting
        return frozenset(found)


@dataclass(frozen=True)
class Verdict:
    """What the measurements of a run say.

    Attributes:
        run: its number.
        headline: one sentence.
        reasons: a sentence each.
        next_step: what to do.
        command: how, in a shell or in Python.
        sites: norms after which insert_ce_ would put CE.
        with_ce: layers that have CE already.
    """

    run: int
    headline: str
    reasons: tuple[str, ...] = ()
    next_step: str | None = None
    command: str | None = None
    sites: tuple[str, ...] = ()
    with_ce: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything a reader sees."""

    title: str
    runs: tuple[str, ...]
    about: tuple[str, ...]  # a line per run
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    lead: tuple[str, ...] = ()  # paragraphs under the title
    notes: tuple[str, ...] = ()  # what to know before any number
    verdicts: tuple[Verdict, ...] = ()
    kind: str = "cenet report"
