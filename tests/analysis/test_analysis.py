"""What the recorder sees, against networks whose answer is known and slow independent formulas."""

import copy
from typing import NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn

import cenet
import cenet.analysis.activations as activations
import cenet.analysis.recorder as recorder_module
import cenet.models  # registers its networks with timm
from _distributed import run as run_ranks
from _planted import Planted, Tangled, images
from _shards import record, sharded
from cenet.analysis import Recorder
from cenet.analysis.channels import channel_correlation, inhibited_ratio
from cenet.analysis.recorder import LayerStatistics

TOLERANCE = 1e-6
STREAMED = (
    "mean_abs", "mean_abs_error", "root_mean_square", "deviation", "firing", "magnitude",
    "magnitude_before", "mean", "covariance",
)  # fmt: skip


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def test_every_activation_is_seen_once_and_named():
    recorder = record(Tangled().eval(), images())
    sites = recorder.sites
    assert {name: site.activation for name, site in sites.items()} == {
        "relu": "relu",
        "relu#2": "relu",
        "elu": "elu",
        "relu#3": "relu",
        "gelu": "gelu",
    }
    assert [site.channels for site in sites.values()] == [8, 8, 8, 8, 24]
    assert sites["relu"].norms == ("bn1",)
    assert sites["relu#2"].norms == ("bn2", "short.1")
    assert all(not sites[name].norms for name in ("elu", "relu#3", "gelu"))
    assert recorder.layers["gelu"].size == (8, 8)


IN_PLACE_TOO = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(nn.ReLU6, nn.Hardtanh, nn.RReLU),
)


@pytest.mark.parametrize(
    ("kind", "inplace"),
    [
        *((kind, inplace) for kind in IN_PLACE_TOO for inplace in (False, True)),
        *((kind, False) for kind in (nn.GELU, nn.PReLU, nn.Softplus, nn.Tanh)),
        *((kind, False) for kind in (nn.Softshrink, nn.Hardshrink)),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_activations_before_and_after(kind, inplace, training):
    act = kind(inplace=True) if inplace else kind()
    model = nn.Sequential(nn.Conv2d(3, 5, 1), act).train(training)
    x = images()
    recorder = record(model, x)
    (layer,) = recorder.layers.values()
    assert recorder.sites["1"].activation.replace("_", "") == kind.__name__.lower()
    with torch.no_grad():
        before = model[0](x).double().transpose(0, 1).flatten(1)
    assert relative(layer.covariance, torch.cov(before, correction=0)) < TOLERANCE
    assert relative(layer.mean, before.mean(1)) < TOLERANCE
    if not (kind is nn.RReLU and training):
        with torch.no_grad():
            after = model(x).double().abs().mean((0, 2, 3))
        assert relative(layer.mean_abs, after) < TOLERANCE


@pytest.mark.parametrize("swish", ["x * sigmoid", "sigmoid * x", "in place"])
def test_swish_by_hand_is_one_activation_and_gates_are_none(swish):
    class Hand(nn.Module):
        def forward(self, x):
            if swish == "in place":
                return x.mul_(x.sigmoid())
            return x * x.sigmoid() if swish == "x * sigmoid" else x.sigmoid() * x

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), Hand()

        def forward(self, x):
            x = self.act(self.bn(self.conv(x)))
            return x * x.mean((2, 3), keepdim=True).sigmoid() * (2 * x).sigmoid()

    torch.manual_seed(0)
    model, x = Gated().eval(), images()
    recorder = record(model, x)
    assert list(recorder.layers) == ["act"]
    assert recorder.sites["act"][1:3] == ("silu", ("bn",))
    with torch.no_grad():
        before = model.bn(model.conv(x))
        after = nn.functional.silu(before).double().abs().mean((0, 2, 3))
    assert relative(recorder.layers["act"].mean, before.double().mean((0, 2, 3))) < TOLERANCE
    assert relative(recorder.layers["act"].mean_abs, after) < TOLERANCE


def test_planted_dead_channels_are_found():
    weight = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(10)
    weight[[2, 7]] = 0
    bias[7] = -1.0
    weight[4] *= 1e-3
    (layer,) = record(Planted(weight, bias), images()).layers.values()
    assert (layer.mean_abs < 1e-2).nonzero().flatten().tolist() == [2, 4, 7]
    assert inhibited_ratio(layer.mean_abs) == pytest.approx(0.3)
    found = channel_correlation(layer.mean, layer.covariance)
    assert found.constant == 2  # 4 is weak, but varies
    assert found.mean is not None


def test_duplicated_channels_correlate_by_one():
    weight = torch.randn(1, 3).expand(6, 3) * torch.tensor([1, -2, 3, 1e-4, 5, 6.0])[:, None]
    (layer,) = record(Planted(weight), images()).layers.values()
    found = channel_correlation(layer.mean, layer.covariance)
    assert found == (pytest.approx(1, abs=TOLERANCE), 0)


def test_orthogonal_channels_do_not_correlate():
    # three channels, each a checkerboard of its own frequency: exactly orthogonal and centred
    i = torch.arange(8)
    waves = torch.stack([(-1.0) ** i, (-1.0) ** (i // 2), (-1.0) ** (i // 4)])
    x = waves[None, :, :, None].expand(2, 3, 8, 8).contiguous()
    (layer,) = record(Planted(torch.eye(3), torch.full((3,), 50.0)), x).layers.values()
    assert channel_correlation(layer.mean, layer.covariance).mean < TOLERANCE
    mixed = torch.eye(3) + torch.tensor([[0, 1.0, 0], [0, 0, 0], [0, 0, 0]])
    (layer,) = record(Planted(mixed), x).layers.values()
    # one pair of three at 45 degrees
    expected = 0.5**0.5 / 3
    assert channel_correlation(layer.mean, layer.covariance).mean == pytest.approx(expected)


def test_statistics_against_slow_formulas():
    model, x = Tangled().eval(), images(5, 10)
    recorder = record(model, x)
    seen = []
    handle = model.bn1.register_forward_hook(lambda m, a, y: seen.append(y.clone()))
    with torch.no_grad():
        model(x)
    handle.remove()
    values = seen[0].double()
    layer = recorder.layers["relu"]
    matrix = torch.corrcoef(values.transpose(0, 1).flatten(1))
    pairs = [matrix[a, b].abs().item() for a in range(8) for b in range(8) if a != b]
    found = channel_correlation(layer.mean, layer.covariance)
    assert found.mean == pytest.approx(sum(pairs) / len(pairs), abs=TOLERANCE)
    y = values.clamp_min(0)
    for c in range(8):
        assert layer.mean_abs[c].item() == pytest.approx(y[:, c].abs().mean().item())
    lengths = [[sum(y[n, :, i, j].square().sum().sqrt() for n in range(5)) / 5 for j in range(10)]
               for i in range(10)]  # fmt: skip
    assert relative(layer.magnitude, torch.tensor(lengths, dtype=torch.float64)) < TOLERANCE


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_streaming_equals_all_at_once(offset):
    x = images(13, 6, channels=7).double() * torch.logspace(-3, 1, 7)[:, None, None] + offset
    x, y = x.float(), x.relu().float()
    whole = LayerStatistics.empty(7, (6, 6))
    rows = x.double().transpose(0, 1).flatten(1)
    whole.mean, whole.scatter = rows.mean(1), torch.cov(rows, correction=0) * rows.shape[1]
    for sizes in ([13], [1] * 13, [5, 8], [12, 1]):
        stream = LayerStatistics.empty(7, (6, 6))
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            stream.see_before(a)
            stream.see_after(b)
        assert stream.pixels == rows.shape[1]
        assert stream.images == 13
        assert relative(stream.mean, whole.mean) < TOLERANCE
        # each entry by itself: the weakest channel counts like the strongest
        deviation = whole.scatter.diagonal().sqrt()
        error = (stream.scatter - whole.scatter) / deviation / deviation[:, None]
        assert error.abs().max() < TOLERANCE
        z = y.double()
        assert relative(stream.mean_abs, z.abs().mean((0, 2, 3))) < TOLERANCE
        assert relative(stream.root_mean_square, z.square().mean((0, 2, 3)).sqrt()) < TOLERANCE
        assert stream.firing.tolist() == (z.amax((2, 3)) > 0).double().mean(0).tolist()
        by_image = z.mean((2, 3))
        assert relative(stream.mean_abs_error, by_image.std(0) / 13**0.5) < 1e-3 + offset
        assert relative(stream.deviation, z.std((0, 2, 3), correction=0)) < 1e-3 + offset


def test_streaming_a_network_and_merging_recorders():
    model, x = Tangled().eval().double(), images(9).double()
    whole = record(model, x)
    parts = [record(model, part) for part in x.split([4, 1, 4])]
    merged = parts[0]
    for part in parts[1:]:
        merged.merge(part)
    for other in (record(model, *x.split(2)), merged):
        assert list(other.layers) == list(whole.layers)
        for name, layer in whole.layers.items():
            for field in STREAMED:
                actual = getattr(other.layers[name], field)
                assert relative(actual, getattr(layer, field)) < TOLERANCE, (name, field)
        for name, reads in whole.reads.items():
            assert torch.equal(other.reads[name], reads)
        assert other.shared == whole.shared


def test_an_empty_recorder_takes_in_all_layers_of_another():
    model = Tangled().eval()
    seen, empty = record(model, images()), Recorder(model)
    empty.merge(seen)
    assert list(empty.layers) == list(seen.layers)
    assert empty.sites == seen.sites
    assert torch.equal(empty.layers["gelu"].mean_abs, seen.layers["gelu"].mean_abs)


def test_batches_that_are_taken_in_parts_count_whole(monkeypatch):
    x = images(7, 6, channels=5)
    whole, parts = LayerStatistics.empty(5, (6, 6)), LayerStatistics.empty(5, (6, 6))
    for found, chunk in ((whole, 2**23), (parts, 2 * 5 * 6 * 6)):
        monkeypatch.setattr(recorder_module, "CHUNK", chunk)
        found.see_before(x)
        found.see_after(x)
    assert whole.pixels == parts.pixels == 7 * 36
    for field in STREAMED:
        assert relative(getattr(parts, field), getattr(whole, field)) < TOLERANCE


class Turned(nn.Module):
    """Channels that are scaled, shifted and turned between norm and activation."""

    def __init__(self):
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(5), nn.ReLU6()

    def forward(self, x):
        return self.act(((self.bn(x) - 1) / 2).transpose(1, 3))


def test_channels_are_followed_through_arithmetic_and_transposition():
    recorder = record(Turned().eval(), images(4, 6, channels=5))
    (site,) = recorder.sites.values()
    assert site == ("act", "relu6", ("bn",), None, 3, 5, False)


def test_sharded_over_processes_equals_one():
    torch.manual_seed(0)
    whole = record(Tangled().eval().double(), images(9).double())
    for found, reads, shared in (part for rank in run_ranks(sharded, 2) for part in rank):
        assert list(found) == list(whole.layers)
        assert shared == whole.shared
        assert reads.keys() == whole.reads.keys()
        for name, layer in whole.layers.items():
            assert (found[name]["images"], found[name]["pixels"]) == (9, layer.pixels)
            for field in (*recorder_module.AFTER, *recorder_module.MAPS, "mean", "scatter"):
                assert relative(found[name][field], getattr(layer, field)) < TOLERANCE
        for name, read in whole.reads.items():
            assert torch.equal(reads[name], read)


def test_recording_changes_nothing():
    model = Tangled().train()
    twin = copy.deepcopy(model)
    x = images()
    with Recorder(model):
        y = model(x)
    y.square().sum().backward()
    expected = twin(x)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_failing_pass_leaves_nothing_behind():
    model = Tangled().eval()
    with pytest.raises(RuntimeError), Recorder(model):
        model(torch.randn(2, 5, 8, 8))
    recorder = record(model, images())
    assert recorder.layers["relu"].images == 6
    assert not nn.modules.module._global_forward_hooks


def test_channels_last_networks_are_read_along_their_channels():
    model = timm.create_model("convnext_atto", conv_mlp=False, num_classes=2).eval()
    sites = record(model, images(2, 64)).sites
    assert [site.channels for site in sites.values()][:3] == [160, 160, 320]
    assert {site.dim for site in sites.values()} == {3}


def test_wide_layers_keep_some_of_their_covariances(monkeypatch):
    monkeypatch.setattr("cenet.analysis.recorder.WIDEST", 4)
    weight = torch.randn(9, 3)
    (layer,) = record(Planted(weight), images()).layers.values()
    assert layer.covariance.shape == (4, 4)
    assert layer.mean_abs.shape == (9,)
    kept = weight[[0, 2, 4, 6]]
    expected = kept.double() @ torch.cov(images().transpose(0, 1).flatten(1).double(), correction=0)
    assert relative(layer.covariance, expected @ kept.double().T) < TOLERANCE


def test_ce_layers_and_their_norms_are_named():
    model = timm.create_model("ceresnet18", num_classes=2).eval()
    sites = record(model, images(2, 32)).sites
    assert sites["act1"].ce == "bn1.ce"
    assert sites["layer1.0.act2"].norms == ("layer1.0.bn2",)
    assert sites["layer1.0.act2"].ce == "layer1.0.bn2.ce"
    assert sites["layer1.0.act1"].ce is None
    inside = timm.create_model("mobilenetv2_100", num_classes=2).eval()
    cenet.insert_ce_(inside, lambda norm, name: name == "bn1")
    assert record(inside, images(2, 32)).sites["bn1.act"].ce == "bn1.ce"
    slot = {"attn_layer": lambda channels, **kw: cenet.ChannelEquilibrium2d(channels)}
    model = timm.create_model("resnet18", block_args=slot, num_classes=2).eval()
    site = record(model, images(2, 32)).sites["layer1.0.act2"]
    assert (site.norms[0], site.ce) == ("layer1.0.bn2", "layer1.0.se")


def test_an_operator_with_an_activation_inside_is_watched(monkeypatch):
    # on CUDA, norm, CE and activation are one operator; this one stands for it
    library = torch.library.Library("cenet_test", "DEF")
    library.define("scaled(Tensor x, str act, float slope) -> (Tensor, Tensor)")

    def scaled(x, act, slope):
        y = 3 * x
        return (y.relu() if act == "relu" else y), x.sum()

    library.impl("scaled", scaled, "CompositeExplicitAutograd")
    operator = torch.ops.cenet_test.scaled.default

    class ScaledCall(NamedTuple):
        x: Tensor
        act: str
        slope: float

        def before_activation(self):
            return self._replace(act="none")

    monkeypatch.setattr(activations.ops, "CALLS", {operator: ScaledCall})

    class Fused(nn.Module):
        def forward(self, x):
            return operator(x, "relu", 0.0)[0] + operator(x, "none", 0.0)[0]

    x = images()
    recorder = record(Fused(), x)
    assert list(recorder.layers) == ["relu"]
    layer = recorder.layers["relu"]
    rows = 3 * x.double().transpose(0, 1).flatten(1)
    assert relative(layer.covariance, torch.cov(rows, correction=0)) < TOLERANCE
    assert relative(layer.mean_abs, rows.clamp_min(0).mean(1)) < TOLERANCE
