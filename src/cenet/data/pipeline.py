"""Batches whose images are cropped and resized on the device of the run, and decoded there or not.

Processes read the files. Without a decoder on the device they decode them too, and hand over the
pixels that are needed: resizing would take them as long as decoding does. A few threads do the
rest: many would spend their time waiting for Python's lock. Each prepares one batch at a time and
is given the next when one is taken, so that they are idle, or about to be, whenever somebody ends
them.
"""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cenet.data.cuda_decoding import as_tensor, jpeg_size
from cenet.data.datasets import Encoded
from cenet.data.decoding import decode, read
from cenet.data.order import Item
from cenet.data.resizing import resized
from cenet.data.views import View, Viewing, shown_image
from cenet.data.workers import loaded

Decoder = Callable[[list[Tensor]], list[Tensor]]

# that prepare batches
THREADS = 2
# batches that are being prepared or are ready
AHEAD = 4
# of images that are decoded in one call
PIXELS = 2**28
# as many times the pixels that are shown are resized before they are moved
LARGE = 4


class _File(NamedTuple):
    """An image file as it was read, and what is shown of it."""

    number: int
    pixels: int  # that it takes when it is decoded on the device
    view: View
    shape: tuple[int, int] | None  # of its pixels; None if it is not decoded yet
    content: Tensor  # bytes, or pixels, (height, width, 3)


@dataclass
class _Batch:
    """Files on their way from one process to another, in one tensor instead of hundreds."""

    files: list[_File]  # without content
    lengths: list[int]
    content: Tensor

    def pin_memory(self) -> "_Batch":
        """The same in memory that a GPU can copy from by itself; called by `DataLoader`."""
        return _Batch(self.files, self.lengths, self.content.pin_memory())

    def unpacked(self, device: torch.device) -> list[_File]:
        """The files with their content, pixels on the device."""
        encoded = decoded = torch.split(self.content, self.lengths)
        if any(file.shape is not None for file in self.files):
            moved = self.content.to(device, non_blocking=True)
            decoded = torch.split(moved, self.lengths)
        return [
            file._replace(content=here if file.shape is None else there.view(*file.shape, 3))
            for file, here, there in zip(self.files, encoded, decoded, strict=True)
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
    """Files, read; those that are not for the GPU's decoder are decoded and cropped here."""

    def __init__(self, data: Encoded, viewing: Viewing, *, encoded: bool) -> None:
        """Leave files for a decoder on the device if they are wanted `encoded`."""
        self.data, self.viewing, self.encoded = data, viewing, encoded

    def __getitem__(self, item: Item) -> _File:
        number = item[1]
        if self.encoded:
            content = read(self.data.source, number)
            size = jpeg_size(content)
            if size is not None:
                view = self.viewing.view(item, *size)
                return _File(number, size[0] * size[1], view, None, as_tensor(content))
        image = decode(self.data.source, number)
        view = self.viewing.view(item, image.height, image.width)
        return _File(number, 0, *self._part(image, view))

    def _part(self, image: Any, view: View) -> tuple[View, tuple[int, int], Tensor]:
        """What is left to do of a view, and the pixels it needs.

        The device resizes them, unless they are too many to be moved there.
        """
        size = self.viewing.size
        top, left, height, width = view.box
        if height * width > LARGE * size**2:
            image, (height, width) = shown_image(image, view, size), (size, size)
            view = View((0, 0, size, size), (size, size), colour=view.colour)
        else:
            image = image.crop((left, top, left + width, top + height))
            view = view._replace(box=(0, 0, height, width))
        return view, (height, width), torch.from_numpy(numpy.array(image))


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
        decoder: Decoder | None,
        device: torch.device,
        workers: int,
    ) -> None:
        """Start nothing yet.

        Args:
            data: the files.
            viewing: what is shown of an image.
            finish: from pixels on the device to what a network takes.
            decoder: from bytes of JPEG files to pixels on the device; RuntimeError if it cannot.
                None has the processes decode.
            device: where batches are needed.
            workers: processes that read files, or decode them.
        """
        self.data, self.viewing, self.finish = data, viewing, finish
        self.decoder, self.device, self.workers = decoder, device, workers
        make: Any = torch.cuda.Stream
        # their few kernels go before those of the network, which would have them wait for a step
        self.streams = [
            make(device, priority=-1) if device.type == "cuda" else None for _ in range(THREADS)
        ]

    def batches(self, items: Iterable[list[Item]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Images and labels; processes and threads end when this generator does."""
        files = _Files(self.data, self.viewing, encoded=self.decoder is not None)
        threads = ThreadPoolExecutor(THREADS, "cenet prepares")
        # also when Python ends while somebody, a traceback for one, keeps this generator
        end = Finalize(None, _end, (threads,), exitpriority=0)
        streams = cycle(self.streams)
        ready: deque[Future[_Ready]] = deque()
        try:
            with closing(
                loaded(files, items, self.workers, self.viewing.seed, collate=_packed)
            ) as found:
                while True:
                    for batch in islice(found, AHEAD - len(ready)):
                        ready.append(threads.submit(self._prepared, batch, next(streams)))
                    if not ready:
                        return
                    yield self._taken(ready.popleft().result())
        finally:
            end()

    def _prepared(self, batch: _Batch, stream: Any) -> _Ready:
        place: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            place = torch.cuda.stream(stream)
        with place:
            files = batch.unpacked(self.device)
            size = self.viewing.size
            found = [
                resized(self._decoded(group), [file.view for file in group], size)
                for group in _groups(files)
            ]
            images = torch.cat(found) if len(found) > 1 else found[0]
            images = self.finish(_coloured(images, [file.view for file in files]))
            labels = self.data.labels[[file.number for file in files]].to(self.device)
            done = None if stream is None else stream.record_event()
        return _Ready(images, labels, done)

    def _decoded(self, files: list[_File]) -> list[Tensor]:
        """Pixels on the device, (3, height, width) each."""
        encoded = [file for file in files if file.shape is None]
        decoded = iter(
            self._decoded_there(self.decoder, encoded) if self.decoder and encoded else []
        )
        return [
            next(decoded) if file.shape is None else file.content.permute(2, 0, 1) for file in files
        ]

    def _decoded_there(self, decoder: Decoder, files: list[_File]) -> list[Tensor]:
        try:
            return decoder([file.content for file in files])
        except RuntimeError as error:
            found = [self._decoded_here(file.number) for file in files]
            warnings.warn(
                f"the GPU's decoder refuses some of {len(files)} images ({error}); they are "
                "decoded on the CPU, which takes longer",
                stacklevel=2,
            )
            return found

    def _decoded_here(self, number: int) -> Tensor:
        """The same by Pillow; ValueError that names the file if it is damaged."""
        from torchvision.transforms.functional import pil_to_tensor

        pixels: Tensor = pil_to_tensor(decode(self.data.source, number))
        return pixels.to(self.device)

    def _taken(self, ready: _Ready) -> tuple[Tensor, Tensor]:
        """A batch for the stream of the caller."""
        if ready.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready.done)
            for tensor in (ready.images, ready.labels):
                tensor.record_stream(current)
        return ready.images, ready.labels


def _coloured(images: Tensor, views: list[View]) -> Tensor:
    """Images with the colours that their views move, in float32; as they are if none does."""
    colours = [view.colour for view in views if view.colour is not None]
    if not colours:
        return images
    return images.float() + torch.tensor(colours, device=images.device)[:, :, None, None]


def _end(threads: ThreadPoolExecutor) -> None:
    """End threads as soon as they have done what they are at."""
    threads.shutdown(cancel_futures=True)


def _groups(files: list[_File]) -> Iterator[list[_File]]:
    """Files whose pixels fit in memory together."""
    group: list[_File] = []
    pixels = 0
    for file in files:
        if group and pixels + file.pixels > PIXELS:
            yield group
            group, pixels = [], 0
        group.append(file)
        pixels += file.pixels
    if group:
        yield group
