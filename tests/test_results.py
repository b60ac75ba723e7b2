"""Numbers in the docs are those of the committed rows, and code in the docs runs."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import cenet

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))
results_table = pytest.importorskip("results_table")


def test_the_table_of_the_docs_is_that_of_the_rows():
    lines = results_table.table("vgg16_plain", "vgg16_ce")
    assert "\n".join(lines) in (ROOT / "docs" / "results.md").read_text()


QUOTED = {
    "top-1": "top-1",
    "test loss": "test loss",
    "channels that duplicate another": "duplicates of another channel",
    "effective dimensions / channels": "participation ratio / channels",
    "dormant channels": "dormant, all layers",
    "inhibited channels": "inhibited (the paper's figure), first six layers",
    "the same, all layers": "inhibited, all layers",
}


def test_the_readme_quotes_the_table():
    rows = [line.split("|")[1:-1] for line in results_table.table("vgg16_plain", "vgg16_ce")]
    readme = [line.split("|")[1:-1] for line in (ROOT / "README.md").read_text().splitlines()]
    for title, source in QUOTED.items():
        (row,) = [row for row in rows if re.split(", mean|$", row[0].strip())[0] == source]
        quoted = [row for row in readme if row and row[0].strip().startswith(title)]
        (quoted,) = [row for row in quoted if "±" in row[1]]
        assert [cell.strip() for cell in quoted[1:]] == [cell.strip() for cell in row[1:3]], title
    difference = next(row for row in rows if row[0].strip() == "top-1")[3].strip()
    mean, low, high = (v.replace("-", "−") for v in re.findall(r"[-+][0-9.]+", difference))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"({mean} points, 95 % interval {low} to {high})" in text


def test_the_difference_is_paired_by_seed():
    line = next(row for row in results_table.table("vgg16_plain", "vgg16_ce") if "top-1 |" in row)
    numbers = [float(v) for v in re.findall(r"[-+]?\d+\.\d+", line)]
    plain, _, ce, _, difference, low, high = numbers
    assert difference == pytest.approx(ce - plain, abs=0.011)
    assert (low + high) / 2 == pytest.approx(difference, abs=0.011)
    assert low < difference < high


def test_the_pruning_recipe_of_the_docs_leaves_the_outputs():
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.ReLU(),
        nn.Conv2d(20, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2),
    )  # fmt: skip
    x = torch.randn(64, 3, 12, 12)
    with torch.no_grad():
        model[1].weight[:6], model[1].bias[:6] = 0, -1
        model.train()(x)
    model.eval()
    found = cenet.diagnose(model, [x])
    assert found.prunable == {"2": tuple(range(6))}
    with torch.no_grad():
        before = model(x)
    text = (ROOT / "docs" / "diagnose.md").read_text().split("## Pruning")[1]
    code = text.split("```python")[1].split("```")[0]
    exec(code, {"model": model, "images": x, "found": found})
    assert model[0].out_channels == model[3].in_channels == 14
    with torch.no_grad():
        assert torch.allclose(model(x), before, atol=1e-5)


def test_the_pruning_recipe_leaves_residual_connections_alone():
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=3)
    x = torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        for norm in (model.layer1[0].bn1, model.layer1[0].bn2):  # inside, and before the sum
            norm.weight[:5], norm.bias[:5] = 0, -100
        model.train()(x)
        before = model.eval()(x)
    found = cenet.diagnose(model, [x])
    shared = {layer.name: layer.shared for layer in found.layers}
    assert found.prunable.keys() >= {"layer1.0.relu", "layer1.0.relu#2"}
    assert (shared["layer1.0.relu"], shared["layer1.0.relu#2"]) == (False, True)
    text = (ROOT / "docs" / "diagnose.md").read_text().split("## Pruning")[1]
    exec(text.split("```python")[1].split("```")[0], {"model": model, "images": x, "found": found})
    assert model.layer1[0].conv1.out_channels == 59
    assert model.layer1[0].conv2.out_channels == 64
    with torch.no_grad():
        # other channels are prunable too, and contribute a little
        assert torch.allclose(model(x), before, atol=5e-3)
