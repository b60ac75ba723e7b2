"""The driver: what it starts, in which order, what it says, and what happens when it is stopped."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from experiments import costs, tables
from experiments.__main__ import main as driver
from experiments.__main__ import parse as parse_driver
from experiments.catalogue import RESULTS
from experiments.lasting_result import cases_of
from experiments.launching import Command
from experiments.runs import DetectorRun, Run, runs
from experiments.scheduling import Schedule, Settings, last_words, state

import cenet
from _experiments import EVERY, ROOT, Ended
from cenet.run_folder import locked


def start(*arguments):
    command = [sys.executable, "-m", "experiments", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_states(tmp_path):
    settings, run = Settings(runs=tmp_path), Run("digits_ce")
    assert state(run, settings, set()) == "missing"
    folder = tmp_path / run.name
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1}) + "\n")
    (folder / "metrics.csv").write_text("epoch\n1\n")
    assert state(run, settings, set()) == "epoch 1 of 15"
    (folder / "weights.safetensors").touch()
    assert state(run, settings, set()) == "trained"
    assert state(run, settings, {run.name}) == "finished"


def test_what_runs_lack(tmp_path):
    settings = Settings(runs=tmp_path)
    assert settings.lacks(Run("digits_ce")) is None
    assert settings.lacks(Run("vgg16_ce")) == "cifar10 (--data cifar10=FOLDER)"
    detector = DetectorRun("resnet50_ce", begins_with=Run("resnet50_ce"))
    there = Settings(data={"coco": tmp_path}, runs=tmp_path)
    assert "weights of resnet50_ce-seed0" in there.lacks(detector)
    (tmp_path / "resnet50_ce-seed0").mkdir()
    (tmp_path / "resnet50_ce-seed0" / "weights.safetensors").touch()
    assert there.lacks(detector) is None


def test_grad_cams_need_their_package(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.scheduling.find_spec", lambda name: None)
    settings = Settings(data={"imagenet": tmp_path}, runs=tmp_path)
    assert settings.lacks(Run("resnet50_se")) == "grad-cam package (pip install 'cenet[gradcam]')"
    assert settings.lacks(Run("resnet18_se")) is None


def test_costs():
    tasks = 25 * 14 * 10_000 / 67_000 + 20
    assert costs.seconds(cases_of("vgg16")[0].trials[0], []) == pytest.approx(tasks)
    digits = 25 * 14 * 1_347 / 5_000 + 20
    assert costs.seconds(cases_of("vgg6")[0].trials[0], []) == pytest.approx(digits)
    hours = costs.seconds(Run("resnet50_ce"), []) / 3600
    assert hours == pytest.approx(100 * 1_281_167 / 5_300 / 3600, rel=0.01)  # 6.7 h
    assert costs.seconds(Run("vgg16_ce"), []) == pytest.approx(
        (160 * 50_000 + 188 * 10_000) / 67_000 + 20
    )
    known = [{"recipe": "mobilenetv2_100_ce", "epochs": "150", "seconds": s} for s in ("70", "50")]
    ablation = 124 * 5_000 / (4 * 5_300)
    assert costs.seconds(Run("mobilenetv2_100_ce"), known) == pytest.approx(70 + ablation)
    watched = Run("vgg16_ce", watched=True)
    assert costs.seconds(watched, []) > 2 * costs.seconds(Run("vgg16_ce"), [])


def test_a_command_has_the_arguments_log_and_exit_code_of_a_process_of_its_own(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    for arguments, code in ((["--version"], 0), (["train", "nothing"], 1)):
        command = Command("cenet", arguments, log)
        command.wait()
        assert command.poll() == code
    lines = log.read_text().splitlines()
    assert lines[:3] == ["before", "$ python -m cenet --version", f"cenet {cenet.__version__}"]
    assert lines[-1].startswith("'nothing' is not a recipe")


def test_a_command_starts_processes_as_one_of_its_own_does(tmp_path, monkeypatch):
    """Data loaders pass their images on by fork, where that is the default."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "says.py").write_text("import multiprocessing as m; print(m.get_start_method())")
    command = Command("says", [], tmp_path / "log")
    command.wait()
    alone = subprocess.run(
        [sys.executable, tmp_path / "says.py"], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "log").read_text().partition("\n")[2] == alone.stdout


def test_a_trial_that_diverges_is_the_worst_of_all(tmp_path):
    """A run of the table that diverges is named; a trial says that its settings are no good."""
    found = {}
    schedule = Schedule(Settings(runs=tmp_path, results=tmp_path / "rows", device="cpu"), print)
    # its weights are not finite any more after an update or two
    hopeless = {"lr": 1e30, "warmup_epochs": 0.0}
    for run in (*runs("digits_plain", holdout=0.1, **hopeless), *runs("digits_plain", **hopeless)):
        assert schedule.finish(lambda run=run: [run]) == []
        found[run.is_trial] = run
    assert schedule.failed == [found[False]]
    (only,) = tables.read("trials", tmp_path / "rows")
    assert (only["name"], only["epochs"], only["top1"]) == (found[True].name, "0", "0")
    assert (only["train_loss"], only["test_loss"]) == ("inf", "inf")


def test_measurements_finish_when_the_time_is_over_and_trainings_stop(tmp_path, monkeypatch):
    """The training would take an hour unless it is told to stop; the measurement takes 1 s."""
    trained, measured = Run("digits_ce", 0), Run("digits_ce", 1)
    schedule = Schedule(Settings(runs=tmp_path, results=tmp_path, minutes=0), print)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sleep_for.py").write_text("import sys, time; time.sleep(float(sys.argv[1]))")
    for run, kind, seconds in ((trained, "train", "3600"), (measured, "diagnose", "1")):
        schedule.under_way[run] = (kind, Command("sleep_for", [seconds], tmp_path / "log"))
    written = []
    monkeypatch.setattr(schedule, "_write", written.append)
    commands = {run: command for run, (_, command) in schedule.under_way.items()}
    assert schedule.finish(list) == [trained]
    assert {run: command.poll() for run, command in commands.items()} == {
        trained: -signal.SIGTERM, measured: 0
    }  # fmt: skip
    assert written == [measured]


class SharedGPU:
    """A clock, and a GPU on which runs share `speed` seconds of work for each second."""

    def __init__(self, speed):
        self.now, self.speed, self.work = 0.0, speed, {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        busy = [run for run, left in self.work.items() if left > 0]
        for run in busy:
            self.work[run] -= seconds * self.speed / len(busy)


class Working(Ended):
    """A run on it."""

    def __init__(self, gpu, run, work):
        self.gpu, self.run = gpu, run
        gpu.work[run] = work

    def poll(self):
        return 0 if self.gpu.work[self.run] <= 0 else None


@pytest.mark.parametrize(
    ("speed", "begins"),
    [
        # as fast as expected: when the first two end, 40 s are left, too few for any
        (1.0, [(0, "a"), (0, "b")]),
        # twice as fast, which is known from the first end on
        (2.0, [(0, "a"), (0, "b"), (100, "c"), (100, "d"), (100, "short")]),
        # a little faster: then the short one fits
        (1.12, [(0, "a"), (0, "b"), (179, "short")]),
        # so slow that the first two do not end in time either
        (0.5, [(0, "a"), (0, "b")]),
    ],
)
def test_runs_that_would_not_end_in_time_are_not_begun(speed, begins, tmp_path, monkeypatch):
    """Four minutes for runs of 100 s of work and one of 60 s."""
    gpu = SharedGPU(speed)
    monkeypatch.setattr("experiments.scheduling.time", gpu)
    named = {Run("digits_ce", seed): name for seed, name in enumerate("abcdef")}
    named[Run("digits_plain")] = "short"
    work = {run: 60.0 if name == "short" else 100.0 for run, name in named.items()}
    monkeypatch.setattr("experiments.scheduling.seconds", lambda run, rows: work[run])
    settings = Settings(runs=tmp_path, results=tmp_path, minutes=4, jobs=8, whole_runs=True)
    schedule = Schedule(settings, print)
    begun = []

    def begin(run):
        begun.append((round(gpu.now), named[run]))
        schedule.under_way[run] = ("train", Working(gpu, run, work[run]))

    monkeypatch.setattr(schedule, "_begin", begin)
    monkeypatch.setattr(schedule, "_diagnose", schedule._end)
    left = schedule.finish(lambda: [*named])
    assert begun == begins
    in_time = 0 if speed < 1 else len(begins)
    assert len(schedule.finished) == in_time
    assert len(left) == len(named) - in_time
    assert (gpu.now < 240) == (speed >= 1)  # it ends as soon as nothing more can be begun


def test_epochs_that_are_trained_need_no_more_time(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.scheduling.seconds", lambda run, rows: 60.0)
    run, schedule = Run("digits_ce"), Schedule(Settings(runs=tmp_path), print)
    assert schedule._work_left(run, []) == 60.0
    (tmp_path / run.name).mkdir()
    rows = [json.dumps({"epoch": epoch}) for epoch in range(1, 6)]
    (tmp_path / run.name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert schedule._work_left(run, []) == pytest.approx(60 * 10 / 15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "table9"), "table9 is none of fig1a, "),
        (("train", "--data", "cifar10"), "--data cifar10 must be SET=FOLDER with a folder that"),
        (("train", "--ablation-images", "-3"), "-3 must be a whole number or all"),
        (("train", "--ablation-images", "few"), "few must be a whole number or all"),
        (("train", "--jobs", "0"), "--jobs 0 must be at least 1"),
        (("train", "--whole-runs"), "--whole-runs needs --minutes M, in which they have to end"),
        (("train", "--task", "3/3"), "--task 3/3 must be I/N with I from 0 to N - 1"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
    with pytest.raises(SystemExit) as left:
        parse_driver()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_list_has_a_line_for_each_result(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["experiments", "list"])
    driver()
    lines = capsys.readouterr().out.splitlines()
    body = [line for line in lines if line.startswith("│")]
    assert [line.split()[1] for line in body] == [*RESULTS]
    assert max(map(len, lines)) <= columns
    assert ("Fig. 1 a: norms" in body[0]) == (columns >= 120)
    assert all("…" not in line for line in body) or columns == 120


def test_the_dry_run_lists_every_run(tmp_path, monkeypatch, capsys):
    folders = ("--results", str(tmp_path), "--runs", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["experiments", "list", "--every-run", *folders])
    driver()
    assert capsys.readouterr().out.count("missing") == len(EVERY)


SMALL = ("table_branches", "--smoke", "--device", "cpu", "--ablation-images", "20")


def trained(folder, *arguments):
    where = ("--runs", folder / "runs", "--results", folder / "rows")
    return start("train", *where, *(arguments or SMALL))  # --options takes all that follows


def measured(folder):
    """All rows but what differs from run to run."""
    found = {}
    for table in (*tables.HEADS, *tables.PARTS):
        for number, own in enumerate(tables.read(table, folder / "rows")):
            for column in ("seconds", "command"):
                own.pop(column, None)
            found[table, own["name"], number if table == "layers" else tuple(own.values())] = own
    return sorted(map(str, found.values()))


@pytest.mark.slow
def test_two_jobs_give_the_rows_of_one_and_nothing_is_trained_twice(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, jobs in ((one, "1"), (two, "2")):
        done = trained(folder, *SMALL, "--jobs", jobs)
        assert done.returncode == 0, done.stdout + done.stderr
    assert measured(one) == measured(two)
    with (one / "rows" / "runs.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    again = trained(one)
    assert again.stdout == ""
    built = start("build", "table_branches", "--smoke", "--results", one / "rows", "--out", one)
    assert built.returncode == 0, built.stderr
    assert "Smoke test" in (one / "table_branches.md").read_text()


@pytest.mark.slow
def test_a_killed_driver_goes_on(tmp_path):
    first = trained(tmp_path, *SMALL, "--minutes", "0.2")
    assert "not finished" in first.stdout
    done = trained(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(tables.names(tmp_path / "rows")) == 4


@pytest.mark.slow
def test_a_driver_that_gets_a_signal_stops_its_runs(tmp_path):
    """Else they would go on alone, and the same command would find their folders locked."""
    where = ("--runs", tmp_path / "runs", "--results", tmp_path / "rows")
    command = [sys.executable, "-m", "experiments", "train", *where, *SMALL, "--options",
               "--epochs", "500"]  # fmt: skip
    process = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    found: list[Path] = []
    while not found and time.monotonic() < end:  # until an epoch is trained
        time.sleep(0.2)
        found = [path for path in tmp_path.glob("runs/*/metrics.jsonl") if path.stat().st_size]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    with locked(found[0].parent):  # nobody else holds it
        assert [*found[0].parent.glob("step-*.safetensors")]


@pytest.mark.slow
def test_two_processes_train_and_write_once(tmp_path):
    done = trained(tmp_path, *SMALL, "--seeds", "1", "--processes", "2", "--task", "0/4")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tables.read("runs", tmp_path / "rows")
    folder = tmp_path / "runs" / found["name"]
    assert json.loads((folder / "run.json").read_text())["environment"]["processes"] == 2


TRACEBACK = """$ python -m cenet.cli train r
Traceback (most recent call last):
  File "a.py", line 1, in <module>
torch.AcceleratorError: CUDA error: out of memory
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (TRACEBACK, "torch.AcceleratorError: CUDA error: out of memory"),
        (TRACEBACK + "$ python -m cenet.cli diagnose r\nno such folder\n", "no such folder"),
        ("Error importing a: none\n│ lr=-1 is low │\n│ For full helptext\n", "lr=-1 is low"),
        ("$ python -m cenet.cli train r\n", "it said nothing"),
        ("", "it said nothing"),
    ],
)
def test_the_words_of_a_failed_run_are_those_that_say_why(log, words, tmp_path):
    (tmp_path / "r.log").write_text(log)
    assert last_words(tmp_path / "r.log") == words


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path):
    done = trained(tmp_path, *SMALL, "--task", "0/4", "--options", "--lr", "-1")
    assert done.returncode == 1
    assert "failed: Error parsing recipe: lr=-1.0 must be at least" in done.stdout
    assert not tables.names(tmp_path / "rows")
