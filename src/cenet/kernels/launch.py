"""Starting kernels and making room for their results.

A kernel is looked up by what it was compiled for and started by that handle: going through Triton's
own lookup every time takes longer on the host than most of these kernels take on the device.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any, Protocol

import torch
import triton.language as tl
from torch import Tensor

# the interpreter has no arithmetic in bfloat16: there, operands are widened after rounding
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


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
    rest: list[Any]
    if INTERPRETED:
        start, rest = partial(kernel[grid], **constants), []
    else:
        key = (id(kernel), torch.cuda.current_device(), *constants.values(), *map(_kind, args))
        if key not in _compiled:
            names = kernel.arg_names[len(args) :]
            compiled = kernel.warmup(*args, grid=grid, **constants)
            _compiled[key] = compiled, [constants[name] for name in names]
        compiled, rest = _compiled[key]
        start = compiled[(*grid, 1, 1)[:3]]
    start(*args, *rest)
    if listening.listener is not None:
        listening.listener.launched(start, args, rest)


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel for: type and alignment of a tensor, divisibility of a size."""
    if argument is None or type(argument) is float:
        return None
    if type(argument) is int:
        return -1 if argument == 1 else argument % 16
    return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype, "unaligned")


def empty(device: torch.device, *shape: int) -> Tensor:
    """Room for a small result, in float32."""
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    if listening.listener is not None:
        listening.listener.allocated(tensor)
    return tensor
