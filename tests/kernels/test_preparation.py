"""A rehearsal finds exactly the kernels that real steps launch, and leaves no trace."""

import copy
import gc
import importlib
import os
import pkgutil
import random
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import cenet.kernels
import cenet.kernels.launch as launch_module
from _fused import block
from _kernels import each_device, interpreted, kernels_on, poisoned
from _training import TINY, few_digits
from cenet.distributed import Processes
from cenet.kernels import layer
from cenet.kernels.preparation import rehearse
from cenet.models import create_model
from cenet.train.classifier import Trainer, rehearsals
from cenet.train.options import Options

NETWORKS = {
    "vgg": partial(create_model, "vgg6", in_chans=1),
    # blocks end in one operator with the shortcut, and the stem pools
    "resnet": partial(create_model, "resnet18", in_chans=1, channels=(16, 16, 24, 32)),
    "group norm": partial(create_model, "vgg6", norm="gn", in_chans=1),
    "instance norm": partial(create_model, "vgg6", norm="in", in_chans=1),
    "bd": partial(create_model, "vgg6", "bd", in_chans=1),
    "ir": partial(create_model, "vgg6", "ir", in_chans=1),
    "identity start": partial(create_model, "vgg6", start="identity", in_chans=1),
    "dropout": partial(create_model, "vgg6", in_chans=1, drop_rate=0.5),
}


def make(name, device="cpu", *, last=False):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    return NETWORKS[name]().to(device).to(memory_format=layout)


def images(n, size, device="cpu", *, last=False):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 1, size, size, generator=generator).to(device)
    layout = torch.channels_last if last else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def train(network, x, dtype=torch.float32):
    half = dtype != torch.float32
    with torch.autocast(x.device.type, dtype) if half else nullcontext():
        loss = network.train()(x).float().square().mean()
    loss.backward()


@torch.no_grad()
def evaluate(network, x):
    network.eval()(x)


@pytest.fixture
def launched(monkeypatch, request):
    """Keys of launches outside of rehearsals, of passes that are all worked out.

    In the interpreter a network takes minutes, so there launches fill their results with zeros
    only, unless `request` asks for more.
    """
    monkeypatch.setattr(launch_module, "_passes", {})
    real, keys = launch_module.launch, set()
    pretend = launch_module.INTERPRETED and not hasattr(request, "param")

    def launch(kernel, grid, *args, **constants):
        collecting = launch_module.is_collecting()
        if not collecting:
            keys.add(launch_module.key_of(kernel, args, constants))
        if collecting or not pretend:
            real(kernel, grid, *args, **constants)

    if pretend:
        monkeypatch.setattr(layer, "empty_like", torch.zeros_like)
        monkeypatch.setattr(layer, "empty", lambda device, *shape: torch.zeros(shape))
    for found in pkgutil.iter_modules(cenet.kernels.__path__):
        module = importlib.import_module(f"cenet.kernels.{found.name}")
        if getattr(module, "launch", None) is real:
            monkeypatch.setattr(module, "launch", launch)
    return keys


def assert_rehearsed(network, steps, device, launched):
    """A rehearsal launches nothing, and finds all that the steps launch then."""
    with kernels_on(device):
        found = rehearse(network, *steps)
        assert not launched
        for step in steps:
            step(network)
    assert found.keys() == launched


@each_device
@pytest.mark.parametrize(
    ("name", "dtype", "last"),
    [
        *((name, torch.float32, False) for name in NETWORKS),
        ("vgg", torch.bfloat16, True),
        ("resnet", torch.bfloat16, True),
        ("group norm", torch.bfloat16, False),
    ],
)
def test_a_rehearsal_finds_what_real_steps_launch(name, dtype, last, device, launched):
    network = make(name, device, last=last)
    size = 64 if name == "resnet" else 8
    x, rest = (images(n, size, device, last=last) for n in (4, 3))
    steps = [partial(train, x=x, dtype=dtype), partial(evaluate, x=x), partial(evaluate, x=rest)]
    assert_rehearsed(network, steps, device, launched)


@each_device
@pytest.mark.parametrize("launched", ["in earnest"], indirect=True)
def test_a_rehearsal_finds_what_is_launched_in_earnest(device, launched):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 24, 3), block(), nn.Conv2d(24, 24, 3), block())
    network.to(device)
    steps = [partial(train, x=images(3, 8, device)), partial(evaluate, x=images(2, 8, device))]
    assert_rehearsed(network, steps, device, launched)


@each_device
@pytest.mark.parametrize(
    "fields", [{}, {"accumulate": 2, "precision": "bfloat16", "mixup": 0.2}], ids=str
)
@pytest.mark.parametrize("last", [False, True])
def test_a_trainer_rehearses_its_run(fields, last, device, launched, tmp_path, monkeypatch):
    """With a last batch of the test that is smaller than the others."""
    monkeypatch.setattr("cenet.train.evaluation.RESIDENT_BATCH", 256)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    own = Processes(0, 1, place)
    options = Options(tmp_path, channels_last=last)
    recipe = replace(TINY, epochs=1, **fields)
    with kernels_on(device):
        trainer = Trainer(recipe, few_digits(32, 259), options, own)
        steps = rehearsals(
            recipe, trainer.inputs, own.device, channels_last=last, tested=trainer._tester.counts()
        )
        found = rehearse(trainer.network, *steps)
        assert not launched
        trainer.run()
    assert found.keys() == launched


def chance(device):
    states = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(numpy.random.get_state()),  # noqa: NPY002
    ]
    return [*states, torch.cuda.get_rng_state().tolist() if device == "cuda" else None]


@each_device
def test_a_rehearsal_leaves_no_trace(device, launched):
    network = make("dropout", device)
    x = images(4, 8, device)
    with kernels_on(device):
        train(network, x)
    before = copy.deepcopy(network)
    grads = {name: p.grad.clone() for name, p in network.named_parameters()}
    copies, passes, generators = [], dict(launch_module._passes), chance(device)

    def step(shadow):
        copies.append(weakref.ref(shadow))
        assert shadow is not network
        random.random()
        numpy.random.rand()  # noqa: NPY002
        train(shadow, x)
        results = [p.grad for p in shadow.parameters()]
        assert all(grad.isfinite().all() for grad in results)

    with kernels_on(device):
        found = rehearse(network, step)
    assert found
    gc.collect()
    assert [shadow() for shadow in copies] == [None]
    assert chance(device) == generators
    assert launch_module._passes == passes
    assert not launch_module.is_collecting()
    for name, value in before.state_dict().items():  # num_batches_tracked, too
        assert torch.equal(network.state_dict()[name], value), name
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter.grad, grads[name]), name
    assert all(module.training for module in network.modules())


@each_device
def test_layers_return_zeros_in_a_rehearsal(device):
    """Nothing is launched, and nothing that was not written to is handed on."""
    module, x = block().to(device), images(3, 4, device).expand(3, 24, 4, 4)

    def step(copy):
        given = x.clone().requires_grad_()
        y = copy(given)
        assert not y.any()
        y.sum().backward()
        assert not any(leaf.grad.any() for leaf in (given, *copy.parameters()))

    with kernels_on(device), poisoned():
        assert rehearse(module, step)


@each_device
def test_collected_kernels_keep_no_tensors(device):
    with kernels_on(device):
        found = rehearse(make("vgg", device), partial(train, x=images(4, 8, device)))
    arguments = [argument for wanted in found.values() for argument in wanted.args]
    assert any(isinstance(argument, torch.dtype) for argument in arguments)
    assert not any(isinstance(argument, torch.Tensor) for argument in arguments)


@interpreted
def test_unaligned_tensors_are_told_apart():
    flat = torch.zeros(2 * 24 * 16 + 1)
    x, shifted = flat[:-1].view(2, 24, 4, 4), flat[1:].view(2, 24, 4, 4)
    assert shifted.data_ptr() % 16
    module = block().eval()
    with kernels_on("cpu"), torch.no_grad():
        found, other = (rehearse(module, lambda copy, x=x: copy(x)) for x in (x, shifted))
    assert found.keys() != other.keys()
    for key, wanted in other.items():
        assert key == launch_module.key_of(
            wanted.kernel,
            [torch.zeros(1, dtype=a) if isinstance(a, torch.dtype) else a for a in wanted.args],
            wanted.constants,
        )


@interpreted
def test_an_error_in_a_rehearsal_ends_the_collection():
    def step(network):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rehearse(nn.Identity(), step)
    assert not launch_module.is_collecting()


@interpreted
def test_too_little_memory_for_a_rehearsal_is_no_error():
    def step(network):
        raise torch.OutOfMemoryError

    assert rehearse(nn.Identity(), step) == {}


def run_python(code, cache, *arguments):
    """What a fresh process says that compiles kernels, with this cache of them."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WITHOUT_GPU = """
import sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda source, metadata: None,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**20},
        load_binary=lambda *arguments: (object(), 0, 0, 0, 1024),
        unload_module=lambda module: None,
    ),
))
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_name = lambda device: sys.argv[1]

from _fused import block, images
from _kernels import kernels_on
from cenet.kernels import launch, preparation

bad = sys.argv[2] if len(sys.argv) > 2 else None
real = preparation.compile_kernel

def compile_kernel(key, wanted):
    if wanted.kernel.__name__ == bad:
        raise RuntimeError("cannot be compiled")
    return real(key, wanted)

preparation.compile_kernel = compile_kernel
network, x = block().eval(), images()
with kernels_on("cpu"), torch.no_grad():
    found = preparation.rehearse(network, lambda copy: copy(x))
    preparation.prepare(network, lambda copy: copy(x))
print(len(found), sum(map(launch.is_compiled, found)))
"""


@interpreted
def test_kernels_are_compiled_once_and_a_bad_one_is_left_out(tmp_path):
    """For a GPU that is not there."""
    *said, counts = run_python(WITHOUT_GPU, tmp_path, "NVIDIA H200", "_forward_kernel")
    found, compiled = map(int, counts.split())
    assert compiled == found - 1 > 0
    begun, ended = said
    assert begun.startswith("compiling kernels for this GPU in ")
    assert begun.endswith(f"; they are kept in {tmp_path} (TRITON_CACHE_DIR)")
    assert ended.startswith(f"compiled {compiled} in ")
    begun, ended, counts = run_python(WITHOUT_GPU, tmp_path, "NVIDIA L4")
    assert begun.endswith("(TRITON_CACHE_DIR); their tiles were tuned on an NVIDIA H200")
    assert ended.startswith("compiled 1 in ")
    assert counts == f"{found} {found}"
    assert run_python(WITHOUT_GPU, tmp_path, "NVIDIA L4") == [counts]


ON_GPU = """
import sys
import torch
from triton import knobs
from torch import nn
from cenet.kernels.preparation import prepare
from cenet.models import create_model

torch.backends.cudnn.deterministic = True
compiled = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)
name, prepared = sys.argv[1], sys.argv[2] == "True"
torch.manual_seed(0)
network = create_model(name, num_classes=10).cuda().to(memory_format=torch.channels_last)
x = torch.randn(16, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
labels = torch.arange(16, device="cuda") % 10
optimizer = torch.optim.SGD(network.parameters(), 0.01)

def train(network):
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(network.train()(x), labels)
    loss.backward()
    return loss.item()

@torch.no_grad()
def test(network):
    return network.eval()(x).double().sum().item()

if prepared:
    prepare(network, train, test, shown=False)
before = len(compiled)
for _ in range(2):
    print(train(network))
    optimizer.step()
    optimizer.zero_grad()
print(test(network))
print(before, len(compiled))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vgg16", "resnet18"])
def test_after_a_preparation_steps_compile_nothing_and_are_the_same(name, tmp_path):
    """With empty caches; the launchers that Triton has a C compiler make are in the cache, too."""
    *losses, counts = run_python(ON_GPU, tmp_path / "plain", name, "False")
    before, after = map(int, counts.split())
    assert before == 0 < after
    *prepared, counts = run_python(ON_GPU, tmp_path / "prepared", name, "True")
    assert counts == f"{after} {after}"
    assert prepared == losses
    folders = [
        {path.name for path in (tmp_path / kind).iterdir()} for kind in ("plain", "prepared")
    ]
    assert folders[0] == folders[1]
