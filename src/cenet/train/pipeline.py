"""Batches prepared on the device of the run by threads: read, decode, crop and resize.

Threads do one batch at a time and are given the next when one is taken, so that they are idle, or
about to be, whenever somebody ends them.
"""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet.train.cuda_decoding import as_tensor, jpeg_size
from cenet.train.data import Encoded
from cenet.train.decoding import decode, read
from cenet.train.order import Item
from cenet.train.resizing import resized
from cenet.train.views import View, Viewing

Decoder = Callable[[list[Tensor]], list[Tensor]]

# batches that are being prepared or are ready
AHEAD = 4
# of images that are decoded in one call
PIXELS = 2**28


class _Read(NamedTuple):
    """An image file; its content is pixels, (3, H, W), where the decoder has nothing to do."""

    number: int
    content: Tensor
    pixels: int
    view: View


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
            workers: threads that read files.
        """
        self.data, self.viewing, self.finish = data, viewing, finish
        self.decoder, self.device, self.workers = decoder, device, max(1, workers)
        make: Any = torch.cuda.Stream
        # its few kernels go before those of the network, which would have them wait for a step
        self.stream = make(device, priority=-1) if device.type == "cuda" else None

    def batches(self, items: Iterator[list[Item]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Images and labels; the threads end when this generator does."""
        readers = ThreadPoolExecutor(self.workers, "cenet reads")
        preparer = ThreadPoolExecutor(1, "cenet decodes")
        # also when Python ends while somebody, a traceback for one, keeps this generator
        end = Finalize(None, _end, (readers, preparer), exitpriority=0)
        ready: deque[Future[_Ready]] = deque()
        try:
            while True:
                for batch in islice(items, AHEAD - len(ready)):
                    parts = [
                        readers.submit(self._read_all, batch[first :: self.workers])
                        for first in range(min(self.workers, len(batch)))
                    ]
                    ready.append(preparer.submit(self._prepared, batch, parts))
                if not ready:
                    return
                yield self._taken(ready.popleft().result())
        finally:
            end()

    def _read_all(self, items: list[Item]) -> list[_Read]:
        return [self._read(item) for item in items]

    def _read(self, item: Item) -> _Read:
        content = read(self.data.source, item[1])
        size = jpeg_size(content)
        found = self._decoded_here(item[1]) if size is None else as_tensor(content)
        height, width = size or found.shape[1:]
        view = self.viewing.view(item, height, width)
        return _Read(item[1], found, height * width, view)

    def _decoded_here(self, index: int) -> Tensor:
        """Pixels, on the CPU; ValueError that names the file if it is damaged."""
        from torchvision.transforms.functional import pil_to_tensor

        found: Tensor = pil_to_tensor(decode(self.data.source, index))
        return found

    def _prepared(self, batch: list[Item], parts: list["Future[list[_Read]]"]) -> _Ready:
        files: list[Any] = [None] * len(batch)
        for first, part in enumerate(parts):
            files[first :: len(parts)] = part.result()
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

    def _decoded(self, files: list[_Read]) -> list[Tensor]:
        """Pixels on the device."""
        images = [file.content for file in files]
        encoded = [i for i, image in enumerate(images) if image.dim() == 1]
        try:
            decoded = self.decoder([images[i] for i in encoded]) if encoded else []
        except RuntimeError as error:
            decoded = [self._decoded_here(files[i].number) for i in encoded]
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


def _end(*pools: ThreadPoolExecutor) -> None:
    """End threads as soon as they have done what they are at."""
    for pool in pools:
        pool.shutdown(cancel_futures=True)


def _groups(files: list[_Read]) -> Iterator[list[_Read]]:
    """Files whose pixels fit in memory together."""
    group: list[_Read] = []
    pixels = 0
    for file in files:
        if group and pixels + file.pixels > PIXELS:
            yield group
            group, pixels = [], 0
        group.append(file)
        pixels += file.pixels
    yield group
