"""Batches of images, from any step of an epoch on.

Order and augmentation depend only on seed, epoch and image: not on the number of workers or
processes, and not on where a run was interrupted.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from cenet.data.cuda_decoding import Decoding, choose, decode_jpegs
from cenet.data.datasets import (
    Augment,
    DataSettings,
    Encoded,
    InputSpec,
    Normalization,
    Resident,
    is_for_files,
)
from cenet.data.decoding import decode
from cenet.data.order import Item, Plan, Shard, epoch_order, seed_of
from cenet.data.pipeline import Pipeline
from cenet.data.views import PADDING, Viewing, shown
from cenet.data.workers import loaded

Batch = tuple[Tensor, Tensor]  # normalized images and labels on the device

# images in memory are augmented up to this many values at a time: kernels per step would be slow
VALUES = 2**24


class Loader(Protocol):
    """A loader of training batches.

    Attributes:
        decoding: where files are decoded; None for images in memory.
    """

    decoding: Decoding | None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, from step `start` on."""
        ...

    def end(self) -> None:
        """Stop preparing batches; `epoch` can be called again afterwards."""
        ...


class ResidentLoader:
    """A loader of images that stay on the device and are cropped and flipped there."""

    decoding: Decoding | None = None

    def __init__(
        self,
        data: Resident,
        inputs: InputSpec,
        shard: Shard,
        *,
        augment: Augment,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        """Move the images to the device."""
        if is_for_files(augment):
            raise ValueError("images in memory can be cropped and flipped; use augment=crop_flip")
        self.shard, self.augment, self.seed, self.device = shard, augment, seed, device
        self.channels_last = channels_last
        self.size = data.images.shape[2:]
        margin = (PADDING,) * 4 if augment == "crop_flip" else (0,) * 4
        self.images = pad(data.images.to(device), margin).permute(0, 2, 3, 1).contiguous()
        self.labels = data.labels.to(device)
        self.mean, self.std = inputs.statistics(device)

    def end(self) -> None:
        """Do nothing: no batches are prepared ahead."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """See `Loader`."""
        order = epoch_order(self.shard.count, self.seed, epoch)
        moves = self._moves(epoch).to(self.device)
        order = order.to(self.device)
        together = max(1, VALUES // (self.shard.batch * self.images[0].numel()))
        for first in range(start, self.shard.steps, together):
            steps = range(first, min(first + together, self.shard.steps))
            chosen = torch.cat([order[self.shard.places(step)] for step in steps])
            own = torch.cat([moves[self.shard.places(step)] for step in steps])
            images = (self._cropped(chosen, own).float() - self.mean) / self.std
            images = images.permute(0, 3, 1, 2)
            images = images if self.channels_last else images.contiguous()
            parts = (torch.split(part, self.shard.batch) for part in (images, self.labels[chosen]))
            yield from zip(*parts, strict=True)

    def _moves(self, epoch: int) -> Tensor:
        """Top, left and flip of each image, (N, 3), in the order of the epoch."""
        if self.augment == "none":
            return torch.zeros(self.shard.count, 3, dtype=torch.long)
        generator = torch.Generator().manual_seed(seed_of("moves", self.seed, epoch))
        shape = (self.shard.count,)
        corners = [torch.randint(2 * PADDING + 1, shape, generator=generator) for _ in range(2)]
        return torch.stack([*corners, torch.randint(2, shape, generator=generator)], 1)

    def _cropped(self, chosen: Tensor, moves: Tensor) -> Tensor:
        """The images, cropped and flipped, (B, H, W, C) in uint8."""
        if self.augment == "none":
            return self.images[chosen]
        height, width = self.size
        top, left, flip = moves.unbind(1)
        rows = top[:, None] + torch.arange(height, device=self.device)
        columns = torch.arange(width, device=self.device)
        columns = left[:, None] + torch.where(flip[:, None] > 0, columns.flip(0), columns)
        return self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


class Reading(NamedTuple):
    """Reads batches of image files onto a device.

    Attributes:
        data: the files.
        viewing: chooses the views of images.
        finish: normalizes pixels on the device.
        device: device of the run.
        workers: number of processes that decode, or that read files for the GPU's decoder.
        decoding: where files are decoded.
    """

    data: Encoded
    viewing: Viewing
    finish: Callable[[Tensor], Tensor]
    device: torch.device
    workers: int
    decoding: Decoding

    def batches(self, items: Iterable[list[Item]]) -> Generator[Batch, None, None]:
        """Batches of these images; processes and threads end with the generator."""
        if resizes(self.device):
            on_gpu = self.decoding == "cuda"
            pipeline = Pipeline(
                self.data, self.viewing, self.finish, device=self.device, workers=self.workers,
                decoder=partial(decode_jpegs, device=self.device) if on_gpu else None,
            )  # fmt: skip
            yield from pipeline.batches(items)
            return
        images = _Images(self.data, self.viewing)
        with closing(loaded(images, items, self.workers, self.viewing.seed)) as found:
            for batch in found:
                pixels, labels = (part.to(self.device, non_blocking=True) for part in batch)
                yield self.finish(pixels), labels


def resizes(device: torch.device) -> bool:
    """Whether the device crops and resizes; on a CPU, the worker processes do."""
    return device.type == "cuda"


class _Images(Dataset[tuple[Tensor, int]]):
    """Views of image files, decoded on the CPU."""

    def __init__(self, files: Encoded, viewing: Viewing) -> None:
        self.files, self.viewing = files, viewing

    def __getitem__(self, item: Item) -> tuple[Tensor, int]:
        index = item[1]
        image = decode(self.files.source, index)
        view = self.viewing.view(item, image.height, image.width)
        return shown(image, view, self.viewing.size), int(self.files.labels[index])


class FilesLoader:
    """A loader of image files that prepares batches ahead, across the ends of epochs."""

    def __init__(self, plan: Plan, reading: Reading) -> None:
        """Start nothing yet."""
        self.plan, self.reading = plan, reading
        self.decoding: Decoding | None = reading.decoding
        self._stream: Generator[Batch, None, None] | None = None
        self._next: tuple[int, int] | None = None  # epoch and step of the stream

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """See `Loader`. Leaving before the last step stops the preparation of batches."""
        step = start
        try:
            while step < self.plan.steps:
                batch = self._batch(epoch, step)
                step += 1
                yield batch
        finally:
            if step < self.plan.steps:
                self.end()

    def _batch(self, epoch: int, step: int) -> Batch:
        if self._stream is None or self._next != (epoch, step):
            self.end()
            self._stream = self.reading.batches(self.plan.batches(epoch, step))
        batch = next(self._stream)
        self._next = self.plan.after(epoch, step)
        if self._next is None:
            self.end()
        return batch

    def end(self) -> None:
        """See `Loader`."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def training_loader(
    recipe: DataSettings,
    data: Resident | Encoded,
    inputs: InputSpec,
    shard: Shard,
    *,
    device: torch.device,
    channels_last: bool = False,
    workers: int = 0,
    steps: int | None = None,
    decode: Literal["auto", "cpu", "cuda"] = "cpu",
) -> Loader:
    """Batches of the training images of a recipe.

    Args:
        recipe, data, inputs, shard, device, channels_last: those of the run.
        workers: see `Reading`.
        steps: number of steps of an epoch that will be used; by default all.
        decode: see `Options`.
    """
    if isinstance(data, Resident):
        if decode == "cuda":
            choose(decode, device, workers)  # raises if the GPU cannot decode
        return ResidentLoader(
            data, inputs, shard, augment=recipe.augment, seed=recipe.seed, device=device,
            channels_last=channels_last,
        )  # fmt: skip
    viewing = Viewing(recipe.augment, recipe.image_size, recipe.seed)
    finish = Normalization(inputs, device, channels_last=channels_last)
    reading = Reading(data, viewing, finish, device, workers, choose(decode, device, workers))
    steps = shard.steps if steps is None else steps
    return FilesLoader(Plan(shard, recipe.seed, recipe.epochs, steps), reading)


def evaluation_batches(
    data: Resident | Encoded,
    inputs: InputSpec,
    *,
    size: int,
    batch: int,
    device: torch.device,
    channels_last: bool,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    decode: Literal["auto", "cpu", "cuda"] = "cpu",
) -> Iterator[Batch]:
    """Batches of all test images of this process, in order."""
    if isinstance(data, Encoded):
        finish = Normalization(inputs, device, channels_last=channels_last)
        viewing = Viewing(None, size)
        reading = Reading(data, viewing, finish, device, workers, choose(decode, device, workers))
        places = torch.split(torch.arange(rank, len(data.labels), world), batch)
        yield from reading.batches([(0, i) for i in chosen.tolist()] for chosen in places)
        return
    mean, std = inputs.statistics(device)
    own = (torch.split(part[rank::world], batch) for part in (data.images, data.labels))
    for images, labels in zip(*own, strict=True):
        pixels = images.to(device).permute(0, 2, 3, 1)
        pixels = ((pixels.float() - mean) / std).permute(0, 3, 1, 2)
        yield (pixels if channels_last else pixels.contiguous()), labels.to(device)
