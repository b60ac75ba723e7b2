"""Tracing, vmap, hooks and quantization of layers in evaluation, as they are and folded."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from _checks import assert_close
from cenet import ChannelEquilibrium2d, InstanceReweighting2d, NormCE2d, fold_ce
from cenet import functional as F


def network(seed=0):
    """Of 24 channels, in a ragged group; the running statistics of a few batches."""
    torch.manual_seed(seed)
    block = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 24, 3), block)
    for _ in range(3):
        model(torch.randn(4, 3, 12, 12))
    return model.eval()


def images(n, seed=1):
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def folded(seed=0):
    return fold_ce(network(seed))


FORMS = pytest.mark.parametrize("make", [network, folded])


@FORMS
@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore:.*torch.jit:FutureWarning")
def test_a_trace_takes_another_batch_size(make):
    model = make()
    traced = torch.jit.trace(model, images(2))  # runs it again without gradients and compares
    actual = traced(images(5))
    assert_close("y", actual, model.double()(images(5).double()), 1e-5)


@FORMS
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_script_is_refused_in_one_sentence(make):
    kind = type(make()[1]).__name__
    with pytest.raises(RuntimeError, match=rf"torch\.jit\.script cannot compile {kind}; use") as e:
        torch.jit.script(make())
    assert "\n" not in str(e.value)


@FORMS
def test_vmap_over_images_in_evaluation(make):
    model = make()
    x = images(6).reshape(3, 2, 3, 12, 12)
    expected = model.double()(x.double().flatten(0, 1)).reshape(3, 2, 24, 10, 10)
    model.float()
    assert_close("y", torch.vmap(model)(x), expected, 1e-5)
    one = torch.func.jacrev(lambda image: model(image[None]).sum())(images(1)[0])
    assert one.isfinite().all()


@FORMS
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_vmap_over_networks(make, layout):
    models = [make(0), make(1)]
    x = images(2).to(memory_format=layout)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def run(parameters, buffers):
        return functional_call(skeleton, (parameters, buffers), (x,))

    y = torch.vmap(run)(*stack_module_state(models))
    for i, model in enumerate(models):
        assert_close("y", y[i], model.double()(x.double()), 1e-5)


@FORMS
def test_hooks_of_the_gate_run(make):
    model = make()
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda *_, name=name: seen.append(name.split(".")[-1]))
    expected = model(images(2))
    assert seen == ["fc1", "norm", "fc2"]
    with torch.no_grad():
        model.get_submodule("1.ce.ir.fc2" if make is network else "1.ir.fc2").weight.mul_(-1)
    assert not torch.equal(model(images(2)), expected)


@FORMS
def test_dynamic_quantization_reaches_the_gate(make):
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises another package
        quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    kinds = [type(m) for m in quantized.modules()]
    assert kinds.count(torch.ao.nn.quantized.dynamic.Linear) == 2
    assert_close("y", quantized(images(4)), model(images(4)), 2e-2)
    assert not torch.equal(quantized(images(4)), model(images(4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_modules_of_the_gate_compute_the_function(dtype):
    torch.manual_seed(0)
    layer = InstanceReweighting2d(24).to(dtype)
    variance = torch.rand(5, 24)  # in float32, as it is of float32 and half precision input
    with torch.autocast("cpu", torch.bfloat16):
        actual = layer.gated(variance)
    assert actual.dtype == torch.float32
    gate = F.Gate(*(weight.detach().double() for weight in layer.gate))
    assert_close("gate", actual, F.instance_gate(variance.double(), gate), 1e-5)
