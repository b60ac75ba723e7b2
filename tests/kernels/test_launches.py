"""Every launch by itself against float64, so that a fault in one does not hide in the whole layer.

The input of a launch is computed here in float64, never by the launch before it.
"""

import math

import pytest
import torch
from torch.nn.functional import layer_norm, max_pool2d

pytest.importorskip("triton")

from _checks import RTOL, assert_close
from _kernels import each_device, make_call, poisoned
from _reference import activate, newton_printed
from cenet import functional as F
from cenet.kernels import coefficients as between
from cenet.kernels import mix, moments, small_maps
from cenet.kernels.gate import GateState, Hidden, gate_forward, span_of
from cenet.kernels.tiles import (
    BETA,
    CENTER,
    GAMMA,
    MEAN,
    OFFSET,
    ORIGIN,
    ROWS_OF_VALUES,
    RSTD,
    SCALE,
    SPREAD,
    VARIANCE,
)

K = 16
EXACT = 2e-6  # of float32 sums
PASSES = {"mix": (mix, (5, 7)), "small maps": (small_maps, (2, 3))}
each_pass = pytest.mark.parametrize("name", PASSES)
each_layout = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def feature_map(n, c, h, w, last=False, seed=0):
    """Channels that correlate, with scales and means of their own, exact in float32."""
    x = noise(n, c, h, w, seed=seed)
    x = (x + 0.7 * x.roll(1, 1)) * (0.5 + noise(1, c, 1, 1, seed=1).abs())
    x = (x + 2 * noise(1, c, 1, 1, seed=2) + noise(n, c, 1, 1, seed=3)).float()
    return x.contiguous(memory_format=torch.channels_last) if last else x


def on(device, *tensors):
    """float32 on the device, in the layout they have."""
    found = [None if t is None else t.detach().float().to(device) for t in tensors]
    return found[0] if len(found) == 1 else found


def matrices_of(values, c):
    """The diagonal blocks (G, K, K) of (C, C), zero in the padding."""
    groups = -(-c // K)
    padded = torch.zeros(groups * K, groups * K, dtype=values.dtype)
    padded[:c, :c] = values
    return torch.stack([padded[i : i + K, i : i + K] for i in range(0, groups * K, K)])


def without_padding(matrices, c):
    """Zeros where a ragged group has no channels: the passes over x leave that unwritten."""
    return torch.where(matrices_of(torch.ones(c, c), c).to(matrices) > 0, matrices, 0)


def grams(rows):
    """Sum of products around the mean of (C, …), in groups."""
    rows = rows.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return matrices_of(rows @ rows.T, len(rows))


def dense_of(matrices, c):
    """(C, C) from its diagonal blocks."""
    return torch.block_diag(*matrices)[:c, :c]


# ---------------------------------------------------------------- measuring


@each_device
@each_layout
def test_measure(last, device):
    """Samples in several splits, the last of them shorter."""
    x = feature_map(2, 24, 41, 50, last)
    with poisoned():
        parts = moments.measure(on(device, x), K, gram=True)
    assert parts.splits > 1
    assert_parts(parts, [part.double() for part in x.flatten(2).split(parts.split_pixels, 2)])


@each_device
def test_measure_without_gram(device):
    x = feature_map(3, 24, 5, 7)
    with poisoned():
        parts = moments.measure(on(device, x), K, gram=False)
    assert parts.gram is None
    assert_parts(parts, [x.flatten(2).double()])


@each_device
@each_layout
def test_measure_pooled(last, device):
    x = feature_map(2, 24, 17, 19, last)
    weight = noise(24, seed=4)
    with poisoned():
        parts = moments.measure(on(device, x), K, gram=True, pool=2, weight=on(device, weight))
    assert parts.splits > 1
    rows = x.double().split(parts.split_pixels // 19, 2)
    sign = torch.where(weight < 0, -1.0, 1.0)[:, None, None]
    pooled = [sign * max_pool2d(sign * part, 2, ceil_mode=True) for part in rows]
    assert_parts(parts, [part.flatten(2) for part in rows], [p.flatten(2) for p in pooled])


@each_device
@each_layout
def test_measure_small_maps(last, device):
    """Samples that share a Gram matrix, the last program with fewer of them."""
    x = feature_map(19, 24, 2, 3, last)
    with poisoned():
        parts = small_maps.measure(on(device, x), K, gram=True)
    assert 1 < parts.samples < 19
    values = x.flatten(2).double()
    assert_parts(parts._replace(gram=None), [values])
    inside = torch.stack([grams(sample) for sample in values])
    expected = [part.sum(0) for part in inside.split(parts.samples)]
    assert_close("gram", without_padding(parts.gram, 24), torch.stack(expected), EXACT)


def assert_parts(parts, values, pooled=None):
    """`parts` against the pixels of each split, (N, C, pixels), and the pooled ones."""
    means = torch.stack([v.mean(2) for v in values], 1).flatten(0, 1)
    squares = torch.stack([v.var(2, correction=0) * v.shape[2] for v in values], 1).flatten(0, 1)
    pivot = parts.pivot.double()
    assert_close("mean", pivot + parts.rest, means, EXACT)
    assert_close("square", parts.square, squares, EXACT)
    if pooled is not None:
        expected = torch.stack([v.mean(2) for v in pooled], 1).flatten(0, 1)
        assert_close("pooled mean", pivot + parts.pooled_rest, expected, EXACT)
    if parts.gram is not None:
        measured = values if pooled is None else pooled
        expected = [grams(sample) for v in zip(*measured, strict=True) for sample in v]
        found = without_padding(parts.gram, means.shape[1])
        assert_close("gram", found, torch.stack(expected), EXACT)


@each_device
@pytest.mark.parametrize("pooled", [False, True])
def test_condense(pooled, device):
    """Two splits a sample, two chunks, the second with fewer samples."""
    n, c, pixels, split = 40, 24, 35, 20
    x = feature_map(n, c, 5, 7).double()
    splits = [x.flatten(2)[:, :, :split], x.flatten(2)[:, :, split:]]
    windows = max_pool2d(x, 2, ceil_mode=True)  # 3 rows of 4
    window_splits = [windows[:, :, :2].flatten(2), windows[:, :, 2:].flatten(2)]
    measured = window_splits if pooled else splits

    def by_part(values):
        return torch.stack(values, 1).flatten(0, 1)

    mean = by_part([v.mean(2) for v in splits])
    pivot = (mean + 0.1 * noise(2 * n, c, seed=5)).float().double()
    window_mean = by_part([v.mean(2) for v in window_splits])
    parts = moments.Parts(
        *on(
            device,
            pivot,
            mean - pivot,
            by_part([v.var(2, correction=0) * v.shape[2] for v in splits]),
            torch.stack([grams(s) for pair in zip(*measured, strict=True) for s in pair]),
            window_mean - pivot if pooled else None,
        ),
        splits=2,
        split_pixels=split,
    )
    instances = torch.full((2, n, c), math.nan, device=device)
    with poisoned():
        chunks = moments.condense(parts, instances, pixels, 12, 8, K)
    assert chunks.samples == 32
    origin = pivot[0]
    assert_close("origin", chunks.origin, origin, 1e-7)
    for i, group in enumerate(x.split(32)):
        of_channels = group.transpose(0, 1).flatten(1)
        assert_close("mean", origin + chunks.mean[i].cpu(), of_channels.mean(1), EXACT)
        square = of_channels.var(1, correction=0) * of_channels.shape[1]
        assert_close("square", chunks.square[i], square, EXACT)
        spread = group.var((2, 3), correction=0).sum(0)
        assert_close("spread", chunks.spread[i], spread, EXACT)
    for i, group in enumerate((windows if pooled else x).split(32)):
        assert_close("gram", chunks.gram[i], grams(group.transpose(0, 1)), EXACT)
        if pooled:
            mean = group.mean((0, 2, 3))
            assert_close("pooled mean", origin + chunks.pooled_mean[i].cpu(), mean, EXACT)
    assert_close("instance mean", origin + instances[0].cpu(), x.mean((2, 3)), EXACT)
    assert_close("instance variance", instances[1], x.var((2, 3), correction=0), EXACT)


# ---------------------------------------------------------------- between the passes, forward


class Layer:
    """float64 quantities of norm, decorrelation and gate for a batch, by their formulas."""

    def __init__(self, n=70, c=24, h=2, w=5, units=40, steps=3):
        self.n, self.c, self.pixels, self.units, self.steps = n, c, h * w, units, steps
        self.x = feature_map(n, c, h, w).double()
        self.gamma, self.beta = 1 + 0.5 * noise(c, seed=6), noise(c, seed=7)
        self.w1, self.w2 = noise(units, c, seed=8), 0.3 * noise(c, units, seed=9)
        self.ln_weight, self.ln_bias = 1 + 0.3 * noise(units, seed=10), 0.3 * noise(units, seed=11)
        self.mix_logit, self.blend = torch.tensor(0.4).double(), torch.tensor(0.7).double()
        self.lam = self.mix_logit.sigmoid()
        self.mean = self.x.mean((0, 2, 3))
        self.var = self.x.var((0, 2, 3), correction=0)
        self.rstd = (self.var + 1e-5).rsqrt()
        self.xhat = (self.x - self.mean[:, None, None]) * self.rstd[:, None, None]
        self.instance_mean = self.x.mean((2, 3))
        self.instance_var = self.x.var((2, 3), correction=0)
        self.scale = self.gamma * self.rstd
        self.cov = grams(self.xhat.transpose(0, 1)) / (n * self.pixels)
        self.W = torch.stack([self.newton(group) for group in range(len(self.cov))])
        self.W_dense = dense_of(self.W, c)
        self.s = (self.instance_var * self.scale**2).mean()
        self.r = (self.s + 1e-5).rsqrt()
        self.u = self.instance_var * self.scale**2 * self.r**2
        self.z = self.u @ self.w1.T
        self.standard = layer_norm(self.z, (units,), eps=1e-5)
        self.ln_rstd = (self.z.var(1, correction=0) + 1e-5).rsqrt()
        self.hidden = (self.standard * self.ln_weight + self.ln_bias).relu()
        self.gate = (self.hidden @ self.w2.T).sigmoid()
        self.w = self.blend * (1 - self.lam) * self.r * self.gate + 1 - self.blend
        self.origin = self.x[0, :, 0, 0]

    def sigma(self, group):
        """Covariance of γ ⊙ x̂ in a group, with the ridge, of trace 1."""
        size = min(self.c - group * K, K)
        gamma = self.gamma[group * K : group * K + size]
        sigma = self.cov[group, :size, :size] * gamma[:, None] * gamma
        sigma = sigma + (1e-5 * sigma.trace() / size + 1e-10) * torch.eye(size).double()
        return sigma / sigma.trace()

    def newton(self, group):
        """W of a group by the printed iteration, the identity in its padding."""
        W = torch.eye(K, dtype=torch.float64)
        sigma = self.sigma(group)
        W[: len(sigma), : len(sigma)] = newton_printed(sigma, self.steps)
        return W

    def iterates(self):
        """Y, step and Z of the coupled iteration, (G, 3·steps, K, K)."""
        found = torch.zeros(len(self.cov), 3 * self.steps, K, K, dtype=torch.float64)
        for group in range(len(self.cov)):
            y = self.sigma(group)
            eye = torch.eye(len(y), dtype=torch.float64)
            z = step = 1.5 * eye - 0.5 * y
            for t in range(self.steps):
                if t > 0:
                    y = y @ step
                    step = 1.5 * eye - 0.5 * z @ y
                    z = step @ z
                for i, matrix in enumerate((y, step, z)):
                    found[group, 3 * t + i, : len(y), : len(y)] = matrix
        return found

    def values(self):
        """The rows of `values`."""
        rows = torch.zeros(ROWS_OF_VALUES, self.c, dtype=torch.float64)
        rows[CENTER.value], rows[RSTD.value] = self.mean, self.rstd
        rows[GAMMA.value], rows[BETA.value] = self.gamma, self.beta
        rows[OFFSET.value] = self.blend * self.lam * self.W_dense @ self.beta
        rows[VARIANCE.value], rows[SCALE.value] = self.var, self.scale
        rows[ORIGIN.value] = self.origin - self.mean
        rows[SPREAD.value] = self.instance_var.sum(0)
        return rows  # the mean of x̂ is 0

    def P(self):
        return self.blend * self.lam * self.W * F.grouped(self.gamma, K)[:, None, :]

    def statistics(self, device):
        instances = torch.stack([self.instance_mean - self.origin, self.instance_var])
        matrices = torch.stack([self.W, self.P(), self.cov])
        return moments.Statistics(*on(device, self.values(), instances, matrices, self.iterates()))

    def gate_state(self, device):
        gates = torch.stack([self.gate, self.w])
        return GateState(*on(device, self.standard, self.ln_rstd, gates, self.r))

    def call(self, device, **changes):
        given = {
            "weight": self.gamma,
            "bias": self.beta,
            "w1": self.w1,
            "norm_weight": self.ln_weight,
            "norm_bias": self.ln_bias,
            "w2": self.w2,
            "mix_logit": self.mix_logit,
            "blend": self.blend,
        }
        given = {name: on(device, tensor) for name, tensor in given.items()}
        given |= {"sources": (1, 1, 1), "steps": self.steps} | changes
        return make_call(on(device, self.x), **given)

    def map(self, device):
        return mix.Map(*on(device, self.values(), self.P(), self.w), K, "none", 0.0)


@pytest.fixture(scope="module")
def layer():
    return Layer()


@each_device
def test_coefficients(layer, device):
    """Norm, decorrelation and hidden layer from two chunks of samples."""
    chunks = [chunk.transpose(0, 1).flatten(1) for chunk in layer.x.split(64)]
    measured = moments.Chunks(
        *on(
            device,
            layer.origin,
            torch.stack([v.mean(1) for v in chunks]) - layer.origin,
            torch.stack([v.var(1, correction=0) * v.shape[1] for v in chunks]),
            torch.stack([v.sum(0) for v in layer.instance_var.split(64)]),
            torch.stack([grams(v) for v in chunks]),
            None,
        ),
        samples=64,
    )
    found = moments.Statistics(*(torch.full_like(t, math.nan) for t in layer.statistics(device)))
    found.instances.copy_(layer.statistics(device).instances)
    with poisoned():
        hidden = between.coefficients(layer.call(device), found, measured, windows=layer.pixels)
    expected = layer.values()
    assert_close("mean of x̂", found.values[MEAN.value] + 1, torch.ones(layer.c), EXACT)
    for row in (CENTER, RSTD, GAMMA, BETA, VARIANCE, SCALE, ORIGIN, SPREAD):
        assert_close(f"row {row.value}", found.values[row.value], expected[row.value], EXACT)
    assert_close("offset", found.values[OFFSET.value], expected[OFFSET.value], 1e-5)
    assert_close("W", found.matrices[0], layer.W, 1e-5)
    assert_close("P", found.matrices[1], layer.P(), 1e-5)
    assert_close("covariance", found.matrices[2], layer.cov, 1e-5)
    for t in range(layer.steps):
        z = without_padding(found.iterates[:, 3 * t + 2], layer.c)
        assert_close(f"iterate {t}", z, layer.iterates()[:, 3 * t + 2], 1e-5)
    assert_close("z / r²", hidden.parts.sum(0), layer.z / layer.r**2, 1e-5)
    assert_close("s", hidden.s.sum() / layer.n / layer.c, layer.s, EXACT)


@each_device
def test_gate_and_averages(layer, device):
    depths = -(-layer.c // span_of(layer.n, layer.c, layer.units))
    shares = (0.3, 0.7)[:depths] if depths > 1 else (1.0,)
    parts = torch.stack([share * layer.z / layer.r**2 for share in shares])
    s = torch.tensor(shares).double() * layer.s * layer.n * layer.c
    state = GateState(*(torch.full_like(t, math.nan) for t in layer.gate_state(device)))
    mean, var, inv_sqrt = noise(24, seed=1), noise(24, seed=2).abs(), noise(2, K, K, seed=3)
    running = on(device, mean, var, inv_sqrt, torch.tensor(0.5))
    counts = [torch.tensor(count, device=device) for count in (4, 4, 0)]
    averages = {
        "average_mean": running[0],
        "average_var": running[1],
        "norm_count": counts[0],
        "average_inv_sqrt": running[2],
        "bd_count": counts[1],
        "average_inv_std": running[3],
        "ir_count": counts[2],
    }
    call = layer.call(device, momenta=(0.1, 0.3, 0.1), **averages)
    gate_forward(call, Hidden(*on(device, parts, s)), state, layer.statistics(device))
    assert_close("standardized z", state.hidden, layer.standard, 1e-5)
    assert_close("spread", state.spread, layer.ln_rstd, 1e-5)
    assert_close("gate", state.gates[0], layer.gate, 1e-5)
    assert_close("w", state.gates[1], layer.w, 1e-5)
    assert_close("r", state.inv_std, layer.r, EXACT)
    count = layer.n * layer.pixels
    unbiased = layer.var * count / (count - 1)
    assert_close("mean", running[0], mean + 0.1 * (layer.mean - mean), EXACT)
    assert_close("variance", running[1], var + 0.1 * (unbiased - var), EXACT)
    assert_close("W", running[2], inv_sqrt + 0.3 * (layer.W - inv_sqrt), EXACT)
    assert_close("s^{-1/2}", running[3], layer.r, EXACT)  # the first batch replaces the start
    assert [int(count) for count in counts] == [5, 5, 1]


# ---------------------------------------------------------------- between the passes, backward


def gradient_parts(layer, splits=2):
    """Random gradients of P, d and c, one row per split of a sample."""
    rows = layer.n * splits
    P = 0.1 * torch.stack([matrices_of(m, layer.c) for m in noise(rows, layer.c, layer.c, seed=12)])
    return P, noise(rows, layer.c, seed=13), noise(rows, layer.c, seed=14)


def summed(layer, parts, splits=2):
    """Sum over the splits of each sample."""
    return parts.view(layer.n, splits, *parts.shape[1:]).sum(1)


@each_device
def test_collect_sums(layer, device):
    """Sums over chunks of 32 samples with two splits each; gradient of the hidden layer."""
    P, d, c = gradient_parts(layer)
    sums = mix.Sums(*on(device, P, d, c), splits=2)
    call = layer.call(device)
    with poisoned():
        found = between.collect_sums(
            call, sums, layer.map(device), layer.statistics(device), layer.gate_state(device)
        )
    gd, gc = summed(layer, d), summed(layer, c)
    for i, rows in enumerate(torch.arange(layer.n).split(32)):
        assert_close("gP", found.P[i], summed(layer, P)[rows].sum(0), EXACT)
        expected = (gc, gd, gc * layer.w, gd * layer.w)
        for sums_of, value in zip(found.sums[:, i], expected, strict=True):
            assert_close("sums", sums_of, value[rows].sum(0), 1e-5)
    grad_w = gd * layer.gamma + gc * layer.beta
    share = layer.blend * (1 - layer.lam) * layer.r
    grad_logit = share * grad_w * layer.gate * (1 - layer.gate)
    assert_close("logit", found.grad_logit, grad_logit, 1e-5)
    assert_close("hidden", found.grad_hidden.sum(0), grad_logit @ layer.w2, 1e-5)


def collected_of(layer, device):
    """Inputs of the second launch: gradients in chunks of 32 samples, the hidden layer's in one."""
    P, d, c = gradient_parts(layer)
    gd, gc = summed(layer, d), summed(layer, c)
    sums = [
        torch.stack([v.sum(0) for v in t.split(32)]) for t in (gc, gd, gc * layer.w, gd * layer.w)
    ]
    P_sums = torch.stack([v.sum(0) for v in summed(layer, P).split(32)])
    grad_hidden = noise(layer.n, layer.units, seed=15)
    grad_logit = noise(layer.n, layer.c, seed=16)
    parts = (P_sums, torch.stack(sums), grad_logit, grad_hidden[None])
    exact = (summed(layer, P).sum(0), gd, gc, grad_hidden, grad_logit)
    return mix.Sums(*on(device, P, d, c), splits=2), between.Collected(*on(device, *parts)), exact


@each_device
def test_branches_backward(layer, device):
    sums, collected, (gP, gd, gc, grad_hidden, _) = collected_of(layer, device)
    with poisoned():
        found = between.branches_backward(
            layer.call(device), sums, collected, layer.statistics(device), layer.gate_state(device)
        )
    # decorrelation: W as a function of the covariance of x̂ and of γ, differentiated by autograd
    cov, gamma, beta = (t.clone().requires_grad_() for t in (layer.cov, layer.gamma, layer.beta))
    W = F.decorrelation(cov, gamma, layer.steps)
    share = layer.blend * layer.lam
    through_P = gP * W * F.grouped(gamma, K)[:, None, :]
    through_c = F.grouped(gc.sum(0), K)[:, :, None] * W * F.grouped(beta, K)[:, None, :]
    (share * (through_P + through_c).sum()).backward()
    assert_close("γ", found.affine[0], gamma.grad, 2e-5)
    assert_close("β", found.affine[1], beta.grad, 2e-5)
    Q = (cov.grad + cov.grad.mT) / (layer.n * layer.pixels)
    assert_close("Q", found.Q, Q, 2e-5)
    assert_close("<W, gM>", found.scalars[:, 0], (through_P + through_c).sum((1, 2)), 2e-5)
    # the gate: from the gradient of h to that of u
    u = layer.u.clone().requires_grad_()
    z = u @ layer.w1.T
    z.retain_grad()
    before = layer_norm(z, (layer.units,), layer.ln_weight, layer.ln_bias, 1e-5)
    before.retain_grad()
    before.relu().backward(grad_hidden)
    gate = found.gate
    assert_close("relu's argument", gate.grad_norm, before.grad, 1e-5)
    assert_close("z", gate.grad_z, z.grad, 2e-5)
    assert_close("u", gate.grad_u, u.grad, 2e-5)
    through_var = (u.grad * layer.instance_var).sum(0)
    assert_close("through the variances", gate.through_var.sum(0), through_var, 5e-5)
    grad_w = gd * layer.gamma + gc * layer.beta
    expected = [(grad_w * layer.gate).sum(), (through_var * layer.scale**2).sum(), grad_w.sum()]
    assert_close("sums", gate.scalars.double().sum(0), torch.stack(expected), 5e-5)


@each_device
def test_parameters_backward(layer, device):
    """γ, β, e and f by the formulas of docs/kernels.md; the gate's weights, λ and α."""
    sums, collected, (_, gd, gc, _, grad_logit) = collected_of(layer, device)
    rows, n, c, units = -(-layer.n // 16), layer.n, layer.c, layer.units
    Q = torch.stack([matrices_of(m + m.T, c)[0] for m in noise(2, c, c, seed=17)])
    Q[1, c - K :] = Q[1, :, c - K :] = 0  # padding
    affine, through_W = noise(2, c, seed=18), noise(2, seed=19)
    grad_u, grad_norm, grad_z = (
        noise(n, k, seed=s) for k, s in ((c, 20), (units, 21), (units, 22))
    )
    through_var = torch.stack([v.sum(0) for v in (grad_u * layer.instance_var).split(16)])
    grad_w = gd * layer.gamma + gc * layer.beta
    totals = [
        (grad_w * layer.gate).sum(),
        (through_var.sum(0) * layer.scale**2).sum(),
        grad_w.sum(),
    ]
    scalars = torch.zeros(rows, 3, dtype=torch.float64)
    scalars[0], scalars[1] = 0.25 * torch.stack(totals), 0.75 * torch.stack(totals)
    gate = between.GateGradient(*on(device, grad_u, through_var, scalars, grad_norm, grad_z))
    group_scalars = on(device, torch.stack([through_W, torch.zeros(2)], 1))
    branches = between.BranchGradients(*on(device, Q, None, affine), group_scalars, gate)
    # x̂ with a mean of its own, which Q has to leave out
    statistics = layer.statistics(device)
    mean_of_xhat = 0.1 * noise(c, seed=23)
    statistics.values[MEAN.value] = on(device, mean_of_xhat)
    call = layer.call(device)
    names = ("weight", "bias", "w1", "norm_weight", "norm_bias", "w2", "mix_logit", "blend")
    grads = {name: torch.full_like(getattr(call, name), math.nan) for name in names}
    found_e, found_f = torch.full((2, n, c), math.nan, device=device)
    with poisoned():
        between.parameters_backward(
            call, sums, collected, branches, layer.map(device), statistics,
            layer.gate_state(device), grads, (found_e, found_f),
        )  # fmt: skip
    r, M = layer.r, n * layer.pixels
    share = layer.blend * (1 - layer.lam)
    # r is used twice: w = share · r · gate + …, and u = σ̃² r²; s = mean of σ̃²
    grad_r = share * totals[0] + 2 * r * totals[1]
    through_s = -0.5 * r**3 * grad_r / n / c
    grad_var = grad_u * r**2 + through_s  # of σ̃²
    grad_gamma = (gd * layer.w).sum(0) + affine[0]
    grad_gamma += 2 * layer.gamma * layer.rstd**2 * (grad_var * layer.instance_var).sum(0)
    grad_beta = (gc * layer.w).sum(0) + affine[1]
    assert_close("γ", grads["weight"], grad_gamma, 2e-5)
    assert_close("β", grads["bias"], grad_beta, 2e-5)
    e = 2 / layer.pixels * layer.gamma**2 * grad_var  # times x̂ − its mean in the sample
    instance_xhat = (layer.instance_mean - layer.mean) * layer.rstd
    f = -e * instance_xhat - dense_of(Q, c) @ mean_of_xhat - layer.gamma * grad_beta / M
    assert_close("e", found_e, e - layer.gamma * grad_gamma / M, 2e-5)
    assert_close("f", found_f, f, 2e-5)
    assert_close("W1", grads["w1"], grad_z.T @ layer.u, 2e-5)
    assert_close("W2", grads["w2"], grad_logit.T @ layer.hidden, 2e-5)
    assert_close("LN weight", grads["norm_weight"], (grad_norm * layer.standard).sum(0), 2e-5)
    assert_close("LN bias", grads["norm_bias"], grad_norm.sum(0), 2e-5)
    gated = r * totals[0]
    lam = layer.lam
    expected = layer.blend * (through_W.sum() - gated) * lam * (1 - lam)
    assert_close("λ's logit", grads["mix_logit"], expected, 2e-5)
    expected = lam * through_W.sum() + (1 - lam) * gated - totals[2]
    assert_close("α", grads["blend"], expected, 2e-5)


# ---------------------------------------------------------------- the passes that apply the map


class Pass:
    """A random map of a random x, and gradients, in float64."""

    def __init__(self, shape, act, *, last=False, P=True, n=5, c=24, dtype=torch.float32):
        self.x = feature_map(n, c, *shape, last).to(dtype).double()
        self.grad = self._like(noise(*self.x.shape, seed=1), dtype)
        self.residual = self._like(noise(*self.x.shape, seed=2), dtype)
        self.act, self.dtype, self.c = act, dtype, c
        self.values = torch.zeros(ROWS_OF_VALUES, c, dtype=torch.float64)
        self.values[CENTER.value] = self.x.mean((0, 2, 3)) + 0.2 * noise(c, seed=3)
        self.values[RSTD.value] = 0.5 + noise(c, seed=4).abs()
        for i, row in enumerate((GAMMA, BETA, OFFSET)):
            self.values[row.value] = noise(c, seed=5 + i)
        self.values = self.values.float().double()
        self.P = matrices_of(0.3 * noise(c, c, seed=8), c) if P else None
        self.w = noise(n, c, seed=9)
        center, self.rstd, self.gamma, beta, offset = self.values[:5]
        self.xhat = (self.x - center[:, None, None]) * self.rstd[:, None, None]
        self.before = self.w[:, :, None, None] * (
            self.gamma[:, None, None] * self.xhat + beta[:, None, None]
        )
        self.before = self.before + offset[:, None, None] + self.product(self.P, self.xhat)

    def _like(self, values, dtype):
        layout = torch.channels_last if self.x.stride(1) == 1 else torch.contiguous_format
        return values.to(dtype).double().contiguous(memory_format=layout)

    def product(self, matrices, values):
        if matrices is None:
            return torch.zeros_like(values)
        return torch.einsum("ij,njhw->nihw", dense_of(matrices, self.c), values)

    def on(self, device, values):
        return values.to(device, self.dtype)

    def map(self, device):
        slope = {"leaky_relu": 0.1, "elu": 1.0}.get(self.act, 0.0)
        return mix.Map(*on(device, self.values, self.P, self.w), K, self.act, slope)

    def masked(self, before):
        """grad ⊙ act'(before)."""
        before = before.detach().requires_grad_()
        activate(before, self.act, before > 0).backward(self.grad)
        return before.grad


@each_device
@each_layout
@each_pass
@pytest.mark.parametrize("P", [True, False])
def test_map(name, last, P, device):
    run, shape = PASSES[name]
    given = Pass(shape, "elu", last=last, P=P)
    x = given.on(device, given.x)
    y = torch.full_like(x, math.nan)
    with poisoned():
        run.forward(x, y, given.map(device), given.on(device, given.residual))
    before = given.before + given.residual
    assert_close("y", y, activate(before, "elu", before > 0), 1e-5)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_map_in_half_precision(dtype, device):
    """Tensor cores take x itself and a rounded matrix."""
    given = Pass((12, 13), "none", dtype=dtype, c=40)
    x = given.on(device, given.x)
    y = torch.full_like(x, math.nan)
    mix.forward(x, y, given.map(device))
    assert_close("y", y, given.before, RTOL[dtype])


@each_device
@each_layout
@each_pass
@pytest.mark.parametrize("P", [True, False])
@pytest.mark.parametrize("act", ["leaky_relu", "none"])
def test_reduce(name, last, P, act, device):
    """The activation's argument is recomputed from x."""
    run, shape = PASSES[name]
    given = Pass(shape, act, last=last, P=P)
    with poisoned():
        sums = run.reduce(
            given.on(device, given.x), given.on(device, given.grad), given.map(device)
        )
    assert_sums(sums, given, given.masked(given.before))


@each_device
@each_pass
def test_reduce_from_the_output(name, device):
    """With a residual the activation's slope is read off y, and the masked gradient is written."""
    run, shape = PASSES[name]
    given = Pass(shape, "elu")
    before = given.before + given.residual
    y = activate(before, "elu", before > 0)
    x, grad, y = (given.on(device, t) for t in (given.x, given.grad, y))
    masked = torch.full_like(x, math.nan)
    with poisoned():
        sums = run.reduce(x, grad, given.map(device), y, masked)
    g = given.masked(before)
    assert_close("masked", masked, g, 1e-5)
    assert_sums(sums, given, g)


def assert_sums(sums, given, g):
    products = torch.einsum("nihw,njhw->nij", g, given.xhat)
    c = given.c
    if given.P is None:
        assert sums.P is None
    else:
        gP = without_padding(sums.P, c).double().sum(0)
        assert_close("gP", gP, matrices_of(products.sum(0), c), 1e-5)
    n = len(g)
    gd, gc = (part.double().view(n, sums.splits, c).sum(1) for part in (sums.d, sums.c))
    assert_close("gd", gd, products.diagonal(dim1=1, dim2=2), 1e-5)
    assert_close("gc", gc, g.sum((2, 3)), 1e-5)


def through_of(given, device, *, Q=True, pooled=False):
    """Random gradients through the statistics."""
    n, c = given.w.shape
    matrix = noise(c, c, seed=10)
    matrix = 0.2 * matrices_of(matrix + matrix.T, c) if Q else None
    e, f, offset = noise(n, c, seed=11), noise(n, c, seed=12), noise(c, seed=13)
    exact = mix.StatisticsGradient(matrix, e, f, offset if pooled else None)
    return exact, mix.StatisticsGradient(*on(device, *exact))


def without_pooling(given, exact, g):
    """rstd ⊙ (Pᵀg + w γ ⊙ g + Q x̂ + e ⊙ x̂ + f)."""
    dx = (given.w * given.gamma)[:, :, None, None] * g
    if given.P is not None:
        dx = dx + given.product(given.P.mT, g)
    dx = dx + exact.e[:, :, None, None] * given.xhat + exact.f[:, :, None, None]
    if exact.pooled_offset is None:
        dx = dx + given.product(exact.Q, given.xhat)
    return given.rstd[:, None, None] * dx


@each_device
@each_layout
@each_pass
@pytest.mark.parametrize("P", [True, False])
def test_apply_backward(name, last, P, device):
    run, shape = PASSES[name]
    given = Pass(shape, "leaky_relu", last=last, P=P)
    exact, through = through_of(given, device, Q=P)
    x = given.on(device, given.x)
    dx = torch.full_like(x, math.nan)
    run.backward(x, given.on(device, given.grad), dx, given.map(device), through)
    assert_close("dx", dx, without_pooling(given, exact, given.masked(given.before)), 1e-5)


@each_device
@each_pass
def test_apply_backward_of_a_masked_gradient(name, device):
    """The activation is not differentiated a second time."""
    run, shape = PASSES[name]
    given = Pass(shape, "relu")
    exact, through = through_of(given, device)
    x = given.on(device, given.x)
    dx = torch.full_like(x, math.nan)
    run.backward(x, given.on(device, given.grad), dx, given.map(device), through, masked=True)
    assert_close("dx", dx, without_pooling(given, exact, given.grad), 1e-5)


@each_device
@each_layout
def test_add_pooled(last, device):
    """Q acts on the pooled x̂; its result goes to the largest pixel of each window, by γ's sign."""
    given = Pass((7, 9), "none", last=last)
    exact, through = through_of(given, device, pooled=True)
    x = given.on(device, given.x)
    dx = torch.full_like(x, math.nan)
    mix.backward(x, given.on(device, given.grad), dx, given.map(device), through, pool=2)
    sign = torch.where(given.gamma < 0, -1.0, 1.0)[:, None, None]
    signed = (sign * given.xhat).detach().requires_grad_()
    pooled = sign * max_pool2d(signed, 2, ceil_mode=True)
    added = given.product(exact.Q, pooled.detach()) + exact.pooled_offset[:, None, None]
    pooled.backward(added)
    expected = without_pooling(given, exact, given.grad)
    expected = expected + given.rstd[:, None, None] * sign * signed.grad
    assert_close("dx", dx, expected, 1e-5)
