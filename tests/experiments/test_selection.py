"""Settings chosen by held-out images, and the runs that follow from the choice."""

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from experiments import building, tables, uncertainty
from experiments.__main__ import main as driver
from experiments.catalogue import GRID, RESULTS
from experiments.result import Result, Rows
from experiments.runs import DetectorRun, Run, runs
from experiments.scheduling import Schedule, Settings
from experiments.selection import Grid, finals

from _experiments import Ended, filled, row
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec
from cenet.detection.command import parse as parse_detector
from cenet.detection.recipes import RECIPES as DETECTORS
from cenet.detection.trainer import build_detector
from cenet.train import RECIPES
from cenet.train.weights import build_network, write_weights


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


def test_a_table_of_chosen_settings_leaves_trials_out(tmp_path):
    """Their accuracy is of other images."""
    result = RESULTS["tiny_resnets"]
    filled(result, tmp_path)
    (line, *_) = result.build(Rows(tmp_path)).table
    own = finals("tiny_resnet18_plain", GRID, 5, Rows(tmp_path))
    values = Rows(tmp_path).values(own, "top1")
    assert line["top-1"] == uncertainty.spread(values, 100, 2, "%")
    assert (line["n"], line["learning rate"], line["weight decay"]) == ("5", "0.05", "0.0001")


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
