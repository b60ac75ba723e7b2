"""Starting kernels and making room for their results.

A kernel is looked up by what it was compiled for and started by that handle: going through Triton's
own lookup every time takes longer on the host than most of these kernels take on the device.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor

# the interpreter has no arithmetic in bfloat16: there, operands are widened after rounding
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

Key = tuple[Any, ...]


class Wanted(NamedTuple):
    """A kernel to compile; a tensor among its arguments may be given by its dtype."""

    kernel: Any
    args: Sequence[Any]
    constants: dict[str, Any]


_compiled: dict[Key, tuple[Any, list[Any]]] = {}
_collected: dict[Key, Wanted] | None = None


class Listener(Protocol):
    """Who wants to know what is started and made room for."""

    def launched(self, start: Callable[..., None], args: Sequence[Any], rest: list[Any]) -> None:
        """`start(*args, *rest)` was called; `rest` has no tensors."""

    def allocated(self, tensor: Tensor) -> None:
        """`tensor` is new."""


class _Listening(local):
    listener: Listener | None = None


listening = _Listening()  # of a thread


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` on a grid; `constants` are what it is compiled for, and launch options."""
    if _collected is not None:
        wanted = Wanted(kernel, [_without_memory(argument) for argument in args], constants)
        _collected[key_of(kernel, args, constants)] = wanted
        return
    rest: list[Any]
    if INTERPRETED:
        start, rest = partial(kernel[grid], **constants), []
    else:
        key = key_of(kernel, args, constants)
        if key not in _compiled:
            compile_kernel(key, Wanted(kernel, args, constants))
        compiled, rest = _compiled[key]
        start = compiled[(*grid, 1, 1)[:3]]
    start(*args, *rest)
    if listening.listener is not None:
        listening.listener.launched(start, args, rest)


def compile_kernel(key: Key, wanted: Wanted) -> Any:
    """Compile a kernel, or find it in Triton's cache, for launches of this key."""
    kernel, args, constants = wanted
    names = kernel.arg_names[len(args) :]
    compiled = kernel.warmup(*args, grid=(1,), **constants)
    _compiled[key] = compiled, [constants[name] for name in names]
    return compiled


def is_compiled(key: Key) -> bool:
    """Whether launches of this key have their kernel."""
    return key in _compiled


@contextmanager
def collecting() -> Iterator[dict[Key, Wanted]]:
    """Start nothing inside, in no thread: collect the kernels that would be, each once.

    Not thread-local, because the backward pass has threads of its own. What is still launched in
    earnest by others meanwhile is lost.
    """
    global _collected
    found: dict[Key, Wanted] = {}
    _collected = found
    try:
        yield found
    finally:
        _collected = None


def is_collecting() -> bool:
    """Whether launches are collected instead of started."""
    return _collected is not None


def key_of(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> Key:
    """What launches have in common that one compiled kernel serves."""
    if INTERPRETED:
        return (id(kernel), *constants.values(), *map(_kind, args))
    kinds = [
        None if parameter.do_not_specialize and type(argument) is int else _kind(argument)
        for argument, parameter in zip(args, kernel.params, strict=False)
    ]
    return (id(kernel), torch.cuda.current_device(), *constants.values(), *kinds)


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel for: type and alignment of a tensor, divisibility of a size."""
    if argument is None or type(argument) is float:
        return None
    if type(argument) is int:
        return -1 if argument == 1 else argument % 16 == 0
    return argument.dtype if _is_aligned(argument) else (argument.dtype, "unaligned")


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _without_memory(argument: Any) -> Any:
    """Something of the same kind that keeps no tensor alive."""
    if not isinstance(argument, Tensor):
        return argument
    if _is_aligned(argument):
        return argument.dtype
    return torch.empty(2, dtype=argument.dtype)[1:]


def empty(device: torch.device, *shape: int) -> Tensor:
    """Room for a small result, in float32; see `empty_like`."""
    make = torch.empty if _collected is None else torch.zeros
    tensor = make(shape, dtype=torch.float32, device=device)
    if listening.listener is not None:
        listening.listener.allocated(tensor)
    return tensor


def empty_like(x: Tensor) -> Tensor:
    """Room for a result like x; zeros while launches are collected, since nothing will fill it."""
    return torch.empty_like(x) if _collected is None else torch.zeros_like(x)
