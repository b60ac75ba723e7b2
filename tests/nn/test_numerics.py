"""Invariants of the operator as properties, and degenerate inputs with bounds."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from _checks import assert_close, relative_error
from _reference import operator
from cenet import BatchDecorrelation2d, ChannelEquilibrium2d, InstanceReweighting2d, NormCE2d
from cenet import functional as F

seeds = st.integers(0, 2**31)
steps = st.integers(1, 7)
channels = st.sampled_from([1, 3, 16, 24, 58])
properties = settings(max_examples=40, deadline=None)


def feature_map(seed, c, *, rank=None, n=3, h=4, w=5, dtype=torch.float64):
    """Channels of very different scale, mixtures of `rank` independent maps."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randn(n, rank or c, h, w, generator=generator, dtype=dtype)
    mixing = torch.randn(c, rank or c, generator=generator, dtype=dtype)
    scale = 10 ** (4 * torch.rand(c, 1, 1, generator=generator, dtype=dtype) - 3)
    return torch.einsum("cr,nrhw->nchw", mixing, sources) * scale


def operator_of(x, newton_steps=3, scale=None):
    scale = x.new_ones(x.shape[1]) if scale is None else scale
    return F.decorrelation(F.moments(x, min(16, x.shape[1])).cov, scale, newton_steps)


def assert_spectrum(w, newton_steps, slack=1e-9):
    values = torch.linalg.eigvalsh(w)
    assert values.min() >= 1 - slack
    assert values.max() <= 1.5**newton_steps + slack
    assert (w - w.mT).abs().max() <= slack * 1.5**newton_steps


@properties
@given(seeds, channels, steps, st.sampled_from([None, 1, 2]))
def test_spectrum_of_the_operator_lies_between_one_and_the_bound(seed, c, newton_steps, rank):
    assert_spectrum(operator_of(feature_map(seed, c, rank=rank), newton_steps), newton_steps)


@properties
@given(seeds, steps)
def test_spectrum_of_the_running_average_too(seed, newton_steps):
    layer = BatchDecorrelation2d(24, newton_steps=newton_steps, dtype=torch.float64)
    for batch in range(15):
        x = feature_map(seed + batch, 24, rank=(None, 1, 3)[batch % 3])
        layer(torch.zeros_like(x) if batch == 7 else x)
    assert_spectrum(layer.running_inv_sqrt, newton_steps)


@properties
@given(seeds, channels, steps)
def test_decorrelation_never_shrinks_a_vector(seed, c, newton_steps):
    x = feature_map(seed, c)
    y = BatchDecorrelation2d(c, newton_steps=newton_steps, dtype=torch.float64)(x)
    for group in range(0, c, 16):
        before, after = x[:, group : group + 16].norm(dim=1), y[:, group : group + 16].norm(dim=1)
        assert (after >= before * (1 - 1e-9)).all()


@properties
@given(seeds, channels, steps)
def test_decorrelation_never_lowers_the_variance_of_a_channel(seed, c, newton_steps):
    x = feature_map(seed, c)
    y = BatchDecorrelation2d(c, newton_steps=newton_steps, dtype=torch.float64)(x)
    before, after = x.var((0, 2, 3)), y.var((0, 2, 3))
    # the ridge moves Σ by a relative 1e-5
    assert (after >= before * (1 - 1e-4)).all()


@properties
@given(seeds, channels, st.floats(1e-2, 1e3))
def test_operator_does_not_depend_on_the_size_of_gamma(seed, c, factor):
    x = feature_map(seed, c)
    x = x / x.std((0, 2, 3), keepdim=True)  # far above the floor of the ridge
    gamma = torch.rand(c, generator=torch.Generator().manual_seed(seed), dtype=x.dtype) + 0.1
    expected = operator_of(x, scale=gamma)
    assert relative_error(operator_of(x, scale=gamma * factor), expected) < 1e-4
    assert relative_error(operator_of(x, scale=-gamma), expected) < 1e-12


def test_an_absolute_ridge_would_break_the_invariance(monkeypatch):
    monkeypatch.setattr(F, "RIDGE", 0.0)
    monkeypatch.setattr(F, "RIDGE_FLOOR", 1e-5)
    x = feature_map(0, 16)
    gamma = torch.ones(16, dtype=x.dtype)
    assert relative_error(operator_of(x, scale=1e-3 * gamma), operator_of(x, scale=gamma)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("newton_steps", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("condition", [1, 10, 1e3, 1e6, None])
def test_newton_is_the_same_polynomial_in_every_precision(dtype, newton_steps, condition):
    generator = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))
    if condition is None:  # rank 1
        spectrum = torch.zeros(16, dtype=torch.float64)
        spectrum[0] = 1
    else:
        spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 16).double()
    sigma = basis @ torch.diag(spectrum) @ basis.T
    value = spectrum / spectrum.sum()
    z = torch.ones_like(value)
    for _ in range(newton_steps):
        z = 0.5 * (3 * z - z**3 * value)
    expected = basis @ torch.diag(z) @ basis.T
    w = F.newton_inverse_sqrt(sigma.to(dtype), newton_steps)
    # the printed form is 80 off at rank 1 and nine steps
    assert_close("W", w, expected, 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_moments_survive_large_offsets(offset, channels_last):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 24, 9, 11, generator=generator) * 0.7 + offset
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    assert_close("eval", F.moments(x, None).var, x.double().var((2, 3), correction=0), 2e-6)
    mean, var, cov, pixels, *_ = F.moments(x, 16)
    exact = x.double()
    assert pixels == 99
    assert_close("mean", mean, exact.mean((2, 3)), 1e-6)
    assert_close("var", var, exact.var((2, 3), correction=0), 2e-6)
    rows = exact.transpose(0, 1).reshape(24, -1)
    dense = torch.cov(rows, correction=0)
    assert_close("cov", cov[0], dense[:16, :16], 2e-6)
    assert_close("ragged cov", cov[1, :8, :8], dense[16:, 16:], 2e-6)
    assert cov[1, 8:].abs().sum() == 0
    assert (cov.diagonal(dim1=-2, dim2=-1) >= 0).all()


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_block_survives_large_offsets(offset):
    """Rounding of the input itself is offset · 6e-8; the output may lose a little more, not all."""
    torch.manual_seed(0)
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    exact = copy.deepcopy(block).double()
    x = torch.randn(4, 24, 9, 11) + offset
    z = x.double().requires_grad_()
    x.requires_grad_()
    upstream = torch.randn(x.shape)
    y, expected = block(x), exact(z)
    y.backward(upstream)
    expected.backward(upstream.double())
    bound = 1e-5 + 1e-6 * offset
    assert_close("y", y, expected, bound)
    assert_close("x.grad", x.grad, z.grad, bound)
    assert_close("gamma.grad", block.norm.weight.grad, exact.norm.weight.grad, bound)


LAYERS = [ChannelEquilibrium2d, BatchDecorrelation2d, InstanceReweighting2d]
each_layer = pytest.mark.parametrize("make", LAYERS)


def run(block, x):
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(torch.ones_like(y))
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    return y, x.grad


@each_layer
def test_all_gamma_zero(make):
    block = NormCE2d(nn.BatchNorm2d(24), make(24))
    nn.init.zeros_(block.norm.weight)
    y, dx = run(block, torch.randn(4, 24, 5, 5))
    assert y.abs().max() == 0
    assert dx.abs().max() == 0
    # the gain of the instance branch is eps^{-1/2} at most
    assert block.norm.weight.grad.abs().max() <= 1e-5**-0.5 * 100 * 4


@each_layer
def test_gamma_zero_with_beta(make):
    block = NormCE2d(nn.BatchNorm2d(24), make(24))
    nn.init.zeros_(block.norm.weight)
    nn.init.constant_(block.norm.bias, 0.5)
    y, dx = run(block, torch.randn(4, 24, 5, 5))
    assert y.abs().max() <= 0.5 * max(3.375, 1e-5**-0.5)
    assert dx.abs().max() == 0


def test_one_group_zero_leaves_the_others_alone():
    x = torch.randn(4, 48, 5, 5)
    x[:, 16:32] = 0
    y, _ = run(BatchDecorrelation2d(48), x)
    alone = BatchDecorrelation2d(16)(x[:, :16])
    assert_close("first group", y[:, :16], alone, 1e-6)
    assert y[:, 16:32].abs().max() == 0
    y, dx = run(ChannelEquilibrium2d(48), x)
    assert y[:, 16:32].abs().max() == 0
    assert dx.abs().max() < 20


@each_layer
@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_constant_channels(make, value):
    x = torch.randn(4, 24, 5, 5)
    x[:, 3] = value
    y, dx = run(make(24), x)
    assert y.abs().max() < 3.375 * x.abs().max() * 16**0.5
    assert dx.abs().max() < 50
    y, _ = run(make(24), torch.full((4, 24, 5, 5), value))
    assert y.abs().max() <= abs(value) * max(3.375, 1e-5**-0.5) + 1e-6


@each_layer
@pytest.mark.parametrize("shape", [(1, 24, 1, 2), (1, 24, 2, 2), (2, 24, 1, 3), (1, 24, 3, 5)])
def test_fewer_values_than_channels(make, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    y, dx = run(make(24), x)
    assert y.abs().max() < 3.375 * x.norm(dim=1).max()
    assert dx.abs().max() < 100


def test_constant_channel_matches_the_reference():
    x = torch.randn(4, 16, 5, 5, dtype=torch.float64)
    x[:, 3] = 0.7
    w = operator_of(x)[0]
    assert_close("W", w, operator(x, 3), 1e-10)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_ten_thousand_under_autocast(make, dtype):
    conv = nn.Conv2d(24, 24, 1, bias=False)
    nn.init.dirac_(conv.weight)
    block = NormCE2d(nn.BatchNorm2d(24), make(24), nn.ReLU())
    x = 1e4 * torch.randn(8, 24, 14, 14)
    x = x.clamp(-6e4, 6e4).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        features = conv(x)
        y = block(features)
        bare = make(24)(features / 4)
    exact = copy.deepcopy(block).double()(features.double())
    assert y.dtype == dtype
    assert_close("y", y, exact, {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype])
    assert bare.isfinite().all()
    y.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


def test_a_gate_sees_differences_between_images_however_small_gamma_is():
    torch.manual_seed(0)
    layer = InstanceReweighting2d(24, eps=1e-12)
    x = torch.randn(16, 24, 7, 7) * torch.rand(16, 24, 1, 1)
    spread = [
        (layer(gamma * x) / (gamma * x)).mean((2, 3)).std(0).mean() * gamma for gamma in (1, 1e-3)
    ]
    assert relative_error(spread[1], spread[0]) < 1e-2


@pytest.mark.parametrize("size", [1.0, 1e12, 1e15, 1e18])
def test_the_gate_takes_inputs_whose_square_overflows(size):
    torch.manual_seed(0)
    layer = InstanceReweighting2d(24)
    variance = torch.rand(3, 24) * torch.tensor([1, size, size**2])[:, None]
    wide = copy.deepcopy(layer).double()
    exact, given = (v.detach().clone().requires_grad_() for v in (variance.double(), variance))
    hidden = wide.fc1.weight @ exact.mT
    # LayerNorm without a variance: distances from the mean over their root mean square
    apart = hidden.mT - hidden.mean(0)[:, None]
    standard = apart / (apart.square().mean(1, keepdim=True) + F.GATE_NORM_EPS).sqrt()
    expected = (wide.norm.weight * standard + wide.norm.bias).relu() @ wide.fc2.weight.mT
    for gate in (layer.gated, lambda v: F.instance_gate(v, layer.gate)):
        actual = gate(given)
        assert_close("gate", actual, expected.sigmoid(), 1e-5)
        (grad,) = torch.autograd.grad(actual.sum(), given)
        (wanted,) = torch.autograd.grad(expected.sigmoid().sum(), exact, retain_graph=True)
        for row in range(3):
            assert_close("gradient", grad[row], wanted[row], 1e-4)


@pytest.mark.parametrize("size", [1e15, 1e25])
def test_identity_start_is_the_identity_of_huge_activations(size):
    layer = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24), start="identity").eval()
    x = size * torch.randn(2, 24, 6, 6)
    assert_close("y", layer(x), layer.norm(x), 1e-6)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_mean_of_windows_is_that_of_the_pooled_map(offset):
    """Ranks tell it each other."""
    x = feature_map(0, 24, h=5, w=7) + offset
    pooled = nn.functional.max_pool2d(x, 2, ceil_mode=True)
    found = F.moments(x, 16, pool=2)
    assert_close("windows", found.window_mean, pooled.mean((2, 3)), 1e-12)
    assert_close("mean", found.mean, x.mean((2, 3)), 1e-12)
