"""Private names of torch, Triton and multiprocessing, which a later release may move.

Each has a fallback, or an error that says what to do. Nothing else imports them.
"""

import atexit
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def _of(module: str, name: str) -> Any:
    """A name in a module, or None."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _kernels_need(what: str) -> Callable[..., Any]:
    """A function that raises an error: the kernels cannot do without this name."""

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch {torch.__version__} has no {what}, which the kernels of cenet need; set "
            "CENET_BACKEND=torch to do without them, or install an earlier version of torch"
        )

    return missing


# torch

# a context in which operators skip autograd
below_autograd: Any = _of("torch._C", "_AutoDispatchBelowAutograd") or _kernels_need(
    "torch._C._AutoDispatchBelowAutograd"
)
# tells autograd that tensors were changed by a kernel
increment_version: Any = _of("torch.autograd.graph", "increment_version") or _kernels_need(
    "torch.autograd.graph.increment_version"
)
# the fake mode of tensors that are traced, or None
detect_fake_mode: Any = _of("torch._guards", "detect_fake_mode") or _kernels_need(
    "torch._guards.detect_fake_mode"
)
_unsafe_view: Any = getattr(torch.ops.aten, "_unsafe_view", None)
_graph_task: Any = _of("torch._C", "_current_graph_task_id")
if _graph_task is None:
    warnings.warn(
        f"torch {torch.__version__} has no torch._C._current_graph_task_id: with activation "
        "checkpointing, running statistics count each batch twice",
        stacklevel=2,
    )


def unsafe_view(x: Tensor, shape: list[int]) -> Tensor:
    """A dense tensor in another shape that is no view to autograd; at worst it is one."""
    y: Tensor = x.reshape(shape) if _unsafe_view is None else _unsafe_view(x, shape)
    return y


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return _graph_task is not None and _graph_task() != -1


def end_workers(loader: Any) -> None:
    """Ask the worker processes of an iterator of `DataLoader` to end, then kill them.

    They ignore the signal with which Python ends processes, and a worker that died may hold a lock
    that the others wait for. Those of an iterator without these names end with the process.
    """
    shutdown = getattr(loader, "_shutdown_workers", None)
    try:
        if shutdown is not None:
            shutdown()
    except RuntimeError:  # a worker may die meanwhile
        pass
    for worker in getattr(loader, "_workers", ()):
        worker.kill()


# multiprocessing


class _AtExit:
    """Calls a function once: when it is called itself, or at the end of the process."""

    def __init__(self, _owner: None, call: Any, args: tuple[Any, ...], exitpriority: int) -> None:
        self._call: Any = lambda: call(*args)
        atexit.register(self)

    def __call__(self) -> None:
        atexit.unregister(self)
        call, self._call = self._call, lambda: None
        call()


# the same, at a moment of its own in the end of multiprocessing
Finalize: Any = _of("multiprocessing.util", "Finalize") or _AtExit


# Triton


@cache
def _driver() -> Any:
    return _of("triton.runtime", "driver")


def current_stream(device: int) -> int:
    """The stream on which Triton launches kernels."""
    active = getattr(_driver(), "active", None)
    if active is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(active.get_current_stream(device))


def current_device() -> int:
    """The device for which Triton compiles kernels; its driver exists afterwards."""
    active = getattr(_driver(), "active", None)
    return torch.cuda.current_device() if active is None else int(active.get_current_device())


def compiled(kernel: Any, args: Any, constants: Any) -> Any:
    """A kernel that Triton has compiled for these arguments, and not launched."""
    warmup = getattr(kernel, "warmup", None) or _kernels_need("JITFunction.warmup in its Triton")
    return warmup(*args, grid=(1,), **constants)
