"""The log of a run: run.json with recipe and environment, and tables of metrics and channels."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from cenet.analysis.monitor import FIELDS, Values
from cenet.data.datasets import InputSpec
from cenet.files import append, harmless, make_folder, read_json, replace_file, replace_files
from cenet.run_folder import ABOUT, CHANNELS, METRICS, METRICS_CSV, read_metrics
from cenet.train.options import Service
from cenet.train.recipes import TrainingRecipe

# columns that differ between two runs of the same recipe
TIMES = ("seconds", "images_per_second")
# entries of run.json that a resumed run keeps, and their types
EARLIER = {"environment": dict, "resumed": list, "times": list, "tracked": dict}


class RunLog:
    """Rows of metrics, one per epoch, in JSON lines, CSV and (if installed) TensorBoard.

    With `service`, they are also sent to Weights & Biases or MLflow.
    """

    def __init__(self, folder: Path, service: Service | None = None) -> None:
        """Read the rows of an earlier start of the run."""
        self.folder, self.service = folder, service
        self._tracker: Any = None
        self.rows: list[dict[str, Any]] = []
        # texts of the rows that were written, for both files
        self._lines: list[str] = []
        self._table: list[str] = []
        self._columns: list[str] = []
        self._about: dict[str, Any] = {}
        self._tensorboard: Any = None
        path = folder / METRICS
        if path.is_file():
            self.rows = read_metrics(path)

    def begin(
        self,
        recipe: TrainingRecipe,
        inputs: InputSpec,
        environment: dict[str, Any],
        *,
        after: int,
        updates: int,
        tested_on: str,
    ) -> None:
        """Write run.json, and remove rows that the run will write again.

        Args:
            recipe, inputs, environment, tested_on: content of run.json.
            after: number of finished epochs; rows of later epochs are removed.
            updates: number of finished updates; later rows of channels.csv are removed.
        """
        self.rows = [row for row in self.rows if row["epoch"] <= after]
        lost = {*range(1, after + 1)} - {row["epoch"] for row in self.rows}
        if lost:
            epochs = ", ".join(map(str, sorted(lost)))
            print(f"{METRICS} has no row of epoch {epochs} (cut off or removed); the run goes on")
        self._forget_channels(updates)
        path = self.folder / ABOUT
        about: dict[str, Any] = {
            "command": recipe.command,
            "recipe": recipe.as_dict(),
            "tested_on": tested_on,
            "inputs": inputs.as_dict(),
            "environment": environment,
        }
        if updates:
            about |= _kept(path, environment)
        self._about = about
        if self.service is not None:
            self._begin_tracking(self.service)
        self._write_about()
        self._write()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        events = make_folder(self.folder / "tensorboard")
        self._tensorboard = SummaryWriter(str(events), purge_step=after + 1)

    def _begin_tracking(self, service: Service) -> None:
        """Begin a run at a service, or continue that of an earlier start; keep its id."""
        from cenet.train.trackers import begin

        known = self._about.setdefault("tracked", {})
        name = self.folder.resolve().name
        self._tracker = begin(service, name, self._about["recipe"], known.get(service))
        known[service] = self._tracker.id

    def add(self, row: dict[str, Any]) -> None:
        """Add the row of an epoch."""
        self.rows.append(row)
        self._write()
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, row["epoch"])
            self._tensorboard.flush()
        if self._tracker is not None:
            try:
                self._tracker.add(numbers, row["epoch"])
            except Exception as error:  # of the service; a run must not end because of it
                print(
                    f"{self.service} failed and gets no numbers from epoch {row['epoch']} on: "
                    f"{error!r}; they are in {self.folder / METRICS}"
                )
                self._tracker = None

    def add_channels(self, updates: int, values: Values) -> None:
        """Add the measurements of the monitor after this many updates."""
        path = self.folder / CHANNELS
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        if not path.exists():
            writer.writeheader()
        writer.writerows(
            {"step": updates, "layer": harmless(name), **values[name]} for name in values
        )
        append(path, text.getvalue())

    def _forget_channels(self, updates: int) -> None:
        path = self.folder / CHANNELS
        if not path.is_file():
            return
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            # columns of other versions, for which `add_channels` writes no cells
            others = [name for name in rows.fieldnames or () if name not in FIELDS]
            kept = [row for row in rows if _step(row, path) < updates]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*FIELDS, *others], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        replace_file(path, text.getvalue().encode())

    def add_times(self, times: dict[str, Any]) -> None:
        """Add the wall time of this start of the run to run.json."""
        self._about["times"] = [*self._about.get("times", []), times]
        self._write_about()

    def end(self) -> None:
        """Close the files of TensorBoard, and the run at a service."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._tracker is not None:
            self._tracker.end()

    def _write_about(self) -> None:
        replace_file(self.folder / ABOUT, (json.dumps(self._about, indent=2) + "\n").encode())

    def _write(self) -> None:
        """Replace both files of metrics; of rows that were there before, the text is kept."""
        new = self.rows[len(self._lines) :]
        self._lines += [json.dumps(row) + "\n" for row in new]
        columns = list(dict.fromkeys([*self._columns, *(name for row in new for name in row)]))
        if columns != self._columns:  # the first rows, or those of another version
            self._columns, self._table, new = columns, [_csv_line(columns)], self.rows
        self._table += [_csv_line([row.get(name) for name in columns]) for row in new]
        lines, table = "".join(self._lines), "".join(self._table)
        replace_files(
            {self.folder / METRICS: lines.encode(), self.folder / METRICS_CSV: table.encode()}
        )


def _kept(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """Entries of run.json that earlier starts wrote, with the environment of this one added."""
    try:
        before = read_json(path)
        if not isinstance(before, dict):
            raise ValueError(f"{path} cannot be read: it is no object of JSON")
        for name, kind in EARLIER.items():
            if type(before.setdefault(name, kind())) is not kind:
                raise ValueError(f"{path} cannot be read: {name} is {before[name]!r}")
    except ValueError as error:
        print(f"{error}; it is written again, without what earlier starts of the run recorded")
        return {}
    kept = {name: before[name] for name in EARLIER}
    return kept | {
        "environment": kept["environment"] or environment,
        "resumed": [*kept["resumed"], environment],
    }


def _csv_line(cells: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(map(harmless, cells))
    return line.getvalue()


def _step(row: dict[str, Any], path: Path) -> float:
    """The update of a row of channels.csv; that of a row whose writing was cut off is infinite."""
    if any(name in row and row[name] is None for name in FIELDS):
        return math.inf
    try:
        return int(row["step"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not of `cenet train --monitor-every`: {error!r}") from error
