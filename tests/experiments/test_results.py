"""Numbers in the docs are those of the committed rows, and code in the docs runs."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import cenet

ROOT = Path(__file__).parents[2]


def test_the_readme_quotes_the_dormant_channels():
    pytest.importorskip("scipy")
    from experiments.catalogue import RESULTS
    from experiments.result import Rows

    table = RESULTS["measures_resnet18"].build(Rows()).table
    (line,) = (line for line in table if "dormant, all layers" in line.values())
    shares = {name: float(line[name].split()[0]) for name in ("CE", "plain")}
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{shares['CE']:.1f} % with CE, {shares['plain']:.1f} % without" in text


def test_the_readme_says_what_its_table_says():
    """Half a point, one point, nothing, and no more than SE."""
    text = (ROOT / "README.md").read_text()
    assert (
        "half a point of accuracy in ResNet-18, one point in ResNet-50, nothing in VGG-16" in text
    )
    rows = {line.split(",")[0].strip("| "): line for line in text.splitlines() if "|" in line}
    number = r"[−+]\d\.\d\d"
    found = {
        name: [float(n.replace("−", "-")) for n in re.findall(number, rows[name])]
        for name in ("VGG-16", "ResNet-18", "ResNet-50")
    }
    # difference, lowest, highest of the interval: from plain, then from SE
    (low, high), (eighteen, fifty) = found["VGG-16"][1:3], (found[f"ResNet-{n}"] for n in (18, 50))
    assert low < 0 < high
    assert eighteen[0] == pytest.approx(0.5, abs=0.25)
    assert fifty[0] == pytest.approx(1, abs=0.25)
    assert min(eighteen[1], fifty[1]) > 0
    assert max(eighteen[4], fifty[4]) < 0


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
