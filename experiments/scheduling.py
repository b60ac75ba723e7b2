"""Schedules runs on one device: each is `cenet train`, then `cenet diagnose`, then its rows."""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from cenet.analysis.diagnosis import FILE
from cenet.run_folder import METRICS, WEIGHTS, read_metrics
from cenet.train.nonfinite import DIVERGED
from experiments.collecting import collect, parts_of
from experiments.costs import seconds
from experiments.launching import BEGINNING, Command
from experiments.runs import Run
from experiments.tables import RESULTS, Row, add, names, read

EMBEDDED = ("digits", "shapes")
RAISED = re.compile(r"[\w.]*(Error|Exception)(: |$)")
BATCH = 250  # of a diagnosis
SMALL = 64  # height of images that are all ablated
LARGE_IMAGES = 5000  # that are ablated of larger ones


@dataclass(frozen=True)
class Settings:
    """Where and how runs are trained; nothing of it moves a number by more than rounding.

    Attributes:
        data: folder of each data set.
        runs: folder of the runs' folders.
        results: folder of the rows.
        options: of `cenet train`, as it takes them.
        jobs: runs at a time.
        processes: of each run; more than one are started by torchrun.
        minutes: after so long, trainings save and stop, and measurements finish.
        whole_runs: begin only runs that are expected to end within these minutes.
        ablation_images: of the diagnosis, or "all"; None: see `ablated`.
        device: of all runs.
        commit: of the code, where git is not at hand.
    """

    data: dict[str, Path] = field(default_factory=dict)
    runs: Path = Path("experiments/out/runs")
    results: Path = RESULTS
    options: tuple[str, ...] = ()
    jobs: int = 1
    processes: int = 1
    minutes: float = float("inf")
    whole_runs: bool = False
    ablation_images: int | Literal["all"] | None = None
    device: str = "auto"
    commit: str = ""

    @cached_property
    def on_gpu(self) -> bool:
        """Whether runs are."""
        return self.device != "cpu" and torch.cuda.is_available()

    def folder(self, run: Run) -> Path:
        """Of a run."""
        return self.runs / run.name

    def lacks(self, run: Run) -> str | None:
        """What a run cannot begin without; None if it can."""
        dataset = run.dataset
        if dataset not in EMBEDDED and dataset not in self.data:
            return f"{dataset} (--data {dataset}=FOLDER)"
        if "cams" in parts_of(run) and find_spec("pytorch_grad_cam") is None:
            return "grad-cam package (pip install 'cenet[gradcam]')"
        first = run.begins_with
        if first is not None and not self.has_weights(first):
            return f"file of the weights of {first.name} ({self._weights(first)})"
        return None

    def has_weights(self, run: Run) -> bool:
        """Whether another run can begin with its weights."""
        return self._weights(run).is_file()

    def _weights(self, run: Run) -> Path:
        return self.folder(run) / WEIGHTS

    def training(self, run: Run) -> list[str]:
        """The command that trains a run, or goes on with it."""
        command = [*run.arguments, *self._data(run), "--device", self.device]
        command += ["--out", str(self.folder(run)), *run.options(on_gpu=self.on_gpu)]
        if run.begins_with is not None:
            command += [run.weights_option, str(self._weights(run.begins_with))]
        return [*command, *(self.options if run.module == "cenet" else ())]

    def diagnosing(self, run: Run) -> list[str]:
        """The command that measures a finished run."""
        command = ["diagnose", str(self.folder(run)), "--batch", str(BATCH), *self._data(run)]
        chosen = self.ablation_images
        command += ["--ablation-images", str(ablated(run) if chosen is None else chosen)]
        return [*command, "--device", self.device]

    def _data(self, run: Run) -> list[str]:
        place = self.data.get(run.dataset)
        return [] if place is None else ["--data", str(place)]


def ablated(run: Run) -> int | Literal["all"]:
    """Images of the ablation of a run: none if no result shows it, all of a set of small images."""
    if "ablation" not in parts_of(run):
        return 0
    return "all" if run.made.image_size <= SMALL else LARGE_IMAGES


def state(run: Run, settings: Settings, known: set[str]) -> str:
    """One of: finished, trained, epoch 3 of 24, missing."""
    folder = settings.folder(run)
    if run.name in known:
        return "finished"
    if (folder / run.finished_by).is_file():
        return "trained"
    if (folder / METRICS).is_file():
        return f"epoch {len(read_metrics(folder / METRICS))} of {run.epochs}"
    return "missing"


def last_words(log: Path) -> str:
    """The line that says why the last command of a log failed.

    That is the exception, which more lines can follow (CUDA's advice does), or else the last line,
    without the frame that tyro draws around it.
    """
    text = "\n" + log.read_text(errors="replace")
    own = text.rpartition(f"\n{BEGINNING}")[2].splitlines()[1:]
    lines = [line.strip("╭─╮│╰╯ ") for line in own]
    said = [line for line in lines if line and not line.startswith("For full helptext")]
    raised = [line for line in said if RAISED.match(line)]
    return (raised or said or ["it said nothing"])[-1]


class Schedule:
    """Runs that are under way."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        """Nothing is yet."""
        self.settings, self.say = settings, say
        self.under_way: dict[Run, tuple[str, Command]] = {}
        self.finished: list[Run] = []
        self.failed: list[Run] = []
        self.begin = self.end = 0.0  # of `finish`, by the monotonic clock

    def finish(self, todo: Callable[[], list[Run]]) -> list[Run]:
        """Train and measure all that there is to do; what was left when the time was over.

        A run that was interrupted goes on.

        Args:
            todo: the runs that are missing, and those that are trained again for their weights;
                asked again whenever a run is finished, which may choose others.
        """
        self.begin = time.monotonic()
        self.end = self.begin + 60 * self.settings.minutes
        waiting = self._waiting(todo())
        try:
            while (waiting or self.under_way) and time.monotonic() < self.end:
                before = len(self.finished)
                while self._count("train") < self.settings.jobs:
                    if (run := self._next(waiting)) is None:
                        break
                    waiting.remove(run)
                    self._begin(run)
                if not self.under_way and len(self.finished) == before:
                    break  # no run that waits would end in time
                time.sleep(0.2)
                for run in [*self.under_way]:
                    self._look_at(run)
                if len(self.finished) > before:
                    waiting = self._waiting(todo())
            self._wind_down()
        finally:
            self._terminate(("train", "diagnose"))
        return [*self.under_way, *waiting]

    def _waiting(self, todo: list[Run]) -> list[Run]:
        """Those that this schedule has not begun."""
        begun = {*self.finished, *self.failed, *self.under_way}
        return [run for run in todo if run not in begun]

    def _next(self, waiting: list[Run]) -> Run | None:
        """The first run that waits; the first that is expected to end in time, if asked for."""
        if not self.settings.whole_runs:
            return waiting[0] if waiting else None
        rows = read("runs", self.settings.results)
        room = self._speed(rows) * (self.end - time.monotonic())
        room -= sum(self._work_left(run, rows) for run in self.under_way)
        return next((run for run in waiting if self._work_left(run, rows) <= room), None)

    def _work_left(self, run: Run, rows: list[Row]) -> float:
        """Seconds that the rest of a run takes on a GPU of its own, by `costs.seconds`."""
        return seconds(run, rows) * (1 - self._share_trained(run))

    def _share_trained(self, run: Run) -> float:
        path = self.settings.folder(run) / METRICS
        return len(read_metrics(path)) / run.epochs if path.is_file() else 0.0

    def _speed(self, rows: list[Row]) -> float:
        """Such seconds of work that are done in a second of time, all runs together.

        It is known as soon as a run has finished, and taken to be one before.
        """
        if not self.finished:
            return 1.0
        done = sum(seconds(run, rows) for run in self.finished)
        done += sum(seconds(run, rows) * self._share_trained(run) for run in self.under_way)
        return done / (time.monotonic() - self.begin)

    def _count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.under_way.values())

    def _begin(self, run: Run) -> None:
        if (self.settings.folder(run) / run.finished_by).is_file():
            self._diagnose(run)
            return
        self.settings.folder(run).parent.mkdir(parents=True, exist_ok=True)
        processes = self.settings.processes if run.module == "cenet" else 1
        self._start(run, "train", [run.module, *self.settings.training(run)], processes)

    def _diagnose(self, run: Run) -> None:
        if run.name in names(self.settings.results):  # trained again, for its weights
            self._end(run)
        elif not run.is_diagnosed or (self.settings.folder(run) / FILE).is_file():
            self._write(run)
        else:
            self._start(run, "diagnose", ["cenet", *self.settings.diagnosing(run)], 1)

    def _start(self, run: Run, kind: str, command: list[str], processes: int) -> None:
        self.say(" ".join(command))
        if processes > 1:
            launcher = ["--standalone", "--nproc-per-node", str(processes), "-m"]
            command = ["torch.distributed.run", *launcher, *command]
        module, *arguments = command
        self.under_way[run] = (kind, Command(module, arguments, self._log(run)))

    def _log(self, run: Run) -> Path:
        return self.settings.runs / f"{run.name}.log"

    def _look_at(self, run: Run) -> None:
        kind, process = self.under_way[run]
        code = process.poll()
        if code is None:
            return
        del self.under_way[run]
        if code == DIVERGED and run.is_trial:
            self._write(run)  # a bad setting, which is good to know
        elif code != 0:
            self.failed.append(run)
            self.say(f"{run.name} failed: {last_words(self._log(run))} (see {self._log(run)})")
        elif kind == "train":
            self._diagnose(run)
        else:
            self._write(run)

    def _write(self, run: Run) -> None:
        command = " ".join([run.module, *self.settings.training(run)])
        try:
            found = collect(run, self.settings.folder(run), command, self.settings.commit)
        except ValueError as error:
            self.failed.append(run)
            self.say(f"{run.name} failed: {error}")
            return
        add(found, self.settings.results)
        self._end(run)

    def _end(self, run: Run) -> None:
        self.finished.append(run)
        self.say(f"{run.name} is finished")

    def _wind_down(self) -> None:
        """Have runs that train save and stop; let those that are measured get their rows.

        A measurement takes seconds to minutes, and one that is stopped has to begin anew.
        """
        self._terminate(("train",))
        while measured := [run for run, (kind, _) in self.under_way.items() if kind == "diagnose"]:
            time.sleep(0.2)
            for run in measured:
                self._look_at(run)

    def _terminate(self, kinds: tuple[str, ...]) -> None:
        processes = [process for kind, process in self.under_way.values() if kind in kinds]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
