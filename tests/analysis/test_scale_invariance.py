"""What rescaling a layer may move: the paper's figure, and none of the other measures.

BN → ReLU → conv → BN does not care about the scale of a layer, so a number that says what its
channels do must not care either.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cenet
from _planted import images
from cenet.analysis import channels as measures

TOLERANCE = 1e-5
COUNTS = (
    "dormant", "dormant_strict", "rare", "saturated", "duplicates", "prunable", "undecided",
    "constant", "shared",
)  # fmt: skip
NUMBERS = ("activity", "firing", "contribution", "participation_ratio", "correlation",
           "correlation_in_groups")  # fmt: skip


class Network(nn.Module):
    """Three stages of conv → norm → ReLU, one of them pooled, and a head that reads flat maps.

    The first stage has two readers: the next stage, and a projection with a norm of its own.
    """

    def __init__(self, width, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, width, 3, padding=1), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, 2 * width, 3, padding=1), norm(2 * width)
        self.conv3, self.norm3 = nn.Conv2d(2 * width, width, 1), norm(width)
        self.short, self.norm4 = nn.Conv2d(width, width, 1), norm(width)
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(4 * width, 3)

    def forward(self, x):
        x = self.pool(self.act1(self.norm1(self.conv1(x))))
        y = self.act2(self.norm2(self.conv2(x)))
        y = self.act3(self.norm3(self.conv3(y)) + self.norm4(self.short(x)))
        return self.head(nn.functional.adaptive_avg_pool2d(y, 2).flatten(1))


def random_network(seed, width, norm):
    """Weights of a trained look: some channels weak, one dead, statistics that fit the images."""
    torch.manual_seed(seed)
    network = Network(width, norm).double()
    x = images(24, 8, seed).double()
    with torch.no_grad():
        for layer in (network.norm1, network.norm2, network.norm3, network.norm4):
            if layer.weight is not None:
                layer.weight.copy_(torch.rand(len(layer.weight)) ** 2 + 0.02)
                layer.bias.copy_(0.3 * torch.randn(len(layer.bias)))
                layer.weight[0], layer.bias[0] = 1e-3, -1.0
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        network.train()(x)
    return network.eval(), x


def rescaled(network, number, factor, undo):
    """The same function with one layer's output multiplied by `factor` > 0."""
    twin = copy.deepcopy(network)
    norms = ((twin.norm1,), (twin.norm2,), (twin.norm3, twin.norm4))[number]
    readers = (
        ((twin.conv2, twin.norm2), (twin.short, twin.norm4)),
        ((twin.conv3, twin.norm3),),
        ((twin.head, None),),
    )[number]
    with torch.no_grad():
        for norm in norms:
            norm.weight *= factor
            norm.bias *= factor
        for reader, following in readers:
            if undo == "weights" or not isinstance(following, nn.BatchNorm2d):
                reader.weight /= factor
            else:  # the following norm absorbs it, but for its ε
                reader.bias *= factor
                following.running_mean *= factor
                following.running_var *= factor**2
                following.running_var += (factor**2 - 1) * following.eps
    return twin


def batch_norm(width):
    return nn.BatchNorm2d(width)


def group_norm(width):
    return nn.GroupNorm(2, width)


def assert_same_measures(one, other):
    for before, after in zip(one.layers, other.layers, strict=True):
        for name in COUNTS:
            assert getattr(before, name) == getattr(after, name), (before.name, name)
        for name in NUMBERS:
            expected = torch.tensor(getattr(before, name), dtype=torch.float64)
            actual = torch.tensor(getattr(after, name), dtype=torch.float64)
            assert torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE), name
    assert one.verdict == other.verdict


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    number=st.integers(0, 2),
    factor=st.floats(-3, 3).map(lambda power: 10.0**power),
    norm=st.sampled_from([batch_norm, group_norm]),
    undo=st.sampled_from(["weights", "norm"]),
)
def test_no_new_measure_moves_when_a_layer_is_rescaled(seed, number, factor, norm, undo):
    network, x = random_network(seed, 8, norm)
    twin = rescaled(network, number, factor, undo)
    with torch.no_grad():
        assert torch.allclose(network(x), twin(x), rtol=1e-9, atol=1e-9)
    one, other = cenet.diagnose(network, [x]), cenet.diagnose(twin, [x])
    assert_same_measures(one, other)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_the_papers_figure_moves(factor):
    network, x = random_network(0, 8, batch_norm)
    before = cenet.diagnose(network, [x]).layers[1]
    after = cenet.diagnose(rescaled(network, 1, factor, "weights"), [x]).layers[1]
    assert after.mean_abs == pytest.approx([factor * value for value in before.mean_abs])
    if factor < 1:
        assert after.inhibited_ratio == 1 > before.inhibited_ratio
    else:
        assert len(after.inhibited) < len(before.inhibited) or after.inhibited == before.inhibited


def test_contribution_does_not_move_when_one_channel_is_rescaled():
    network, x = random_network(1, 8, batch_norm)
    factors = torch.logspace(-2, 2, 16, dtype=torch.float64)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        twin.norm2.weight *= factors
        twin.norm2.bias *= factors
        twin.conv3.weight /= factors[:, None, None]
    before, after = (cenet.diagnose(each, [x]).layers[1] for each in (network, twin))
    assert after.contribution == pytest.approx(before.contribution, rel=TOLERANCE)
    assert after.prunable == before.prunable
    assert after.firing == before.firing
    assert after.duplicates == before.duplicates
    # activity is relative to the layer, not to the channel
    assert after.activity != pytest.approx(before.activity, rel=0.1)


MUTATIONS = {
    "activity is absolute": ("relative_activity", lambda mean_abs: mean_abs),
    "contribution is absolute": (
        "contribution",
        lambda mean_abs, reads: (mean_abs * reads.to(mean_abs).sqrt()).amax(0),
    ),
    "contribution forgets the weights": (
        "contribution",
        lambda mean_abs, reads: mean_abs / mean_abs.mean() + 1e-3 * mean_abs,
    ),
    "readers are added as they are": (
        "contribution",
        lambda mean_abs, reads: measures.relative_activity(mean_abs * reads.sum(0).sqrt()),
    ),
    "saturation is absolute": ("saturated", lambda mean_abs, deviation: deviation <= 0.05),
    "the ratio forgets a square": (
        "participation_ratio",
        lambda covariance: covariance.trace().item() / covariance.square().sum().item(),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_measure_of_absolute_size_is_noticed(name, monkeypatch):
    monkeypatch.setattr(measures, *MUTATIONS[name])
    network, x = random_network(3, 8, batch_norm)
    # the second layer's norm follows one of the two readers of the first
    one = cenet.diagnose(network, [x])
    other = cenet.diagnose(rescaled(network, 1, 10.0, "weights"), [x])
    with pytest.raises(AssertionError):
        assert_same_measures(one, other)
