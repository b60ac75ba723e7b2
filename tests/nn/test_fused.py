"""Layers on the kernels against layers in plain PyTorch.

On the CPU the kernels are slow, so the tensors are tiny there.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from _checks import RTOL, assert_close
from _fused import HALF, MODULES, assert_same, block, each_module, gradients, images
from _kernels import each_device, interpreted, kernels_on
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    fold_ce,
    ops,
)

gpu = pytest.mark.gpu


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Identity])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(24), nn.GroupNorm(2, 24)], ids=["bn", "gn"])
def test_a_residual_is_added_before_the_activation(norm, act):
    module = NormCE2d(copy.deepcopy(norm), ChannelEquilibrium2d(24), act())
    plain = copy.deepcopy(module)
    plain.act = None
    x, residual = images(), images(seed=1)
    expected = module.act(plain(x) + residual)
    assert torch.equal(module(x, residual), expected)
    module.ce.register_forward_hook(lambda *_: None)
    assert_close("hooked", module(x, residual=residual), expected, 1e-6)


@pytest.mark.parametrize("shape", [(3, 24, 3, 4), (1, 24, 3, 5), (3, 1, 1, 1)])
def test_a_residual_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"residual of shape .* they must be equal"):
        block()(images(), torch.zeros(shape))


@each_device
@each_module
def test_layers_and_their_buffers_match_the_plain_path(name, device):
    own = MODULES[name]().to(device)
    plain = copy.deepcopy(own)
    # averages of the others move like those of the first
    moving = ("relu", "frozen ce", "norm in evaluation", "no tracking")
    for seed in range(2 if device == "cuda" or name in moving else 1):
        x = images(seed=seed, device=device)
        residual = images(seed=9, device=device) if isinstance(own, NormCE2d) else None
        with kernels_on(device):
            actual = gradients(own, x, residual)
        with ops.backend("torch"):
            expected = gradients(plain, x, residual)
        assert_same(actual, expected, 2e-5)
        assert_same(dict(own.named_buffers()), dict(plain.named_buffers()), 1e-5)
    with kernels_on(device), torch.no_grad():
        actual = own.eval()(x)
    with ops.backend("torch"):
        assert_close("evaluation", actual, plain.eval()(x), 1e-5)


@each_device
def test_parameters_with_gaps(device):
    """As slices of other tensors have them, columns for example."""
    module = block().to(device)
    for owner in (module.norm, module.ce.ir.norm):
        for name in ("weight", "bias"):
            columns = torch.stack([getattr(owner, name).data, torch.zeros_like(owner.weight)], 1)
            setattr(owner, name, nn.Parameter(columns.to(device)[:, 0]))
    assert not module.norm.weight.is_contiguous()
    x = images(device=device)
    with kernels_on(device):
        actual = gradients(module, x)
    with ops.backend("torch"):
        assert_same(actual, gradients(module, x), 2e-5)


@each_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["relu", "ce alone", "ir", "bd pool"])
def test_a_non_finite_batch_never_enters_a_buffer(name, bad, device):
    module = MODULES[name]().to(device)
    before = copy.deepcopy(dict(module.named_buffers()))
    x = images(device=device)
    x[1, 2, 0, 0] = bad
    with kernels_on(device):
        module(x)
    assert all(torch.equal(value, before[k]) for k, value in module.named_buffers())


@each_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy
def test_a_value_too_large_for_a_half_precision_buffer_does_not_enter_it(device):
    module = block().half().to(device)
    before = copy.deepcopy(dict(module.norm.named_buffers()))
    with kernels_on(device):
        y = module((1000 * images(device=device)).half())
    assert y.isfinite().all()
    assert all(torch.equal(value, before[k]) for k, value in module.norm.named_buffers())


@each_device
@pytest.mark.parametrize("dtype", HALF)
def test_autocast(dtype, device):
    conv = nn.Conv2d(24, 24, 1).to(device)
    module = block().to(device)
    exact = copy.deepcopy(module).double()
    x = images(n=8, device=device).contiguous(memory_format=torch.channels_last)
    with kernels_on(device), torch.autocast(device, dtype=dtype):
        features = conv(x).detach().requires_grad_()
        y = module(features)
    assert y.dtype == dtype
    assert {b.dtype for b in module.buffers() if b.is_floating_point()} == {torch.float32}
    expected = exact(features.double())
    twice = 2 if device == "cpu" and dtype == torch.bfloat16 else 1  # it truncates there
    assert_close("y", y, expected, twice * RTOL[dtype])
    with kernels_on(device):
        y.float().square().mean().backward()
    assert features.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@each_device
def test_second_derivatives_are_refused_clearly(device):
    module = block().to(device)
    x = images(device=device).requires_grad_()
    with kernels_on(device):
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r'no second derivative.*backend\("torch"\)'):
            grad.square().sum().backward()
    with ops.backend("torch"):
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert x.grad.isfinite().all()


@each_device
def test_inference_mode(device):
    module = block().to(device)
    x = images(device=device)
    with ops.backend("torch"):
        expected = [copy.deepcopy(module)(x), copy.deepcopy(module).eval()(x)]
    with kernels_on(device), torch.inference_mode():
        actual = [copy.deepcopy(module)(x), copy.deepcopy(module).eval()(x)]
    for own, other in zip(actual, expected, strict=True):
        assert own.is_inference()
        assert_close("y", own.clone(), other, 1e-5)


@each_device
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_the_batch_once(use_reentrant, device):
    module = block().to(device)
    once = copy.deepcopy(module)
    x = images(device=device).requires_grad_()
    with kernels_on(device):
        checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
        grad = x.grad
        x.grad = None
        once(x).sum().backward()
    assert torch.equal(x.grad, grad)
    for own, other in zip(module.buffers(), once.buffers(), strict=True):
        assert torch.equal(own, other)


@each_device
def test_only_x_is_kept_for_backward_and_y_only_with_a_residual(device):
    module = block(32).to(device)
    x = images(c=32, h=24, w=24, n=2, device=device).requires_grad_()
    for residual in (None, images(c=32, h=24, w=24, n=2, seed=1, device=device)):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.data_ptr()] = tensor
            return tensor

        with kernels_on(device), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = module(x, residual)
        large = {pointer for pointer, tensor in kept.items() if tensor.numel() >= x.numel()}
        assert large == {x.data_ptr()} | (set() if residual is None else {y.data_ptr()})
        small = sum(t.numel() for pointer, t in kept.items() if pointer not in large)
        n, c, groups, size, steps = 2, 32, 2, 16, 3
        matrices = (3 + 3 * steps) * groups * size**2
        parameters = sum(parameter.numel() for parameter in module.parameters())
        gaps = 7 * 3
        assert small <= matrices + 5 * n * c + 10 * c + parameters + 1 + gaps


@gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("pool", [1, 2])
def test_peak_memory_is_three_tensors_at_most(residual, pool):
    module = block(64, pool=pool).cuda()
    x = torch.randn(32, 64, 112, 112, device="cuda", requires_grad=True)
    added = torch.randn_like(x).requires_grad_() if residual else None
    upstream = torch.randn_like(x)
    for _ in range(2):
        x.grad = None
        if residual:
            added.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with ops.backend("triton"):
            module(x, added).backward(upstream)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 3.1 * x.numel() * x.element_size()


@gpu
def test_cuda_graph_of_a_training_step():
    module = block(64).cuda()
    eager = copy.deepcopy(module)
    static = images(8, 64, 14, 14, device="cuda").requires_grad_()
    residual = images(8, 64, 14, 14, seed=1, device="cuda")
    with ops.backend("triton"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                copy.deepcopy(module)(static, residual).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
        static.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(static, residual)
            y.square().mean().backward()
        for seed in range(3):
            x = images(8, 64, 14, 14, seed=seed, device="cuda")
            static.data.copy_(x)
            graph.replay()
            expected = gradients(eager, x, residual)
            assert torch.equal(y, expected["y"])
            assert torch.equal(static.grad, expected["x"])
            assert torch.equal(module.norm.weight.grad, expected["norm.weight"])
            for own, other in zip(module.buffers(), eager.buffers(), strict=True):
                assert torch.equal(own, other)


@gpu
def test_another_stream():
    module = block(64).cuda()
    twin = copy.deepcopy(module)
    x = images(32, 64, 56, 56, device="cuda")
    with ops.backend("triton"):
        expected = gradients(module, x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # work in front of it: a launch on the wrong stream would not wait
            torch.cuda._sleep(100_000_000)
            late = x * 1
            actual = gradients(twin, late)
        torch.cuda.synchronize()
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_more_than_two_to_the_31_elements(layout):
    """Samples are turned copies of one, so statistics and results are those of one, turned."""
    n, side = 33, 1009
    module = block(64, act=nn.ReLU).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    one = torch.randn(1, 64, side, side, device="cuda", generator=generator).bfloat16()
    upstream = torch.randn(1, 64, side, side, device="cuda", generator=generator).bfloat16()
    with ops.backend("triton"):
        first = one.requires_grad_()
        expected = copy.deepcopy(module)(first)
        expected.backward(upstream)

        def turned(sample):
            out = torch.empty(
                (n, 64, side, side), dtype=sample.dtype, device="cuda", memory_format=layout
            )
            for i in range(n):
                out[i] = sample[0].roll(31 * i, 1)
            return out

        x = turned(one.detach()).requires_grad_()
        assert x.numel() > 2**31
        y = module(x)
        y.backward(turned(upstream))
    assert y.is_contiguous(memory_format=layout)
    assert x.grad.is_contiguous(memory_format=layout)
    for i in (0, 1, 16, 31, 32):
        for name, own, other in (("y", y, expected), ("x.grad", x.grad, first.grad)):
            value = own[i].roll(-31 * i, 1)
            assert value.isfinite().all()
            error = (value.float() - other[0].float()).norm() / other[0].float().norm()
            assert error <= RTOL[torch.bfloat16], f"{name} of sample {i}: {error:.1e}"


class Network(nn.Module):
    """A residual block between two convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.first = block(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.second = block(16, act=nn.ELU)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(self.stem(x))
        x = self.second(self.conv(x), residual=x)
        return self.head(x.mean((2, 3)))


def losses(model, device, steps, batch, size, dtype):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(batch) % 10
    patterns = torch.randn(10, 3, size, size, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for _ in range(steps):
        noise = torch.randn(batch, 3, size, size, generator=generator)
        x = (patterns[labels] + noise).to(device)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(model(x), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("device", "steps", "dtype", "rtol"),
    [
        pytest.param("cpu", 3, torch.float32, 1e-5, marks=interpreted),
        pytest.param("cuda", 32, torch.float32, 1e-3, marks=gpu),
        pytest.param("cuda", 32, torch.bfloat16, 1e-2, marks=gpu),
    ],
)
def test_training_follows_the_plain_path(device, steps, dtype, rtol, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    own = Network().to(device)
    plain = copy.deepcopy(own)
    batch, size = (4, 4) if device == "cpu" else (64, 16)
    with kernels_on(device):
        actual = losses(own, device, steps, batch, size, dtype)
    with ops.backend("torch"):
        expected = losses(plain, device, steps, batch, size, dtype)
    assert ((actual - expected).abs() <= rtol * expected.abs()).all(), (actual, expected)
    assert steps < 32 or expected[-1] < 0.7 * expected[0]


@each_device
@pytest.mark.parametrize("ce", [ChannelEquilibrium2d, BatchDecorrelation2d, InstanceReweighting2d])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_folded_networks_match_the_plain_path(ce, dtype, device):
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), block(24, ce=ce)).to(device)
    x = images(3, 3, 5, 5, device=device)
    with ops.backend("torch"), torch.no_grad():
        model(x)
        folded = fold_ce(model.eval())
        expected = folded(x)
    with kernels_on(device), torch.no_grad():
        actual = folded.to(dtype)(x.to(dtype))
    assert_close("y", actual, expected.double(), {torch.float32: 1e-5}.get(dtype, 2e-2))


@each_device
@pytest.mark.parametrize("act", [None, nn.ReLU()], ids=str)
def test_a_residual_of_another_dtype_gives_the_dtype_of_the_sum(act, device):
    module = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24), act).to(device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 24, 5, 7, generator=generator).to(device, torch.bfloat16)
    residual = torch.randn(4, 24, 5, 7, generator=generator).to(device)
    plain = copy.deepcopy(module)
    with kernels_on(device):
        y = module(x, residual)
    with ops.backend("torch"):
        expected = plain(x, residual)
    assert y.dtype == expected.dtype == torch.float32
    assert_close("y", y, expected.double(), RTOL[torch.bfloat16])


@each_device
def test_the_released_gate_is_refused_where_kernels_are_demanded(device):
    module = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24)).to(device)
    module.ce.ir.released = True
    with kernels_on(device), pytest.raises(RuntimeError, match="released"):
        module(torch.randn(4, 24, 5, 7, device=device))
