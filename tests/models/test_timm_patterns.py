"""The properties that timm tests of its own networks, of every name that cenet registers with timm.

Left out are TorchScript (refused: docs/limits.md), the token networks, and weights to download,
which there are none of; a folder of `cenet.save` stands in for them.
"""

from functools import cache
from math import ceil

import pytest
import timm
import torch
from timm.models import FeatureInfo, get_notrace_functions, get_notrace_modules
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import cenet
import cenet.models  # registers

NAMES = (
    "cemobilenetv2_100",
    "ceresnet101",
    "ceresnet18",
    "ceresnet50",
    "ceshufflenetv2_x0_5",
    "ceshufflenetv2_x1_0",
    "cevgg16",
    "cevgg6",
    "with_ce",
)
# feature maps of each, with stem and stages
MAPS = {"cevgg6": 3, "ceshufflenetv2_x0_5": 4, "ceshufflenetv2_x1_0": 4}
each_name = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.filterwarnings("ignore:the weight of", "ignore:.*torch.jit:FutureWarning")
TRACED = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}


@cache
def default(name):
    """The network by its name alone, in evaluation mode. Not to be changed."""
    torch.manual_seed(0)
    return timm.create_model(name).eval()


def images(name, n=1, largest=224):
    """Random images of the size that the network names, or of `largest` if that is smaller."""
    channels, height, width = default(name).default_cfg["input_size"]
    size = (min(height, largest), min(width, largest))
    return torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(1))


def largest_difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


def test_these_are_the_registered_names():
    makers = {name: timm.model_entrypoint(name) for name in timm.list_models()}
    ours = [name for name, make in makers.items() if make.__module__.startswith("cenet.")]
    assert sorted(ours) == sorted(NAMES)
    assert set(NAMES) <= set(timm.list_models(name_matches_cfg=True))
    assert {f"{name}.untrained" for name in NAMES} <= set(timm.list_models(include_tags=True))


@each_name
@torch.no_grad()
def test_one_image_and_the_same_with_checkpointing(name):
    model, x = timm.create_model(name).eval(), images(name)
    model.load_state_dict(default(name).state_dict())
    logits = model(x)
    assert logits.shape == (1, model.default_cfg["num_classes"])
    assert logits.isfinite().all()
    last, maps = model.forward_intermediates(x)
    model.set_grad_checkpointing()
    assert torch.equal(model(x), logits)
    again, maps_again = model.forward_intermediates(x)
    assert torch.equal(again, last)
    assert all(map(torch.equal, maps_again, maps))


@each_name
def test_every_parameter_has_a_gradient(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=42)
    logits = model(images(name, 2, 64))
    assert logits.shape == (2, 42)
    assert logits.isfinite().all()
    logits.mean().backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None]
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each_name
@torch.no_grad()
def test_the_configuration_is_true(name):
    torch.manual_seed(0)
    model, x = timm.create_model(f"{name}.untrained").eval(), images(name)
    config, state = model.default_cfg, model.state_dict()
    assert config["num_classes"] == model.num_classes == model(x).shape[1]
    assert f"{config['first_conv']}.weight" in state
    assert f"{config['classifier']}.weight" in state
    assert model.get_submodule(config["first_conv"]).in_channels == config["input_size"][0]
    assert model.get_submodule(config["classifier"]) is model.get_classifier()
    features = model.forward_features(x)
    assert features.shape[1:] == (model.num_features, *config["pool_size"])
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (1, model.head_hidden_size)
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)
    bare = timm.create_model(name, num_classes=0, global_pool="").eval()
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare(x), features)


@each_name
@pytest.mark.parametrize("how", [{}, {"feature_cls": "getter"}], ids=["own way", "getter"])
@torch.no_grad()
def test_feature_maps(name, how):
    model, x = timm.create_model(name, features_only=True, **how).eval(), images(name, largest=96)
    info = model.feature_info
    maps = model(x)
    assert len(maps) == len(info.channels()) == MAPS.get(name, 5)
    for feature, channels, reduction in zip(maps, info.channels(), info.reduction(), strict=True):
        assert feature.shape == (1, channels, *(ceil(side / reduction) for side in x.shape[2:]))
        assert feature.isfinite().all()
    two = timm.create_model(name, features_only=True, out_indices=(1, 2), **how).eval()
    assert [m.shape for m in two(x)] == [m.shape for m in maps[1:3]]


@each_name
@torch.no_grad()
def test_intermediates(name):
    model, x = default(name), images(name, largest=96)
    info = FeatureInfo(model.feature_info, tuple(range(len(model.feature_info))))
    last, maps = model.forward_intermediates(x, output_fmt="NCHW")
    assert torch.equal(last, model.forward_features(x))
    assert [m.shape[1] for m in maps] == info.channels()
    assert [m.shape[2] for m in maps] == [ceil(x.shape[2] / r) for r in info.reduction()]


def traced(model):
    """The network as a graph of torch.fx, its last node under its name."""
    nodes = [names[-1] for names in get_graph_node_names(model, TRACED)]
    return create_feature_extractor(
        model, train_return_nodes=nodes[:1], eval_return_nodes=nodes[1:], tracer_kwargs=TRACED
    )


@each_name
def test_a_traced_network_computes_the_same_and_is_trained(name):
    torch.manual_seed(0)
    model, x = timm.create_model(name, num_classes=42), images(name, 2, 64)
    graph = traced(model)
    with torch.no_grad():
        (logits,) = graph.eval()(x).values()
        assert torch.equal(logits, model.eval()(x))
    (logits,) = graph.train()(x).values()
    assert logits.shape == (2, 42)
    logits.mean().backward()
    unused = [key for key, p in graph.named_parameters() if p.grad is None]
    assert not unused
    assert len(list(graph.parameters())) == len(list(model.parameters()))


@each_name
@torch.no_grad()
def test_trained_weights_for_other_channels_and_classes(name, tmp_path):
    model = timm.create_model(name).eval()
    cenet.save(model, tmp_path)
    folder = f"local-dir:{tmp_path}"
    grey = timm.create_model(folder, pretrained=True, in_chans=1, num_classes=5).eval()
    x = images(name, 2, 64)[:, :1]
    # timm adds up the weights of the colours
    expected = model.forward_features(x.expand(-1, 3, -1, -1))
    assert largest_difference(grey.forward_features(x), expected) < 1e-4
    assert grey(x).shape == (2, 5)
    headless = timm.create_model(folder, pretrained=True, num_classes=0).eval()
    assert isinstance(headless.get_classifier(), nn.Identity)
    features = timm.create_model(folder, pretrained=True, features_only=True).eval()
    x = images(name, 2, 64)
    *_, last = model.forward_intermediates(x, intermediates_only=True)
    assert torch.equal(features(x)[-1], last)


@each_name
def test_torchscript_is_refused_in_one_sentence(name):
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile") as refused:
        torch.jit.script(timm.create_model(name))
    assert "use torch.export" in str(refused.value)
