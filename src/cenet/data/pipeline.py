"""Batches of image files that are cropped, resized and, if possible, decoded on the device.

Worker processes read the files. Without a decoder on the device they also decode them, and pass on
the pixels that are needed; resizing there would take as long as decoding. A few threads of the
main process do the rest; more threads would mostly wait for Python's lock. Each thread prepares one
batch at a time and gets the next one when a batch is taken. So threads are idle, or soon will be,
when the pipeline ends.
"""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
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
from cenet.internals import Finalize

Decoder = Callable[[list[Tensor]], list[Tensor]]

# number of threads that prepare batches
THREADS = 2
# number of batches that are being prepared or ready
AHEAD = 4
# largest number of pixels that are decoded in one call
PIXELS = 2**28
# parts with more than this many times the pixels of a view are resized by the worker
LARGE = 4


class _File(NamedTuple):
    """An image file as it was read, and its view."""

    number: int
    pixels: int  # number of pixels to decode on the device
    view: View
    shape: tuple[int, int] | None  # height and width of the pixels; None if not decoded yet
    content: Tensor  # bytes of the file, or pixels (height, width, 3)


@dataclass
class _Batch:
    """Files packed into one tensor, which is faster to pass between processes than hundreds."""

    files: list[_File]  # without content
    lengths: list[int]
    content: Tensor

    def pin_memory(self) -> "_Batch":
        """The batch in pinned memory; called by `DataLoader`."""
        return _Batch(self.files, self.lengths, self.content.pin_memory())

    def unpacked(self, device: torch.device) -> list[_File]:
        """The files with their content; pixels are moved to the device."""
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
    """Image files; those that the GPU's decoder cannot handle are decoded and cropped here."""

    def __init__(self, data: Encoded, viewing: Viewing, *, encoded: bool) -> None:
        """`encoded` leaves JPEG files to the decoder on the device."""
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
        """The view that the device still has to apply, and height, width and pixels of its input.

        The device resizes, unless there are too many pixels to move.
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
    """A batch on the device; `done` is the event after the work that is queued for it."""

    images: Tensor
    labels: Tensor
    done: Any


class Pipeline:
    """Turns lists of image numbers into batches on the device."""

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
            viewing: chooses the views of images.
            finish: normalizes pixels on the device.
            decoder: decodes JPEG files on the device, or raises RuntimeError; None leaves decoding
                to the worker processes.
            device: device of the batches.
            workers: number of processes that read or decode files.
        """
        self.data, self.viewing, self.finish = data, viewing, finish
        self.decoder, self.device, self.workers = decoder, device, workers
        make: Any = torch.cuda.Stream
        # high priority: otherwise their few kernels would wait for a whole step of the network
        self.streams = [
            make(device, priority=-1) if device.type == "cuda" else None for _ in range(THREADS)
        ]

    def batches(self, items: Iterable[list[Item]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Images and labels; processes and threads end when this generator does."""
        files = _Files(self.data, self.viewing, encoded=self.decoder is not None)
        threads = ThreadPoolExecutor(THREADS, "cenet prepares")
        # also if Python exits while a traceback still refers to this generator
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
        """Decoded images on the device, (3, height, width) each."""
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
        """An image decoded by Pillow; ValueError that names the file if it is damaged."""
        from torchvision.transforms.functional import pil_to_tensor

        pixels: Tensor = pil_to_tensor(decode(self.data.source, number))
        return pixels.to(self.device)

    def _taken(self, ready: _Ready) -> tuple[Tensor, Tensor]:
        """Hand a batch over to the stream of the caller."""
        if ready.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready.done)
            for tensor in (ready.images, ready.labels):
                tensor.record_stream(current)
        return ready.images, ready.labels


def _coloured(images: Tensor, views: list[View]) -> Tensor:
    """Add the colours of the views, in float32; return the images unchanged if there are none."""
    colours = [view.colour for view in views if view.colour is not None]
    if not colours:
        return images
    return images.float() + torch.tensor(colours, device=images.device)[:, :, None, None]


def _end(threads: ThreadPoolExecutor) -> None:
    """End the threads after the batches that they are preparing."""
    threads.shutdown(cancel_futures=True)


def _groups(files: list[_File]) -> Iterator[list[_File]]:
    """Split files into groups whose pixels fit in memory together."""
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
