"""A figure or table: the runs that it needs, and the function that builds it from their rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.runs import Run
from experiments.tables import RESULTS, Row, read


@dataclass(frozen=True)
class Rows:
    """What the runs have given so far.

    Attributes:
        folder: of the tables.
        smoke: the runs are those on digits that stand for the others.
    """

    folder: Path = RESULTS
    smoke: bool = False

    @cached_property
    def _tables(self) -> dict[str, dict[str, list[Row]]]:
        return {}

    def of(self, run: Run, table: str = "runs") -> list[Row]:
        """The rows of a run in a table; none if it is missing."""
        if table not in self._tables:
            found: dict[str, list[Row]] = defaultdict(list)
            for row in read(table, self.folder):
                found[row["name"]].append(row)
            self._tables[table] = found
        own = run.smoke() if self.smoke else run
        return self._tables[table].get(own.name, [])

    def values(self, runs: Sequence[Run], column: str, table: str = "runs") -> list[float]:
        """A column of the runs that are there."""
        return [float(row[column]) for run in runs for row in self.of(run, table)]


@dataclass
class Built:
    """A result: a table, and perhaps a figure.

    Attributes:
        table: cells by column, row by row.
        figure: of matplotlib; None if there is nothing to draw.
    """

    table: list[dict[str, str]]
    figure: Any = None


def _nothing(rows: Rows) -> Sequence[Run]:
    return ()


@dataclass(frozen=True)
class Result:
    """A figure or table.

    Attributes:
        name: in commands and files.
        title: what it shows.
        claim: what the paper says it shows, or the question, for those that are not the paper's.
        needs: the runs; of those that are chosen among others, the others.
        build: makes it of what is there.
        then: the runs that these rows choose; none as long as they cannot.
        later: how many runs `then` will be at least.
        parts: tables that only the runs of such results fill, because they are large (`maps`,
            `cams`) or take long to measure (`ablation`).
    """

    name: str
    title: str
    claim: str
    needs: tuple[Run, ...]
    build: Callable[[Rows], Built] = field(repr=False)
    then: Callable[[Rows], Sequence[Run]] = field(default=_nothing, repr=False)
    later: int = 0
    parts: tuple[str, ...] = ()
