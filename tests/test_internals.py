"""Private names of other packages: all in one file, and each can go."""

import ast
import importlib
import multiprocessing.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton.runtime

import cenet.internals as internals

SOURCE = Path(internals.__file__).parent
# in torch's documentation, or in wide use outside of it
ALLOWED = {
    "torch._foreach_copy_",
    "torch.ops._c10d_functional",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
}


def without(monkeypatch, holder, name):
    """The module as it is imported where a name is missing."""
    monkeypatch.delattr(holder, name)
    return importlib.reload(internals)


@pytest.fixture(autouse=True)
def _whole_again(monkeypatch):
    yield
    monkeypatch.undo()
    importlib.reload(internals)


def names_in(path):
    """Every dotted name that a file uses or imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_private_names_are_in_one_file():
    private = re.compile(
        r"(torch|triton|multiprocessing)\.(\w+\.)*(_[a-z]|driver\b|Finalize\b)|"
        r".*\.(warmup|_shutdown_workers|_workers)$"
    )
    found = {
        (path.name, name)
        for path in SOURCE.rglob("*.py")
        for name in names_in(path)
        if private.match(name) and name not in ALLOWED
    }
    assert not found
    for name in (
        "torch._C._x",
        "triton.runtime.driver",
        "multiprocessing.util.Finalize",
        "k.warmup",
    ):
        assert private.match(name)


@pytest.mark.parametrize(
    ("holder", "name", "ours"),
    [
        (torch._C, "_AutoDispatchBelowAutograd", "below_autograd"),
        (torch.autograd.graph, "increment_version", "increment_version"),
        (torch._guards, "detect_fake_mode", "detect_fake_mode"),
    ],
)
def test_what_the_kernels_cannot_do_without_is_named(holder, name, ours, monkeypatch):
    module = without(monkeypatch, holder, name)
    with pytest.raises(RuntimeError, match=rf"has no torch\S+{name}, .* set CENET_BACKEND=torch"):
        getattr(module, ours)()


def test_a_kernel_without_warmup_is_named():
    def warmup(*args, grid, **constants):
        return args, grid, constants

    kernel = SimpleNamespace(warmup=warmup)
    assert internals.compiled(kernel, (1, 2), {"C": 3}) == ((1, 2), (1,), {"C": 3})
    with pytest.raises(RuntimeError, match=r"has no JITFunction.warmup in its Triton, .* CENET_BA"):
        internals.compiled(SimpleNamespace(), (1, 2), {})


def test_a_plain_view_takes_the_place_of_an_unsafe_one(monkeypatch):
    x = torch.randn(2, 6, requires_grad=True)
    y = internals.unsafe_view(x * 1, [4, 3])
    assert not y._is_view()
    packet = SimpleNamespace()  # operators cannot be removed from torch.ops.aten
    monkeypatch.setattr(torch, "ops", SimpleNamespace(aten=packet))
    plain = importlib.reload(internals).unsafe_view(x * 1, [4, 3])
    assert torch.equal(plain, y)
    plain += 1  # as a residual block does
    plain.square().sum().backward()
    assert torch.equal(x.grad, 2 * (x + 1))


def test_without_the_task_of_autograd_there_is_a_warning(monkeypatch):
    assert not internals.is_in_backward()
    seen = []
    x = torch.zeros(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(internals.is_in_backward()))
    y.sum().backward()
    assert seen == [True]
    with pytest.warns(UserWarning, match="running statistics count each batch twice"):
        without(monkeypatch, torch._C, "_current_graph_task_id")
    assert not internals.is_in_backward()


def test_workers_of_another_kind_of_iterator_are_left_alone():
    killed = []
    worker = SimpleNamespace(kill=lambda: killed.append(1))

    def shut_down():
        killed.append(0)
        raise RuntimeError("a worker died")

    internals.end_workers(SimpleNamespace(_shutdown_workers=shut_down, _workers=[worker]))
    assert killed == [0, 1]
    internals.end_workers(SimpleNamespace(_workers=[worker]))
    assert killed == [0, 1, 1]
    internals.end_workers(SimpleNamespace())


def test_without_finalize_a_function_is_called_once_and_at_the_end():
    assert internals.Finalize is multiprocessing.util.Finalize
    code = (
        "import multiprocessing.util as util; del util.Finalize; "
        "import importlib.util as machinery, sys; "
        "spec = machinery.spec_from_file_location('internals', sys.argv[1]); "
        "module = machinery.module_from_spec(spec); spec.loader.exec_module(module); "
        "first = module.Finalize(None, print, ('first',), exitpriority=1); "
        "second = module.Finalize(None, print, ('second',), exitpriority=1); "
        "first(); first(); print('end')"
    )
    command = [sys.executable, "-c", code, internals.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["first", "end", "second"]


def test_without_the_driver_of_triton_torch_is_asked(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda d: 40 + d, get_current_device=lambda: 3)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    module = importlib.reload(internals)
    assert (module.current_stream(2), module.current_device()) == (42, 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=50 + d))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 4)
    module = without(monkeypatch, triton.runtime, "driver")
    assert (module.current_stream(2), module.current_device()) == (52, 4)
