"""The scripts of the paper's figures and tables, on digits, and what they share."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SCRIPTS = sorted(path.stem for kind in ("fig", "table") for path in EXPERIMENTS.glob(f"{kind}*.py"))
PICTURES = {name for name in SCRIPTS if name.startswith("fig")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments")


def start(name, *arguments):
    command = [sys.executable, str(EXPERIMENTS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(name, folder):
    """Runs are shared, so a script after others trains only what is missing."""
    if name == "fig_gradcam":
        pytest.importorskip("pytorch_grad_cam")
    where = ("--runs", str(folder / "runs"), "--out", str(folder / "out"), "--device", "cpu")
    done = start(name, "--scale", "smoke", *where)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / f"{name}.svg").is_file() == (name in PICTURES)
    with (folder / "out" / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    again = start(name, "--scale", "smoke", *where)
    assert not any(line.startswith("training ") for line in again.stdout.splitlines())
    with (folder / "out" / f"{name}.csv").open(newline="") as file:
        repeated = list(csv.DictReader(file))
    if not name.startswith(("table1", "table2")):  # which time something
        assert repeated == rows


@pytest.mark.slow
def test_numbers_are_those_of_the_runs(folder):
    where = ("--runs", str(folder / "runs"), "--out", str(folder / "out"), "--device", "cpu")
    done = start("fig1a_normalizers", "--scale", "smoke", *where)
    assert done.returncode == 0, done.stderr
    with (folder / "out" / "fig1a_normalizers.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    run = folder / "runs" / "digits_ln_ce-epochs=1"
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(rows["LN+CE"]["error"]) == pytest.approx(1 - metrics["test_top1"])
    layers = json.loads((run / "diagnosis.json").read_text())["layers"][:6]
    shares = [sum(value < 1e-2 for value in layer["mean_abs"]) / layer["channels"]
              for layer in layers]  # fmt: skip
    assert float(rows["LN+CE"]["inhibited"]) == pytest.approx(sum(shares) / 6)


@pytest.mark.slow
def test_measures_over_seeds(tmp_path):
    """Two runs at a time; what has a row is not run again, and a run that fails is named."""
    given = ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--ablation-images", "20")
    short = ("--change", "epochs=1", "warmup_epochs=0", "--jobs", "2")
    arguments = ("measures", "digits_plain", "digits_ce", "--seeds", "0", "1", *given, *short)
    assert start(*arguments, "--minutes", "0").stdout.startswith(
        "not finished: digits_plain seed 0"
    )
    done = start(*arguments)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "measures.csv").open(newline="") as file:
        rows = {(row["recipe"], row["seed"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    for (recipe, seed), row in rows.items():
        folder = tmp_path / "runs" / f"{recipe}-epochs=1-warmup_epochs=0-seed{seed}"
        layers = json.loads((folder / "diagnosis.json").read_text())["layers"]
        metrics = json.loads((folder / "metrics.jsonl").read_text())
        assert float(row["top1"]) == metrics["test_top1"]
        dormant = sum(len(layer["dormant_0.1"]) for layer in layers)
        channels = sum(layer["channels"] for layer in layers)
        assert float(row["dormant"]) == pytest.approx(dormant / channels)
        assert bool(row["lambda"]) == (recipe == "digits_ce")
    assert len((tmp_path / "measures_layers.csv").read_text().splitlines()) == 1 + 4 * 6
    assert start(*arguments).stdout == ""
    failed = start("measures", "digits_plain", *given, "--change", "lr=-1")
    assert failed.returncode == 1
    assert "digits_plain-lr=-1-seed0 failed; see" in failed.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_shows(name):
    text = (EXPERIMENTS / f"{name}.py").read_text()
    page = text.split('"""')[1]
    assert f"python experiments/{name}.py --scale smoke" in page
    assert "Claim of the paper:" in page
    assert "Expected cost:" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data FOLDER is needed, or --scale smoke"),
        (("--scale", "smoke", "--data", "x"), "takes the embedded digits; leave --data away"),
        (("--scale", "smoke", "--seeds", "0"), "--seeds and --epochs must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = start("fig_curves", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
