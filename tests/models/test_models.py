"""Every registered network keeps one contract: training, features, head, files, folding, export."""

import re
from copy import deepcopy
from functools import cache

import pytest
import timm
import torch
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

import cenet.models  # registers
from _checks import relative_error
from cenet import NormCE2d, ce_sites, fold_ce, ops
from cenet.export import export_folded, export_onnx
from cenet.models import create_model
from cenet.nn import ce_layers

pytestmark = pytest.mark.usefixtures("quick_weights")

RESNETS = ("ceresnet18", "ceresnet50", "ceresnet101")
NAMES = (
    *RESNETS,
    "cemobilenetv2_100",
    "ceshufflenetv2_x0_5",
    "ceshufflenetv2_x1_0",
    "cevgg16",
)
each_network = pytest.mark.parametrize("name", NAMES)
# ResNet-18 and the narrow ShuffleNetV2 are exported at every commit, the rest in the long tier
LONG_TO_EXPORT = set(NAMES) - {"ceresnet18", "ceshufflenetv2_x0_5"}
# with nothing that others do not have
LIKE_OTHERS = ("ceresnet101", "ceshufflenetv2_x1_0", "ceresnet18", "cevgg16")


def images(name, n=4):
    size = 32 if name == "cevgg16" else 64
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))


@cache
def prepared(name):
    """In evaluation mode, after one batch of training statistics. Not to be changed."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    with torch.no_grad():
        model(images(name, 8))
    return model.eval()


def network(name):
    return deepcopy(prepared(name))


def test_timm_lists_them():
    assert sorted((*NAMES, "cevgg6")) == sorted(timm.list_models("ce*", module="entrypoints"))
    for name in NAMES:
        model = prepared(name)
        config = model.pretrained_cfg
        assert config["architecture"] == name
        assert isinstance(model.get_submodule(config["first_conv"]), nn.Conv2d)
        assert isinstance(model.get_submodule(config["classifier"]), nn.Linear)


@each_network
def test_every_parameter_gets_a_gradient(name):
    model = network(name).train()
    model(images(name)).square().sum().backward()
    unused = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # γ of a stage's last norm and λ have one like every other parameter
    assert not unused


def places(name):
    """Where the paper puts CE, written out."""
    if name == "ceresnet18":
        return ["bn1", *(f"layer{i}.{j}.bn2" for i in (1, 2, 3, 4) for j in (0, 1))]
    if name == "ceresnet50":
        blocks = {1: 3, 2: 4, 3: 6}
        return ["bn1", *(f"layer{i}.{j}.bn3" for i, n in blocks.items() for j in range(n))]
    if name == "ceresnet101":
        first_seven = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
        return ["bn1", *(f"layer{i}.{j}.bn3" for i, j in first_seven)]
    if name == "cemobilenetv2_100":
        repeats = (1, 2, 3, 4, 3, 3, 1)
        units = [(i, j) for i, n in enumerate(repeats) for j in range(n)]
        return [f"blocks.{i}.{j}.bn{1 if i == 0 else 2}" for i, j in units]
    if name == "cevgg16":
        convolutions = (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)
        return [f"features.{i + 1}" for i in convolutions]
    units = [(stage, j) for stage, n in ((2, 4), (3, 8), (4, 4)) for j in range(n)]
    return [f"stage{stage}.{j}.branch2.6" for stage, j in units]


@each_network
def test_ce_stands_where_the_paper_puts_it(name):
    counts = dict(zip(NAMES, (9, 14, 8, 17, 16, 16, 13), strict=True))
    found = {key: m for key, m in prepared(name).named_modules() if isinstance(m, NormCE2d)}
    assert sorted(found) == sorted(places(name))
    assert len(found) == counts[name]
    for key, module in found.items():
        assert module.ce.bd.group_size == 16
        assert module.ce.bd.pool == (2 if key == "bn1" else 1)


@pytest.mark.parametrize("name", RESNETS)
def test_in_residual_blocks_it_is_the_last_norm_before_the_addition(name):
    plain = create_model(name.removeprefix("ce"), None, num_classes=5)
    last = {site.name for site in ce_sites(plain) if site.default}
    in_blocks = set(places(name)) - {"bn1"}
    assert in_blocks <= last
    if name == "ceresnet18":
        assert in_blocks == last


def test_in_mobilenet_it_follows_the_depthwise_convolution_and_precedes_the_activation():
    for key in places("cemobilenetv2_100"):
        block = prepared("cemobilenetv2_100").get_submodule(key.rsplit(".", 1)[0])
        norm = prepared("cemobilenetv2_100").get_submodule(key)
        assert block.conv_dw.kernel_size == (3, 3)
        assert block.conv_dw.groups == block.conv_dw.out_channels == norm.ce.num_features
        assert isinstance(norm.act, nn.ReLU6)


@pytest.mark.parametrize("act", ["relu", "elu"])
def test_vgg_hands_activations_to_its_norms(act, monkeypatch):
    """One operator on a GPU; the results are those of the modules by themselves."""
    model = create_model("vgg16", act=act, num_classes=10).eval()
    handed = []
    forward = NormCE2d.forward

    def recorded(self, x, residual=None, act=None):
        handed.append((self, act))
        return forward(self, x, residual, act)

    monkeypatch.setattr(NormCE2d, "forward", recorded)
    layers = list(model.features)
    norms = [i for i, layer in enumerate(layers) if isinstance(layer, NormCE2d)]
    x = images("cevgg16")
    seen = []
    layers[norms[3] + 1].register_forward_hook(lambda module, *_: seen.append(module))
    y = model.forward_features(x)
    assert handed == [(layers[i], layers[i + 1]) for i in norms]
    assert seen == [layers[norms[3] + 1]]
    assert torch.equal(y, model.features(x))
    *_, last = model.forward_intermediates(x, intermediates_only=True)
    assert handed[len(norms) :] == [(layers[i], None) for i in norms] + handed[: len(norms)]
    assert torch.equal(last, model.features[:-1](x))


@each_network
def test_features(name):
    x, model = images(name), network(name)
    last, maps = model.forward_intermediates(x)
    assert torch.equal(model.forward_head(last), model(x))
    assert torch.equal(last, model.forward_features(x))
    features = timm.create_model(name, features_only=True, num_classes=5).eval()
    assert features.feature_info.channels() == [m.shape[1] for m in maps]
    reductions = [x.shape[2] // m.shape[2] for m in maps]
    assert features.feature_info.reduction() == reductions
    features.load_state_dict(
        {**features.state_dict(), **_matching(model.state_dict(), features.state_dict())}
    )
    for ours, theirs in zip(features(x), maps, strict=True):
        assert torch.equal(ours, theirs)
    only = model.forward_intermediates(x, indices=2, intermediates_only=True)
    assert [m.shape for m in only] == [m.shape for m in maps[-2:]]
    chosen = model.forward_intermediates(x, indices=[1, -1], intermediates_only=True)
    assert [m.shape for m in chosen] == [m.shape for m in (maps[1], maps[-1])]


@pytest.mark.parametrize("indices", [0, -1, 100, [], [100], [-100]])
def test_feature_maps_that_do_not_exist(indices):
    model = network("cevgg16")
    with pytest.raises(ValueError, match=re.escape(f"indices={indices} must be")):
        model.forward_intermediates(images("cevgg16"), indices=indices)


def _matching(state, wanted):
    """The entries of a network by the names that a feature extractor gives them."""
    matching = {}
    for key in wanted:
        plain = key.removeprefix("model.")
        candidates = [plain, plain.replace("_", ".", 1)]
        matching[key] = next(state[c] for c in candidates if c in state)
    return matching


@each_network
def test_head(name):
    x, model = images(name), network(name)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (4, model.num_features)
    model.reset_classifier(3)
    assert model(x).shape == (4, 3)
    assert model.get_classifier().out_features == 3
    model.reset_classifier(0)
    assert torch.equal(model.eval()(x), pooled)


@each_network
def test_files(name, tmp_path):
    x, model = images(name), network(name)
    fresh = timm.create_model(name, num_classes=5)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(x), model(x))
    cenet.save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.eval()(x), model(x))


def test_a_folder_remembers_how_the_network_was_built(tmp_path):
    options = {"block": "bd", "act": "elu", "norm": "gn", "in_chans": 1, "num_classes": 3}
    model = timm.create_model("cevgg16", layer_args={"group_size": 8}, **options).eval()
    cenet.save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", ["ceresnet18", "ceshufflenetv2_x0_5", "cevgg16"])
@pytest.mark.parametrize("head", [(3,), (0,), (3, "max")])
def test_a_folder_remembers_a_new_head(name, head, tmp_path):
    model = network(name)
    model.reset_classifier(*head)
    cenet.save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(name)
    assert torch.equal(again(x), model.eval()(x))


def test_the_plain_network_by_name(tmp_path):
    model = timm.create_model("cevgg16", block="plain").eval()
    assert not dict(ce_layers(model))
    cenet.save(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images("cevgg16")), model(images("cevgg16")))


def test_a_network_that_timm_would_not_build_again_is_refused(tmp_path):
    model = network("cevgg16")
    with pytest.raises(ValueError, match="this VGG16 is folded and cannot be saved"):
        cenet.save(fold_ce(model), tmp_path)
    features = timm.create_model("ceresnet18", features_only=True)
    with pytest.raises(ValueError, match=r"has no classifier \(features_only\?\)"):
        cenet.save(features, tmp_path)
    assert not list(tmp_path.iterdir())


def test_networks_of_the_factory_go_into_folders(tmp_path):
    for name, size in (("vgg16", 32), ("mobilenetv2_100", 64)):
        model = create_model(name, "bd", act="elu", num_classes=3).eval()
        cenet.save(model, tmp_path / name)
        again = timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True).eval()
        x = torch.randn(2, 3, size, size)
        assert torch.equal(again(x), model(x))
        readable = (tmp_path / name / "model.safetensors").stat().st_mode & 0o077
        assert readable == (tmp_path / name / "config.json").stat().st_mode & 0o077


@pytest.mark.parametrize(("block", "norm"), [("se", "bn"), ("ce", "gn")])
@pytest.mark.slow
def test_onnx_of_a_network_that_cannot_be_folded(block, norm, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model, x = create_model("vgg16", block, act="leaky_relu", norm=norm), images("cevgg16", 2)
    model.eval()
    export_onnx(model, tmp_path / "se.onnx", x)
    session = runtime.InferenceSession(tmp_path / "se.onnx")
    logits = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
    assert relative_error(logits, model(x)) < 1e-4


@each_network
def test_layout_and_precision(name):
    x, model = images(name), network(name)
    expected = model(x)
    last = model.to(memory_format=torch.channels_last)
    actual = last(x.contiguous(memory_format=torch.channels_last))
    assert relative_error(actual, expected) < 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert half.isfinite().all()
    assert relative_error(half, expected) < 0.3  # rounded a hundred times, and untrained


@pytest.mark.parametrize(
    ("name", "backend"),
    # autograd's own graphs of all of them would take minutes; it sees nothing new in the rest
    [
        *((name, "eager") for name in NAMES if name not in LIKE_OTHERS),
        *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in LIKE_OTHERS),
        ("ceresnet18", "aot_eager"),
    ],
)
def test_compiled_training_step(name, backend):
    x, model = images(name), network(name).train()
    compiled = deepcopy(model)
    # the same operations: untrained networks turn the rounding of others into errors of 2 %
    with ops.backend("torch"):
        model(x).square().sum().backward()
    torch.compile(compiled, backend=backend, fullgraph=True)(x).square().sum().backward()
    expected = dict(model.named_parameters())
    for key, parameter in compiled.named_parameters():
        if expected[key].grad.norm() > 1e-3:
            assert relative_error(parameter.grad, expected[key].grad) < 2e-2, key
    for key, buffer in compiled.named_buffers():
        assert torch.allclose(buffer, model.get_buffer(key), rtol=1e-4, atol=1e-5), key


@each_network
def test_folded(name):
    x, model = images(name).double(), network(name).double()
    assert relative_error(fold_ce(model)(x), model(x)) < 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LONG_TO_EXPORT else n for n in NAMES],
)
def test_onnx(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model = network(name)
    export_onnx(model, tmp_path / "model.onnx", images(name, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]  # weights inside
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for n in (1, 3):
        x = images(name, n)
        logits = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
        assert relative_error(logits, model(x)) < 1e-4


@each_network
def test_symbolic_tracing(name):
    x, model = images(name), network(name)
    if name == "cemobilenetv2_100" or name in RESNETS:
        traced = create_feature_extractor(model, ["global_pool"])
        (pooled,) = traced(x).values()
    else:
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x))
        return
    expected = model.forward_head(model.forward_features(x), pre_logits=True)
    assert torch.equal(pooled.flatten(1), expected.flatten(1))


def test_torchvision_layer_getter():
    x, model = images("ceresnet18"), network("ceresnet18")
    found = IntermediateLayerGetter(model, {"layer2": "a", "layer4": "b"})(x)
    maps = model.forward_intermediates(x)[1]
    assert torch.equal(found["a"], maps[2])
    assert torch.equal(found["b"], maps[4])


@pytest.mark.parametrize("name", ["ceresnet18", "ceshufflenetv2_x0_5", "cevgg16"])
def test_gradient_checkpointing(name):
    x, model = images(name), network(name).train()
    saving = deepcopy(model)
    saving.set_grad_checkpointing()
    model(x).square().sum().backward()
    calls = []
    site = next(m for key, m in saving.named_modules() if key.endswith(("branch2.6", "bn2", "s.1")))
    site.register_forward_pre_hook(lambda *_: calls.append(1))
    saving(x.requires_grad_()).square().sum().backward()
    assert len(calls) == 2  # once more in backward
    expected = dict(model.named_parameters())
    for key, parameter in saving.named_parameters():
        assert relative_error(parameter.grad, expected[key].grad) < 1e-4, key
    # a bare batch norm counts twice, as ever; those with CE do not
    for site in (key for key, m in saving.named_modules() if isinstance(m, NormCE2d)):
        for key, buffer in saving.get_submodule(site).named_buffers():
            assert torch.allclose(buffer, model.get_buffer(f"{site}.{key}")), (site, key)


def test_exported_program(tmp_path):
    x, model = images("ceshufflenetv2_x0_5", 3), network("ceshufflenetv2_x0_5")
    export_folded(model, tmp_path / "model.pt2", x)
    program = torch.export.load(tmp_path / "model.pt2")
    assert not any("running_mean" in key for key in program.state_dict)  # folded
    assert relative_error(program.module()(x), model(x)) < 1e-5
    assert model.train().training
    export_folded(model, tmp_path / "again.pt2", x)
    assert model.training  # as it was


@pytest.mark.parametrize("name", ["vgg6", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_a_fine_tune_from_stock_weights_to_onnx(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    if name == "resnet18":
        # with branches that do something: timm starts their last norms at zero
        stock = timm.create_model(name, num_classes=5, zero_init_last=False)
        x = images("ceresnet18")
    else:
        stock, x = create_model(name, "plain", num_classes=5), torch.randn(4, 3, 8, 8)
    torch.save(stock.state_dict(), tmp_path / "stock.pth")
    model = create_model(name, start="identity", num_classes=5)
    state = torch.load(tmp_path / "stock.pth", weights_only=True)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown
    assert all(".ce." in key for key in missing)
    assert relative_error(model.eval()(x), stock.eval()(x)) < 1e-5  # CE changes nothing yet
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), torch.arange(4) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    assert all(m.ce.blend.item() != 0 for m in model.modules() if isinstance(m, NormCE2d))
    torch.save(model.state_dict(), tmp_path / "tuned.pth")
    again = create_model(name, start="identity", num_classes=5).eval()
    again.load_state_dict(torch.load(tmp_path / "tuned.pth", weights_only=True))
    assert torch.equal(again(x), model(x))
    assert relative_error(fold_ce(again)(x), model(x)) < 1e-4
    export_onnx(again, tmp_path / "tuned.onnx", x)
    session = runtime.InferenceSession(tmp_path / "tuned.onnx")
    logits = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
    assert relative_error(logits, model(x)) < 1e-4


def test_there_are_no_weights_to_download():
    assert not any(cenet.models.entrypoints.default_cfgs[n].default.has_weights for n in NAMES)
