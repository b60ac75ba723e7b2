"""The rows of results: what a run leaves, how files of them are joined, where they come from."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from experiments import tables
from experiments.catalogue import RESULTS
from experiments.collecting import _lambdas, collect, parts_of
from experiments.runs import Run
from experiments.scheduling import Settings
from torch import nn

from _experiments import row
from cenet.analysis.diagnosis import FILE
from cenet.diagnosing.command import diagnose_named
from cenet.train import RECIPES
from cenet.train.job import Job, train
from cenet.train.options import Options
from cenet.train.weights import load_run


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
    found, _ = diagnose_named(str(tmp_path), None, limit=48, ablation_images="all")
    found.write(tmp_path / FILE)
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
    for line in rows["cams"]:
        cam = found.gradcam[line["image"]]
        assert line["value"] == cam.evidence[line["i"]][line["j"]]
        assert line["label"] == line["target"] == cam.label
        assert line["predicted"] == cam.predicted
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


def test_committed_rows_say_where_they_come_from():
    for found in (
        line for table in ("runs", "trials", "detections") for line in tables.read(table)
    ):
        for column in ("command", "commit", "seed", "epochs", "seconds", "device", "precision"):
            assert found[column], (found["name"], column)
        assert found["name"].startswith((found["recipe"], f"detect_{found['recipe']}"))
        assert found["recipe"] in RECIPES or found["name"].startswith("detect_")
