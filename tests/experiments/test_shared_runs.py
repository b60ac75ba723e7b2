"""Runs that several figures and tables share: one name each, whichever of them asks."""

import pytest
from experiments import drawing, tables
from experiments.catalogue import GRID, RATES_ALONE, RESULTS
from experiments.result import Rows
from experiments.runs import runs


def row(run, **columns):
    return {"name": run.name, **columns}


def test_a_run_has_one_name_whatever_the_order_of_its_changes():
    one, other = {"lr": 0.2, "weight_decay": 2.5e-3}, {"weight_decay": 2.5e-3, "lr": 0.2}
    assert runs("tiny_resnet18_ce", **one) == runs("tiny_resnet18_ce", **other)
    assert runs("tiny_resnet18_ce", **one)[0].name.endswith("-lr=0.2-weight_decay=0.0025-seed0")


def test_settings_show_trials_that_another_search_has_made(tmp_path):
    """A setting beyond an edge: the plain network's search went there, CE has it from elsewhere."""
    for block in ("plain", "ce"):
        for trial in GRID.trials(f"tiny_resnet18_{block}"):
            edge = block == "plain" and (trial.made.lr, trial.made.weight_decay) == (0.05, 5e-4)
            tables.add({"trials": [row(trial, top1=0.5 if edge else 0.4)]}, tmp_path)
    (beyond,) = runs("tiny_resnet18_plain", holdout=0.1, lr=0.05, weight_decay=2.5e-3)
    tables.add({"trials": [row(beyond, top1=0.3)]}, tmp_path)
    elsewhere = RATES_ALONE.trials("tiny_resnet18_ce")[0]
    tables.add({"trials": [row(elsewhere, top1=0.35)]}, tmp_path)
    lines = RESULTS["settings"].build(Rows(tmp_path)).table
    (line,) = [
        line for line in lines
        if (line["network"], line["learning rate"], line["weight decay"])
        == ("ResNet-18", "0.05", "0.0025")
    ]  # fmt: skip
    assert line["held-out top-1, plain"] == "30.00 %"
    assert line["held-out top-1, CE"] == "35.00 %"


def test_channels_at_equal_rates_share_the_runs_of_the_search(tmp_path):
    """Each label at both rates, over three seeds, at the weight decay of the rows above them."""
    result = RESULTS["dormant_rates"]
    chosen = runs("tiny_resnet18_ce", 3, lr=0.2, weight_decay=2.5e-3)
    assert set(chosen) < set(result.needs)
    assert len(result.needs) == len(set(result.needs)) == 4 * 2 * 3
    assert {run.made.weight_decay for run in result.needs} == {2.5e-3}
    for run, dormant in zip(chosen, (0.1, 0.2, 0.3), strict=True):
        tables.add({"runs": [row(run, top1=0.5, dormant=dormant, prunable=0.0)]}, tmp_path)
    made = result.build(Rows(tmp_path))
    found = {(line[""], line["lr"]): line for line in made.table}
    assert found["CE", "0.2"]["dormant"] == "20.00 ± 10.00 %"
    assert found["CE", "0.2"]["n"] == "3"
    assert found["plain", "0.2"]["dormant"] == "not run"
    drawing.plt.close(made.figure)


@pytest.mark.parametrize("label", ["plain", "BD", "IR", "CE"])
def test_every_label_is_compared_at_both_rates(label, tmp_path):
    made = RESULTS["dormant_rates"].build(Rows(tmp_path))
    assert [line["lr"] for line in made.table if line[""] == label] == ["0.1", "0.2"]
    drawing.plt.close(made.figure)
