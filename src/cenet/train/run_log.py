"""The log of a run: run.json with recipe and environment, and tables of metrics and channels."""

import csv
import io
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from cenet.analysis.monitor import FIELDS, Values
from cenet.data.datasets import InputSpec
from cenet.files import harmless, open_to_append, read_json, replace_file
from cenet.run_folder import ABOUT, CHANNELS, METRICS, METRICS_CSV, read_metrics
from cenet.train.recipes import TrainingRecipe

# columns that differ between two runs of the same recipe
TIMES = ("seconds", "images_per_second")


class RunLog:
    """Rows of metrics, one per epoch, in JSON lines, CSV and (if installed) TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Read the rows of an earlier start of the run."""
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
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
            recipe, inputs, environment, tested_on: as their names say, for run.json.
            after: number of finished epochs; rows of later epochs are removed.
            updates: number of finished updates; later rows of channels.csv are removed.
        """
        self.rows = [row for row in self.rows if row["epoch"] <= after]
        self._forget_channels(updates)
        path = self.folder / ABOUT
        about: dict[str, Any] = {
            "command": recipe.command,
            "recipe": recipe.as_dict(),
            "tested_on": tested_on,
            "inputs": inputs.as_dict(),
            "environment": environment,
        }
        if updates:  # keep what the first start of the run wrote
            with suppress(ValueError, KeyError, TypeError):
                before = read_json(path)
                about["environment"] = before["environment"]
                about["resumed"] = [*before.get("resumed", []), environment]
                about["times"] = list(before.get("times", []))
        self._about = about
        self._write_about()
        self._write()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=after + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Add the row of an epoch."""
        self.rows.append(row)
        self._write()
        if self._tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, float) and name != "epoch":
                    self._tensorboard.add_scalar(name, value, row["epoch"])
            self._tensorboard.flush()

    def add_channels(self, updates: int, values: Values) -> None:
        """Add the measurements of the monitor after this many updates."""
        path = self.folder / CHANNELS
        is_new = not path.exists()
        with open_to_append(path) as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(
                {"step": updates, "layer": harmless(name), **values[name]} for name in values
            )

    def _forget_channels(self, updates: int) -> None:
        path = self.folder / CHANNELS
        if not path.is_file():
            return
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            # of other versions; `add_channels` writes no cells for those that it does not know
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
        """Close the files of TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_about(self) -> None:
        replace_file(self.folder / ABOUT, (json.dumps(self._about, indent=2) + "\n").encode())

    def _write(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        replace_file(self.folder / METRICS, lines.encode())
        table = io.StringIO()
        if self.rows:
            # rows of other versions, or edited ones, have other columns
            columns = dict.fromkeys(name for row in self.rows for name in row)
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow([harmless(name) for name in columns])
            writer.writerows([harmless(row.get(name)) for name in columns] for row in self.rows)
        replace_file(self.folder / METRICS_CSV, table.getvalue().encode())


def _step(row: dict[str, Any], path: Path) -> float:
    """The update of a row of channels.csv; that of a row whose writing was cut off is infinite."""
    if any(name in row and row[name] is None for name in FIELDS):
        return math.inf
    try:
        return int(row["step"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not of `cenet train --monitor-every`: {error!r}") from error
