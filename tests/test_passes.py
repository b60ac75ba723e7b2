"""The two passes over x as operators of their own, against plain PyTorch in float64."""

import pytest
import torch

pytest.importorskip("triton")

from _checks import RTOL, assert_close
from _kernels import each_device, kernels_on
from cenet import functional as F
from cenet import passes

# (N, C, H, W), channels of a group, side of the pooling window
CASES = {
    "small map": ((5, 24, 3, 3), 16, 1),
    "ragged": ((3, 20, 7, 6), 8, 1),
    "pooled": ((3, 24, 7, 5), 16, 2),
    "no covariance": ((3, 24, 7, 5), None, 1),
}


def images(shape, device, seed=0, dtype=torch.float32):
    """Images whose means and spreads differ from one to the next."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.5, 2, shape[0])[:, None, None, None]
    x = torch.randn(shape, generator=random) * spread + 3 * spread
    return x.to(device, dtype)


def weights_like(tensors, seed=7):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=random, dtype=torch.float64).to(t) for t in tensors]


@each_device
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CASES)
def test_moments_and_their_gradient(name, layout, device):
    shape, group_size, pool = CASES[name]
    x = images(shape, device).contiguous(memory_format=layout).requires_grad_()
    sign = torch.where(torch.arange(shape[1]) % 3 == 0, -1.0, 1.0).to(device)
    with kernels_on(device):
        seen, found, center = passes.measure(x, group_size, pool, sign)
    exact = x.detach().double().requires_grad_()
    expected = F.moments(exact, group_size, pool, sign.double())
    pairs = [
        ("mean", found.mean + center, expected.mean),
        ("var", found.var, expected.var),
    ]
    if group_size is not None:
        pairs += [
            ("cov", found.cov, expected.cov),
            ("windows", found.window_mean.mean(0) + center, expected.window_mean.mean(0)),
        ]
    for what, own, other in pairs:
        assert_close(what, own, other, RTOL[torch.float32])
    # the gradient of the view of x is added to that of the moments
    upstream = weights_like([own for _, own, _ in pairs] + [x])
    loss = sum((own * w).sum() for (_, own, _), w in zip(pairs, upstream, strict=False))
    with kernels_on(device):
        (loss + (seen * upstream[-1]).sum()).backward()
    loss = sum(
        (other * w.double()).sum() for (_, _, other), w in zip(pairs, upstream, strict=False)
    )
    (loss + (exact * upstream[-1].double()).sum()).backward()
    assert_close("gradient of x", x.grad, exact.grad, RTOL[torch.float32])
    assert x.grad.is_contiguous(memory_format=layout)


@each_device
@pytest.mark.parametrize(
    ("parts", "with_residual", "act"),
    [
        ("A", False, "relu"),
        ("w", True, "elu"),
        ("A and w", True, "relu"),
        ("A and w", False, "elu"),
        ("A, w for all", True, "none"),
    ],
)
def test_the_map_and_its_gradients(parts, with_residual, act, device):
    shape = (3, 20, 5, 4)
    x = images(shape, device).requires_grad_()
    residual = images(shape, device, seed=1).requires_grad_() if with_residual else None
    random = torch.Generator().manual_seed(2)
    A = torch.randn(3, 8, 8, generator=random) if "A" in parts else None
    w = torch.randn(1, 1) if "all" in parts else torch.randn(3, 20, generator=random)
    w = w if "w" in parts else None
    scale, shift = torch.randn(2, 20, generator=random)
    center = x.detach().mean((0, 2, 3)).cpu()
    small = [None if t is None else t.to(device).requires_grad_() for t in (A, w, scale, shift)]
    slope = 0.7 if act == "elu" else 0.0
    with kernels_on(device):
        A, w, scale, shift = small
        operator = F.Operator(A, w)
        y = passes.apply(x, operator, center.to(device), scale, shift, residual, act, slope)
        (upstream,) = weights_like([y])
        (y * upstream).sum().backward()
    leaves = [None if t is None else t.detach().double().requires_grad_()
              for t in (x, residual, *small)]  # fmt: skip
    x64, residual64, A, w, scale, shift = leaves
    centered = x64 - center.to(device).double()[:, None, None]
    argument = F.mix(centered, *F.with_norm(F.Operator(A, w), scale, shift))
    argument = argument if residual64 is None else argument + residual64
    acts = {"none": lambda t: t, "relu": torch.relu,
            "elu": lambda t: torch.nn.functional.elu(t, slope)}  # fmt: skip
    expected = acts[act](argument)
    (expected * upstream.double()).sum().backward()
    assert_close("y", y, expected, RTOL[torch.float32])
    for own, other, what in zip(
        (x, residual, *small), leaves, ("x", "residual", "A", "w", "scale", "shift"), strict=True
    ):
        if own is not None:
            assert_close(f"gradient of {what}", own.grad, other.grad, RTOL[torch.float32])


@each_device
def test_there_is_no_second_derivative(device):
    x = images((2, 16, 4, 4), device).requires_grad_()
    with kernels_on(device):
        _, found, _ = passes.measure(x, 16, 1, None)
        (grad,) = torch.autograd.grad(found.var.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()


@each_device
def test_both_passes_compile_to_one_graph(device):
    x = images((3, 24, 5, 4), device)

    def whole(x):
        seen, found, center = passes.measure(x, 16, 1, None)
        operator = F.Operator(found.cov, found.var)
        y = passes.apply(seen, operator, center, found.var.mean(0), center, x, "relu", 0.0)
        return (y * y).sum()

    results = []
    with kernels_on(device):
        for function in (whole, torch.compile(whole, fullgraph=True, backend="aot_eager")):
            leaf = x.clone().requires_grad_()
            loss = function(leaf)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
    for plain, compiled in zip(*results, strict=True):
        assert_close("compiled", compiled, plain.double(), 1e-6)
