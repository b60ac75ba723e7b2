"""Networks by name: every comparison of the paper, plain networks as their libraries have them."""

import json
import re
import runpy
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers.squeeze_excite import SEModule
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import cenet
from _checks import relative_error
from _training import call
from cenet import BatchDecorrelation2d, InstanceReweighting2d, NormCE2d
from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d
from cenet.export import load_network, load_weights_
from cenet.models import NETWORKS, create_model
from cenet.models.cost import PAPER_GFLOPS, cost, multiply_adds
from cenet.models.released import released_ceresnet50
from cenet.models.staged import VGG16

pytestmark = pytest.mark.usefixtures("quick_weights")

DATA = Path(__file__).parents[1] / "fixtures"
# what torchvision publishes with its weights
PUBLISHED = {
    "resnet18": torchvision.models.ResNet18_Weights.IMAGENET1K_V1,
    "resnet50": torchvision.models.ResNet50_Weights.IMAGENET1K_V1,
    "resnet101": torchvision.models.ResNet101_Weights.IMAGENET1K_V1,
    "mobilenetv2_100": torchvision.models.MobileNet_V2_Weights.IMAGENET1K_V1,
    "shufflenetv2_x0_5": torchvision.models.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1,
    "shufflenetv2_x1_0": torchvision.models.ShuffleNet_V2_X1_0_Weights.IMAGENET1K_V1,
}
NORMS = {
    "bn": nn.BatchNorm2d,
    "gn": nn.GroupNorm,
    "in": nn.InstanceNorm2d,
    "ln": nn.GroupNorm,
    "sn": SwitchableNorm2d,
    "iternorm": IterNorm2d,
    "sw": SwitchableWhitening2d,
}


def step(model):
    size = 32 if isinstance(model, VGG16) else 64  # no map of a single pixel
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    y = model.train()(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_networks_cost_what_torchvision_publishes(name):
    model, meta = create_model(name, None).eval(), PUBLISHED[name].meta
    assert sum(p.numel() for p in model.parameters()) == meta["num_params"]
    assert multiply_adds(model, 224) / 1e9 == pytest.approx(meta["_ops"], abs=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100"])
def test_plain_networks_are_those_of_timm(name):
    torch.manual_seed(0)
    model, stock = create_model(name, None).eval(), timm.create_model(name).eval()
    stock.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), stock(x))


def test_plain_shufflenet_is_that_of_torchvision():
    torch.manual_seed(0)
    model = create_model("shufflenetv2_x0_5", None).eval()
    stock = torchvision.models.shufflenet_v2_x0_5(weights=None).eval()
    stock.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(model(x), stock(x), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"drop_path_rate": 0.5}, {"drop_block_rate": 0.5}, {"aa_layer": timm.layers.BlurPool2d}],
    ids=str,
)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_ce_hands_its_shortcut_over_and_changes_nothing_by_it(name, options):
    """The blocks of a CE network against timm's own blocks around the same layers."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=3, **options)
    reference = create_model(name, num_classes=3, **options)
    reference.load_state_dict(model.state_dict())
    for block in reference.modules():
        for stock in (timm.models.resnet.BasicBlock, timm.models.resnet.Bottleneck):
            if isinstance(block, stock):
                block.__class__ = stock
    x = torch.randn(2, 3, 64, 64)
    for mode in (True, False):
        outputs = []
        for network in (model, reference):
            torch.manual_seed(1)  # of what is dropped
            outputs.append(network.train(mode)(x))
        assert relative_error(*outputs) < 1e-6


def test_squeeze_excite_comes_after_the_activation_or_before_the_addition():
    vgg, shuffle = create_model("vgg16", "se"), create_model("shufflenetv2_x0_5", "se")
    assert [type(m) for m in vgg.features[2]] == [nn.ReLU, timm.layers.SEModule]
    branch = shuffle.stage2[0].branch2
    assert [type(m) for m in branch[-2:]] == [nn.ReLU, timm.layers.SEModule]
    for block in create_model("mobilenetv2_100", "se").blocks[1]:
        assert isinstance(block.se, timm.layers.SEModule)
        assert block.se.fc1.in_channels == block.conv_dw.out_channels
        assert isinstance(block.conv_dw, nn.Conv2d)
    assert isinstance(create_model("resnet18", "se").layer1[0].se, timm.layers.SEModule)


def test_norms_are_built_as_documented():
    groups = {m.num_channels: m.num_groups for m in create_model(
        "mobilenetv2_100", None, norm="gn").modules() if isinstance(m, nn.GroupNorm)}  # fmt: skip
    assert groups[32] == 32
    assert groups[24] == 8
    instance = create_model("vgg16", None, norm="in").features[1]
    assert instance.weight is not None
    act = create_model("mobilenetv2_100", None, norm="gn").blocks[1][0].bn1
    x = torch.randn(2, 96, 4, 4)
    assert torch.equal(act(x), act.norm(x).clamp(0, 6))


def test_dropout_before_the_classifier():
    model = create_model("vgg16", drop_rate=0.999, num_classes=3).train()
    nn.init.ones_(model.fc.weight)
    logits = model.forward_head(torch.ones(64, 512, 2, 2))
    assert (logits == model.fc.bias).any(1).float().mean() > 0.3


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "shufflenetv2_x0_5", "vgg16"])
@pytest.mark.parametrize("block", [None, "se", "bd", "ir", "ce"])
def test_every_block_in_every_family(name, block):
    model = create_model(name, block, num_classes=3)
    step(model)
    kinds = {type(m.ce).__name__ for m in model.modules() if isinstance(m, NormCE2d)}
    wanted = {"bd": "BatchDecorrelation2d", "ir": "InstanceReweighting2d"}
    wanted |= {"ce": "ChannelEquilibrium2d"}
    assert kinds == ({wanted[block]} if block in wanted else set())
    squeezed = sum(isinstance(m, timm.layers.SEModule) for m in model.modules())
    counts = {"resnet18": 8, "mobilenetv2_100": 17, "shufflenetv2_x0_5": 16, "vgg16": 13}
    assert squeezed == (counts[name] if block == "se" else 0)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "vgg16"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("block", [None, "ce"])
def test_every_norm(name, norm, block):
    model = create_model(name, block, norm=norm, num_classes=3)
    found = {type(m) for m in model.modules() if hasattr(m, "eps") and "Norm" in type(m).__name__}
    found |= {type(m) for m in model.modules() if isinstance(m, SwitchableWhitening2d)}
    found.discard(nn.LayerNorm)  # of the gate
    if norm == "bn" and name == "mobilenetv2_100":
        assert all(issubclass(kind, nn.BatchNorm2d) for kind in found)
    else:
        assert found == {NORMS[norm]}
    if norm == "ln":
        assert all(m.num_groups == 1 for m in model.modules() if isinstance(m, nn.GroupNorm))
    step(model)


@pytest.mark.parametrize(("act", "kind"), [("elu", nn.ELU), ("leaky_relu", nn.LeakyReLU)])
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "shufflenetv2_x0_5", "vgg16"])
def test_every_activation(name, act, kind):
    model = create_model(name, act=act, num_classes=3)
    assert not any(isinstance(m, nn.ReLU | nn.ReLU6) for m in model.modules() if m is not None)
    assert any(isinstance(m, kind) for m in model.modules())
    step(model)


@pytest.mark.parametrize(
    ("name", "position", "kernel", "count"),
    [("resnet50", 2, (3, 3), 14), ("resnet50", 3, (1, 1), 14), ("resnet18", 1, (3, 3), 9)],
)
def test_position(name, position, kernel, count):
    model = create_model(name, ce_position=position, num_classes=3)
    sites = [name for name, m in model.named_modules() if isinstance(m, NormCE2d)]
    assert len(sites) == count
    for site in sites[1:]:
        block, norm = site.rsplit(".", 1)
        assert norm == f"bn{position}"
        assert model.get_submodule(f"{block}.conv{position}").kernel_size == kernel


@pytest.mark.parametrize("options", [{"ce_position": 1}, {"norm": "sw", "norm_places": "published",
                                     "block": None}])  # fmt: skip
def test_other_places_train_and_go_into_files(options, tmp_path):
    model = create_model("resnet18", **options, num_classes=3)
    step(model)
    cenet.save(model.eval(), tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(again(x), model(x))


def test_options():
    bare = create_model("resnet18", stem=False, layer_args={"group_size": 8}, num_classes=3)
    layers = [m.ce for m in bare.modules() if isinstance(m, NormCE2d)]
    assert len(layers) == 8
    assert {layer.bd.group_size for layer in layers} == {8}
    assert create_model("vgg16", in_chans=1)(torch.randn(2, 1, 32, 32)).shape == (2, 10)
    ir = create_model("resnet18", "ir").bn1.ce
    assert isinstance(ir, InstanceReweighting2d)
    assert isinstance(create_model("resnet18", "bd").bn1.ce, BatchDecorrelation2d)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet34"}, "'resnet34' is not a network of the paper; use one of resnet18"),
        ({"block": "cbam"}, "block='cbam' must be one of 'plain', 'se', 'ce', 'bd', 'ir'"),
        ({"block": None, "start": "foo"}, "start='foo' must be"),
        ({"stem": "no"}, "stem='no' must be True or False"),
        ({"layer_args": 3}, "layer_args=3 must be a dict"),
        ({"num_classes": "5"}, "num_classes='5' must be an integer, at least 0"),
        ({"in_chans": 0}, "in_chans=0 must be an integer, at least 1"),
        ({"norm": []}, "norm=[] must be one of"),
        ({"norm": "batch"}, "norm='batch' must be one of 'bn', 'gn'"),
        ({"act": "gelu"}, "act='gelu' must be one of None, 'relu'"),
        ({"name": "vgg16", "ce_position": 2}, "ce_position=2 is for CE in the residual blocks of"),
        ({"ce_position": 3}, "ce_position=3 must be one of 1, 2"),
        ({"norm": "sw", "norm_places": "some"}, "norm_places='some' must be one of 'all', 'publ"),
        ({"norm": "gn", "norm_places": "published"}, "norm_places='published' is for norm='iter"),
        ({"name": "resnet50", "ce_position": 4}, "ce_position=4 must be one of 2, 3"),
        ({"name": "resnet50", "block": None, "ce_position": 2}, "ce_position=2 is for CE"),
        ({"start": "zero"}, 'start=\'zero\' must be "paper" or "identity"'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model(**{"name": "resnet18", **arguments})


def test_costs():
    # Tables 1 and 2 of the paper
    assert list(PAPER_GFLOPS.values()) == [1.83, 4.16, 7.89, 0.33, 0.05, 0.16]
    assert set(PAPER_GFLOPS) == set(NETWORKS) - {"vgg16"}
    found = cost("shufflenetv2_x1_0")
    plain, se, training, folded = found.multiply_adds
    assert found.sites == 16
    assert plain < se < folded < training
    # one 16 × 16 matrix per group and pixel folded, a second one for the covariance in training
    matrices = 0
    for channels, pixels, units in ((58, 784, 4), (116, 196, 8), (232, 49, 4)):
        padded = -(-channels // 16) * 16
        matrices += units * pixels * padded * 16
    assert folded - plain == pytest.approx(matrices, rel=0.1)
    assert training - folded == pytest.approx(matrices, rel=0.35)
    assert_in_table(found)


def assert_in_table(found):
    """`cenet models` prints the table without counting."""
    table = files("cenet").joinpath("models", "costs.csv").read_text()
    paper = "" if found.paper is None else found.paper
    row = ",".join(
        map(str, (found.name, found.sites, *found.parameters, *found.multiply_adds, paper))
    )
    assert row in table.splitlines(), f"src/cenet/models/costs.csv needs {row}"


@pytest.mark.slow
def test_the_table_has_the_costs_that_are_counted():
    for name in NETWORKS:
        assert_in_table(cost(name))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16"])
def test_cost_of_squeeze_excite(name):
    """Two products of C·R for every image and layer, R the width that timm squeezes to."""
    found = cost(name)
    layers = [m for m in create_model(name, "se").modules() if isinstance(m, SEModule)]
    assert len(layers) == {"resnet18": 8, "resnet50": 16, "vgg16": 13}[name]
    sizes = [(layer.fc1.in_channels, layer.fc1.out_channels) for layer in layers]
    assert found.multiply_adds.se - found.multiply_adds.plain == sum(2 * c * r for c, r in sizes)
    biases = sum(c + r for c, r in sizes)
    assert found.parameters.se - found.parameters.plain == biases + sum(2 * c * r for c, r in sizes)


def test_multiply_adds_are_those_of_a_network_that_computes():
    """Counted on real images, three of them, with torch's counter and by hand."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 32, 3, padding=1), SEModule(32), nn.Flatten(), nn.Linear(2048, 5))
    model = nn.Sequential(*layers).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(3, 3, 8, 8))
    by_hand = 3 * 32 * 9 * 64 + 2 * 32 * layers[1].fc1.out_channels + 2048 * 5
    assert multiply_adds(model, 8) == by_hand == counter.get_total_flops() // 2 // 3


# the authors' released network


def synthetic_state():
    """The checkpoint in the released layout that the stored logits were computed with."""
    layout = json.loads((DATA / "released_ce_resnet50.json").read_text())
    return {name: _fill(i, name, shape) for i, (name, shape) in enumerate(layout)}


def _fill(index, name, shape):
    values = np.random.RandomState(index).standard_normal(shape).astype(np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "num_batches_tracked":
        return torch.tensor(1)
    if leaf in ("running_var", "running_scale"):
        filled = 0.5 + np.abs(values)
    elif leaf == "running_wm":
        filled = 2 * np.eye(shape[-1], dtype=np.float32)
        filled = filled + 0.05 * (values + values.swapaxes(-1, -2))
    elif leaf == "running_mean":
        filled = 0.1 * values
    elif leaf == "x_weight":
        filled = 0.3 * values
    elif len(shape) == 4:
        filled = values * np.float32((2 / np.prod(shape[1:])) ** 0.5)
    elif len(shape) == 2:
        filled = values * np.float32((1 / shape[1]) ** 0.5)
    else:
        filled = (1 + 0.1 * values) if leaf == "weight" else 0.1 * values
    return torch.from_numpy(np.asarray(filled, dtype=np.float32))


def test_released_network_gives_its_logits(tmp_path):
    torch.save({"state_dict": {f"module.{k}": v for k, v in synthetic_state().items()}},
               tmp_path / "released.pth")  # fmt: skip
    model = released_ceresnet50(tmp_path / "released.pth")
    images = np.random.RandomState(12345).standard_normal((2, 3, 224, 224)).astype(np.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(images))
    stored = np.load(DATA / "released_ce_resnet50_logits.npz")["logits"]
    assert relative_error(logits, torch.from_numpy(stored)) < 1e-4


def test_a_foreign_checkpoint_gives_one_error_that_lists_everything():
    state = synthetic_state()
    del state["fc.bias"]
    state["extra"] = torch.zeros(1)
    state["conv1.weight"] = torch.zeros(64, 3, 3, 3)
    state["layer2.1.ce.x_weight"] = torch.zeros(2)
    del state["ce1.running_wm"]
    with pytest.raises(ValueError, match="not a checkpoint of the released") as error:
        released_ceresnet50(state)
    for part in (
        "missing key fc.bias",
        "unknown key extra",
        "conv1.weight is (64, 3, 3, 3), the network has (64, 3, 7, 7)",
        "layer2.1.ce",
        "x_weight is (2,)",
        "missing key running_wm",
    ):
        assert part in str(error.value)


def test_cli_exports_a_checkpoint(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = timm.create_model("cevgg16", num_classes=4)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    arguments = ("export", "cevgg16", str(tmp_path / "weights.pth"))
    call(monkeypatch, *arguments, "--format", "safetensors", "--out", str(tmp_path / "folder"))
    assert (tmp_path / "folder" / "model.safetensors").is_file()
    again = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model.eval()(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "resnet50", "w.pth", "--out", "x.onnx"), "resnet50 is not a CE network; use"),
        (("export", "cevgg16", "none.pth", "--out", "x.onnx"), "none.pth is not a file"),
    ],
)
def test_cli_names_what_is_wrong(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, *arguments)
    assert left.value.code not in (None, 0)  # a text is printed, and the exit code is 1
    assert message in f"{left.value.code} {capsys.readouterr().err}".replace("\n", " ")


@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint", b"\x80\x04\x95", b"root:x:0:0:root:/root:/bin/sh\n", b"0\n", b"K."],
)
def test_a_damaged_file_gives_one_clear_error(tmp_path, content):
    path = tmp_path / "damaged.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged.pth cannot be read as a checkpoint") as error:
        released_ceresnet50(path)
    for word in ("index", "pop", "stack", "range", "unpack"):  # of the reader's own code
        assert word not in str(error.value).replace(str(path), "")


class Explosive:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_code_in_a_file_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": Explosive()}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="holds code, which is not run"):
        released_ceresnet50(tmp_path / "code.pth")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("state", [{1: torch.zeros(1)}, {"fc.weight": 3}, None, 3])
def test_what_is_no_state_dict_is_named(state):
    with pytest.raises(ValueError, match="must be a file or a state dict"):
        released_ceresnet50(state)


def test_export_refuses_weights_that_are_not_finite(tmp_path):
    model = create_model("vgg16", num_classes=3)
    state = model.state_dict()
    state["fc.bias"] = torch.full((3,), torch.nan)
    torch.save({f"_orig_mod.{key}": value for key, value in state.items()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"not finite: fc.bias"):
        load_weights_(model, tmp_path / "w.pth")


def test_export_into_a_file_as_folder_is_one_error(tmp_path, monkeypatch):
    torch.save(timm.create_model("cevgg16").state_dict(), tmp_path / "w.pth")
    (tmp_path / "file").touch()
    arguments = ("export", "cevgg16", str(tmp_path / "w.pth"), "--format", "safetensors")
    with pytest.raises(SystemExit, match="nothing was written to"):
        call(monkeypatch, *arguments, "--out", str(tmp_path / "file"))


def test_export_does_not_write_over_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "w.pth"
    torch.save(timm.create_model("cevgg16").state_dict(), path)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="is the checkpoint itself"):
        call(monkeypatch, "export", "cevgg16", str(path), "--out", str(path), "--format", "folded")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"model_args": {"no_such": 3}},
        {"model_args": {"group_size": "many"}},
        {"num_classes": 7, "model_args": {"num_classes": 7}},
        {"pretrained_cfg": 3},
        {"architecture": ["cevgg16"]},
        {"architecture": "ce\nvgg16"},
        None,
    ],
    ids=str,
)
def test_an_edited_folder_is_one_line(change, tmp_path, monkeypatch):
    cenet.save(create_model("vgg16", num_classes=3), tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    content = json.loads(path.read_text())
    path.write_text("[" * 10**5 if change is None else json.dumps({**content, **change}))
    arguments = ("export", "cevgg16", str(path.parent), "--format", "safetensors", "--out")
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, *arguments, str(tmp_path / "again"))
    assert left.value.code.startswith(f"nothing was written to {tmp_path / 'again'}: ")
    assert str(path.parent) in left.value.code.removeprefix("nothing was written to")
    assert len(left.value.code.splitlines()) == 1
    assert not (tmp_path / "again").exists()


def test_weights_say_how_ce_started_and_folders_say_everything(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    model = timm.create_model("cevgg16", start="identity", num_classes=4).eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    assert torch.equal(load_network("cevgg16", tmp_path / "w.pth").eval()(x), model(x))
    model = timm.create_model("cevgg16", act="elu", layer_args={"group_size": 8}).eval()
    torch.save(model.state_dict(), tmp_path / "elu.pth")
    with pytest.raises(ValueError, match=r"built with other arguments .* is read from a folder"):
        load_network("cevgg16", tmp_path / "elu.pth")
    cenet.save(model, tmp_path / "folder")
    assert torch.equal(load_network("cevgg16", tmp_path / "folder").eval()(x), model(x))
    with pytest.raises(ValueError, match="holds cevgg16, not ceresnet18"):
        load_network("ceresnet18", tmp_path / "folder")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("conv1.weight", torch.nan, "conv1.weight is not finite"),
     ("bn1.running_var", -1.0, "bn1.running_var is negative")],
)  # fmt: skip
def test_a_released_checkpoint_with_impossible_values_is_refused(key, value, message):
    state = {key: torch.full((64,), value)}
    with pytest.raises(ValueError, match=message):
        released_ceresnet50(state)


def bench(monkeypatch, *arguments):
    """`benchmarks/bench_networks.py` in this process."""
    script = Path(__file__).parents[2] / "benchmarks" / "bench_networks.py"
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vgg16", "--size", "8", "--batch", "1"), "vgg16 does not take 1 images of this size"),
        (("resnet34",), "resnet34 is not a network of the paper; use one of"),
        (("vgg16", "--batch", "0"), "batch, rounds and size must be at least 1"),
        (("vgg16", "--size", "0"), "batch, rounds and size must be at least 1"),
    ],
)
def test_bench_names_what_is_wrong(arguments, message, monkeypatch):
    with pytest.raises(SystemExit, match=message):
        bench(monkeypatch, *arguments)


def test_bench_prints_ratios(monkeypatch, capsys):
    bench(monkeypatch, "vgg16", "--batch", "2", "--rounds", "1")
    printed = capsys.readouterr().out
    for row in ("plain", "SE", "CE folded"):
        assert row in printed


def test_hub_entry_points():
    root = Path(__file__).parents[2]
    model = torch.hub.load(str(root), "ceshufflenetv2_x0_5", source="local", num_classes=3)
    assert sum(isinstance(m, NormCE2d) for m in model.modules()) == 16
