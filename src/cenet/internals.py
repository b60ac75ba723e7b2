"""Private names of torch, Triton, timm and multiprocessing, which a later release may move.

Also here: functions that torch lacks, such as the memory layout of a feature map.

No other file uses the private names. Each is looked up once, when it is imported. Where a release
lacks one, a fallback takes its place, or a function that raises an error with advice.
"""

import atexit
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


def _of(module: str, name: str) -> Any:
    """A name in a module, or None."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _missing(package: str, name: str, advice: str) -> Callable[..., Any]:
    """A function that raises RuntimeError: this version of the package lacks the name."""

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        version = _of(package, "__version__")
        raise RuntimeError(
            f"{package} {version} has no {name}; {advice}, or install an earlier {package}"
        )

    return missing


# torch: autograd and the dispatcher

_NO_KERNELS = "set CENET_BACKEND=torch to do without the kernels of cenet"

# a context in which operators skip autograd
below_autograd: Any = _of("torch._C", "_AutoDispatchBelowAutograd") or _missing(
    "torch", "torch._C._AutoDispatchBelowAutograd", _NO_KERNELS
)
# tells autograd that tensors were changed by a kernel
increment_version: Any = _of("torch.autograd.graph", "increment_version") or _missing(
    "torch", "torch.autograd.graph.increment_version", _NO_KERNELS
)
# the fake mode of tensors that are traced; without it, activations are never left to the compiler
detect_fake_mode: Any = _of("torch._guards", "detect_fake_mode") or (lambda _tensors: None)
# gives a dense tensor another shape without a view for autograd; the fallback may make a view
unsafe_view: Any = getattr(torch.ops.aten, "_unsafe_view", torch.reshape)
# torch.compiler.is_exporting() is true under torch.compile too in some releases
is_exporting: Any = (
    (lambda: torch.compiler._is_exporting_flag)
    if hasattr(torch.compiler, "_is_exporting_flag")
    else torch.compiler.is_exporting
)
# number of the backward pass that this thread runs, -1 outside of one
graph_task: Any = _of("torch._C", "_current_graph_task_id")
if graph_task is None:
    graph_task = lambda: -1  # noqa: E731
    warnings.warn(
        f"torch {torch.__version__} has no torch._C._current_graph_task_id: with activation "
        "checkpointing, running statistics count each batch twice; do without it, or install an "
        "earlier torch",
        stacklevel=2,
    )

# number of dispatch modes, which see every operator; transforms of functorch; a profiler
_dispatch_modes: Any = _of("torch._C", "_len_torch_dispatch_stack")
_transforms: Any = _of("torch._C._functorch", "peek_interpreter_stack")
_is_profiling: Any = _of("torch._C._autograd", "_profiler_enabled")
_modes: Any = _of("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack") or (
    lambda: [None]
)
_CAN_TELL = None not in (_dispatch_modes, _transforms, _is_profiling)

# whether torch.jit.trace records this run
is_tracing: Any = _of("torch.jit", "is_tracing") or (lambda: False)
# whether a tensor is batched: inside torch.vmap, or among gradients for many outputs at once
_in_vmap: Any = _of("torch._C._functorch", "is_batchedtensor") or (lambda _tensor: False)
_in_gradients: Any = _of("torch._C._functorch", "is_legacy_batchedtensor") or (
    lambda _tensor: False
)


def is_batched(x: Tensor) -> bool:
    """Whether a tensor is batched, as in torch.vmap; torch.compile cannot trace this function."""
    return bool(_in_vmap(x) or _in_gradients(x))


def intercepts_operators() -> bool:
    """Whether operators are traced, counted or transformed, not just run; true if unknown.

    Modes whose attribute `allows_passes` is true only observe them and do not count here.
    """
    return (
        torch.compiler.is_compiling()
        or not _CAN_TELL
        or (_dispatch_modes() and not all(getattr(m, "allows_passes", False) for m in _modes()))
        or _transforms() is not None
        or is_tracing()
    )


def hears_operators() -> bool:
    """Whether something may observe the operators that are called; true if unknown."""
    return intercepts_operators() or bool(_dispatch_modes()) or _is_profiling()


def sequence_number(node: Node) -> int:
    """Place of an operation in the order of the run."""
    return int(_of_node(node, "_sequence_nr")())


def output_rank(node: Node) -> int:
    """Number of dimensions of an operation's output."""
    return len(_of_node(node, "_input_metadata")[0].shape)


def _of_node(node: Node, name: str) -> Any:
    found = getattr(node, name, None)
    if found is None:
        advice = "name the places of CE with filter_fn"
        _missing("torch", f"torch.autograd.graph.Node.{name}", advice)()
    return found


# torch: memory


def is_channels_last(x: Tensor) -> bool:
    """Whether x is in channels_last layout; tensors that fit both layouts count as contiguous."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The layout of x, as torch wants it for a result: channels_last or contiguous."""
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    without = properties.shared_memory_per_block  # the limit without opting in to more
    return int(getattr(properties, "shared_memory_per_block_optin", without))


# torch: containers, many tensors at once, ranks


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, (dict, list, tuple)):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in _leaves(child)]


def _copy_each(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# the values in nested tuples, lists and dictionaries
tree_leaves: Any = _of("torch.utils._pytree", "tree_leaves") or _leaves
# copies a list of tensors to another, in one call
copy_each: Any = getattr(torch, "_foreach_copy_", _copy_each)


def _collective(name: str) -> Any:
    """A collective that torch.compile can trace."""
    advice = "use cenet.revert_sync_ce(model) to measure each rank by itself"
    found = getattr(torch.ops._c10d_functional, name, None)
    return found or _missing("torch", f"torch.ops._c10d_functional.{name}", advice)


all_gather_into_tensor = _collective("all_gather_into_tensor")
all_gather_into_tensor_out = _collective("all_gather_into_tensor_out")
reduce_scatter_tensor = _collective("reduce_scatter_tensor")
wait_tensor = _collective("wait_tensor")


# processes


def shut_down_workers(loader: Any) -> None:
    """Tell the worker processes of an iterator of `DataLoader` to end, if it can."""
    with suppress(RuntimeError):  # a worker may die meanwhile
        getattr(loader, "_shutdown_workers", lambda: None)()


class _AtExit:
    """Calls a function once: when it is called itself, or when this process ends."""

    def __init__(self, _owner: None, call: Any, args: tuple[Any, ...], exitpriority: int) -> None:
        self._call, self._args, self._process = call, args, os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        atexit.unregister(self)
        call, self._call = self._call, None
        if call is not None and self._process == os.getpid():  # not in a copy of the process
            call(*self._args)


# of several, those of high priority are called first
Finalize: Any = _of("multiprocessing.util", "Finalize") or _AtExit


# Triton, which not every installation has: its names are looked up when the kernels are imported


def triton_driver() -> Any:
    """Object whose `active` knows the device and the stream on which Triton launches kernels."""
    found = _of("triton.runtime", "driver")
    if "active" in dir(found):  # not hasattr, which would look for a GPU
        return found
    active = SimpleNamespace(
        get_current_device=torch.cuda.current_device,
        get_current_stream=lambda device: torch.cuda.current_stream(device).cuda_stream,
    )
    return SimpleNamespace(active=active)


def triton_warmup() -> Any:
    """Function that compiles a kernel for arguments, and does not launch it."""
    found = getattr(_of("triton", "JITFunction"), "warmup", None)
    return found or _missing("triton", "JITFunction.warmup", _NO_KERNELS)


def triton_cache_key() -> None:
    """Have Triton compute and remember its part of the keys of its cache, where it has one."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        if found := _of(module, "triton_key"):
            found()
            return


# timm, likewise


def timm_config_writer() -> Any:
    """Function that writes the config.json from which timm builds a network."""
    advice = "save model.state_dict() instead"
    name = "save_config_for_hf"
    found = _of("timm.models._hub", name)
    return found or _missing("timm", f"timm.models._hub.{name}", advice)
