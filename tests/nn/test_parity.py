"""Every value and gradient against the float64 `_reference`, and mutations that must show."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import layer_norm

from _build import Case, build, gradient_names, make_input, twin
from _checks import RTOL, assert_close
from _reference import activate, equilibrium
from cenet import ChannelEquilibrium2d, NormCE2d, cpu, ops
from cenet import functional as F

BASE = Case()
HALF = (torch.float16, torch.bfloat16)
CASES = [
    *(BASE.but(channels=c) for c in (3, 16, 24, 58, 64, 100)),
    *(BASE.but(channels=c, n=1, height=7, width=9) for c in (16, 58)),
    *(BASE.but(height=h, width=w) for h, w in ((1, 2), (3, 1), (7, 7), (13, 5))),
    *(BASE.but(norm=n) for n in ("gn", "in", "ln2d-torchvision", "ln2d-timm", "none")),
    *(BASE.but(act=a) for a in ("leaky_relu", "elu", "silu", "none")),
    *(BASE.but(layer=b, norm=n, channels=58) for b in ("bd", "ir") for n in ("bn", "gn", "none")),
    *(BASE.but(layout=v, norm=n) for v in ("channels_last", "sliced") for n in ("bn", "gn")),
    BASE.but(layout="expanded"),
    BASE.but(layout="channels_last", channels=58, layer="bd"),
    *(BASE.but(pool=2, channels=c, height=6, width=9) for c in (24, 64)),
    BASE.but(pool=2, norm="gn", height=6),
    *(BASE.but(steps=t) for t in (1, 2, 5)),
    *(BASE.but(gamma=g, channels=58) for g in (1e-1, 1e-2)),
    BASE.but(group_size=64, channels=64, height=9, width=9),
    BASE.but(group_size=5, channels=24),
    # more pixels than the compiled passes take at once
    BASE.but(height=19, width=29, channels=58),
    BASE.but(height=19, width=29, channels=58, layout="channels_last"),
    # means far from zero: of x, and of what another norm hands over
    *(
        BASE.but(offset=o, norm=n, layout=v)
        for o in (100, 1000)
        for n in ("bn", "none")
        for v in ("contiguous", "channels_last")
    ),
    *(BASE.but(offset=1000, layer=b, norm=n) for b in ("bd", "ir") for n in ("bn", "none")),
    BASE.but(offset=1000, pool=2, height=6, width=9),
    BASE.but(offset=100, channels=90, n=7, height=6, width=1),
    *(BASE.but(beta=20, norm=n) for n in ("gn", "ln2d-timm")),
    *(BASE.but(dtype=d, norm=n) for d in HALF for n in ("bn", "gn", "none")),
    *(BASE.but(dtype=d, act=a, channels=58) for d in HALF for a in ("elu", "leaky_relu")),
    *(BASE.but(dtype=d, layout="channels_last", channels=64) for d in HALF),
    *(BASE.but(dtype=torch.float64, channels=c) for c in (16, 58)),
]
ON_GPU = [
    pytest.param(case.but(device="cuda"), marks=pytest.mark.gpu, id=f"{case}-cuda")
    for case in CASES
    # CUDA's group norm wants weights of the input's dtype; the kernels round means that are far
    # from zero (test_block_survives_large_offsets)
    if not (case.norm == "gn" and case.dtype in HALF) and not case.offset
]


def check_parity(case: Case) -> None:
    block = build(case)
    block = block.double() if case.dtype == torch.float64 else block
    parameters, constants = twin(case, block)
    leaf, view = make_input(case)
    x = leaf.clone().requires_grad_()
    reference_x = leaf.double().cpu().requires_grad_()
    rtol = RTOL[case.dtype]

    y = block(view(x))
    before = equilibrium(view(reference_x), parameters, constants)
    # rounding to half precision flips signs near zero: gradients are compared on the tested mask
    own_mask = y.detach().cpu() > 0
    expected = activate(before, case.act, own_mask if case.dtype in HALF else before > 0)
    # not pure noise: the gradient of a scalar such as λ would be a sum of terms that cancel
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    upstream = (noise + y.detach().cpu().float()).to(y.dtype)
    y.backward(upstream.to(case.device))
    expected.backward(upstream.double())

    assert y.dtype == case.dtype
    assert_close("y", y, activate(before, case.act, before > 0), rtol)
    assert_close("x.grad", x.grad, reference_x.grad, rtol)
    own = dict(block.named_parameters())
    assert set(own) == set(gradient_names(case))
    for name, field in gradient_names(case).items():
        assert_close(f"{name}.grad", own[name].grad, getattr(parameters, field).grad, rtol)


@pytest.mark.parametrize("case", [*CASES, *ON_GPU], ids=str)
def test_values_and_gradients_match_the_reference(case):
    check_parity(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != torch.float64], ids=str)
def test_without_compiled_passes_they_match_too(case):
    with ops.backend("torch"):
        check_parity(case)


@pytest.mark.parametrize("dtype", HALF)
def test_activation_mask_differs_from_the_exact_one_only_near_zero(dtype):
    case = BASE.but(dtype=dtype, channels=64, height=14, width=14)
    block = build(case)
    leaf, _ = make_input(case)
    before = equilibrium(leaf.double(), *twin(case, block))
    flipped = (block(leaf) > 0) != (before > 0)
    assert (before[flipped].abs() < RTOL[dtype]).all()
    assert flipped.float().mean() < RTOL[dtype]


def mutate_fewer_steps(monkeypatch):
    original = F.decorrelation
    monkeypatch.setattr(
        F, "decorrelation", lambda cov, scale, steps: original(cov, scale, steps - 1)
    )


def mutate_absolute_ridge(monkeypatch):
    monkeypatch.setattr(F, "RIDGE", 0.0)
    monkeypatch.setattr(F, "RIDGE_FLOOR", 1e-5)


def mutate_unbiased_variance(monkeypatch):
    original = F.centered_moments

    def unbiased(*args, **kwargs):
        m, images = original(*args, **kwargs)
        return m._replace(var=m.var * m.pixels / (m.pixels - 1)), images

    monkeypatch.setattr(F, "centered_moments", unbiased)


def mutate_swapped_lambda(monkeypatch):
    original = F.coefficients

    def swapped(*args, lam=None, **kwargs):
        return original(*args, lam=None if lam is None else 1 - lam, **kwargs)

    monkeypatch.setattr(F, "coefficients", swapped)


def mutate_gate_eps(monkeypatch):
    monkeypatch.setattr(F, "GATE_NORM_EPS", 1e-3)


def mutate_unsigned_pooling(monkeypatch):
    original = F.centered_moments

    def unsigned(x, group_size, pool, sign):
        return original(x, group_size, pool, None)

    monkeypatch.setattr(F, "centered_moments", unsigned)


def mutate_no_centering(monkeypatch):
    monkeypatch.setattr(cpu, "enabled", False)
    monkeypatch.setattr(F, "image_means", lambda x: x.new_zeros(x.shape[:2]))


def mutate_no_centering_in_the_passes(monkeypatch):
    original = cpu.measure

    def at_zero(x, group_size):
        less, rest, *others = original(x, group_size)
        return torch.zeros_like(less), less + rest, *others

    monkeypatch.setattr(cpu, "measure", at_zero)


@pytest.mark.parametrize(
    ("mutate", "case"),
    [
        (mutate_fewer_steps, BASE),
        (mutate_fewer_steps, BASE.but(layer="bd", dtype=torch.bfloat16)),
        (mutate_absolute_ridge, BASE.but(gamma=1e-2)),
        (mutate_unbiased_variance, BASE.but(height=13, width=15)),
        (mutate_unbiased_variance, BASE.but(norm="none", height=13, width=15)),
        (mutate_swapped_lambda, BASE),
        (mutate_swapped_lambda, BASE.but(dtype=torch.bfloat16)),
        (mutate_gate_eps, BASE),
        (mutate_unsigned_pooling, BASE.but(pool=2, height=6, width=9)),
        (mutate_no_centering, BASE.but(offset=100)),
        (mutate_no_centering, BASE.but(offset=100, norm="none")),
        (mutate_no_centering_in_the_passes, BASE.but(offset=100)),
        (mutate_no_centering_in_the_passes, BASE.but(offset=100, norm="none")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parity_notices_a_mutation(monkeypatch, mutate, case):
    check_parity(case)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="relative error"):
        check_parity(case)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_evaluation_at_means_far_from_zero(offset, layout):
    """Against the equations in float64, written out."""
    torch.manual_seed(0)
    channels, size = 32, 16
    block = NormCE2d(nn.BatchNorm2d(channels), ChannelEquilibrium2d(channels, group_size=size))
    nn.init.normal_(block.norm.weight, 1, 0.2)
    x = (torch.randn(8, channels, 10, 10) + offset).contiguous(memory_format=layout)
    block(x)
    block.eval()
    block.norm.running_mean.copy_(x.mean((0, 2, 3)))
    block.norm.running_var.fill_(1.2)
    twin = {name: value.detach().double() for name, value in block.state_dict().items()}
    leaves = {name: twin[name].requires_grad_() for name, _ in block.named_parameters()}
    x, exact = x.requires_grad_(), x.detach().double().requires_grad_()

    mean, rstd = twin["norm.running_mean"], (twin["norm.running_var"] + 1e-5).rsqrt()
    values = (exact - mean[:, None, None]) * (rstd * twin["norm.weight"])[:, None, None]
    values = values + twin["norm.bias"][:, None, None]
    inv_std, gate = twin["ce.ir.running_inv_std"], {}
    for name in ("fc1.weight", "norm.weight", "norm.bias", "fc2.weight"):
        gate[name] = twin[f"ce.ir.{name}"]
    hidden = values.var((2, 3), correction=0) * inv_std.square() @ gate["fc1.weight"].mT
    width = hidden.shape[1:]
    hidden = layer_norm(hidden, width, gate["norm.weight"], gate["norm.bias"], 1e-5).relu()
    gain = (hidden @ gate["fc2.weight"].mT).sigmoid() * inv_std
    groups = values.unflatten(1, (-1, size)).flatten(3)
    decorrelated = (twin["ce.bd.running_inv_sqrt"] @ groups).reshape(values.shape)
    mix = twin["ce.mix_logit"].sigmoid()
    expected = mix * decorrelated + (1 - mix) * gain[:, :, None, None] * values

    y = block(x)
    upstream = torch.randn_like(y) + y.detach()
    y.backward(upstream)
    expected.backward(upstream.double())
    assert_close("y", y, expected, 1e-5)
    assert_close("x.grad", x.grad, exact.grad, 1e-5)
    for name, parameter in block.named_parameters():
        assert_close(f"{name}.grad", parameter.grad, leaves[name].grad, 1e-5)


@pytest.mark.parametrize("layer", ["ce", "bd", "ir"])
@pytest.mark.parametrize("norm", ["bn", "none"])
def test_first_and_second_derivatives(layer, norm):
    small = Case(channels=4, n=2, height=1, width=3, act="none", group_size=3)
    case = small.but(norm=norm, layer=layer, gamma=0.3)
    block = build(case).double()
    names = [name for name, _ in block.named_parameters()]
    values = list(block.parameters())
    leaf, _ = make_input(case)
    parameters = (value.detach().clone().requires_grad_() for value in values)
    inputs = (leaf.double().requires_grad_(), *parameters)

    def run(x, *parameters):
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs, atol=1e-4)


def test_second_derivatives_through_pooling():
    def moments(x):
        return F.moments(x, 3, pool=2, sign=torch.tensor([1.0, -1, 1, 1, -1]))[:3]

    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert gradcheck(moments, (x.requires_grad_(),))
    assert gradgradcheck(moments, (x,))


@pytest.mark.parametrize("channels", [24, 58])
def test_channel_equilibrium_is_the_layer_as_one_function(channels):
    case = BASE.but(channels=channels, act="none", pool=2)
    block = build(case)
    parameters, constants = twin(case, block)
    leaf, _ = make_input(case)
    mean, var = leaf.mean((0, 2, 3)), leaf.var((0, 2, 3), correction=0)
    scale = block.norm.weight * (var + block.norm.eps).rsqrt()
    shift = block.norm.bias - mean * scale
    ce = block.ce
    y = F.channel_equilibrium(leaf, ce.ir.gate, ce.mix, scale=scale, shift=shift, pool=2)
    assert_close("y", y, equilibrium(leaf.double(), parameters, constants), 1e-5)
    block.eval()
    running = {"inv_sqrt": ce.bd.running_inv_sqrt, "inv_std": ce.ir.running_inv_std}
    scale = block.norm.weight * (block.norm.running_var + block.norm.eps).rsqrt()
    shift = block.norm.bias - block.norm.running_mean * scale
    y = F.channel_equilibrium(leaf, ce.ir.gate, ce.mix, scale=scale, shift=shift, **running)
    assert_close("y in evaluation", y, block(leaf).double(), 1e-6)
