"""The driver of the figures and tables: what it would train, what it keeps, what it builds."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from experiments import building, costs, drawing, tables, uncertainty
from experiments.__main__ import main as driver
from experiments.__main__ import parse as parse_driver
from experiments.catalogue import GRID, RESULTS
from experiments.collecting import _lambdas, collect, parts_of
from experiments.lasting import parse as parse_tasks
from experiments.lasting_result import CASES
from experiments.launching import Command
from experiments.measures_table import ABLATION, MEASURES
from experiments.result import Result, Rows
from experiments.runs import LOOK_EVERY, DetectorRun, LastingRun, Run, runs
from experiments.scheduling import Schedule, Settings, state
from experiments.selection import Grid, finals
from experiments.speed import epochs_until
from experiments.tables import names
from scipy import stats
from torch import nn

import cenet
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec
from cenet.detection.command import parse as parse_detector
from cenet.detection.recipes import RECIPES as DETECTORS
from cenet.detection.trainer import build_detector
from cenet.diagnosing.command import diagnose_named
from cenet.models.cost import PAPER_GFLOPS as NETWORKS
from cenet.run_folder import locked
from cenet.train import RECIPES
from cenet.train.command import parse
from cenet.train.job import Job, train
from cenet.train.options import Options
from cenet.train.weights import build_network, load_run, write_weights

ROOT = Path(__file__).parents[2]
EVERY = list(dict.fromkeys(run for result in RESULTS.values() for run in result.needs))


def start(*arguments):
    command = [sys.executable, "-m", "experiments", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_commands_ask_for_the_runs_of_the_paper(result, on_gpu, monkeypatch, tmp_path):
    """At the configuration users run; parsing stops before training."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    data = dict.fromkeys(("imagenet", "tinyimagenet", "cifar10", "coco", "coco128"), tmp_path)
    settings = Settings(data=data, runs=tmp_path, options=("--workers", "7"))
    for run in result.needs if on_gpu else result.needs[:1]:  # others differ as they do on a GPU
        command = settings.training(run)
        if isinstance(run, LastingRun):
            course, job = parse_tasks(command)
            assert course == run.made
            assert (job.data, job.out) == (tmp_path, tmp_path / run.name)
            continue
        if isinstance(run, DetectorRun):
            job = parse_detector(command[2:])
            assert job.checkpoint == tmp_path / run.begins_with.name / "weights.safetensors"
            assert job.options.evaluate_every == job.recipe.epochs
        else:
            job = parse(command[1:])
            assert job.options.cuda_graphs == (on_gpu and not run.watched)
            assert job.options.monitor_every == (LOOK_EVERY if run.watched else 0)
            first = run.begins_with
            assert job.weights == (first and tmp_path / first.name / "weights.safetensors")
        precision = "bfloat16" if on_gpu else "float32"
        assert job.recipe == replace(run.made, precision=precision)
        assert job.recipe.seed == run.seed
        assert (job.options.out, job.options.resume) == (tmp_path / run.name, "auto")
        assert (job.options.workers, job.options.channels_last) == (7, on_gpu)
        assert job.data == tmp_path


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_smoke_runs_are_rows_of_their_own(result):
    for run in result.needs:
        small = run.smoke()
        assert small.dataset in ("digits", "shapes")
        if isinstance(run, LastingRun):
            assert (small.made.block, small.made.norm) == (run.made.block, run.made.norm)
            assert small.epochs == 2
            continue
        assert small.epochs == 1
        if not isinstance(run, DetectorRun):
            for field in ("block", "norm", "act", "label_corruption", "holdout", "ce_start"):
                assert getattr(small.made, field) == getattr(run.made, field)
            assert small.watched == run.watched
            assert (small.begins_with is None) == (run.begins_with is None)


def test_names_tell_runs_apart():
    assert len({run.name for run in EVERY}) == len(EVERY)
    assert len({run.smoke().name for run in EVERY}) > len(EVERY) / 3
    assert runs("vgg16_ce", weight_decay=5e-4) == runs("vgg16_ce")  # its own
    (changed,) = runs("vgg16_ce", weight_decay=2e-3)
    assert changed.name == "vgg16_ce-weight_decay=0.002-seed0"


def test_fewer_epochs_move_what_happens_in_between():
    found = Run("vgg16_ce", changes=(("epochs", 16),)).made
    assert (found.epochs, found.milestones, found.warmup_epochs) == (16, (6, 12), 4.0)


def row(name, **values):
    return {"name": name, "recipe": name.rsplit("-", 1)[0], "seed": name[-1], "top1": 0.5, **values}


def test_rows_are_added_once_by_many(tmp_path):
    def write(i):
        own = row(f"a-seed{i % 5}")
        return tables.add({"runs": [own], "layers": [{"name": own["name"], "layer": 0}]}, tmp_path)

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(write, range(40))) == 5
    for table in ("runs", "layers"):
        assert [found["name"] for found in tables.read(table, tmp_path)] == [
            *dict.fromkeys(found["name"] for found in tables.read(table, tmp_path))
        ]
    assert tables.names(tmp_path) == {f"a-seed{i}" for i in range(5)}


def test_rows_of_other_columns_are_refused(tmp_path):
    tables.add({"runs": [row("a-seed0")]}, tmp_path)
    with pytest.raises(ValueError, match=r"runs\.csv has other columns .*: \['dormant'\]"):
        tables.add({"runs": [row("a-seed1", dormant=0.1)]}, tmp_path)
    assert tables.names(tmp_path) == {"a-seed0"}


def test_merging(tmp_path):
    for folder, seeds in (("here", (0, 1)), ("there", (1, 2))):
        for seed in seeds:
            own = row(f"a-seed{seed}", top1=0.25 if folder == "here" else 0.75)
            tables.add({"runs": [own], "epochs": [{"name": own["name"], "epoch": 1}]},
                       tmp_path / folder)  # fmt: skip
    assert tables.merge(tmp_path / "there", tmp_path / "here") == ["a-seed2"]
    found = {row["name"]: row["top1"] for row in tables.read("runs", tmp_path / "here")}
    assert found == {"a-seed0": "0.25", "a-seed1": "0.25", "a-seed2": "0.75"}
    assert len(tables.read("epochs", tmp_path / "here")) == 3
    assert tables.merge(tmp_path / "there", tmp_path / "here") == []
    with pytest.raises(ValueError, match=r"has none of runs\.csv, "):
        tables.merge(tmp_path, tmp_path / "here")


def test_intervals_are_those_of_a_paired_t_test():
    one, other = [90.1, 91.3, 90.4, 90.9], [90.8, 91.2, 91.1, 91.4]
    expected = stats.ttest_rel(other, one).confidence_interval(0.95)
    found = uncertainty.paired(one, other)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    text = uncertainty.difference([0.901, 0.913], [0.908, 0.912], 100, 1)
    assert text.startswith("+0.3 (−")
    assert uncertainty.difference([0.5], [0.25], 1, 2) == "−0.25"
    assert uncertainty.spread([1.0, 3.0], 100, 1, "%") == "200.0 ± 141.4 %"


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
    assert costs.seconds(CASES[0].trials[0], []) == pytest.approx(tasks)
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


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_nothing_is_built_of_nothing(result, tmp_path):
    made = result.build(Rows(tmp_path))
    assert made.figure is None
    text = building.markdown(made.table)
    assert "not run" in text
    assert "%" not in text.replace("95 %", "") or "paper" in text or "labels" in text


def filled(result: Result, folder: Path) -> None:
    """Rows of all runs of a result, with numbers that tell runs apart."""
    done = 0
    while found := [
        run for run in (*result.needs, *result.then(Rows(folder))) if run.name not in names(folder)
    ]:
        for place, run in enumerate(found, done):
            fill(run, (place + 1) / 1000, folder)
        done += len(found)
    if result.name == "main":
        for name in ("vgg16", "tiny_resnets", "tiny_small"):
            filled(RESULTS[name], folder)
    if result.name == "table_cost":
        with (folder / "inference.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["network", "block", "device", "multiply_adds", "ratio_to_plain"])
            writer.writerows(
                product(NETWORKS, ("plain", "se", "ce"), ("cpu", "cuda"), (1e9,), (1.1,))
            )


def fill(run: Run, share: float, folder: Path) -> None:
    columns = ("dormant", "inhibited", "inhibited_first_six", "dormant_first_six")
    own = {"name": run.name, "recipe": run.recipe, "top1": 0.9 - share, "top5": 0.99,
           **dict.fromkeys(columns, share)}  # fmt: skip
    name = {"name": run.name}
    if isinstance(run, LastingRun):
        tasks = [name | {"task": t, "accuracy": 0.5 + share, "dormant_ratio": share,
                         "participation_share": share} for t in range(1, 8)]  # fmt: skip
        tables.add({"lasting": [name | {"accuracy": 0.5 + share}], "tasks": tasks}, folder)
        return
    if isinstance(run, DetectorRun):
        columns = [f"{k}_ap{t}" for k in ("box", "mask") for t in ("", "50", "75")]
        losses = {"train_loss": 1 + share}
        tables.add({"detections": [own | dict.fromkeys(columns, share) | losses]}, folder)
        return
    for column in ("train_loss", "test_loss", "dormant_strict", "rare", "weak_contribution",
                   "prunable", "duplicates", "participation_share", "correlation", "gini",
                   "mean_activation", "correlation_in_groups"):  # fmt: skip
        own[column] = share
    place = round(1000 * share)
    own |= {"betas": 1000, "betas_nonpositive": 100 * place, "relu_betas": 400,
            "relu_betas_nonpositive": 99 + place}  # fmt: skip
    if not run.is_diagnosed:
        tables.add({"trials": [own]}, folder)
        return
    ratios = [i / 10 for i in range(11)]
    found = {
        "runs": [own],
        "layers": [name | {"layer": i, "title": f"l{i}", "channels": 64,
                           "correlation": share * (i + 1), "correlation_in_groups": share,
                           "participation_share": share, "lambda": i * share if i % 2 else ""}
                   for i in range(6)],
        "lambdas": [name | {"epoch": e, "layer": f"l{i}", "lambda": (i + e) / 10}
                    for e in (1, 2) for i in (1, 3, 5)],
        "epochs": [name | {"epoch": e, "train_top1": 0.2 * e, "test_top1": 0.1 * e,
                           "train_loss": 1 / e} for e in range(1, 4)],
        "ablation": [name | {"ratio": r, "random": 0.9 - r * share,
                             "least_important_first": 0.9} for r in ratios],
        "looks": [name | {"step": 400 * s, "layer": f"l{i}", "correlation": share}
                  for s in range(3) for i in range(6)],
        "maps": [name | {"layer": "f", "i": i, "j": j, "value": share + i + 2 * j}
                 for i in range(3) for j in range(4)],
        "cams": [name | {"image": k, "label": "a", "target": "a", "predicted": f"p{place - 1}",
                         "i": i, "j": j, "value": (i + j) / 2}
                 for k in range(2) for i in range(2) for j in range(2)],
    }  # fmt: skip
    tables.add(found, folder)


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_everything_is_built_of_all_runs(result, tmp_path):
    filled(result, tmp_path)
    made = result.build(Rows(tmp_path))
    text = building.markdown(made.table)
    assert "not run" not in text
    assert text.count("\n") == len(made.table) + 1
    assert "not chosen" not in text
    drawn = result.name.startswith(("fig", "measures_")) or result.name in (
        "lasting", "learning_speed", "main",
    )  # fmt: skip
    assert (made.figure is not None) == drawn
    building.write({result.name: made}, tmp_path / "one")
    again = result.build(Rows(tmp_path))
    building.write({result.name: again}, tmp_path / "two")
    pair = [sorted((tmp_path / side).rglob("*.svg")) for side in ("one", "two")]
    assert [path.read_bytes() for path in pair[0]] == [path.read_bytes() for path in pair[1]]
    assert len(pair[0]) == drawn


def test_numbers_of_a_table(tmp_path):
    result = RESULTS["table_branches"]
    filled(result, tmp_path)
    lines = result.build(Rows(tmp_path)).table
    assert [line["top-1"] for line in lines] == ["89.90 %", "89.80 %", "89.70 %", "89.60 %"]
    assert [line["difference (95 %)"] for line in lines] == ["", "−0.10", "−0.20", "−0.30"]
    assert [line["paper's top-1"] for line in lines] == ["76.6 %", "77.0 %", "77.3 %", "78.3 %"]


def test_settings_are_chosen_by_held_out_images_once_all_were_tried(tmp_path):
    recipe = "tiny_resnet18_ce"
    trials = GRID.trials(recipe)
    assert len(trials) == 6
    assert {run.made.holdout for run in trials} == {0.1}
    assert {(run.made.lr, run.made.weight_decay) for run in trials} == {
        *product((0.05, 0.1, 0.2), (1e-4, 5e-4))
    }
    assert not any(run.is_diagnosed for run in trials)
    for place, trial in enumerate(trials):
        assert finals(recipe, GRID, 5, Rows(tmp_path)) == []
        tables.add({"trials": [row(trial.name, top1=0.9 if place == 3 else 0.1 * place)]}, tmp_path)
    assert (trials[3].made.lr, trials[3].made.weight_decay) == (0.1, 5e-4)
    chosen = finals(recipe, GRID, 5, Rows(tmp_path))
    assert [run.seed for run in chosen] == [0, 1, 2, 3, 4]
    assert {(r.made.lr, r.made.weight_decay, r.made.holdout) for r in chosen} == {(0.1, 5e-4, 0.0)}
    assert all(run.is_diagnosed for run in chosen)


@pytest.mark.parametrize("values", [(0.1,), (0.2, 0.1), (0.01, 0.05, 0.1)])
def test_a_grid_has_one_ratio(values):
    """Else a step beyond its edge and back would lead elsewhere."""
    with pytest.raises(ValueError, match=r"lr: \(.*\) must ascend in one ratio"):
        Grid((("lr", values),))


def test_a_fixed_field_is_in_every_run_and_never_searched(tmp_path):
    recipe = "tiny_resnet18_bd"
    grid = Grid((("lr", (0.1, 0.2)),), fixed=(("weight_decay", 2.5e-3),))
    for trial in grid.trials(recipe):
        tables.add({"trials": [row(trial.name, top1=trial.made.lr)]}, tmp_path)
    found = grid.search(recipe, Rows(tmp_path))
    assert found.best == (("lr", 0.2), ("weight_decay", 2.5e-3))
    assert [(run.made.lr, run.made.weight_decay) for run in found.missing] == [(0.4, 2.5e-3)]
    (final,) = finals(recipe, grid, 1, Rows(tmp_path))
    assert (final.made.lr, final.made.weight_decay, final.made.holdout) == (0.2, 2.5e-3, 0.0)


def test_settings_beyond_the_grid_are_tried_as_long_as_they_are_better(tmp_path):
    """Along (lr, weight decay): the best are 0.2, 5e-4; then 0.4, 5e-4; then nothing is better."""
    recipe, line = "tiny_resnet18_ce", 2
    result = RESULTS["tiny_resnets"]
    accuracies = {(0.2, 5e-4): 0.5, (0.4, 5e-4): 0.6, (0.2, 2.5e-3): 0.55, (0.8, 5e-4): 0.59}

    def tell(runs):
        for run in runs:
            top1 = accuracies.get((run.made.lr, run.made.weight_decay), 0.1)
            tables.add({"trials": [row(run.name, top1=top1)]}, tmp_path)

    tell(GRID.trials(recipe))
    steps = ([(0.2, 2.5e-3), (0.4, 5e-4)], [(0.4, 1e-4), (0.4, 2.5e-3), (0.8, 5e-4)])
    for step in steps:
        found = result.then(Rows(tmp_path))
        assert {run.made.holdout for run in found} == {0.1}
        assert sorted((run.made.lr, run.made.weight_decay) for run in found) == step
        cells = result.build(Rows(tmp_path)).table[line]
        assert cells["learning rate"].endswith(" (search goes on)")
        tell(found)
    found = result.then(Rows(tmp_path))
    assert [(run.recipe, run.seed) for run in found] == [(recipe, seed) for seed in range(5)]
    assert {(run.made.lr, run.made.weight_decay, run.made.holdout) for run in found} == {
        (0.4, 5e-4, 0.0)
    }
    cells = result.build(Rows(tmp_path)).table[line]
    assert (cells["learning rate"], cells["weight decay"]) == ("0.4", "0.0005")


def chosen_detectors(folder):
    """Those of coco128; the best settings are 0.1, 5e-4, and nothing around them is better."""
    result, told = RESULTS["coco128"], set()
    while trials := {*result.needs, *result.then(Rows(folder))} - told:
        if not any(run.is_trial for run in trials):
            break
        for run in trials:
            best = (run.made.lr, run.made.weight_decay) == (0.1, 5e-4)
            tables.add({"trials": [row(run.name, top1=0.6 if best else 0.5)]}, folder)
        told |= trials
    assert len(told) == 2 * (6 + 1)  # the grid, and one step beyond its edge
    return [run for run in result.then(Rows(folder)) if isinstance(run, DetectorRun)]


def test_detectors_begin_with_classifiers_at_their_best_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    rows = tmp_path / "rows"
    assert not any(isinstance(run, DetectorRun) for run in RESULTS["coco128"].then(Rows(rows)))
    found = chosen_detectors(rows)
    assert [run.name for run in found] == [
        f"detect_coco128_{side}-seed{seed}" for side in ("plain", "ce") for seed in range(3)
    ]
    settings = Settings(data={"coco128": tmp_path}, runs=tmp_path / "runs")
    for run in found:
        side = run.recipe.removeprefix("coco128_")
        first = f"tiny_resnet50_{side}-seed{run.seed}"  # 0.1 and 5e-4 are the recipe's own
        job = parse_detector(settings.training(run)[2:])
        assert job.checkpoint == tmp_path / "runs" / first / "weights.safetensors"
        assert job.recipe.backbone == ("ceresnet50" if side == "ce" else "resnet50")
        assert (job.recipe.setting, job.recipe.holdout) == ("frozen", 0.25)
        assert (job.recipe.epochs, job.options.evaluate_every) == (60, 60)
        assert job.data == tmp_path
        assert not run.is_trial
        assert "weights of tiny_resnet50" in settings.lacks(run)


def test_detectors_are_compared_seed_by_seed(tmp_path):
    for run in chosen_detectors(tmp_path):
        own = {"plain": 0.01, "ce": 0.03}[run.recipe.removeprefix("coco128_")] + 0.01 * run.seed
        values = {f"{kind}_ap{level}": own for kind in ("box", "mask") for level in ("", "50")}
        tables.add({"detections": [row(run.name, **values, train_loss=2.0)]}, tmp_path)
    plain, ce = RESULTS["coco128"].build(Rows(tmp_path)).table
    assert (plain["n"], plain["AP box"], ce["AP box"]) == ("3", "2.0 ± 1.0", "4.0 ± 1.0")
    assert (plain["AP mask against the first (95 %)"], ce["training loss"]) == ("", "2.000 ± 0.000")
    assert ce["AP mask against the first (95 %)"] == "+2.0 (+2.0 to +2.0)"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["plain", "ce"])
def test_weights_of_a_tiny_imagenet_classifier_fit_the_detector(side, tmp_path):
    recipe = RECIPES[f"tiny_resnet50_{side}"]
    inputs = InputSpec(("cat", "dog"), FILES_MEAN, FILES_STD)
    network, file = build_network(recipe, inputs), tmp_path / "weights.safetensors"
    write_weights(file, network, recipe, inputs)
    found = build_detector(DETECTORS[f"coco128_{side}"], inputs, file).backbone.body.state_dict()
    last = [name for name in network.state_dict() if "layer4.2.conv3" in name]
    for name in ("conv1.weight", *last):
        assert torch.equal(found[name], network.state_dict()[name])


def test_a_classifier_whose_weights_are_gone_is_trained_again_and_not_counted_twice(
    tmp_path, monkeypatch, capsys
):
    """Its rows came from a machine that is gone; the run that begins with it is missing."""
    first = Run("digits_plain", changes=(("epochs", 1), ("warmup_epochs", 0)))
    then = replace(first, begins_with=first)
    result = Result("two", "two", "", (first, then), build=lambda rows: building.Built([]))
    monkeypatch.setitem(RESULTS, "two", result)
    tables.add({"runs": [row(first.name, top1=0.25)]}, tmp_path / "rows")
    started = []
    monkeypatch.setattr(
        "experiments.scheduling.collect",
        lambda run, *_: {"runs": [row(run.name, top1=0.75)]},
    )
    monkeypatch.setattr(Schedule, "_start", lambda self, run, kind, *_: (
        started.append((run.name, kind)), finish(self, run, kind)))  # fmt: skip

    def finish(schedule, run, kind):
        folder = schedule.settings.folder(run)
        folder.mkdir(exist_ok=True)
        (folder / ("weights.safetensors" if kind == "train" else "diagnosis.json")).touch()
        schedule.under_way[run] = (kind, Ended())

    folders = ("--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "rows"))
    arguments = ["experiments", "train", "two", "--device", "cpu", *folders]
    monkeypatch.setattr(sys, "argv", arguments)
    driver()
    assert started == [(first.name, "train"), (then.name, "train"), (then.name, "diagnose")]
    assert "left out" not in capsys.readouterr().out
    found = {own["name"]: own["top1"] for own in tables.read("runs", tmp_path / "rows")}
    assert found == {first.name: "0.25", then.name: "0.75"}


class Ended:
    """A command that has ended well."""

    def poll(self):
        return 0

    def send_signal(self, number):
        pass

    def wait(self):
        pass


def test_a_command_has_the_arguments_log_and_exit_code_of_a_process_of_its_own(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    for arguments, code in ((["--version"], 0), (["train", "nothing"], 1)):
        command = Command("cenet", arguments, log)
        command.wait()
        assert command.poll() == code
    lines = log.read_text().splitlines()
    assert lines[:2] == ["before", f"cenet {cenet.__version__}"]
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
    assert (tmp_path / "log").read_text() == alone.stdout


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
    """Both take 60 s unless they are told to stop; the measurement writes its file after 1 s."""
    trained, measured = Run("digits_ce", 0), Run("digits_ce", 1)
    schedule = Schedule(Settings(runs=tmp_path, results=tmp_path, minutes=0), print)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sleep_for.py").write_text("import sys, time; time.sleep(float(sys.argv[1]))")
    for run, kind, seconds in ((trained, "train", "60"), (measured, "diagnose", "1")):
        schedule.under_way[run] = (kind, Command("sleep_for", [seconds], tmp_path / "log"))
    written = []
    monkeypatch.setattr(schedule, "_write", written.append)
    began = time.monotonic()
    commands = {run: command for run, (_, command) in schedule.under_way.items()}
    assert schedule.finish(list) == [trained]
    assert {run: command.poll() for run, command in commands.items()} == {
        trained: -signal.SIGTERM, measured: 0
    }  # fmt: skip
    assert written == [measured]
    assert time.monotonic() - began < 30


def test_a_table_of_chosen_settings_leaves_trials_out(tmp_path):
    """Their accuracy is of other images."""
    result = RESULTS["tiny_resnets"]
    filled(result, tmp_path)
    (line, *_) = result.build(Rows(tmp_path)).table
    own = finals("tiny_resnet18_plain", GRID, 5, Rows(tmp_path))
    values = Rows(tmp_path).values(own, "top1")
    assert line["top-1"] == uncertainty.spread(values, 100, 2, "%")
    assert (line["n"], line["learning rate"], line["weight decay"]) == ("5", "0.05", "0.0001")


@pytest.mark.parametrize(
    ("values", "target", "sign", "expected"),
    [
        ((4, 2, 1), 2, 1, 2.0),
        ((4, 2, 1), 1.5, 1, 2.5),
        ((4, 2, 1), 9, 1, 1.0),
        ((4, 2, 1), 0.5, 1, None),
        ((0.1, 0.3, 0.2, 0.5), 0.25, -1, 1.75),
        ((0.1, 0.3, 0.2, 0.5), 0.6, -1, None),
    ],
)
def test_epochs_until_a_curve_is_there(values, target, sign, expected):
    found = epochs_until([{"x": str(value)} for value in values], "x", target, sign)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_learning_speed_is_against_the_plain_network_of_the_seed(tmp_path):
    result = RESULTS["learning_speed"]
    for run in result.needs:
        best = run.made.lr == 0.1  # inside the grid
        tables.add({"trials": [row(run.name, top1=0.6 if best else 0.5)]}, tmp_path)
    for run in result.then(Rows(tmp_path)):
        # twice as fast as the plain network, whose loss is 1 / epoch
        faster = 2 if run.recipe.endswith("_ce") else 1
        epochs = [{"name": run.name, "epoch": e, "train_loss": 1 / (faster * e),
                   "test_top1": min(0.1 * e, 0.3)} for e in range(1, 5)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "epochs": epochs}, tmp_path)
    lines = {line[""]: line for line in result.build(Rows(tmp_path)).table}
    loss, top1 = list(lines["CE"])[-2:]
    assert lines["plain"][loss] == "1.000 ± 0.000"
    assert lines["CE"][loss] == "0.500 ± 0.000"
    assert lines["CE"][top1] == "0.750 ± 0.000"


def test_the_rate_over_many_tasks_is_the_best_of_a_seed_that_counts_no_more(tmp_path):
    case = CASES[0]
    for place, trial in enumerate(case.trials):
        assert trial.seed == 0
        tables.add(
            {"lasting": [{"name": trial.name, "accuracy": (0.3, 0.5, 0.4)[place]}]}, tmp_path
        )
    found = case.finals(3, Rows(tmp_path))
    assert [run.seed for run in found] == [1, 2, 3]
    assert {run.made.lr for run in found} == {0.02}


def test_measures_of_several_networks_are_compared_with_the_first(tmp_path):
    """Of the seeds that all have; measures that some run has not are left out."""
    result = RESULTS["measures_resnet18"]
    for run in result.needs:
        top1 = 0.6 if (run.made.lr, run.made.weight_decay) == (0.1, 5e-4) else 0.5
        tables.add({"trials": [row(run.name, top1=top1)]}, tmp_path)
    beyond = [run for run in result.then(Rows(tmp_path)) if run.is_trial]
    for run in beyond:
        tables.add({"trials": [row(run.name, top1=0.1)]}, tmp_path)
    dormant = {"plain": (0.1, 0.2, 0.3), "se": (0.2, 0.3, 0.4), "ce": (0.4, 0.6)}
    for side, values in dormant.items():
        for seed, value in enumerate(values):
            name = f"tiny_resnet18_{side}-seed{seed}"
            gini = "" if (side, seed) == ("ce", 1) else 0.5
            own = row(name, dormant=value, gini=gini)
            own |= {
                measure.column: 0.0
                for measure in MEASURES
                if measure.column not in own and measure.column not in ABLATION
            }
            tables.add({"runs": [own]}, tmp_path)
    made = result.build(Rows(tmp_path))
    (line,) = (line for line in made.table if line["n = 2 seeds"] == "dormant, all layers")
    assert list(line.values())[1:] == [
        "15.00 ± 7.07 %", "25.00 ± 7.07 %", "50.00 ± 14.14 %",
        "+10.00 (+10.00 to +10.00)", "+35.00 (−28.53 to +98.53)",
    ]  # fmt: skip
    assert list(line)[-2:] == ["SE − plain, 95 % interval", "CE − plain, 95 % interval"]
    texts = {line["n = 2 seeds"] for line in made.table}
    assert len(texts) == len(MEASURES) - len(ABLATION) - 1
    assert not any("Gini" in text for text in texts)


def test_the_main_table_compares_what_is_there(tmp_path):
    """VGG-16: two seeds of both and a third of one; on Tiny ImageNet nothing was chosen yet."""
    for name, top1 in (("plain-seed0", 0.5), ("plain-seed1", 0.6), ("plain-seed2", 0.9),
                       ("ce-seed0", 0.52), ("ce-seed1", 0.64)):  # fmt: skip
        own = row(f"vgg16_{name}", top1=top1, train_loss=1.0, test_loss=2 * top1)
        tables.add({"runs": [own]}, tmp_path)
    made = RESULTS["main"].build(Rows(tmp_path))
    vgg, *others = made.table
    assert vgg["top-1, plain"] == "66.67 ± 20.82 % (n = 3)"
    assert (vgg["top-1, SE"], vgg["top-1, CE"]) == ("–", "58.00 ± 8.49 % (n = 2)")
    low, high = stats.ttest_rel([52, 64], [50, 60]).confidence_interval(0.95)
    text = f"+3.00 ({low:+.2f} to {high:+.2f})".replace("-", "−")
    assert vgg["CE − plain, 95 % interval"] == text
    assert len(others) == 5
    assert {cell for line in others for cell in list(line.values())[1:]} == {"not run", ""}
    panel = made.figure.axes[0]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [vgg[""]]
    ((dots, _, bars),) = panel.containers
    assert list(dots.get_xdata()) == pytest.approx([3])
    assert bars[0].get_segments()[0][:, 0] == pytest.approx([low, high])
    drawing.plt.close(made.figure)


def test_settings_show_what_was_tried_and_the_best(tmp_path):
    """The best is marked once the grid was tried; settings beyond the grid have rows too."""
    recipe, result = "tiny_resnet18_ce", RESULTS["settings"]
    trials = GRID.trials(recipe)
    for place, run in enumerate(trials):
        tables.add({"trials": [row(run.name, top1=0.4 + place / 100)]}, tmp_path)
        marked = "**" in building.markdown(result.build(Rows(tmp_path)).table)
        assert marked == (run is trials[-1])
    (further,) = runs(recipe, holdout=0.1, lr=0.4, weight_decay=5e-4)
    tables.add({"trials": [row(further.name, top1=0.7)]}, tmp_path)
    lines = [line for line in result.build(Rows(tmp_path)).table if line["network"] == "ResNet-18"]
    found = {(line["learning rate"], line["weight decay"]): line for line in lines}
    assert len(found) == len(lines) == 7
    ce = "held-out top-1, CE"
    assert (found["0.4", "0.0005"][ce], found["0.2", "0.0005"][ce]) == ("**70.00 %**", "45.00 %")
    assert found["0.2", "0.0005"]["held-out top-1, plain"] == "not run"


def test_lambda_by_layer_and_while_training(tmp_path):
    result = RESULTS["fig_lambda"]
    for seed, (one, other) in enumerate(((0.2, 0.9), (0.4, 0.7))):
        name = {"name": f"vgg16_ce-seed{seed}"}
        layers = [name | {"title": title, "lambda": value}
                  for title, value in (("a", one), ("without", ""), ("b", other))]  # fmt: skip
        # in training, the record of the second seed ends with the other's layer a at 0.8
        lambdas = [name | {"epoch": e, "layer": layer, "lambda": 0.5 + e * way * (1 + seed) / 10}
                   for e in (1, 2) for layer, way in (("a", 1), ("b", -1))]  # fmt: skip
        found = {"runs": [row(name["name"])], "layers": layers, "lambdas": lambdas}
        tables.add(found, tmp_path)
    made = result.build(Rows(tmp_path))
    line = made.table[0]
    assert (line["n"], line["CE layers"], line["λ, mean of layers"]) == ("2", "2", "0.550 ± 0.000")
    assert line["smallest λ of a layer"] == "0.300 ± 0.141 (`a`)"
    assert line["largest λ of a layer"] == "0.800 ± 0.141 (`b`)"
    after, training = made.figure.axes
    assert [list(dots.get_ydata()) for dots in after.lines] == [[0.2, 0.4], [0.9, 0.7]]
    drawn = [(list(one.get_xdata()), list(one.get_ydata())) for one in training.lines]
    assert drawn == [([1, 2], pytest.approx([0.65, 0.8])), ([1, 2], pytest.approx([0.35, 0.2]))]
    drawing.plt.close(made.figure)


def test_both_shares_of_nonpositive_betas(tmp_path):
    result = RESULTS["table_beta"]
    filled(result, tmp_path)
    lines = result.build(Rows(tmp_path)).table
    assert [line["β ≤ 0, all batch norms"] for line in lines] == [
        "10.0 % of 1,000", "20.0 % of 1,000", "30.0 % of 1,000",
    ]  # fmt: skip
    assert [line["β ≤ 0, directly before ReLU"] for line in lines] == [
        "25.0 % of 400", "25.2 % of 400", "25.5 % of 400",
    ]  # fmt: skip
    assert [line["paper"] for line in lines] == ["76.0 %", "76.7 %", "81.8 %"]


def test_maps_are_averaged_over_seeds_and_compared(tmp_path):
    result = RESULTS["fig_magnitude"]
    (plain, ce) = ([run for run in result.needs if run.recipe == f"vgg16_{row}"]
                   for row in ("plain", "ce"))  # fmt: skip
    grids = {
        plain[0]: [[1.0, 2.0]], plain[1]: [[3.0, 4.0]],  # mean 2, 3
        ce[0]: [[2.5, 2.0]],
    }  # fmt: skip
    for run, grid in grids.items():
        maps = [{"name": run.name, "layer": "f", "i": i, "j": j, "value": value}
                for i, line in enumerate(grid) for j, value in enumerate(line)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "maps": maps}, tmp_path)
    made = result.build(Rows(tmp_path))
    lines = [list(line.values()) for line in made.table]
    assert lines[0] == ["BN", "2", "2.500 ± 1.414", "2.000", "3.000"]
    assert lines[1] == ["BN+CE", "1", "2.250", "2.000", "2.500", "50 %"]
    shown = [axes.images[0].get_array().tolist() for axes in made.figure.axes[:2]]
    assert shown == [[[2.0, 3.0]], [[2.5, 2.0]]]
    assert made.figure.axes[0].images[0].get_clim() == made.figure.axes[1].images[0].get_clim()
    drawing.plt.close(made.figure)


def test_grad_cams_of_the_paper_and_se_side_by_side(tmp_path):
    result = RESULTS["fig_gradcam"]
    filled(result, tmp_path)
    made = result.build(Rows(tmp_path))
    assert [line[""] for line in made.table] == ["plain", "SE", "BD", "CE"]
    assert [line["image 2, a"] for line in made.table] == ["p0", "p1", "p2", "p3"]
    assert len(made.figure.axes) == 2 * 4
    assert made.figure.axes[5].images[0].get_array().tolist() == [[0, 0.5], [0.5, 1]]
    drawing.plt.close(made.figure)


def test_a_run_leaves_rows_with_the_columns_of_the_committed_ones(tmp_path):
    """Trained, measured and collected as the driver does, in this process."""
    pytest.importorskip("pytorch_grad_cam")
    (run,) = {run.smoke() for run in RESULTS["fig_gradcam"].needs if run.recipe == "resnet50_ce"}
    assert parts_of(run) == {"maps", "cams", "ablation"}  # on digits, of VGG and ResNet
    assert parts_of(Run("vgg16_ce")) == {"maps", "ablation"}
    assert parts_of(Run("vgg16_elu")) == {"ablation"}
    assert parts_of(Run("resnet50_se")) == {"cams"}
    assert parts_of(Run("vgg16_ce", watched=True)) == parts_of(Run("vgg16_bd")) == frozenset()
    train(Job(run.made, Options(tmp_path)))
    found, _ = diagnose_named(str(tmp_path), None, tmp_path, limit=48, ablation_images="all")
    rows = collect(run, tmp_path, "command")
    for table in ("runs", "layers", "ablation"):
        assert list(rows[table][0]) == list(tables.read(table)[0]), table
    assert {row["images"] for row in rows["ablation"]} == {found.data.images}
    kept = {row["layer"]: row["lambda"] for row in rows["lambdas"]}
    assert {row["epoch"] for row in rows["lambdas"]} == {1}
    assert sorted(kept.values()) == sorted(
        layer.mix for layer in found.layers if layer.mix is not None
    )
    (own,) = rows["runs"]
    network = load_run(tmp_path)
    norms = [norm for norm in network.modules() if isinstance(norm, nn.BatchNorm2d)]
    betas = [beta for norm in norms for beta in norm.bias.tolist()]
    assert (own["betas"], own["betas_nonpositive"]) == (len(betas), sum(b <= 0 for b in betas))
    assert own["relu_betas"] == own["relu_betas_nonpositive"] == 0  # CE is between
    first = found.layers[0]
    assert [row["value"] for row in rows["maps"]] == [*chain(*first.magnitude_before)]
    assert {row["layer"] for row in rows["maps"]} == {first.name}
    side = len(found.gradcam[0].evidence)
    assert len(rows["cams"]) == 4 * side**2
    for row in rows["cams"]:
        cam = found.gradcam[row["image"]]
        assert row["value"] == cam.evidence[row["i"]][row["j"]]
        assert row["label"] == row["target"] == cam.label
        assert row["predicted"] == cam.predicted
    content = json.loads((tmp_path / "diagnosis.json").read_text())
    del content["batch_norms"]
    for layer in content["layers"]:
        del layer["magnitude_before"], layer["correlation_in_groups"]
    for cam in content["gradcam"]:
        del cam["target"], cam["evidence"]
    (tmp_path / "diagnosis.json").write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ValueError, match=r"is of an earlier version .*; remove it, and the same"):
        collect(run, tmp_path, "command")


@pytest.mark.parametrize(("epochs", "kept"), [(3, [1, 2, 3]), (49, [1, *range(2, 49, 2), 49])])
def test_lambda_is_kept_of_some_epochs(epochs, kept):
    metrics = [
        {"epoch": e, "train_loss": 1.0, "lambda/a.bn": e / 100} for e in range(1, epochs + 1)
    ]
    assert _lambdas(metrics) == [
        {"epoch": e, "layer": "a.bn", "lambda": e / 100} for e in kept
    ]  # fmt: skip


def test_images_of_the_ablation(tmp_path):
    def asked(run, **options):
        command = Settings(runs=tmp_path, **options).diagnosing(run)
        return command[command.index("--ablation-images") + 1]

    assert asked(Run("vgg16_ce")) == asked(Run("vgg16_elu")) == "all"
    assert asked(Run("vgg16_bd")) == asked(Run("tiny_resnet18_ce")) == "0"  # no result shows it
    assert asked(Run("resnet50_ce")) == "5000"
    assert asked(Run("vgg16_ce"), ablation_images=1000) == "1000"
    assert asked(Run("resnet50_ce"), ablation_images="all") == "all"
    assert asked(Run("resnet50_ce"), ablation_images=0) == "0"


def test_label_corruption_matches_training_error(tmp_path):
    result = RESULTS["fig_label_corruption"]
    for run in result.needs:
        # CE is at BN's last training accuracy in its second epoch, whose test accuracy is 0.55
        is_ce = run.recipe.endswith("ce")
        curve = (
            [(0.3, 0.3), (0.6, 0.55), (0.9, 0.5)]
            if is_ce
            else [(0.2, 0.2), (0.4, 0.4), (0.6, 0.45)]
        )
        name = {"name": run.name}
        epochs = [name | {"epoch": e, "train_top1": a, "test_top1": b}
                  for e, (a, b) in enumerate(curve, 1)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "epochs": epochs}, tmp_path)
    line = result.build(Rows(tmp_path)).table[2]
    assert line["test error, BN"] == "55.00 %"
    assert line["test error, CE"] == "50.00 %"
    assert line["test error, CE, as BN in training"] == "45.00 %"


def test_a_smoke_figure_says_that_it_is_one(tmp_path):
    figure, axes = drawing.plt.subplots()
    axes.plot([1, 2])
    drawing.save(figure, tmp_path / "x.svg", smoke=True)
    assert "SMOKE TEST" in (tmp_path / "x.svg").read_text()


def test_pages_hold_what_is_built():
    made = building.built(RESULTS, Rows())
    shown = {}
    for page in building.PAGES:
        text = page.read_text()
        assert building.page_built(page, text, made) == text, "run `make results`"
        shown[page.name] = {name for _, name, _ in building.BLOCK.findall(text)}
        for picture in re.findall(r"!\[\w+\]\((\S+/results/\S+)\)", text):
            assert (page.parent / picture).is_file()
    assert shown["results.md"] == {*RESULTS} - {"vgg16_short"}
    assert shown["README.md"] == {"main", "vgg16_short"}
    assert shown["guide.md"] == {"main", "settings"}
    for name, result in made.items():
        if result.figure is not None:
            assert (ROOT / building.FIGURES / f"{name}.svg").is_file()
            drawing.plt.close(result.figure)


def test_a_block_without_a_number_is_a_line():
    text = "<!-- result: a -->\nold\n<!-- end of a -->"
    empty = building.Built([{"": "CE", "n": "0", "top-1": "not run"}])
    shown = building.page_with(text, {"a": empty})
    assert shown.splitlines()[1].startswith("Not run yet; `python -m experiments list a`")
    for row in ({"": "CE", "top-1": "90 %"}, {"top-1": "not run", "paper's top-1": "76 %"}):
        shown = building.page_with(text, {"a": building.Built([row])})
        assert "| --- |" in shown


def test_committed_rows_say_where_they_come_from():
    for found in (row for table in ("runs", "trials", "detections") for row in tables.read(table)):
        for column in ("command", "commit", "seed", "epochs", "seconds", "device", "precision"):
            assert found[column], (found["name"], column)
        assert found["name"].startswith((found["recipe"], f"detect_{found['recipe']}"))
        assert found["recipe"] in RECIPES or found["name"].startswith("detect_")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "table9"), "table9 is none of fig1a, "),
        (("train", "--data", "cifar10"), "--data cifar10 must be SET=FOLDER with a folder that"),
        (("train", "--ablation-images", "-3"), "-3 must be a whole number or all"),
        (("train", "--ablation-images", "few"), "few must be a whole number or all"),
        (("train", "--jobs", "0"), "--jobs 0 must be at least 1"),
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


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path):
    done = trained(tmp_path, *SMALL, "--task", "0/4", "--options", "--lr", "-1")
    assert done.returncode == 1
    assert "failed: Error parsing recipe: lr=-1.0 must be at least" in done.stdout
    assert not tables.names(tmp_path / "rows")
