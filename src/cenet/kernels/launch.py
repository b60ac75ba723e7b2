"""Starting kernels: one by one, or all launches of a pass again.

`launch` finds a compiled kernel by its types and constants and starts it by that handle: Triton's
own lookup takes the host longer than most of these kernels take the device.

`replay` goes one step further. Kernels, grids and numbers of a pass depend only on shapes, dtypes
and settings. So the first pass of a kind is recorded: its launches, and for every pointer the
tensor of the caller or the place in scratch memory that it points to. Later passes only fill in
addresses.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor

from cenet.internals import triton_driver, triton_warmup

# the interpreter has no arithmetic in bfloat16: there, operands are widened after rounding
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# upper bound on recorded passes; a detector sees images of many sizes
MOST_PASSES = 4096
ALIGNMENT = 256  # bytes, of scratch memory

driver, _warmup = triton_driver(), triton_warmup()

Key = tuple[Any, ...]


class Wanted(NamedTuple):
    """A kernel to compile. Its tensor arguments may be given by their dtypes."""

    kernel: Any
    args: Sequence[Any]
    constants: dict[str, Any]


_compiled: dict[Key, tuple[Any, list[Any]]] = {}
_collected: dict[Key, Wanted] | None = None


class Listener(Protocol):
    """Receives every kernel launch and scratch allocation of the current thread."""

    def launched(self, start: Callable[..., None], args: Sequence[Any], rest: list[Any]) -> None:
        """`start(*args, *rest)` was called; there are no tensors in `rest`."""

    def allocated(self, tensor: Tensor) -> None:
        """`tensor` was allocated."""


class _Listening(local):
    listener: Listener | None = None


listening = _Listening()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` on a grid; `constants` are its constexpr arguments and launch options."""
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
    compiled = _warmup(kernel, *args, grid=(1,), **constants)
    _compiled[key] = compiled, [constants[name] for name in names]
    return compiled


def is_compiled(key: Key) -> bool:
    """Whether the kernel for launches of this key is compiled."""
    return key in _compiled


@contextmanager
def collecting() -> Iterator[dict[Key, Wanted]]:
    """Collect the kernels that would be launched inside this context, each once; launch none.

    Not thread-local, because the backward pass has threads of its own. Launches of other threads
    meanwhile are lost.
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
    """A key that is equal for all launches that one compiled kernel serves."""
    if INTERPRETED:
        return (id(kernel), *constants.values(), *map(_kind, args))
    kinds = [
        None if parameter.do_not_specialize and type(argument) is int else _kind(argument)
        for argument, parameter in zip(args, kernel.params, strict=False)
    ]
    return (id(kernel), torch.cuda.current_device(), *constants.values(), *kinds)


def _kind(argument: Any) -> Any:
    """What Triton specializes on: dtype and alignment of a tensor, divisibility of a size."""
    if argument is None or type(argument) is float:
        return None
    if type(argument) is int:
        return -1 if argument == 1 else argument % 16 == 0
    return argument.dtype if _is_aligned(argument) else (argument.dtype, "unaligned")


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _without_memory(argument: Any) -> Any:
    """An argument of the same kind that keeps no tensor alive."""
    if not isinstance(argument, Tensor):
        return argument
    if _is_aligned(argument):
        return argument.dtype
    return torch.empty(2, dtype=argument.dtype)[1:]


def empty(device: torch.device, *shape: int) -> Tensor:
    """A small uninitialized result in float32; zeros while launches are collected."""
    make = torch.empty if _collected is None else torch.zeros
    tensor = make(shape, dtype=torch.float32, device=device)
    if listening.listener is not None:
        listening.listener.allocated(tensor)
    return tensor


def empty_like(x: Tensor) -> Tensor:
    """An uninitialized result like x; zeros while launches are collected: nothing will fill it."""
    return torch.empty_like(x) if _collected is None else torch.zeros_like(x)


class _Pointer(NamedTuple):
    """An address that a recorded pass uses."""

    region: int  # number of the tensor of the caller; the number after the last is scratch memory
    offset: int  # in bytes
    dtype: torch.dtype


class _Pass(NamedTuple):
    """A recorded pass: its launches take their arguments from one list, pointers before numbers."""

    pointers: list[_Pointer]
    numbers: list[Any]
    launches: list[tuple[Callable[..., None], Callable[[list[Any]], Any]]]
    scratch: int  # bytes of scratch memory


_passes: dict[Hashable, _Pass] = {}


def replay(
    key: Hashable, tensors: Sequence[Tensor | None], device: torch.device, run: Callable[[], None]
) -> None:
    """Call `run`, or repeat the launches it made when it was first called with this key.

    Args:
        key: everything that decides which launches `run` makes, except the dtypes of `tensors`.
        tensors: all tensors that `run` reads or writes, without gaps, except those it allocates
            by `empty`.
        device: the device of the tensors.
        run: launches kernels and has no other effect.
    """
    if is_collecting():
        return run()
    addresses: list[int] = []
    kind: list[Hashable] = [key, device]
    bits = 0
    for tensor in tensors:
        address = 0 if tensor is None else tensor.data_ptr()
        bits |= address
        addresses.append(address)
        kind.append(None if tensor is None else tensor.dtype)
    if bits % 16:
        return run()  # needs other kernels, compiled for unaligned addresses
    key = tuple(kind)
    known = _passes.get(key)
    if known is not None:
        return _again(known, tensors, addresses, device)
    recorder = _Recorder(tensors)
    listening.listener = recorder
    try:
        run()
    finally:
        listening.listener = None
    if recorder.complete:
        if len(_passes) >= MOST_PASSES:
            del _passes[next(iter(_passes))]
        _passes[key] = recorder.recorded()
    return None


class _Recorder:
    """Records a pass. Keeps its scratch tensors alive, so that no address is used twice."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        # a launch, and its arguments: pointers by their place, numbers in lists of one
        self.launches: list[tuple[Callable[..., None], list[int | list[Any]]]] = []
        self.pointers: dict[_Pointer, int] = {}
        self.scratch = 0
        self.complete = True
        self.kept: list[Tensor] = []
        # region, offset of the tensor in it, first address, end; scratch memory is the last region
        self.spans = [
            (region, 0, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for region, tensor in enumerate(tensors)
            if tensor is not None
        ]
        self.scratch_region = len(tensors)

    def allocated(self, tensor: Tensor) -> None:
        begin = tensor.data_ptr()
        self.kept.append(tensor)
        self.spans.append((self.scratch_region, self.scratch, begin, begin + tensor.nbytes))
        self.scratch += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def launched(self, start: Callable[..., None], args: Sequence[Any], rest: list[Any]) -> None:
        arguments: list[int | list[Any]] = []
        for argument in (*args, *rest):
            if not isinstance(argument, Tensor):
                arguments.append([argument])
                continue
            if argument.numel() == 0:
                arguments.append([argument if INTERPRETED else 0])
                continue
            address = argument.data_ptr()
            found = [
                _Pointer(region, offset + address - begin, argument.dtype)
                for region, offset, begin, end in self.spans
                if begin <= address < end
            ]
            if len(found) != 1:  # a tensor that was passed twice, or not at all
                self.complete = False
                return
            arguments.append(self.pointers.setdefault(found[0], len(self.pointers)))
        self.launches.append((start, arguments))

    def recorded(self) -> _Pass:
        numbers: list[Any] = []
        launches: list[tuple[Callable[..., None], Callable[[list[Any]], Any]]] = []
        for start, arguments in self.launches:
            places = []
            for argument in arguments:
                if isinstance(argument, int):
                    places.append(argument)
                else:
                    places.append(len(self.pointers) + len(numbers))
                    numbers += argument
            launches.append((start, itemgetter(*places)))
        return _Pass([*self.pointers], numbers, launches, self.scratch)


def _again(
    known: _Pass, tensors: Sequence[Tensor | None], addresses: list[int], device: torch.device
) -> None:
    scratch = torch.empty(known.scratch // 4, dtype=torch.float32, device=device)
    values: list[Any]
    if INTERPRETED:
        regions = [*tensors, scratch]
        values = [_view(regions[region], offset, dtype) for region, offset, dtype in known.pointers]
        values += known.numbers
        for start, arguments in known.launches:
            start(*arguments(values))
        return
    addresses.append(scratch.data_ptr())
    values = [addresses[region] + offset for region, offset, _ in known.pointers]
    values += known.numbers
    stream = driver.active.get_current_stream(device.index)
    for start, arguments in known.launches:
        start(*arguments(values), stream=stream)


def _view(tensor: Tensor | None, offset: int, dtype: torch.dtype) -> Tensor:
    """One element of a tensor's memory, `offset` bytes after its first."""
    assert tensor is not None
    begin = tensor.storage_offset() * tensor.element_size() + offset
    view = torch.empty(0, dtype=dtype)
    return view.set_(tensor.untyped_storage(), begin // dtype.itemsize, (1,), (1,))
