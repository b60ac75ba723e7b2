"""Batches prepared on the device of the run: files are read by processes, decoded by a thread.

Many threads that read would spend their time waiting for Python's lock. The one that decodes and
resizes does one batch at a time and is given the next when one is taken, so that it is idle, or
about to be, whenever somebody ends it.
"""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cenet.train.cuda_decoding import as_tensor, jpeg_size
from cenet.train.data import Encoded
from cenet.train.decoding import decode, read
from cenet.train.order import Item
from cenet.train.resizing import resized
from cenet.train.views import View, Viewing
from cenet.train.workers import loaded

Decoder = Callable[[list[Tensor]], list[Tensor]]

# batches that are being decoded or are ready
AHEAD = 3
# of images that are decoded in one call
PIXELS = 2**28


class _File(NamedTuple):
    """An image file as it was read."""

    number: int
    height: int
    width: int
    view: View
    is_decoded: bool  # because the decoder would have nothing to do with it
    content: Tensor  # bytes, or pixels (3, H, W)


@dataclass
class _Batch:
    """Files on their way from one process to another, in one tensor instead of hundreds."""

    files: list[_File]  # without content
    lengths: list[int]
    content: Tensor

    def unpacked(self) -> list[_File]:
        """The files with their content."""
        contents = torch.split(self.content, self.lengths)
        return [
            file._replace(
                content=part.view(3, file.height, file.width) if file.is_decoded else part
            )
            for file, part in zip(self.files, contents, strict=True)
        ]


def _packed(files: list[_File]) -> _Batch:
    contents = [file.content.flatten() for file in files]
    nothing = torch.empty(0, dtype=torch.uint8)
    return _Batch(
        [file._replace(content=nothing) for file in files],
        [len(content) for content in contents],
        torch.cat(contents),
    )


class _Files(Dataset[_File]):
    """Files, read, with what is shown of them."""

    def __init__(self, data: Encoded, viewing: Viewing) -> None:
        self.data, self.viewing = data, viewing

    def __getitem__(self, item: Item) -> _File:
        number = item[1]
        content = read(self.data.source, number)
        size = jpeg_size(content)
        found = decoded_here(self.data, number) if size is None else as_tensor(content)
        height, width = size or found.shape[1:]
        view = self.viewing.view(item, height, width)
        return _File(number, height, width, view, size is None, found)


def decoded_here(data: Encoded, number: int) -> Tensor:
    """Pixels of a file, (3, H, W), on the CPU; ValueError that names it if it is damaged."""
    from torchvision.transforms.functional import pil_to_tensor

    found: Tensor = pil_to_tensor(decode(data.source, number))
    return found


class _Ready(NamedTuple):
    """A batch on the device, once what is queued there has been done."""

    images: Tensor
    labels: Tensor
    done: Any


class Pipeline:
    """What becomes of a batch of numbers of images."""

    def __init__(
        self,
        data: Encoded,
        viewing: Viewing,
        finish: Callable[[Tensor], Tensor],
        *,
        decoder: Decoder,
        device: torch.device,
        workers: int,
    ) -> None:
        """Start nothing yet.

        Args:
            data: the files.
            viewing: what is shown of an image.
            finish: from pixels on the device to what a network takes.
            decoder: from bytes of JPEG files to pixels on the device; RuntimeError if it cannot.
            device: where batches are needed.
            workers: processes that read files.
        """
        self.data, self.viewing, self.finish = data, viewing, finish
        self.decoder, self.device, self.workers = decoder, device, workers
        make: Any = torch.cuda.Stream
        # its few kernels go before those of the network, which would have them wait for a step
        self.stream = make(device, priority=-1) if device.type == "cuda" else None

    def batches(self, items: Iterable[list[Item]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Images and labels; processes and thread end when this generator does."""
        files = _Files(self.data, self.viewing)
        thread = ThreadPoolExecutor(1, "cenet decodes")
        # also when Python ends while somebody, a traceback for one, keeps this generator
        end = Finalize(None, _end, (thread,), exitpriority=0)
        ready: deque[Future[_Ready]] = deque()
        try:
            with closing(
                loaded(files, items, self.workers, self.viewing.seed, collate=_packed)
            ) as found:
                while True:
                    for batch in islice(found, AHEAD - len(ready)):
                        ready.append(thread.submit(self._prepared, batch))
                    if not ready:
                        return
                    yield self._taken(ready.popleft().result())
        finally:
            end()

    def _prepared(self, batch: _Batch) -> _Ready:
        files = batch.unpacked()
        stream: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            stream = torch.cuda.stream(self.stream)
        with stream:
            shown = [
                resized(self._decoded(group), [file.view for file in group], self.viewing.size)
                for group in _groups(files)
            ]
            images = self.finish(shown[0] if len(shown) == 1 else torch.cat(shown))
            labels = self.data.labels[[file.number for file in files]].to(self.device)
            done = None if self.stream is None else self.stream.record_event()
        return _Ready(images, labels, done)

    def _decoded(self, files: list[_File]) -> list[Tensor]:
        """Pixels on the device."""
        images = [file.content for file in files]
        encoded = [i for i, file in enumerate(files) if not file.is_decoded]
        try:
            decoded = self.decoder([images[i] for i in encoded]) if encoded else []
        except RuntimeError as error:
            decoded = [decoded_here(self.data, files[i].number) for i in encoded]
            warnings.warn(
                f"the GPU's decoder refuses some of {len(encoded)} images ({error}); they are "
                "decoded on the CPU, which takes longer",
                stacklevel=2,
            )
        for i, image in zip(encoded, decoded, strict=True):
            images[i] = image
        return [image.to(self.device) for image in images]

    def _taken(self, ready: _Ready) -> tuple[Tensor, Tensor]:
        """A batch for the stream of the caller."""
        if ready.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready.done)
            for tensor in (ready.images, ready.labels):
                tensor.record_stream(current)
        return ready.images, ready.labels


def _end(thread: ThreadPoolExecutor) -> None:
    """End the thread as soon as it has done what it is at."""
    thread.shutdown(cancel_futures=True)


def _groups(files: list[_File]) -> Iterator[list[_File]]:
    """Files whose pixels fit in memory together."""
    group: list[_File] = []
    pixels = 0
    for file in files:
        size = file.height * file.width
        if group and pixels + size > PIXELS:
            yield group
            group, pixels = [], 0
        group.append(file)
        pixels += size
    yield group
