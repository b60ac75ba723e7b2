"""The compiled passes on a CPU against float64, and plain PyTorch wherever they cannot be used."""

import copy
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from _checks import assert_close
from cenet import BatchDecorrelation2d, ChannelEquilibrium2d, NormCE2d, cpu, fold_ce, ops
from cenet import functional as F
from cenet.analysis.activations import ActivationObserver

LAYOUTS = (torch.contiguous_format, torch.channels_last)
# more pixels than go through at once, a remainder of them, ragged groups, single values
SHAPES = [
    ((2, 40, 17, 31), 16),
    ((3, 16, 8, 8), 16),
    ((2, 6, 1, 5), 6),
    ((2, 23, 3, 3), 7),
    ((1, 1, 1, 2), 1),
    ((4, 17, 1, 1), 16),
    ((1, 70, 18, 15), 64),
]


PASSES = ("measure", "apply", "gram", "gradient", "pool", "spread", "newton", "newton_gradients")


def images(shape, layout=torch.contiguous_format, offset=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + offset).contiguous(memory_format=layout)


def groups_of(x, size):
    """(N, C, H, W) -> (N, G, K, L) in float64."""
    return F.grouped(x.double().flatten(2).transpose(1, 2), size).permute(0, 2, 3, 1)


@pytest.fixture
def fresh():
    """Passes are looked for again, in this test and after it."""
    cpu.library.cache_clear()
    yield
    cpu.library.cache_clear()


def test_this_machine_has_the_passes():
    """Without them, every test of this file would test plain PyTorch."""
    assert cpu.library().missing is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_measuring(shape, size, offset, layout):
    if size > 16 and layout == torch.channels_last:
        assert not cpu.can_take(images(shape, layout), size)
        return
    x = images(shape, layout, offset)
    exact = x.double()
    mean = exact.mean((2, 3))
    values = groups_of(exact - mean[:, :, None, None], size)
    for given in (size, None):
        less, rest, var, inside = cpu.measure(x, given)
        assert (less.double() + rest.double() - mean).abs().max() <= 1e-7 * (1 + 1e-3 * offset)
        assert_close("var", var, exact.var((2, 3), correction=0), 2e-6)
        if given is not None:
            assert_close("inside", inside, values @ values.mT / values.shape[-1], 2e-6)
        else:
            assert inside is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_mapping(shape, size, layout):
    if size > 16 and layout == torch.channels_last:
        return
    n, channels = shape[:2]
    x, residual = images(shape, layout, 100), images(shape, seed=1)  # of another layout
    P = images((F.num_groups(channels, size), size, size), seed=2)
    d, c = images((n, channels), seed=3), images((n, channels), seed=4)
    for less in (x.mean((2, 3)), x.mean((0, 2, 3))[None], None):
        for d_, c_ in ((d, c), (d[:1], c[:1]), (None, c), (d, None)):
            for relu, add, transposed in ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1)):
                values = x.double() - (0 if less is None else less.double()[:, :, None, None])
                matrix = P.mT.double() if transposed else P.double()
                expected = (matrix @ groups_of(values, size)).flatten(1, 2)[:, :channels]
                expected = expected.reshape(shape)
                if d_ is not None:
                    expected = expected + d_.double()[:, :, None, None] * values
                if c_ is not None:
                    expected = expected + c_.double()[:, :, None, None]
                if add:
                    expected = expected + residual.double()
                if relu:
                    expected = expected.relu()
                options = {"less": less, "transposed": bool(transposed), "relu": bool(relu)}
                y = cpu.apply(x, P, d_, c_, residual=residual if add else None, **options)
                assert y.stride() == x.stride()
                assert_close("y", y, expected, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_the_gradient_through_map_and_moments(shape, size, layout):
    if size > 16 and layout == torch.channels_last:
        return
    n, channels = shape[:2]
    x, g = images(shape, layout, 100), images(shape, seed=1)  # of another layout
    P, Q = (images((F.num_groups(channels, size), size, size), seed=seed) for seed in (2, 3))
    d, e, f = (images((n, channels), seed=seed) for seed in (4, 5, 6))
    less = x.mean((2, 3))

    def times(matrix, factors, values):
        product = (matrix.double() @ groups_of(values, size)).flatten(1, 2)[:, :channels]
        return product.reshape(shape) + factors.double()[:, :, None, None] * values

    centered = x.double() - less.double()[:, :, None, None]
    for Q_ in (Q, None):
        for d_ in (d, d[:1], None):
            of_map = times(P.mT, torch.zeros(1, channels) if d_ is None else d_, g.double())
            of_moments = times(torch.zeros_like(P) if Q_ is None else Q_, e, centered)
            y = cpu.gradient(g, P, d_, x, Q_, e, f, less)
            assert y.stride() == x.stride()
            expected = of_map + of_moments + f.double()[:, :, None, None]
            assert_close("gradient", y, expected, 1e-6)


@pytest.mark.parametrize(("channels", "size"), [(40, 16), (16, 16), (23, 7), (1, 1), (70, 64)])
@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_newton_s_iteration(channels, size, steps):
    """Against the printed iteration in float64, and its gradients by autograd."""
    spread = groups_of(images((5, channels, 4, 4)), size)
    cov = (spread @ spread.mT).mean(0).float() / 16
    scale = images((channels,), seed=1).exp() * images((channels,), seed=2).sign()
    g = images(cov.shape, seed=3)
    exact_cov, exact_scale = (value.double().requires_grad_() for value in (cov, scale))
    ridge, floor = 0.05, 1e-3  # large enough to be seen
    expected = []
    for number, start in enumerate(range(0, channels, size)):
        valid = min(size, channels - start)
        own = exact_scale[start : start + valid]
        sigma = exact_cov[number, :valid, :valid] * own[:, None] * own
        added = ridge * sigma.trace() / valid + floor
        sigma = sigma + added * torch.eye(valid, dtype=torch.float64)
        sigma = sigma / sigma.trace()
        iterate = torch.eye(valid, dtype=torch.float64)
        for _ in range(steps):
            iterate = 1.5 * iterate - 0.5 * iterate @ iterate @ iterate @ sigma
        expected.append(torch.block_diag(iterate, torch.eye(size - valid)))
    expected = torch.stack(expected)
    expected.backward(g.double())
    W = cpu.newton(cov, scale, steps, ridge, floor)
    gradients = cpu.newton_gradients(g, cov, scale, steps, ridge, floor)
    tolerance = 2e-5 if steps == 9 else 2e-6
    assert_close("W", W, expected, tolerance)
    for name, own, exact in zip(("cov", "scale"), gradients, (exact_cov, exact_scale), strict=True):
        if channels == 1:  # Σ / tr Σ is 1, whatever Σ is
            assert own.abs().max() <= 1e-6
        else:
            assert_close(name, own, exact.grad, 10 * tolerance)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_products_of_gradients(shape, size, layout):
    if size > 16 and layout == torch.channels_last:
        return
    x, g = images(shape, layout, 100), images(shape, seed=1)
    for less in (x.mean((2, 3)), None):
        values = x.double() - (0 if less is None else less.double()[:, :, None, None])
        products, sums = cpu.gram(g, x, less, size)
        expected = groups_of(g, size) @ groups_of(values, size).mT
        assert_close("products", products, expected, 2e-6)
        assert_close("sums", sums, g.double().sum((2, 3)), 2e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "side"),
    [((2, 70, 7, 9), 2), ((3, 17, 5, 5), 3), ((1, 3, 2, 2), 2), ((2, 4, 1, 5), 2)],
    ids=str,
)
def test_pooling(shape, side, layout):
    x = images(shape, layout).round(decimals=1)  # some windows have their largest value twice
    x[0, :2] = -torch.inf
    x[-1, 2, 0, 1] = torch.nan
    for sign in (torch.ones(shape[1]), images(shape, seed=1)[0, :, 0, 0].sign()):
        plain = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        signs = sign[:, None, None]
        expected = nn.functional.max_pool2d(signs * plain, side, ceil_mode=True) * signs
        g = images(expected.shape, seed=2)
        expected.backward(g)
        pooled = cpu.pool(x, side, sign)
        assert torch.equal(pooled.nan_to_num(9), expected.nan_to_num(9))
        assert pooled.is_contiguous(memory_format=layout)
        assert torch.equal(cpu.spread(g, x, side, sign, pooled), plain.grad)


def test_relu_keeps_what_is_not_a_number():
    for layout in LAYOUTS:
        x = images((2, 16, 3, 5), layout)
        x[0, 3, 1, 2] = torch.nan
        y = cpu.apply(x, torch.eye(16)[None], None, None, relu=True)
        assert y[0, 3, 1, 2].isnan()


def outcome(block, x, upstream):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = block(x)
    y.backward(upstream)
    return [y, x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
def test_results_do_not_depend_on_the_number_of_threads(layout, one_thread):
    x, upstream = images((5, 40, 30, 20), layout), images((5, 40, 30, 20), seed=1)
    block = NormCE2d(nn.BatchNorm2d(40), ChannelEquilibrium2d(40))
    # the small algebra of torch may depend on them
    P, less = images((3, 16, 16)), x.mean((2, 3))
    folded, found = folded_network(40)[1], []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([*cpu.measure(x, 16), cpu.apply(x, P, less, less), *cpu.gram(x, x, less, 16)])
        with torch.no_grad():
            found[-1].append(folded(x.clone(memory_format=torch.preserve_format)))
        outcome(copy.deepcopy(block), x, upstream)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def never(*_, **__):
    raise AssertionError("a compiled pass was called")


@pytest.fixture
def no_passes(monkeypatch):
    """A test in which a compiled pass must not be called."""
    for name in PASSES:
        monkeypatch.setattr(cpu, name, never)


def test_a_layer_uses_them(no_passes):
    for layer in (ChannelEquilibrium2d(16), BatchDecorrelation2d(16)):
        with pytest.raises(AssertionError, match="a compiled pass was called"):
            layer(images((2, 16, 3, 3)))


def test_where_they_cannot_be_used(no_passes):
    layer, x = ChannelEquilibrium2d(16, pool=2), images((2, 16, 3, 3))
    with ops.backend("torch"):
        layer(x)
    layer.double()(x.double())
    layer.float()
    layer(x.as_subclass(Subclass))
    with Count():
        layer(x)
    layer.eval()
    torch.vmap(layer)(x[None])
    torch.func.jvp(layer, (x,), (x,))
    torch.func.grad(lambda x: layer(x).sum())(x)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent is not None
    torch.export.export(layer, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(layer, x, check_trace=False)
    layer.train()(x[:0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("pool", [1, 2])
def test_gradients_for_many_outputs_at_once(pool, layout):
    """`is_grads_batched`, as `torch.autograd.functional.jacobian(vectorize=True)` asks for them."""
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24, pool=pool)).eval()
    x = images((2, 24, 3, 3), layout).requires_grad_()
    y = block(x)
    upstream = images((5, *y.shape[1:]), seed=1)[:, None].repeat(1, 2, 1, 1, 1)
    (together,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    for own, given in zip(together, upstream, strict=True):
        (expected,) = torch.autograd.grad(y, x, given, retain_graph=True)
        assert_close("gradient", own, expected, 1e-6)


def test_values_whose_sign_torch_changes_when_it_reads_them():
    """As those of `z.conj().imag`: the memory holds the opposite."""
    block, x = ChannelEquilibrium2d(24).eval(), images((2, 24, 3, 3))
    opposite = torch._neg_view(-x)
    assert opposite.is_contiguous()
    assert_close("y", block(opposite), block(x), 1e-6)


def test_whoever_looks_at_activations_sees_those_of_folded_layers():
    network, seen = folded_network(24, nn.ReLU), []
    x = images((2, 3, 9, 9))
    with torch.no_grad():
        expected = network(x)

        class Look(ActivationObserver):
            def after(self, site, y):
                seen.append((site.name, y))

        with Look(network):
            y = network(x)
    assert [name for name, _ in seen] == ["1.act"]
    assert torch.equal(seen[0][1], expected)
    assert torch.equal(y, expected)


def test_gradients_of_a_forward_pass_with_them_where_they_cannot_be_used(monkeypatch):
    """A mode that sees every operator begins between the two passes."""
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24, pool=2))
    x, upstream = images((3, 24, 4, 5)), images((3, 24, 4, 5), seed=1)
    expected = outcome(copy.deepcopy(block), x, upstream)
    x.requires_grad_()
    y = block(x)
    for name in PASSES:
        monkeypatch.setattr(cpu, name, never)
    with Count():
        y.backward(upstream)
    found = [y, x.grad, *(p.grad for p in block.parameters())]
    for a, b in zip(found, expected[: len(found)], strict=True):
        assert_close("gradient", a, b, 2e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "make", [ChannelEquilibrium2d, BatchDecorrelation2d, partial(ChannelEquilibrium2d, pool=2)]
)
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(make, layout, training):
    torch.manual_seed(0)  # weights of some gates amplify rounding tenfold
    block = NormCE2d(nn.BatchNorm2d(20), make(20)).train(training)
    x = images((3, 20, 4, 5), layout)

    upstream = images((3, 20, 4, 5), seed=1)

    def second(block, x):
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        leaves = [x, *block.parameters()]
        loss = (block(x) * (x + upstream.to(x.dtype))).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum((g * g.detach().sin()).sum() for g in first), leaves)

    exact = second(copy.deepcopy(block).double(), x.double())
    for a, b in zip(second(block, x), exact, strict=True):
        assert_close("second derivative", a, b, 2e-4)


def strided(values):
    """The same values with gaps between them."""
    return torch.stack([values, values + 1], -1)[..., 0]


def test_small_tensors_in_any_layout():
    """Matrices and their gradients may be transposed, or parts of larger tensors."""
    cov, g, P = (images((2, 16, 16), seed=seed) for seed in range(3))
    scale, x = images((24,), seed=3), images((2, 24, 3, 3))
    expected = cpu.newton(cov, scale, 3, 0.1, 0)
    assert torch.equal(cpu.newton(strided(cov), strided(scale), 3, 0.1, 0), expected)
    expected = cpu.newton_gradients(g, cov, scale, 3, 0.1, 0)
    found = cpu.newton_gradients(*map(strided, (g, cov, scale)), 3, 0.1, 0)
    assert all(map(torch.equal, found, expected))
    expected = cpu.apply(x, P, scale[None], scale[None])
    assert torch.equal(cpu.apply(x, *map(strided, (P, scale[None], scale[None]))), expected)
    expected = cpu.gradient(x, P, None, x, P, x[:, :, 0, 0], x[:, :, 1, 1], x[:, :, 2, 2])
    given = strided(P), None, x, strided(P), *(x[:, :, i, i].contiguous() for i in range(3))
    assert torch.equal(cpu.gradient(x, *given), expected)
    sign, expected = P[0, 0].sign().repeat(2)[:24], None
    for own in (sign, strided(sign), sign.long()):
        pooled = cpu.pool(x, 2, own)
        expected = pooled if expected is None else expected
        assert torch.equal(pooled, expected)


def test_decorrelation_uses_the_compiled_iteration(monkeypatch):
    monkeypatch.setattr(cpu, "newton", never)
    cov, scale = torch.eye(16)[None], torch.ones(16)
    with pytest.raises(AssertionError, match="a compiled pass"):
        F.decorrelation(cov, scale)
    with ops.backend("torch"):
        F.decorrelation(cov, scale)
    F.decorrelation(cov.double(), scale.double())
    F.decorrelation(cov, scale.double())
    F.decorrelation(torch.eye(65)[None], torch.ones(65))
    torch.func.grad(lambda scale: F.decorrelation(cov, scale).sum())(scale)


def test_map_and_moments_have_one_gradient_pass(monkeypatch):
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    y = block(images((3, 24, 4, 5)).requires_grad_())
    monkeypatch.setattr(cpu, "apply", never)
    calls = []
    gradient = cpu.gradient
    monkeypatch.setattr(cpu, "gradient", lambda *given: calls.append(1) or gradient(*given))
    y.sum().backward()
    assert len(calls) == 1


def mapped_by(measured, seed=2):
    """Arguments of `mix` that depend on the moments."""
    moments, centered = measured
    P = images((2, 16, 16), seed=seed) + moments.cov
    d = images((3, 24), seed=seed + 1) * moments.var
    c = moments.mean * (d if centered.offset is None else d + centered.offset)
    return centered.values, P, d, c, centered.less, centered.meeting


@pytest.mark.parametrize(
    "how",
    [
        "once",
        "twice",
        "two passes",
        "again after a backward pass",
        "after a second derivative",
        "a second derivative after those of P",
    ],
)
def test_gradients_meet_only_where_images_are_mapped_once(how):
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = images((3, 24, 4, 5)).to(dtype).requires_grad_()
        measured = F.centered_moments(x)
        given = mapped_by(measured)
        y = F.mix(*given).square().sum()
        if how == "twice":
            y = y + F.mix(*mapped_by(measured, seed=5)).square().sum()
        if how == "again after a backward pass":
            y.backward(retain_graph=True)
            y = F.mix(*mapped_by(measured, seed=5)).square().sum()
        if how == "two passes":
            y.backward(retain_graph=True)
        if how == "a second derivative after those of P":
            torch.autograd.grad(y, given[1], retain_graph=True)
        if how in ("after a second derivative", "a second derivative after those of P"):
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            y = y + (first * images(x.shape, seed=9).to(dtype)).sum()
        y.backward()
        gradients.append(x.grad)
    assert_close("gradient", *gradients, 1e-5)


def test_gradients_of_parameters_alone_leave_nothing_behind():
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    x = images((3, 24, 4, 5)).requires_grad_()
    y = block(x).square().sum()
    torch.autograd.grad(y, list(block.parameters()), retain_graph=True)
    (found,) = torch.autograd.grad(y, x)
    exact, x = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
    exact(x).square().sum().backward()
    assert_close("gradient", found, x.grad, 1e-5)


def test_gradients_of_some_inputs_only():
    x, c = images((3, 24, 4, 5)), torch.zeros(1, 24)
    P, d = images((2, 16, 16)), images((3, 24))
    some = images((3, 24, 4, 5), torch.channels_last, seed=1)  # of another layout than x
    for wanted, upstream in product("xPdc", (some, some[:1, :, :1].expand_as(some))):
        given = {"x": x, "P": P, "d": d, "c": c}
        exact = {name: value.double() for name, value in given.items()}
        for inputs in (given, exact):
            inputs[wanted] = inputs[wanted].clone().requires_grad_()
        F.mix(*given.values()).backward(upstream)
        F.mix(*exact.values()).backward(upstream.double())
        assert given[wanted].grad.shape == given[wanted].shape
        assert_close(wanted, given[wanted].grad, exact[wanted].grad, 2e-6)


def test_activation_checkpointing_counts_a_batch_once():
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    twin, x, upstream = copy.deepcopy(block), images((3, 24, 4, 5)), images((3, 24, 4, 5), seed=1)
    expected = outcome(twin, x, upstream)
    found = outcome_checkpointed(block, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def outcome_checkpointed(block, x, upstream):
    x = x.clone().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False)
    y.backward(upstream)
    return [y, x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


def test_the_gradient_of_the_output_is_not_changed():
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    upstream = images((3, 24, 4, 5), seed=1)
    before = upstream.clone()
    x = images((3, 24, 4, 5)).requires_grad_()
    y = block(x)
    y.retain_grad()
    y.backward(upstream)
    assert torch.equal(upstream, before)
    assert torch.equal(y.grad, before)


def folded_network(channels, act=None, ce=ChannelEquilibrium2d):
    block = NormCE2d(nn.BatchNorm2d(channels), ce(channels))
    block.act = None if act is None else act()
    network = nn.Sequential(nn.Conv2d(3, channels, 3), block)
    for seed in range(3):
        network(images((4, 3, 9, 9), seed=seed))
    return fold_ce(network.eval())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, None])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", [(3, 40, 20, 19), (1, 64, 3, 3), (2, 16, 1, 2)], ids=str)
def test_a_folded_layer_is_one_pass(shape, act, with_residual, layout, monkeypatch):
    layer = folded_network(shape[1], act)[1]
    nn.init.normal_(layer.ir.norm.weight)
    nn.init.normal_(layer.ir.norm.bias)
    x = images(shape, layout, 10)
    residual = images(shape, seed=1) if with_residual else None
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()
        expected = exact(x.double(), None if residual is None else residual.double())
        y = layer(x.clone(memory_format=torch.preserve_format), residual)
    assert_close("y", y, expected, 2e-6)
    assert y.is_contiguous(memory_format=layout)
    # by `mix`, with gradients
    again = layer(x.clone(memory_format=torch.preserve_format).requires_grad_(), residual)
    assert again.requires_grad
    assert_close("with gradients", again, expected, 2e-6)
    monkeypatch.setattr(cpu, "folded", never)
    with pytest.raises(AssertionError, match="a compiled pass"), torch.no_grad():
        layer(x, residual)


def test_a_folded_layer_takes_the_memory_of_the_convolution_s_output_alone():
    """`fold_ce` has made sure that nobody else reads it; of other tensors nobody knows."""
    network = folded_network(24)
    x, outputs = images((2, 3, 9, 9)), []
    before = x.clone()
    with torch.no_grad():
        expected = network(x)
        network[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        y = network(x)
        assert y.data_ptr() == outputs[0].data_ptr()
        assert y._version > 0
        with torch.inference_mode():
            assert torch.equal(network(x), expected)
        network[1].owns_input = False
        assert network(x).data_ptr() != outputs[-1].data_ptr()
    assert torch.equal(y, expected)
    assert torch.equal(x, before)
    for given in (x.requires_grad_(), x.detach()):  # with gradients, to x or to the weights
        network.requires_grad_()
        assert network(given).data_ptr() != outputs[-1].data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("side", [9, 210])  # both at a time, and one after the other
def test_images_have_gates_of_their_own(side, layout):
    layer = folded_network(24)[1]
    nn.init.normal_(layer.ir.norm.weight)
    nn.init.normal_(layer.ir.norm.bias)
    layer.owns_input = False
    x = images((2, 24, side, side), layout, 10)
    x[1] *= 1 + torch.arange(24)[:, None, None]
    residual = images(x.shape, layout, seed=1)
    with torch.no_grad():
        expected = copy.deepcopy(layer).double()(x.double(), residual.double())
        assert_close("y", layer(x, residual), expected, 2e-6)


def test_weights_of_a_gate_in_any_layout():
    layer, x = folded_network(24)[1], images((2, 24, 5, 5))
    layer.owns_input = False
    with torch.no_grad():
        expected = layer(x)
        for parameter in layer.parameters():
            parameter.data = strided(parameter.data)
        for buffer in layer.buffers():
            buffer.data = strided(buffer)
        assert torch.equal(layer(x), expected)


def test_what_a_folded_layer_leaves_to_pytorch():
    """Residuals of another shape or type, and activations that are more than ReLU."""

    class Twice(nn.ReLU):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, inputs, y: -y)
    layer, x = folded_network(24)[1], images((2, 24, 5, 5))
    layer.owns_input = False
    with torch.no_grad():
        y = layer(x)
        for residual in (x[:, :, :1, :1], x[:1], x.double(), x.half()):
            assert_close("y", layer(x, residual).double(), (y + residual).double(), 1e-3)
        assert_close("y", layer(x, act=Twice()), 2 * y.relu(), 1e-6)
        assert_close("y", layer(x, act=hooked), -y.relu(), 1e-6)


def hook_of(name):
    def change(network):
        getattr(network[1].ir, name).register_forward_hook(lambda *_: None)

    return change


def other_linear(network):
    class Linear(nn.Linear):
        pass

    network[1].ir.fc1.__class__ = Linear


@pytest.mark.parametrize(
    "change",
    [
        hook_of("fc1"),
        hook_of("norm"),
        hook_of("fc2"),
        other_linear,
        lambda network: network[1].ir.half(),
        lambda network: setattr(network[1].ir, "released", True),
    ],
    ids=[
        "hook",
        "hook of the norm",
        "hook of the last layer",
        "another linear layer",
        "half precision",
        "released",
    ],
)
def test_gates_that_a_pass_does_not_know(change, monkeypatch):
    network = folded_network(24)
    change(network)
    monkeypatch.setattr(cpu, "folded", never)
    with torch.no_grad():
        network(images((2, 3, 9, 9)))


@pytest.mark.parametrize("factor", [1e15, 1e25, 0.0, torch.nan])
def test_the_gate_of_images_out_of_range(factor):
    """A variance that overflows, none at all, and one that is not a number."""
    layer = folded_network(24)[1]
    layer.owns_input = False
    x = images((2, 24, 5, 5)) * torch.tensor([1, factor])[:, None, None, None]
    with torch.no_grad():
        y = layer(x)
        with ops.backend("torch"):
            expected = layer(x)
    assert_close("y", y[0], expected[0], 2e-6)
    assert torch.equal(y.isfinite(), expected.isfinite())
    if y[1].isfinite().all():
        assert_close("y", y[1].double(), expected[1].double(), 2e-6)


def without(monkeypatch, tmp_path, **environment):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler no-such-compiler; install g++, or set CXX"),
        ("false", "ends with 1: no error message"),
    ],
)
def test_without_a_compiler_layers_run_in_plain_pytorch(
    compiler, reason, monkeypatch, tmp_path, fresh
):
    without(monkeypatch, tmp_path, CXX=compiler)
    assert reason in cpu.library().missing
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    x, upstream = images((3, 24, 4, 5)), images((3, 24, 4, 5), seed=1)
    found = outcome(copy.deepcopy(block), x, upstream)
    with ops.backend("torch"):
        expected = outcome(block, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not list(tmp_path.rglob("*.so"))


def test_errors_of_the_compiler_are_told(monkeypatch, tmp_path, fresh):
    source = tmp_path / "cpu.cpp"
    source.write_text("int x = unknown;\n")
    monkeypatch.setattr(cpu, "SOURCE", source)
    without(monkeypatch, tmp_path)
    assert "cpu.cpp:1:9: error" in cpu.library().missing


def test_a_compiler_that_does_not_end_is_given_up(monkeypatch, tmp_path, fresh):
    slow = tmp_path / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(cpu, "SECONDS", 0.1)
    without(monkeypatch, tmp_path, CXX=str(slow))
    assert "timed out after 0.1 seconds" in cpu.library().missing


def test_other_systems_have_no_passes(monkeypatch, fresh):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu.library().missing == "they are compiled on Linux only, not on darwin"


def test_they_are_compiled_once(monkeypatch, tmp_path, fresh):
    without(monkeypatch, tmp_path)
    assert cpu.library().missing is None
    (built,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert built.suffix == ".so"
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    written = built.stat().st_mtime_ns
    cpu.library.cache_clear()
    assert cpu.library().missing is None
    assert built.stat().st_mtime_ns == written
    other = {"DEFAULT": "AVX2"}.get(torch.backends.cpu.get_cpu_capability(), "DEFAULT")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: other)
    cpu.library.cache_clear()
    assert cpu.library().missing is None
    assert len(list(built.parent.iterdir())) == 2  # those for other instructions are others


def test_what_is_compiled_with_another_tool_is_another_file(monkeypatch, tmp_path, fresh):
    """Nothing is compiled here: the file is empty."""
    without(monkeypatch, tmp_path)

    def name_of(version="c++ 1", openmp="/lib/libgomp.so.1"):
        def run(command, **_options):
            if "-o" in command:
                Path(command[-1]).touch()
            return SimpleNamespace(returncode=0, stdout=version.encode())

        with monkeypatch.context() as changed:
            changed.setattr(subprocess, "run", run)
            changed.setattr(Path, "read_text", lambda path: openmp)
            return cpu._compiled().name

    names = [name_of(), name_of(version="c++ 2"), name_of(openmp="/lib/libgomp.so.2")]
    assert name_of() == names[0]
    assert len({*names}) == 3


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path, fresh):
    (tmp_path / "file").touch()
    without(monkeypatch, tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert cpu.library().missing is None
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("damaged", [b"", b"\x7fELF and no more"])
def test_a_damaged_file_in_the_cache_is_compiled_again(damaged, monkeypatch, tmp_path, fresh):
    without(monkeypatch, tmp_path)
    file = cpu._compiled()
    file.write_bytes(damaged)
    assert cpu.library().missing is None
    assert file.stat().st_size > 1000


def test_a_cache_that_is_read_only_is_left_alone(monkeypatch, tmp_path):
    without(monkeypatch, tmp_path / "home")
    assert cpu._cache() == tmp_path / "home" / "cenet"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpu._cache().parent == tmp_path


def test_processes_that_compile_at_once(tmp_path):
    code = "from cenet import cpu; print(cpu.library().missing)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in started] == ["None"] * 2
    assert [path.suffix for path in (tmp_path / "cenet").iterdir()] == [".so"]


MUTATIONS = {
    "means of the tiles do not count": ("weight * distance[i] * distance[j] -", "0.0f -"),
    "tiles lose what rounding left": (
        "- static_cast<float>(pixels) * rest[i] * rest[j]",
        "- 0.5f * distance[i] * distance[j]",
    ),
    "the mean is not merged": ("mean[i] += apart * (pixels / whole);", "mean[i] = center[i];"),
    "the last register is not filled up": (
        "for (int lane = 0; lane < LANES; ++lane) to[p + lane] = 0;",
        "",
    ),
    "the last register is left out of a sum": ("total += load(to + whole(pixels) - LANES);", ""),
    "a sum over lanes takes every second twice": (
        "__builtin_shuffle(a, b, even + 1)",
        "__builtin_shuffle(a, b, even)",
    ),
    "registers behind the last block are not mapped": ("v < registers; ++v", "v < blocks; ++v"),
    "every second block behind the last is not mapped": ("i += TALLER)", "i += 2 * TALLER)"),
    "P is never transposed": ("? own[j * K + i]", "? own[i * K + j]"),
    "d of the first image for all": (
        "diagonal + task.image * diagonal_stride",
        "diagonal + 0 * diagonal_stride",
    ),
    "values of the first image for all": ("values + task.image * stride", "values + 0 * stride"),
    "planes are not centered": (
        "load(from + p) - center;\n    total +=",
        "load(from + p);\n    total +=",
    ),
    "rows are not centered": ("load_row(x + at, size) - minus", "load_row(x + at, size)"),
    "half of the blocks": ("i < rows; i += TALL", "i < rows; i += 2 * TALL"),
    "the residual of rows is left out": ("value += load_row(map.residual", "load_row(map.residual"),
    "relu of planes is left out": ("if (map.relu) value =", "if (false) value ="),
    "relu of remainders is left out": ("y[at + lane] = map.relu && v < 0", "y[at + lane] = false"),
    "the residual of planes is left out": ("value += load(map.residual", "load(map.residual"),
    "one product of a gradient for planes": (
        "k < TERMS; ++k)\n      for (int j = 0; j < size",
        "k < 1; ++k)\n      for (int j = 0; j < size",
    ),
    "one product of a gradient for rows": (
        "k < TERMS; ++k) {\n      const float* from",
        "k < 1; ++k) {\n      const float* from",
    ),
    "P of a gradient is not transposed": ("0, d_stride, true}", "0, d_stride, false}"),
    "images of a gradient are not centered": (
        "{x, less, Q, e, less_stride",
        "{x, nullptr, Q, e, less_stride",
    ),
    "a step of Newton too few": (
        "t < steps; ++t) {\n      square",
        "t < steps - 1; ++t) {\n      square",
    ),
    "no ridge": ("ridge * square.trace(sigma()) / size + floor", "floor"),
    "no gradient of the ridge": ("ridge * square.trace(gY) / size", "0 * square.trace(gY)"),
    "no gradient of the trace": ("inner / (2 * trace) / trace", "0 * inner"),
    "no gradient through S": ("square.multiply(gS, turned, before, true);", ""),
    "no gradient through Z": ("square.multiply_transposed(Z(t - 1), gS, gY, true);", ""),
    "no gradient through Y": ("square.multiply_transposed(Y(t - 1), gY, gS_before);", ""),
    "half the gradient of scale": ("+ gY[j * wide + i] * cov[j * row + i]", ""),
    "padding of W is zero": (": i == j;", ": 0;"),
    "the gate has no relu": ("hidden[i] = value < 0 ? 0 : value;", "hidden[i] = value;"),
    "the gate has no bias": ("+ gate.norm_bias[i]", ""),
    "the gate's norm has no mean": ("(hidden[i] - mean) * rstd", "hidden[i] * rstd"),
    "the gate of the first image": ("var + n * channels,", "var,"),
    "the hidden layer of the first image": (
        "w1 + i * channels, input + n * channels,",
        "w1 + i * channels, input,",
    ),
    "the images that went first": ("x + start, moments);", "x, moments);"),
    "the residual of the images that went first": (
        "? nullptr : residual + start",
        "? nullptr : residual",
    ),
    "windows have their first value": ("value > most[k] ||", "false ||"),
    "windows have no sign": ("sign[k] = signs[channel + (rows ? k : 0)];", "sign[k] = 1;"),
    "windows lose what is not a number": (
        "value > most[k] || value != value",
        "value > most[k] || false",
    ),
    "all largest values get the gradient": ("is_it ? 0 : rest[k]", "rest[k]"),
    "no shift behind the gate": ("constant[i] + factor * shift[i]", "constant[i]"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_pass_is_noticed(name, monkeypatch, tmp_path, fresh):
    before, after = MUTATIONS[name]
    source = cpu.SOURCE.read_text()
    assert before in source
    changed = tmp_path / "cpu.cpp"
    changed.write_text(source.replace(before, after))
    monkeypatch.setattr(cpu, "SOURCE", changed)
    without(monkeypatch, tmp_path)
    assert cpu.library().missing is None
    red = 0
    for layout in LAYOUTS:
        red += fails(test_pooling, (2, 70, 7, 9), 2, layout)
        red += sum(fails(test_images_have_gates_of_their_own, side, layout) for side in (9, 210))
        for shape, size in SHAPES[:4]:
            for offset in (0, 1000):
                red += fails(test_measuring, shape, size, offset, layout)
            red += fails(test_mapping, shape, size, layout)
            red += fails(test_products_of_gradients, shape, size, layout)
            red += fails(test_the_gradient_through_map_and_moments, shape, size, layout)
    red += fails(test_newton_s_iteration, 23, 7, 3)
    assert red


def fails(test, *arguments):
    try:
        test(*arguments)
    except AssertionError:
        return True
    return False
