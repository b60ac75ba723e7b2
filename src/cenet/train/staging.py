"""Copies of tensors as they are at one moment, made while the device goes on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Staging:
    """Room for copies: once on the device, and in pinned memory of the host.

    A copy on the device takes no time worth mentioning. From there it goes to the host on a stream
    of its own, while training changes the original. The room is used again for the next copy.
    """

    def __init__(self) -> None:
        """Room is made when the first copy is taken."""
        self._device: Tensors = {}
        self._host: Tensors = {}
        self._stream: Any = None

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Tensors]:
        """Copy the tensors as they are now; the function waits for the copies and returns them.

        Copies are dense and share no memory. Those of a GPU hold until the next call of `take`.
        """
        here = {name: value.detach() for name, value in tensors.items() if not value.is_cuda}
        there = {name: value.detach() for name, value in tensors.items() if value.is_cuda}
        copies = {
            name: value.clone(memory_format=torch.contiguous_format) for name, value in here.items()
        }
        arrived = self._from_device(there) if there else None

        def wait() -> Tensors:
            if arrived is not None:
                arrived.synchronize()
            return copies if arrived is None else {**copies, **self._host}

        return wait

    def _from_device(self, tensors: Tensors) -> Any:
        """Start the copies; the event comes when they have arrived."""
        if not _alike(tensors, self._device):
            self._device = {
                name: torch.empty_like(value, memory_format=torch.contiguous_format)
                for name, value in tensors.items()
            }
            self._host = {
                name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                for name, value in tensors.items()
            }
            make: Any = torch.cuda.Stream
            self._stream = make()
        torch._foreach_copy_(list(self._device.values()), list(tensors.values()))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, value in self._device.items():
                self._host[name].copy_(value, non_blocking=True)
        return self._stream.record_event()


def _alike(one: Tensors, other: Tensors) -> bool:
    """Whether they have the same names in the same order, shapes and types."""
    return list(one) == list(other) and all(
        value.shape == other[name].shape and value.dtype == other[name].dtype
        for name, value in one.items()
    )
