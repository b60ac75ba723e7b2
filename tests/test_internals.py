"""Private names of other packages: all in one file, and each can go."""

import ast
import copy
import importlib
import multiprocessing.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import triton
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cenet.internals as internals
from _fused import assert_same, block, gradients, images
from _kernels import interpreted, kernels_on
from cenet import insert_ce_, ops

SOURCE = Path(internals.__file__).parent
# why a private name may stand in any file
ALLOWED = {
    "_python_dispatch": "TorchDispatchMode is documented under this name",
    "_forward_hooks": "read by torch's own users since 2016; torch.nn documents the hooks",
    "_forward_pre_hooks": "the same",
    "_backward_hooks": "the same",
    "_backward_pre_hooks": "the same",
    "_base": "documented with views",
    "_metadata": "of state dicts: asked for with a default",
    "_model_args": "of timm's networks: asked for with a default, and set for timm to read",
    "_orig_mod": "part of keys in checkpoints; without it, nothing is taken for compiled",
    "_compiled_call_impl": "asked for with a default; without it, nothing is taken for compiled",
    "_exit": "documented, of os",
    **dict.fromkeys(("_replace", "_make", "_fields", "_asdict"), "documented, of named tuples"),
}
FOREIGN = re.compile(r"(torch|torchvision|triton|timm|multiprocessing)\.")
# private, but for their names
UNDOCUMENTED = {"driver", "warmup", "Finalize"}


@pytest.fixture(autouse=True)
def _whole_again(monkeypatch):
    yield
    monkeypatch.undo()
    importlib.reload(internals)


def without(monkeypatch, holder, name):
    """The module as it is imported where a name is missing."""
    monkeypatch.delattr(holder, name)
    return importlib.reload(internals)


def without_operators(monkeypatch):
    """The same, without operators, which cannot be removed from torch.ops one by one."""
    empty = SimpleNamespace(aten=SimpleNamespace(), _c10d_functional=SimpleNamespace())
    monkeypatch.setattr(torch, "ops", empty)
    return importlib.reload(internals)


def is_private(name):
    return name in UNDOCUMENTED or (name[:1] == "_" and name[1:2].isalpha())


def private_names(tree, own=frozenset()):
    """Private names of other packages: attributes, imports, and names that getattr looks up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and FOREIGN.match(f"{node.module}."):
            for alias in node.names:
                yield from filter(is_private, [*node.module.split("."), alias.name])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if FOREIGN.match(f"{alias.name}.")]
            yield from (part for name in names for part in name.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value


def defined_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_private_names_are_in_one_file():
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    own = {name for tree in trees.values() for name in defined_names(tree)}
    used = {(str(path), name) for path, tree in trees.items() for name in private_names(tree, own)}
    assert {(path, name) for path, name in used if path == "internals.py"}
    elsewhere = {(path, name) for path, name in used if path != "internals.py"}
    assert {name for _, name in elsewhere} >= set(ALLOWED)
    assert not {(path, name) for path, name in elsewhere if name not in ALLOWED}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._current_graph_task_id()",
        "torch.ops.aten._unsafe_view(x, shape)",
        "from triton.runtime import driver",
        "from multiprocessing.util import Finalize",
        "from timm.models._features import feature_take_indices",
        "import torch._dynamo",
        "from torch._guards import detect_fake_mode",
        "kernel.warmup(x)",
        "found._shutdown_workers()",
        'getattr(torch.compiler, "_is_exporting_flag", False)',
    ],
)
def test_private_names_are_recognized(line):
    assert set(private_names(ast.parse(line))) - set(ALLOWED)


@pytest.mark.parametrize(
    ("holder", "name", "ours"),
    [
        (torch._C, "_AutoDispatchBelowAutograd", "below_autograd"),
        (torch.autograd.graph, "increment_version", "increment_version"),
    ],
)
def test_what_the_kernels_cannot_do_without_is_named(holder, name, ours, monkeypatch):
    module = without(monkeypatch, holder, name)
    wanted = rf"^torch {re.escape(torch.__version__)} has no torch\.\S+{name}; set CENET_BACKEND="
    with pytest.raises(RuntimeError, match=wanted):
        getattr(module, ours)()


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (torch._C, "_len_torch_dispatch_stack"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (torch._C._autograd, "_profiler_enabled"),
    ],
)
def test_somebody_may_listen_where_torch_cannot_tell(holder, name, monkeypatch):
    assert not internals.hears_operators()
    assert not internals.intercepts_operators()
    module = without(monkeypatch, holder, name)
    assert module.hears_operators()
    assert module.intercepts_operators()


def test_modes_that_cannot_be_listed_might_want_more_than_to_see(monkeypatch):
    class Look(TorchDispatchMode):
        allows_passes = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Look():
        assert internals.hears_operators()
        assert not internals.intercepts_operators()
    place = importlib.import_module("torch.utils._python_dispatch")
    module = without(monkeypatch, place, "_get_current_dispatch_mode_stack")
    assert not module.intercepts_operators()
    with Look():
        assert module.intercepts_operators()


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "reduce_scatter_tensor",
        "wait_tensor",
    ],
)
def test_collectives_that_are_missing_are_named(name, monkeypatch):
    module = without_operators(monkeypatch)
    wanted = rf"^torch \S+ has no torch.ops._c10d_functional.{name}; use cenet.revert_sync_ce\(mod"
    with pytest.raises(RuntimeError, match=wanted):
        getattr(module, name)()


def test_kernels_that_cannot_be_compiled_in_advance_are_named(monkeypatch):
    def warmup(kernel, *args, grid, **constants):
        return args, grid, constants

    monkeypatch.setattr(triton, "JITFunction", SimpleNamespace(warmup=warmup))
    assert internals.triton_warmup() is warmup
    monkeypatch.setattr(triton, "JITFunction", SimpleNamespace())
    wanted = rf"^triton {re.escape(triton.__version__)} has no JITFunction.warmup; set CENET_BACKEN"
    with pytest.raises(RuntimeError, match=wanted):
        internals.triton_warmup()(None, grid=(1,))


@pytest.mark.parametrize("place", ["triton.runtime.cache", "triton.compiler.compiler", None])
def test_the_key_of_the_cache_is_computed_where_triton_has_it(place, monkeypatch):
    calls = []
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        holder = importlib.import_module(module)
        monkeypatch.setattr(holder, "triton_key", lambda: calls.append(1), raising=False)
        if module != place:
            monkeypatch.delattr(holder, "triton_key")
    internals.triton_cache_key()
    assert len(calls) == (0 if place is None else 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton.language.target_info", "cuda_capability_geq"),
        ("triton.language.extra.cuda", "gdc_wait"),
        ("triton.language.extra.cuda", "gdc_launch_dependents"),
    ],
)
def test_kernels_do_not_overlap_where_triton_lacks_a_part_of_it(module, name, monkeypatch):
    assert internals.triton_overlap() is not None
    monkeypatch.delattr(sys.modules[module], name)
    assert internals.triton_overlap() is None


def test_timm_without_its_config_writer(monkeypatch):
    writer = internals.timm_config_writer()
    assert writer.__name__ == "save_config_for_hf"
    monkeypatch.delattr(timm.models._hub, "save_config_for_hf")
    wanted = r"^timm .* has no timm\.models\._hub\.save_config_for_hf; save model\.state_dict\(\)"
    with pytest.raises(RuntimeError, match=wanted):
        internals.timm_config_writer()(None, "config.json")


def test_without_triton_nothing_is_looked_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    importlib.reload(internals)


def residual_network():
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = x.relu()
            return (x + self.inner(x)).relu()

    return Residual().eval()


@pytest.mark.parametrize("name", ["_sequence_nr", "_input_metadata"])
def test_places_of_ce_without_the_notes_of_autograd(name, monkeypatch):
    """Residual branches cannot be found then; a user can still name the norms."""
    example = torch.randn(2, 3, 4, 4)
    assert insert_ce_(residual_network(), example_input=example) == ["inner.1"]

    def of_node(node, wanted, real=internals._of_node):
        return real(SimpleNamespace() if wanted == name else node, wanted)

    monkeypatch.setattr(internals, "_of_node", of_node)
    wanted = rf"^torch \S+ has no torch.autograd.graph.Node.{name}; name the places of CE with filt"
    with pytest.raises(RuntimeError, match=wanted):
        insert_ce_(residual_network(), example_input=example)
    assert insert_ce_(residual_network(), lambda _, name: name == "inner.1") == ["inner.1"]


def test_a_plain_view_takes_the_place_of_an_unsafe_one(monkeypatch):
    x = torch.randn(2, 6, requires_grad=True)
    y = internals.unsafe_view(x * 1, [4, 3])
    assert not y._is_view()
    plain = without_operators(monkeypatch).unsafe_view(x * 1, [4, 3])
    assert torch.equal(plain, y)
    plain += 1  # as a residual block does
    plain.square().sum().backward()
    assert torch.equal(x.grad, 2 * (x + 1))


def test_the_public_question_about_export_takes_the_place_of_the_flag(monkeypatch):
    assert not internals.is_exporting()
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert internals.is_exporting()
    module = without(monkeypatch, torch.compiler, "_is_exporting_flag")
    assert module.is_exporting is torch.compiler.is_exporting


@interpreted
def test_without_a_fake_mode_activations_stay_in_the_kernels(monkeypatch):
    module = without(monkeypatch, torch._guards, "detect_fake_mode")
    monkeypatch.undo()
    monkeypatch.setattr(ops, "detect_fake_mode", module.detect_fake_mode)
    eager = block()
    traced = copy.deepcopy(eager)
    x, residual = images(), images(seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    with kernels_on("cpu"):
        actual = gradients(traced, x, residual, run=compiled)
        assert_same(actual, gradients(eager, x, residual), 1e-6)


def test_without_the_task_of_autograd_there_is_a_warning(monkeypatch):
    assert internals.graph_task() == -1
    seen = []
    x = torch.zeros(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(internals.graph_task()))
    y.sum().backward()
    assert seen != [-1]
    with pytest.warns(UserWarning, match=r"^torch \S+ has no .* each batch twice; do without"):
        without(monkeypatch, torch._C, "_current_graph_task_id")
    assert internals.graph_task() == -1


@pytest.mark.parametrize("name", ["is_batchedtensor", "is_legacy_batchedtensor"])
def test_tensors_that_stand_for_many(name, monkeypatch):
    seen = []

    def look(x):
        seen.append(internals.is_batched(x))
        return x

    def see():
        seen.clear()
        torch.vmap(look)(torch.zeros(2))
        x = torch.zeros(1, requires_grad=True)
        y = x * 1
        y.register_hook(look)
        torch.autograd.grad(y, x, torch.zeros(2, 1), is_grads_batched=True)
        return [internals.is_batched(x), *seen]

    assert see() == [False, True, True]
    without(monkeypatch, torch._C._functorch, name)
    assert see() == [False, name != "is_batchedtensor", name == "is_batchedtensor"]


def test_shared_memory_is_what_a_program_may_ask_for(monkeypatch):
    sizes = SimpleNamespace(shared_memory_per_block=48, shared_memory_per_block_optin=99)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    assert internals.shared_memory(torch.device("cuda")) == 99
    del sizes.shared_memory_per_block_optin
    assert internals.shared_memory(torch.device("cuda")) == 48


def test_leaves_of_containers(monkeypatch):
    tree = [1, (2, [3, {"a": 4, "b": (5, [])}]), {"c": None}, "six"]
    known = internals.tree_leaves(tree)
    assert known == [1, 2, 3, 4, 5, None, "six"]
    assert without(monkeypatch, torch.utils._pytree, "tree_leaves").tree_leaves(tree) == known


def test_copies_of_many_tensors(monkeypatch):
    sources = [torch.randn(3), torch.randn(2, 5)]
    together = [torch.zeros_like(source) for source in sources]
    internals.copy_each(together, sources)
    one_by_one = [torch.zeros_like(source) for source in sources]
    without(monkeypatch, torch, "_foreach_copy_").copy_each(one_by_one, sources)
    for copied in (together, one_by_one):
        assert all(map(torch.equal, copied, sources))


def test_an_iterator_of_another_kind_is_not_shut_down():
    calls = []

    def shut_down():
        calls.append(1)
        raise RuntimeError("a worker died")

    internals.shut_down_workers(SimpleNamespace(_shutdown_workers=shut_down))
    assert calls == [1]
    internals.shut_down_workers(SimpleNamespace())


AT_THE_END = """
import multiprocessing.util, os, sys
del multiprocessing.util.Finalize
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("internals", sys.argv[1])
module = module_from_spec(spec)
spec.loader.exec_module(module)
first = module.Finalize(None, print, ("first",), exitpriority=1)
second = module.Finalize(None, print, ("second",), exitpriority=1)
if os.fork() == 0:
    sys.exit()
os.wait()
first()
first()
print("end", flush=True)
"""


def test_without_finalize_a_function_is_called_once_and_at_the_end():
    assert internals.Finalize is multiprocessing.util.Finalize
    command = [sys.executable, "-c", AT_THE_END, internals.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["first", "end", "second"]


@pytest.mark.parametrize("place", ["triton.runtime.driver", "triton.runtime.driver.active"])
def test_without_the_driver_of_triton_torch_is_asked(place, monkeypatch):
    import triton.runtime

    assert internals.triton_driver() is triton.runtime.driver
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=50 + d))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 4)
    if place.endswith("active"):
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace())
    else:
        monkeypatch.delattr(triton.runtime, "driver")
    active = internals.triton_driver().active
    assert (active.get_current_stream(2), active.get_current_device()) == (52, 4)
