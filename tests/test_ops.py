"""The operators around the kernels as torch.library and torch.compile see them."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from _fused import MODULES, assert_same, block, gradients, images
from _kernels import each_device, interpreted, kernels_on
from cenet import (
    ChannelEquilibrium2d,
    NormCE2d,
    fold_conv_norm_ce,
    ops,
)
from cenet.kernels import layer
from cenet.kernels.call import BATCH, CONSTANTS, FUSED_ACTIVATIONS, PARAMETERS, NormCECall

gpu = pytest.mark.gpu
# of activations, where `MODULES` calls them otherwise
NAMES = {"none": "no activation", "leaky_relu": "leaky relu"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_starting_the_gpu_leaves_random_numbers_alone(device):
    torch.manual_seed(0)
    known = torch.randn(3, device=device)
    torch.manual_seed(0)
    ops.start_gpu(torch.device(device), kernels=True)
    assert torch.equal(torch.randn(3, device=device), known)


def operator_arguments(device, residual, steps=2, momenta=(0.1, -1.0, 0.1)):
    """Arguments of norm_ce and norm_ce_backward."""
    module = block(newton_steps=steps).to(device)
    ce = module.ce
    tensors = [images(device=device).requires_grad_()]
    tensors += [images(seed=1, device=device).requires_grad_() if residual else None]
    tensors += [module.norm.weight, module.norm.bias, None, None, None, None, *ce.ir.gate]
    values = {"sources": [BATCH] * 3, "group_size": 16, "steps": steps, "pool": 1,
              "norm_eps": 1e-5, "eps": 1e-5, "act": "relu", "slope": 0.0}  # fmt: skip
    constants = [values[name] for name in CONSTANTS]
    forward = [*tensors, ce.mix_logit, None, *buffers_of(module), list(momenta), *constants]
    with kernels_on(device), torch.no_grad():
        y, state = ops.norm_ce(*forward)
    x, _, weight, bias = (t if t is None else t.detach() for t in forward[:4])
    gate = [None if t is None else t.detach() for t in forward[8:14]]
    backward = [torch.ones_like(y), y if residual else None, x, weight, bias, *gate, state]
    return forward, [*backward, *constants]


def buffers_of(module):
    norm, bd, ir = module.norm, module.ce.bd, module.ce.ir
    return [
        *(norm.running_mean, norm.running_var, norm.num_batches_tracked),
        *(bd.running_inv_sqrt, bd.num_batches_tracked),
        *(ir.running_inv_std, ir.num_batches_tracked),
    ]


def test_a_call_goes_through_the_arguments_of_the_backward_operator():
    """By position: what the schema lists is what the record takes back."""
    call = NormCECall(*NormCECall._fields)  # each field holds its own name
    sent = {"grad": "grad", "y": "y", "x": "x", "state": "state"}
    sent |= dict(zip(PARAMETERS, call.parameters(), strict=True))
    sent |= dict(zip(CONSTANTS, call.constants(), strict=True))
    names = [argument.name for argument in ops.norm_ce_backward._schema.arguments]
    _, _, *arguments = (sent[name] for name in names)
    found, state = NormCECall.from_backward(*arguments)
    kept = {"x", *PARAMETERS, *CONSTANTS}
    assert found == tuple(name if name in kept else None for name in NormCECall._fields)
    assert state == "state"
    assert [a.name for a in ops.norm_ce._schema.arguments] == list(NormCECall._fields)


@each_device
@pytest.mark.parametrize("residual", [False, True])
def test_operators_pass_opcheck(residual, device, monkeypatch):
    # nobody writes to the gaps between the parts of the state, which are compared too
    monkeypatch.setattr(layer, "empty", lambda device, *shape: torch.zeros(shape, device=device))
    with kernels_on(device):
        forward, backward = operator_arguments(device, residual)
        torch.library.opcheck(ops.norm_ce, tuple(forward))
        checks = ("test_schema", "test_faketensor")  # it has no gradient of its own
        torch.library.opcheck(ops.norm_ce_backward, tuple(backward), test_utils=checks)


@interpreted
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_fake_cuda_tensors(residual, channels_last):
    """Shapes, dtypes and layouts without a GPU."""
    with FakeTensorMode(), torch.device("cuda"):
        module = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24), nn.ReLU())
        x = torch.randn(3, 24, 4, 5, dtype=torch.bfloat16)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        y = module(x, torch.randn_like(x) if residual else None)
        assert "NormCE" in type(y.grad_fn).__name__
        assert (y.shape, y.dtype, y.device, y.stride()) == (x.shape, x.dtype, x.device, x.stride())


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_device
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "name",
    [
        *("relu", "bd pool"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("identity start", "ce alone")),
    ],
)
def test_compiled_blocks_are_one_graph_and_two_over_batch_sizes(name, device):
    eager = MODULES[name]().to(device)
    module = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with kernels_on(device):
        for seed, n in enumerate((3, 2, 5)):
            x = images(n, seed=seed, device=device)
            assert_same(gradients(module, x, run=compiled), gradients(eager, x), 1e-6)
    assert counter.frame_count <= 2
    assert_same(dict(module.named_buffers()), dict(eager.named_buffers()), 1e-6)


@each_device
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", [NAMES.get(name, name) for name in FUSED_ACTIVATIONS])
def test_the_compiler_gets_the_activation_behind_a_residual(name, device, monkeypatch):
    """To join it with what comes before in the backward pass: then the kernels see no y."""
    outputs = []
    backward = layer.backward

    def recorded(call, grad, y, state):
        outputs.append(y)
        return backward(call, grad, y, state)

    monkeypatch.setattr(layer, "backward", recorded)
    eager = MODULES[name]().to(device)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, residual = images(device=device), images(seed=1, device=device)
    with kernels_on(device):
        actual = gradients(module, x, residual, run=compiled)
        assert outputs == [None]
        assert_same(actual, gradients(eager, x, residual), 1e-6)
    assert (outputs[1] is None) == (name == "no activation")


@gpu
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_around_the_kernels(training, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    parts = [nn.Conv2d(24, 32, 3, padding=1), block(32), nn.Conv2d(32, 8, 1)]
    eager = nn.Sequential(*parts).cuda().train(training)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True)
    x = images(8, h=14, w=14, device="cuda").contiguous(memory_format=torch.channels_last)
    with ops.backend("triton"), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        actual = gradients(module, x, run=compiled)
        expected = gradients(eager, x)
    del actual["0.bias"], expected["0.bias"]  # zero behind a batch norm
    assert_same(actual, expected, 1e-4 if dtype == torch.float32 else 2e-2)


class Heard(TorchDispatchMode):
    """Collects the operators of cenet that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cenet":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


@each_device
def test_operators_are_called_where_somebody_listens(device, monkeypatch):
    """A mode, a profiler, a tensor's own class; else the kernels are called without them."""
    module, x = block().to(device), images(device=device)
    with kernels_on(device):
        with Heard() as heard:
            expected = gradients(module, x)
        assert heard.names == {"norm_ce", "norm_ce_backward"}
        with profile() as profiler:
            assert_same(gradients(module, x), expected, 0.0)
        assert {"cenet::norm_ce", "cenet::norm_ce_backward"} <= {
            event.key for event in profiler.key_averages()
        }
        y = module(x.as_subclass(Marked))
        assert type(y) is Marked
        for name in ("norm_ce", "norm_ce_backward"):
            monkeypatch.setattr(ops, name, None)  # cannot be called
        assert_same(gradients(module, x), expected, 0.0)
        with torch.no_grad():
            assert torch.equal(module(x), expected["y"])
        with pytest.raises(TypeError):
            module(x.as_subclass(Marked))


@each_device
def test_folded_layers_call_the_operator_where_somebody_listens(device, monkeypatch):
    conv = nn.Conv2d(3, 24, 1).to(device)
    folded = fold_conv_norm_ce(conv, block().to(device).eval())[1]
    x = images(device=device)
    with kernels_on(device), torch.no_grad():
        with Heard() as heard:
            expected = folded(x)
        assert heard.names == {"folded_ce"}
        monkeypatch.setattr(ops, "folded_ce", None)
        assert torch.equal(folded(x), expected)


@each_device
def test_flops_are_those_of_the_plain_path_but_for_newton_and_the_means(device):
    n, groups, size, steps = 3, 2, 16, 3
    module = block().to(device)
    x = images(n, device=device)
    counts = {}
    for name, context in (("kernels", kernels_on(device)), ("plain", ops.backend("torch"))):
        with context:
            module(x)  # registers the formulas
            with FlopCounterMode(display=False) as counter:
                y = module(x)
            counts[name] = counter.get_total_flops()
            with FlopCounterMode(display=False) as counter:
                y.sum().backward()
            counts[f"{name} backward"] = counter.get_total_flops()
    newton = 2 * groups * size**3 * 3 * (steps - 1)
    means = 2 * groups * size**2 * n
    shifts = 2 * groups * size**2 * n  # of centered images
    assert counts["plain"] - counts["kernels"] == newton + means + shifts
    assert counts["kernels backward"] > counts["kernels"]
    # the plain backward also differentiates the Gram matrix and the operator of every sample
    assert counts["kernels backward"] <= counts["plain backward"]
