"""Measures of channels against planted answers and slow formulas."""

import sys

import pytest
import torch
from torch import nn

import cenet
from _planted import Planted, Tangled, images
from _shards import record
from cenet.analysis import (
    bias_statistics,
    channel_correlation,
    channel_importance,
    channel_magnitude,
    contribution,
    correlation_matrix,
    cumulative_ablation,
    decorrelation_spectrum,
    duplicates,
    equivalent_gamma,
    first_layers_ratio,
    gini,
    gradcam,
    inhibited_ratio,
    mixing_ratio,
    participation_ratio,
    relative_activity,
    saturated,
    weight_statistics,
)
from cenet.analysis.ablation import Sample

TOLERANCE = 1e-6


def test_a_channel_at_the_papers_threshold_is_not_inhibited():
    magnitude = torch.tensor([0.0, 0.0099, 0.01, 1.0], dtype=torch.float64)
    assert inhibited_ratio(magnitude, 0.01) == 0.5


def test_activity_is_relative_to_the_layer():
    found = relative_activity(torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64))
    assert found.tolist() == [0, 0.5, 2.5]
    assert relative_activity(torch.zeros(3)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"mean_abs must be one value per channel, got \(2, 3\)"):
        relative_activity(torch.zeros(2, 3))


def test_contribution_is_activity_times_the_norm_of_the_weights():
    activity = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = contribution(activity, torch.tensor([[36.0, 4.0, 0.0]]))
    assert found.tolist() == pytest.approx([1.8, 1.2, 0])
    # of two readers the one that the channel reaches most, whatever their scales
    both = contribution(activity, torch.tensor([[36.0, 4.0, 0.0], [0.0, 0.0, 1e-6]]))
    assert both.tolist() == pytest.approx([1.8, 1.2, 3])
    with pytest.raises(ValueError, match=r"must be \(readers, 3\), got \(3,\)"):
        contribution(activity, torch.ones(3))


def test_participation_ratio():
    values = torch.rand(9, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64)).Q
    covariance = basis @ values.diag() @ basis.T
    expected = values.sum() ** 2 / values.square().sum()
    assert participation_ratio(covariance) == pytest.approx(expected.item())
    assert participation_ratio(torch.eye(5)) == 5
    assert participation_ratio(torch.ones(5, 5)) == pytest.approx(1)
    assert participation_ratio(torch.zeros(3, 3)) is None


def test_duplicates_are_the_same_but_for_a_positive_factor():
    torch.manual_seed(0)
    base = torch.randn(3, 4000, dtype=torch.float64)
    values = torch.stack([
        base[0],
        3 * base[0],  # repeats 0
        -base[0],  # a ReLU makes something else of it
        base[0] + 2,  # so it does of this
        base[1],
        base[1] + 0.1 * base[2],  # repeats 4: correlation 0.995
        base[1] + 0.2 * base[2],  # does not: 0.98
        torch.ones(4000),  # constant
        torch.ones(4000),
    ])  # fmt: skip
    found = duplicates(values.mean(1), torch.cov(values, correction=0))
    assert found.nonzero().flatten().tolist() == [1, 5]


def test_of_a_chain_of_neighbours_only_what_repeats_a_kept_channel_counts():
    angles = torch.tensor([0.0, 0.13, 0.26])  # cosines 0.99 and 0.97
    rows = torch.stack([angles.cos(), angles.sin()], 1).double()
    assert duplicates(torch.zeros(3), rows @ rows.T).tolist() == [False, True, False]


def test_saturated_channels_are_active_and_stuck():
    mean = torch.tensor([0.0, 1.0, 1.0, 100.0, 100.0], dtype=torch.float64)
    deviation = torch.tensor([0.0, 0.0, 0.015, 0.9, 1.0], dtype=torch.float64)
    assert saturated(mean, deviation).tolist() == [False, True, False, True, True]


def apart(count):
    """Directions in three dimensions, far from each other."""
    height = torch.linspace(1, -1, count)
    angle = torch.arange(count) * torch.pi * (3 - 5**0.5)
    radius = (1 - height**2).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], 1)


def test_planted_channels_are_found_exactly():
    weight, bias = apart(12), torch.zeros(12)
    weight[2], bias[2] = 0, -1  # dead
    weight[4] *= 0.01  # hardly anything
    weight[5] *= 0.04  # weak
    weight[7] = 2.5 * weight[0]  # repeats 0
    weight[9], bias[9] = 0, 1.0  # stuck at one
    weight[10], bias[10] = torch.tensor([2.0, 0, 0]), -60.0  # for one image in two hundred
    weight[11], bias[11] = torch.tensor([0, 2.0, 0]), -60.0  # for one in a hundred
    x = images(400, 6).clamp(-3, 3)
    x[[17, 230], 0, 2, 2] = 40
    x[[5, 80, 150, 390], 1, 2, 2] = 40
    found = cenet.diagnose(Planted(weight, bias), x.split(64))
    (layer,) = found.layers
    assert layer.dormant_strict == (2, 4, 10, 11)
    assert layer.dormant == (2, 4, 5, 10, 11)
    assert 0.03 < layer.activity[5] < 0.1
    assert layer.rare == (2, 10)  # 11 fires in just 1 %
    assert layer.firing[10] == 2 / 400
    assert layer.saturated == (9,)
    assert layer.duplicates == (7,)
    assert layer.constant == 2
    # 10 and 11 are weak on average, but strong in the few images they are for
    assert layer.prunable == (2, 4)


def test_a_channel_fires_where_one_pixel_is_positive():
    model = nn.Sequential(nn.Identity(), nn.GELU())
    x = torch.full((2, 1, 4, 4), -0.5)
    x[0, 0, 1, 1] = 0.01
    (layer,) = cenet.diagnose(model, [x]).layers
    assert layer.firing == (0.5,)


def test_wide_layers_name_their_own_channels(monkeypatch):
    monkeypatch.setattr("cenet.analysis.recorder.WIDEST", 4)
    monkeypatch.setattr("cenet.analysis.diagnosis.WIDEST", 4)
    weight = apart(8)
    weight[6] = 2 * weight[2]
    (layer,) = cenet.diagnose(Planted(weight), [images(40)]).layers
    assert layer.duplicates == (6,)
    assert layer.participation_share == layer.participation_ratio / 4


def test_images_of_different_sizes_have_one_standard_error():
    model = Planted(apart(5))
    small, large = images(6, 4), 3 * images(7, 9, seed=1)
    recorder = record(model, small, large)
    with torch.no_grad():
        each = [model.conv(x).relu().double().mean((2, 3)) for x in (small, large)]
    means = torch.cat(each)
    expected = means.std(0) / 13**0.5
    assert recorder.layers["act"].mean_abs_error == pytest.approx(expected, rel=1e-5)


def test_first_six_layers():
    assert first_layers_ratio([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0]) == pytest.approx(0.35)
    assert first_layers_ratio([0.5]) == 0.5
    assert first_layers_ratio([]) is None


def test_magnitude_is_the_length_of_the_channels():
    x = torch.zeros(1, 3, 1, 2)
    x[0, :, 0, 1] = torch.tensor([2.0, -3.0, 6.0])
    assert channel_magnitude(x).tolist() == [[[0.0, 7.0]]]


def test_correlation_leaves_constant_channels_out():
    values = torch.randn(4, 100, dtype=torch.float64)
    values[1] = 1000 + 1e-7 * values[1]  # float32 would not see it vary
    covariance = torch.cov(values, correction=0)
    found = channel_correlation(values.mean(1), covariance)
    kept = torch.corrcoef(values[[0, 2, 3]]).abs()
    assert found.mean == pytest.approx((kept.sum().item() - 3) / 6)
    assert found.constant == 1
    matrix = correlation_matrix(values.mean(1), covariance)
    assert matrix[1].isnan().all()
    assert matrix[0, 0].item() == pytest.approx(1)
    assert channel_correlation(torch.zeros(3), torch.zeros(3, 3)) == (None, 3)


def test_gamma_and_beta():
    weight = torch.tensor([0.0, 0.009, -0.009, 0.5])
    found = weight_statistics(weight)
    assert found == pytest.approx((0.125, weight.std(correction=0).item(), 0.75))
    assert bias_statistics(torch.tensor([-1.0, 0.0, 1.0, 2.0])).share_nonpositive == 0.5


@pytest.mark.parametrize("channels", [16, 26])
def test_equivalent_gamma_against_the_printed_iteration(channels):
    torch.manual_seed(0)
    values = torch.randn(channels, 4 * channels, dtype=torch.float64)
    sigma, gamma = torch.cov(values, correction=0), torch.rand(channels, dtype=torch.float64)
    expected = torch.empty_like(gamma)
    for group in torch.arange(channels).split(16):
        own = sigma[group][:, group]
        ridge = 1e-5 * own.trace() / len(group) + 1e-10
        own = own + ridge * torch.eye(len(group), dtype=torch.float64)
        own = own / own.trace()
        root = torch.eye(len(group), dtype=torch.float64)
        for _ in range(3):
            root = (3 * root - root @ root @ root @ own) / 2
        expected[group] = root @ gamma[group]
    found = equivalent_gamma(gamma, sigma)
    assert (found - expected).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match=r"must be \(2, 2\) for 2 weights, got \(3, 3\)"):
        equivalent_gamma(torch.ones(2), torch.eye(3))


def test_gamma_grows_where_the_channels_are_independent():
    # the case in which Proposition 1 holds as printed: W = w·I with w > 1
    gamma = torch.linspace(0.1, 1, 16, dtype=torch.float64)
    grown = equivalent_gamma(gamma, torch.eye(16, dtype=torch.float64))
    assert (grown / gamma).std() < TOLERANCE
    assert (grown > 2 * gamma).all()


def test_gini():
    assert gini(torch.full((5,), 3.0)) == pytest.approx(0)
    assert gini(torch.tensor([0, 0, 0, 4.0])) == pytest.approx(0.75)
    assert gini(torch.tensor([-1.0, 0, 0, 4.0])) == pytest.approx(0.75)
    assert gini(torch.zeros(3)) == 0
    values = torch.rand(20, dtype=torch.float64)
    pairs = (values[:, None] - values).abs().sum() / (2 * 20 * 20 * values.mean())
    assert gini(values) == pytest.approx(pairs.item())


def labelled(count=40):
    """Images of two classes: the first colour tells them apart."""
    x, y = images(count), torch.arange(count) % 2
    x[:, 0] = 2.0 * y[:, None, None] - 1
    return x, y


def carrier(channels=10, carriers=(3,)):
    """A network in which some channels, and no others, carry the class, each alone."""
    weight = torch.zeros(channels, 3)
    weight[:, 1:] = 0.1 * torch.randn(channels, 2, generator=torch.Generator().manual_seed(0))
    weight[list(carriers), :] = torch.tensor([1.0, 0, 0])
    model = Planted(weight)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[1, list(carriers)] = 1
        model.head.bias.copy_(torch.tensor([0.1, 0.0]))
    return model


def test_the_one_channel_that_carries_the_class_has_all_importance():
    model, (x, y) = carrier(), labelled()
    found = channel_importance(model, [(x, y)], "act")
    # without it, both logits are the biases
    with torch.no_grad():
        whole = model(x).double().softmax(1)
        without = model.head.bias.double().softmax(0)
    each = (whole * (whole / without).log()).sum(1)
    assert found.divergence.tolist() == pytest.approx(
        [each.mean().item() if c == 3 else 0 for c in range(10)], abs=1e-7
    )
    assert found.error[3].item() == pytest.approx(each.std().item() / 40**0.5)
    assert found.error[0] == 0
    assert gini(found.divergence) == pytest.approx(0.9)


def test_importance_is_not_in_steps_of_one_image():
    model, batch = carrier(carriers=(1, 2, 3)), labelled()
    found = channel_importance(model, [batch], "act").divergence
    accuracy = cumulative_ablation(model, [batch], "act", ratios=[0.1], order=torch.tensor([1]))
    assert accuracy.item() == 1  # no image is lost
    assert found[1] > 0.01
    assert found[1:4].tolist() == pytest.approx([found[1].item()] * 3)


def test_importance_of_a_single_image_has_no_error():
    (x, y) = labelled()
    found = channel_importance(carrier(), [(x[:1], y[:1])], "act")
    assert found.error.isinf().all()


def test_the_least_important_channels_can_go_first():
    model, batch = carrier(), labelled()
    order = channel_importance(model, [batch], "act").divergence.argsort(stable=True)
    curve = cumulative_ablation(model, [batch], "act", order=order)
    assert curve.flatten().tolist() == [1.0] * 10
    curve = cumulative_ablation(model, [batch], "act", order=order.flip(0))
    assert curve.flatten().tolist() == [1.0] + [0.5] * 9


def test_ablation_curve_of_one_carrier():
    x, y = labelled()
    curve = cumulative_ablation(carrier(), [(x[:30], y[:30]), (x[30:], y[30:])], "act", seed=1)
    assert curve.shape == (10, 5)
    assert (curve[0] == 1).all()
    generator = torch.Generator().manual_seed(1)
    for repeat in range(5):
        order = torch.randperm(10, generator=generator).tolist()
        place = order.index(3)
        expected = [1.0 if count <= place else 0.5 for count in range(10)]
        assert curve[:, repeat].tolist() == expected


def test_a_share_of_channels_is_rounded_to_the_nearest_number():
    # 0.3 of 6 channels are 2, not 1
    model, batch = carrier(channels=6), labelled()
    curve = cumulative_ablation(model, [batch], "act", ratios=[0.3], repeats=20)
    generator = torch.Generator().manual_seed(0)
    gone = [3 in torch.randperm(6, generator=generator)[:2].tolist() for _ in range(20)]
    assert curve[0].tolist() == [0.5 if lost else 1.0 for lost in gone]


def test_ablation_equals_zeroing_by_hand():
    model, (x, y) = Tangled(classes=2).eval(), labelled()
    torch.manual_seed(0)
    curve = cumulative_ablation(model, [(x, y)], "gelu", ratios=[0.5], repeats=2)
    generator = torch.Generator().manual_seed(0)
    for repeat in range(2):
        off = torch.randperm(24, generator=generator)[:12]
        handle = model.head.register_forward_pre_hook(
            lambda m, args, off=off: args[0].index_fill(1, off, 0)
        )
        with torch.no_grad():
            expected = (model(x).argmax(1) == y).double().mean()
        handle.remove()
        assert curve[0, repeat] == expected


def test_ablation_says_what_it_needs():
    model, batch = carrier(), labelled()
    with pytest.raises(ValueError, match="layer 'act9' was not seen; the network has act"):
        channel_importance(model, [batch], "act9")
    with pytest.raises(ValueError, match="batches has none"):
        cumulative_ablation(model, [], "act")
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        channel_importance(model.train(), [batch], "act")


def test_a_sample_is_even_and_the_same_every_time():
    def drawn(batch):
        sample = Sample(20)
        for part in torch.arange(1000.0).split(batch):
            sample.add(part[:, None, None, None], part.long())
        return torch.cat([labels for _, labels in sample.batches()])

    assert torch.equal(drawn(7), drawn(100))
    assert len(drawn(7).unique()) == 20
    assert 300 < drawn(7).float().mean() < 700
    assert Sample(0).batches() == []


def test_lambda_and_spectrum():
    ce = cenet.ChannelEquilibrium2d(26)
    assert mixing_ratio(ce) == 0.5
    assert torch.equal(decorrelation_spectrum(ce), torch.ones(26, dtype=torch.float64))
    with torch.no_grad():
        ce.mix_logit.fill_(2)
        ce.bd.running_inv_sqrt[0] = torch.diag(torch.linspace(1, 3, 16))
        ce.bd.running_inv_sqrt[1, 10:, 10:] = 99 * torch.eye(6)  # padding
    assert mixing_ratio(ce) == pytest.approx(1 / (1 + torch.tensor(-2.0).exp().item()))
    expected = torch.cat([torch.ones(10), torch.linspace(1, 3, 16)]).double()
    assert torch.allclose(decorrelation_spectrum(ce), expected)
    assert mixing_ratio(cenet.BatchDecorrelation2d(8)) is None
    assert decorrelation_spectrum(cenet.BatchDecorrelation2d(8)).shape == (8,)
    assert decorrelation_spectrum(cenet.InstanceReweighting2d(8)) is None


class Corner(nn.Module):
    """Class 1 is a bright top left corner; the last map is changed in place afterwards."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)
        self.head = nn.Linear(1, 2)
        with torch.no_grad():
            self.conv.weight.fill_(1)
            self.conv.bias.zero_()
            self.head.weight.copy_(torch.tensor([[0.0], [1.0]]))

    def forward(self, x):
        y = self.conv(x)
        scores = y.mean((2, 3))
        return self.head(scores + 0 * y.mul_(0).sum())


def test_gradcam_shows_the_corner_that_counts():
    pytest.importorskip("pytorch_grad_cam")
    x = torch.zeros(2, 3, 8, 8)
    x[:, :, :2, :2] = 1
    model = Corner().eval()
    maps = gradcam(model, x, torch.tensor([1, 1]))
    assert maps.shape == (2, 8, 8)
    assert maps[:, :2, :2].min() > 0.99
    assert maps[:, 2:, 2:].max() == 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_gradcam_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    with pytest.raises(ImportError, match=r"pip install 'cenet\[gradcam\]'"):
        gradcam(Planted(torch.randn(2, 3)), images())
