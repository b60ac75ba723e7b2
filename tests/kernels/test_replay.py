"""A pass that is started again does what it did when it was worked out, with other tensors."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from _checks import assert_close
from _fused import block, images
from _kernels import GATE, Kernels, Launch, Reference, check, each_device, kernels_on, upstream_of
from cenet import ops
from cenet.kernels import launch, layer


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(launch, "_passes", {})


@pytest.fixture
def worked_out(monkeypatch):
    """Names of the passes that were worked out, not started again."""
    names = []
    for name in ("_forward", "_backward"):
        original = getattr(layer, name)

        def recorded(*args, name=name, original=original):
            names.append(name)
            original(*args)

        monkeypatch.setattr(layer, name, recorded)
    return names


CASES = [
    Launch(),
    Launch(layout="channels_last", residual=True),
    Launch(n=5, height=2, width=2, act="elu"),
    Launch(layer="bd", norm="none", dtype=torch.bfloat16),
    Launch(running="norm ce", layer="ir"),
    Launch(pool=2, height=7, width=9, coarse=True),
]


@each_device
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_values(case, device, worked_out):
    """Against the reference, with values that the first pass did not see."""
    check(case.but(device=device))
    check(case.but(device=device, scale=3.0, offset=0.5))
    assert worked_out == ["_forward", "_backward"]


@each_device
@pytest.mark.parametrize(
    "other",
    [
        {"n": 6},
        {"height": 6},
        {"act": "elu"},
        {"layout": "channels_last"},
        {"dtype": torch.float16},
        {"weights": torch.float16},
        {"residual": True},
        {"blend": 0.4},
        {"affine": False},
        {"steps": 5},
        {"running": "norm"},
        {"channels": 30},
        {"group_size": 8},
    ],
    ids=str,
)
def test_another_kind_is_worked_out(other, device, worked_out):
    check(Launch(device=device))
    check(Launch(device=device, **other))
    assert worked_out == ["_forward", "_backward"] * 2


@each_device
def test_training_is_that_of_passes_worked_out_each_time(device, monkeypatch):
    """Parameters, momenta of running averages and their counts over several steps."""
    own, other = (block().to(device) for _ in range(2))
    other.load_state_dict(own.state_dict())
    for module in (own, other):
        if module is other:
            monkeypatch.setattr(launch, "_passes", _Forgetful())
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step in range(3):
            with kernels_on(device):
                module(images(seed=step, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert own.norm.num_batches_tracked == 3
    for name, value in own.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


class _Forgetful(dict):
    def get(self, key, default=None):
        return default

    def __setitem__(self, key, value):
        pass


@each_device
def test_momenta_may_change_between_steps(device):
    module = block().to(device)
    for momentum in (0.1, 1.0):
        module.norm.momentum = momentum
        x = images(seed=5, device=device)
        with kernels_on(device):
            module(x)
    assert_close("mean", module.norm.running_mean, x.double().mean((0, 2, 3)), 1e-5)


@each_device
def test_x_as_its_own_residual(device, worked_out):
    """One tensor in two roles: whose pointer it is cannot be told, and nothing is remembered."""
    module = block().to(device)
    x, other = images(device=device), images(seed=3, device=device)
    for residual in (x, other):
        with kernels_on(device):
            actual = module(x, residual)
        with ops.backend("torch"):
            assert_close("y", actual, module(x, residual).double(), 1e-4)
    assert worked_out == ["_forward", "_forward"]


@each_device
def test_unaligned_input_is_worked_out(device, worked_out):
    reference = Reference(Launch(device=device))
    kernels = Kernels(reference)
    kernels.forward()
    flat = kernels.x.new_empty(kernels.x.numel() + 1)
    shifted = flat[1:].view(kernels.x.shape).copy_(kernels.x)
    assert shifted.data_ptr() % 16
    expected, _ = kernels.forward()
    kernels.x = shifted
    actual, _ = kernels.forward()
    assert torch.equal(actual, expected)
    assert worked_out == ["_forward", "_forward"]


@each_device
def test_the_oldest_pass_is_forgotten(device, monkeypatch, worked_out):
    monkeypatch.setattr(launch, "MOST_PASSES", 2)
    for n in (2, 3, 4, 3, 2):
        Kernels(Reference(Launch(n=n, device=device))).forward()
    assert len(launch._passes) == 2
    assert len(worked_out) == 4


@each_device
def test_no_tensor_is_kept(device):
    kernels = Kernels(Reference(Launch(device=device, residual=True)))
    y, state = kernels.forward()
    grads = kernels.backward(upstream_of(y), y, state)
    mine = [weakref.ref(t) for t in (kernels.x, kernels.residual, y, state, grads["x"])]
    assert launch._passes
    del kernels, y, state, grads
    gc.collect()
    assert [tensor() for tensor in mine] == [None] * 5


@each_device
def test_gradients_of_a_replayed_pass_are_new_tensors(device):
    """What one backward pass returned is not overwritten by the next."""
    kernels = Kernels(Reference(Launch(device=device)))
    y, state = kernels.forward()
    first = kernels.backward(upstream_of(y), y, state)
    kept = {name: first[name].clone() for name in ("x", "gamma", *GATE)}
    kernels.backward(2 * upstream_of(y), y, state)
    for name, value in kept.items():
        assert_close(name, first[name], value.double(), 0.0)
