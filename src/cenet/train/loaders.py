"""Batches in an order that depends on seed and epoch alone, from any position of an epoch.

What happens to an image in an epoch depends on nothing else either: not on the number of workers or
processes, and not on where a run was interrupted.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import cenet.train.interrupts as interrupts
from cenet.train.data import Encoded, Resident
from cenet.train.decoding import decode
from cenet.train.inputs import Inputs
from cenet.train.recipes import Augment, Recipe

PADDING = 4
TEST_CROP = 0.875  # share of the shorter side


def seed_of(*parts: int | str) -> int:
    """A seed that depends on all parts."""
    digest = sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the images."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(count, generator=generator)


class Shard:
    """Which images a process takes in each step."""

    def __init__(self, count: int, batch: int, *, rank: int = 0, world: int = 1) -> None:
        """Of `count` images, `batch` per process and step; the rest of an epoch is left out."""
        self.count, self.batch, self.rank, self.world = count, batch, rank, world
        if count < batch * world:
            raise ValueError(
                f"{count} training images do not fill one step of {batch} images in each of "
                f"{world} processes; lower --batch-size"
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.count // (self.batch * self.world)

    def places(self, step: int) -> slice:
        """Places in the order of an epoch that this process takes in a step."""
        start = (step * self.world + self.rank) * self.batch
        return slice(start, start + self.batch)


class Loader(Protocol):
    """Training batches."""

    shard: Shard

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalized images and labels on the device, from step `start` of an epoch."""
        ...


class ResidentLoader:
    """Images on the device, cropped and flipped there."""

    def __init__(
        self,
        data: Resident,
        inputs: Inputs,
        shard: Shard,
        *,
        augment: Augment,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        """Move the images to the device."""
        if augment == "imagenet":
            raise ValueError("images in memory can be cropped and flipped; use augment=crop_flip")
        self.shard, self.augment, self.seed, self.device = shard, augment, seed, device
        self.channels_last = channels_last
        self.size = data.images.shape[2:]
        margin = (PADDING,) * 4 if augment == "crop_flip" else (0,) * 4
        self.images = pad(data.images.to(device), margin).permute(0, 2, 3, 1).contiguous()
        self.labels = data.labels.to(device)
        self.mean, self.std = inputs.statistics(device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader`."""
        order = epoch_order(self.shard.count, self.seed, epoch)
        moves = self._moves(epoch).to(self.device)
        order = order.to(self.device)
        for step in range(start, self.shard.steps):
            places = self.shard.places(step)
            chosen = order[places]
            images = (self._cropped(chosen, moves[places]).float() - self.mean) / self.std
            images = images.permute(0, 3, 1, 2)
            yield (images if self.channels_last else images.contiguous()), self.labels[chosen]

    def _moves(self, epoch: int) -> Tensor:
        """Top, left and whether to flip, (N, 3), in the order of the epoch."""
        if self.augment == "none":
            return torch.zeros(self.shard.count, 3, dtype=torch.long)
        generator = torch.Generator().manual_seed(seed_of("moves", self.seed, epoch))
        shape = (self.shard.count,)
        corners = [torch.randint(2 * PADDING + 1, shape, generator=generator) for _ in range(2)]
        return torch.stack([*corners, torch.randint(2, shape, generator=generator)], 1)

    def _cropped(self, chosen: Tensor, moves: Tensor) -> Tensor:
        """(B, H, W, C) in uint8."""
        if self.augment == "none":
            return self.images[chosen]
        height, width = self.size
        top, left, flip = moves.unbind(1)
        rows = top[:, None] + torch.arange(height, device=self.device)
        columns = torch.arange(width, device=self.device)
        columns = left[:, None] + torch.where(flip[:, None] > 0, columns.flip(0), columns)
        return self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


class _Images(Dataset[tuple[Tensor, int]]):
    """Files, decoded and transformed; the chance in it depends on seed, epoch and image alone."""

    def __init__(self, files: Encoded, transform: Any, seed: int, epoch: int) -> None:
        self.files, self.transform, self.seed, self.epoch = files, transform, seed, epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = decode(self.files.source, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of("image", self.seed, self.epoch, index))
            return self.transform(image), int(self.files.labels[index])


class FilesLoader:
    """Images decoded by worker processes."""

    def __init__(
        self,
        data: Encoded,
        inputs: Inputs,
        shard: Shard,
        *,
        augment: Augment,
        size: int,
        seed: int,
        device: torch.device,
        channels_last: bool,
        workers: int,
    ) -> None:
        """Choose the transforms."""
        self.data, self.shard, self.seed = data, shard, seed
        self.transform = transforms(augment, size)
        self.workers = workers
        self.place = partial(_placed, inputs=inputs, device=device, channels_last=channels_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader`."""
        order = epoch_order(self.shard.count, self.seed, epoch).tolist()
        batches = [order[self.shard.places(step)] for step in range(start, self.shard.steps)]
        dataset = _Images(self.data, self.transform, self.seed, epoch)
        yield from map(self.place, loaded(dataset, batches, self.workers, self.seed))


def training_loader(
    recipe: Recipe,
    data: Resident | Encoded,
    inputs: Inputs,
    shard: Shard,
    *,
    device: torch.device,
    channels_last: bool = False,
    workers: int = 0,
) -> Loader:
    """Batches of the training images of a recipe."""
    shared: dict[str, Any] = {
        "augment": recipe.augment,
        "seed": recipe.seed,
        "device": device,
        "channels_last": channels_last,
    }
    if isinstance(data, Resident):
        return ResidentLoader(data, inputs, shard, **shared)
    return FilesLoader(data, inputs, shard, size=recipe.image_size, workers=workers, **shared)


def evaluation_batches(
    data: Resident | Encoded,
    inputs: Inputs,
    *,
    size: int,
    batch: int,
    device: torch.device,
    channels_last: bool,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """All test images of this process once, in order."""
    if isinstance(data, Encoded):
        dataset = _Images(data, transforms(None, size), 0, 0)
        places = torch.arange(rank, len(data.labels), world)
        indices = [chosen.tolist() for chosen in torch.split(places, batch)]
        place = partial(_placed, inputs=inputs, device=device, channels_last=channels_last)
        yield from map(place, loaded(dataset, indices, workers, 0))
        return
    mean, std = inputs.statistics(device)
    own = (torch.split(part[rank::world], batch) for part in (data.images, data.labels))
    for images, labels in zip(*own, strict=True):
        pixels = images.to(device).permute(0, 2, 3, 1)
        pixels = ((pixels.float() - mean) / std).permute(0, 3, 1, 2)
        yield (pixels if channels_last else pixels.contiguous()), labels.to(device)


def transforms(augment: Augment | None, size: int) -> Any:
    """From an image file to (3, size, size) in uint8; None is for the test."""
    steps: list[Any]
    if augment == "imagenet":
        steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    elif augment == "crop_flip":
        steps = [v2.Resize((size, size), antialias=True), v2.RandomCrop(size, PADDING)]
        steps.append(v2.RandomHorizontalFlip())
    elif augment == "none":
        steps = [v2.Resize((size, size), antialias=True)]
    else:
        steps = [v2.Resize(round(size / TEST_CROP), antialias=True), v2.CenterCrop(size)]
    return v2.Compose([*steps, v2.PILToTensor()])


def loaded(
    dataset: Dataset[Any], batches: list[list[int]], workers: int, seed: int, collate: Any = None
) -> Iterator[Any]:
    """Batches of a data set, by worker processes if there are any; ValueError as it was raised."""
    loader: Any = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        collate_fn=collate,
        worker_init_fn=_leave_signals_to_the_run,
        pin_memory=torch.cuda.is_available(),
        # else it draws from the global one, and a resumed run would go on differently
        generator=torch.Generator().manual_seed(seed),
    )
    found = _started(loader)
    # also when Python ends while somebody, a traceback for one, keeps this iterator; before queues
    # are closed (10), by which workers hear of it
    end = Finalize(None, _end, (found,), exitpriority=20) if workers else None
    try:
        yield from found
    except ValueError as error:  # a worker's comes with its traceback as text
        reason = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")
        raise ValueError(reason) from error
    except RuntimeError as error:
        explain(error)
        raise
    finally:
        if end is not None:
            end()


def _started(loader: Any) -> Any:
    """An iterator whose workers run; one may die while the others are still being started."""
    before = set(multiprocessing.active_children())
    try:
        with interrupts.held_back():  # workers inherit that, until they are deaf
            return iter(loader)
    except BaseException as error:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        explain(error)
        raise


def _end(found: Any) -> None:
    """End the workers of an iterator.

    They are deaf to the signal by which Python would end them, and one that has died may have taken
    with it what the others wait for.
    """
    with suppress(RuntimeError):  # of a worker that dies now
        found._shutdown_workers()
    for worker in found._workers:
        worker.kill()


def explain(error: BaseException) -> None:
    """Raise the death of a worker in words that help; torch reports it wherever the run is."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        raise ValueError(
            f"a process that reads images has died ({str(error).strip()}); is there enough memory? "
            "Use fewer by --workers"
        ) from error


def _leave_signals_to_the_run(_worker: int) -> None:
    """A signal to the whole group must not take the workers away before the run has saved."""
    interrupts.ignore()


def _placed(
    batch: tuple[Tensor, Tensor], *, inputs: Inputs, device: torch.device, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Images on the device, normalized."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    mean, std = inputs.statistics(device)
    images = (images.float() - mean[:, None, None]) / std[:, None, None]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.contiguous(memory_format=layout), labels
