"""What a diagnosis holds, against independent formulas, and what its one reader accepts."""

import json
import math

import pytest
import torch
import torchvision
from torch import nn

import cenet
from _pages import write_run
from _planted import Planted, Tangled, images
from cenet.analysis.diagnosis import VERSION, Diagnosis
from cenet.analysis.gradcam import overlays
from cenet.models.lookup import create_named
from cenet.report import write_diagnosis_page, write_page

pytestmark = pytest.mark.usefixtures("quick_weights")


def test_pictures_show_the_evidence_for_the_true_class():
    pytest.importorskip("pytorch_grad_cam")
    # two channels, bright in one corner each, of which each class reads one
    model = nn.Sequential(
        nn.Conv2d(2, 2, 1, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2, 2, bias=False),
    ).eval()  # fmt: skip
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2)[:, :, None, None])
        model[4].weight.copy_(torch.eye(2))
    x = torch.zeros(5, 3, 14, 14)
    x[:, 0, :4, :4], x[:, 1, 10:, 10:] = 2.0, 1.0  # class 0 is always predicted
    model.insert(0, nn.Conv2d(3, 2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3)[:2, :, None, None])
    labels = torch.tensor([0, 1, 1, 0, 1])
    found = overlays(model, x, labels, ("left", "right"))
    assert [cam.label for cam in found] == ["left", "right", "right", "left"]
    assert {cam.predicted for cam in found} == {"left"}
    assert [cam.target for cam in found] == [cam.label for cam in found]
    for cam in found:
        evidence = torch.tensor(cam.evidence)
        assert evidence.shape == (7, 7)
        corners = (evidence[0, 0].item(), evidence[6, 6].item())
        assert corners == pytest.approx((1, 0) if cam.label == "left" else (0, 1), abs=1e-3)
    for cam in overlays(model, x, None, None):
        assert (cam.label, cam.target) == (None, "class 0")
        assert cam.evidence[0][0] == pytest.approx(1, abs=1e-3)


def test_magnitude_before_the_activation_by_a_plain_hook():
    """In float64, of a norm alone, of a norm with CE behind it, and of a sum of two branches."""
    torch.manual_seed(0)
    model = Tangled().double()
    model.train()(images(8).double())
    cenet.insert_ce_(model, lambda norm, name: name == "bn1")
    model.train()(images(8).double())
    model.eval()
    x = images(5, 12).double()
    found = cenet.diagnose(model, x.split([2, 3]), ablation_images=0)
    seen = {}
    # modules are called apart when they have hooks
    for name in ("bn1.norm", "bn1.ce", "bn2", "short"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: seen.__setitem__(name, y.clone())
        )
    with torch.no_grad():
        model(x)
    expected = {"relu": seen["bn1.ce"], "relu#2": seen["bn2"] + seen["short"]}
    for layer in found.layers[:2]:
        values = expected[layer.name].square().sum(1).sqrt().mean(0)
        assert torch.tensor(layer.magnitude_before, dtype=torch.float64) == pytest.approx(
            values, rel=1e-9
        )
        after = expected[layer.name].relu().square().sum(1).sqrt().mean(0)
        assert torch.tensor(layer.magnitude, dtype=torch.float64) == pytest.approx(after, rel=1e-9)
    assert not torch.allclose(seen["bn1.norm"], seen["bn1.ce"])


def test_batch_norms_and_what_takes_their_output():
    torch.manual_seed(0)
    bottleneck = torchvision.models.resnet.Bottleneck
    model = torchvision.models.ResNet(bottleneck, [1, 2, 1, 1], num_classes=3).eval()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for place, norm in enumerate(norms.values()):
        nn.init.normal_(norm.bias)
        with torch.no_grad():
            norm.bias[: place % 5] = 0
    found = cenet.diagnose(model, [images(2, 64)], ablation_images=0).batch_norms
    assert [norm.name for norm in found] == list(norms)
    for norm in found:
        bias = norms[norm.name].bias
        assert (norm.channels, norm.nonpositive) == (len(bias), sum(b <= 0 for b in bias.tolist()))
        # the others go into a sum first
        directly = norm.name.endswith(("bn1", "bn2"))
        assert norm.activation == ("relu" if directly else None), norm.name
    assert sum(norm.activation is None for norm in found) == 5 + 4
    # an activation inside the norm, and CE between
    inside = create_named("mobilenetv2_100")
    cenet.insert_ce_(inside, lambda norm, name: name == "bn1")
    found = cenet.diagnose(inside, [images(2, 64)], ablation_images=0).batch_norms
    activations = {norm.name: norm.activation for norm in found}
    assert activations["bn1.norm"] is None
    assert activations["blocks.0.0.bn1"] == "relu6"
    assert activations["blocks.0.0.bn2"] is None


def test_correlation_inside_groups_and_over_all_pairs():
    torch.manual_seed(0)
    x = torch.randn(40, 3, 8, 8).double()
    base = torch.randn(20, 3)
    base[:16] += torch.tensor([2.0, 4.0, 6.0])  # alike; the others point anywhere
    plain = Planted(base).double()
    found = cenet.diagnose(plain, [x], ablation_images=0).layers[0]
    with torch.no_grad():
        rows = plain.conv(x).transpose(0, 1).flatten(1)
    matrix = torch.corrcoef(rows).abs()

    def mean(size):
        pairs = [matrix[a, b].item() for a in range(20) for b in range(a) if a // size == b // size]
        return sum(pairs) / len(pairs)

    assert found.correlation == pytest.approx(mean(20))
    assert found.correlation_in_groups == pytest.approx(mean(16))
    assert abs(mean(20) - mean(16)) > 0.01
    model = nn.Sequential(
        nn.Conv2d(3, 20, 1), nn.BatchNorm2d(20), cenet.BatchDecorrelation2d(20, group_size=4),
        nn.ReLU(),
    ).double()  # fmt: skip
    model.train()(x)
    found = cenet.diagnose(model, [x], ablation_images=0).layers[0]
    with torch.no_grad():
        matrix = torch.corrcoef(model.eval()[:3](x).transpose(0, 1).flatten(1)).abs()
    assert found.correlation_in_groups == pytest.approx(mean(4), rel=1e-6)
    assert abs(mean(4) - mean(16)) > 0.01


def test_files_of_version_2_are_read(tmp_path):
    model = Tangled()
    content = json.loads(json.dumps(cenet.diagnose(model, [images()]).as_dict()))
    assert content["version"] == VERSION
    content["version"] = 2
    image = "data:image/png;base64,AAAA"
    picture = {"image": image, "overlay": image, "label": "cat", "predicted": "dog"}
    content["gradcam"] = [picture]
    del content["batch_norms"]
    for layer in content["layers"]:
        del layer["magnitude_before"], layer["correlation_in_groups"]
    found = Diagnosis.from_dict(content)
    assert found.batch_norms is None
    assert {(layer.magnitude_before, layer.correlation_in_groups) for layer in found.layers} == {
        (None, None)
    }
    assert (found.gradcam[0].target, found.gradcam[0].evidence) == ("dog", None)
    found.write(tmp_path / "again.json")
    assert Diagnosis.read(tmp_path / "again.json") == found
    with pytest.raises(ValueError, match=r"missing \['layers'\], unknown \[\]"):
        Diagnosis.from_dict({key: item for key, item in content.items() if key != "layers"})
    with pytest.raises(ValueError, match="layers must be a list"):
        Diagnosis.from_dict({**content, "layers": "none"})


def first(part, **changes):
    """Change an object of a diagnosis, or the first of a list of them."""

    def edit(content):
        found = content[part]
        (found[0] if isinstance(found, list) else found).update(changes)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(format="other"), "not a diagnosis: its format is 'other', not 'cenet"),
        (lambda d: d.update(version=1), f"this diagnosis is of version 1, not {VERSION}"),
        (lambda d: d.pop("layers"), r"missing \['layers'\], unknown \[\]"),
        (lambda d: d.update(layers=None), "layers must be a list, got 'None'"),
        (lambda d: d.update(layers=[{"name": "x"}]), r"layers\[0\]: missing \['activation'"),
        (first("layers", extra=1), r"layers\[0\]: missing \[\], unknown \['extra'\]"),
        (first("layers", width="8"), r"layers\[0\].width must be of type int, got '8'"),
        (first("data", size=[1]), r"data.size must be 2 values, got '\[1\]'"),
        (first("accuracy", top1="high"), "accuracy.top1 must be a number, got 'high'"),
        (lambda d: d.update(threshold=True), "threshold must be a number, got 'True'"),
        (lambda d: d.update(threshold=math.nan), "threshold must be finite, .*, got 'nan'"),
        (lambda d: d.update(first_six=10**400), r"first_six must be .* at most 1e\+100, got '1000"),
        (first("model", parameters=10**400), "model.parameters must be finite, at most 1e"),
        (lambda d: d.update(sites="bn1"), "sites must be a list, got 'bn1'"),
        (first("layers", channels=3), r"layers\[0\]: 3 channels, but 64 values of mean_abs"),
        (first("layers", activity=[]), r"layers\[0\]: 64 channels, but 0 values of activity"),
        (first("layers", contribution=[1.0]), "64 channels, but 1 values of contribution"),
        (first("layers", prunable=[64]), r"layers\[0\]: prunable names a channel that is not one"),
        (first("layers", fires_below_1_percent=[-1]), "rare names a channel that is not one of"),
        (first("layers", magnitude=[[1.0], [1.0, 2.0]]), "magnitude has rows of different lengths"),
        (first("layers", magnitude_before=[[1.0], []]), "magnitude_before has rows of different"),
        (first("matrices", channels=[1, 2]), r"matrices\[0\]: values must be 2 × 2"),
        (first("ablation", ratios=[0.0, 0.5]), "ablation: 2 ratios, but 10 of top1"),
        (first("ablation", least_important_first=[]), "10 ratios, but 0 of least_important_first"),
        (first("ablation", top1=[[]] * 10), "ablation: top1 has a ratio without a value"),
        (first("importance", standard_error=[]), "64 values of divergence, but 0 of standard_err"),
        (first("gradcam", overlay="javascript:x"), r"gradcam\[0\]: overlay must be data:image/png"),
    ],
)
def test_damaged_files_get_one_clear_error(edit, message, tmp_path):
    run = write_run(tmp_path / "run", 0, layers=4, epochs=2)
    content = json.loads((run / "diagnosis.json").read_text())
    edit(content)
    refused(run, json.dumps(content).encode(), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": "cenet.diag', "Unterminated string"),
        (b"\xff\xfe\xfa", "can't decode"),
        (b"[]", "not a diagnosis: its format is None"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_diagnosis_get_the_same_error(content, message, tmp_path):
    refused(write_run(tmp_path / "run", 0, layers=4, epochs=2), content, message)


def refused(run, content, message):
    """Reading the file says what is wrong with it, and so does every page of the run."""
    path, page = run / "diagnosis.json", run.parent / "page.html"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Diagnosis.read(path)
    said = str(error.value)
    assert said.startswith(f"{path} cannot be read: ")
    assert said.endswith("; write it again with `cenet diagnose`")
    for write, given in ((write_page, [run]), (write_page, [path]), (write_diagnosis_page, run)):
        with pytest.raises(ValueError, match=message) as error:
            write(given, page)
        assert str(error.value) == said
    assert not page.exists()
