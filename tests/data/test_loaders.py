"""Batches: their order, what happens to an image, worker processes."""

import errno
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

import cenet.data.workers as pool
import cenet.signals as signals
from cenet.data.datasets import Encoded, Resident, image_folders, input_spec_of
from cenet.data.loaders import ResidentLoader, evaluation_batches, training_loader
from cenet.data.order import Shard, epoch_order
from cenet.data.sources import Folder
from cenet.train import RECIPES

CPU = torch.device("cpu")


def test_processes_share_every_step_and_epochs_differ():
    order = epoch_order(103, seed=1, epoch=0)
    assert order.sort().values.tolist() == list(range(103))
    assert not torch.equal(order, epoch_order(103, seed=1, epoch=1))
    whole = Shard(103, 12)
    parts = [Shard(103, 4, rank=rank, world=3) for rank in range(3)]
    assert whole.steps == parts[0].steps == 8
    for step in range(8):
        joined = torch.cat([order[part.places(step)] for part in parts])
        assert torch.equal(joined, order[whole.places(step)])
    with pytest.raises(ValueError, match="do not fill one step of 64 images in each of 2"):
        Shard(103, 64, world=2)


def resident(n=40, size=10):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return Resident(images, torch.arange(n) % 4, ("a", "b", "c", "d"))


def cropping_loader(data, *, channels_last):
    return ResidentLoader(
        data, input_spec_of(data), Shard(40, 8), augment="crop_flip", seed=0, device=CPU,
        channels_last=channels_last,
    )  # fmt: skip


def test_crops_and_flips_on_the_device():
    """Every image of an epoch is a crop of its padded original, flipped or not; all kinds occur."""
    data = resident()
    loader = cropping_loader(data, channels_last=False)
    mean, std = input_spec_of(data).statistics(CPU)
    expected = data.images.double()
    torch.testing.assert_close(mean.double(), expected.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        std.double(), expected.transpose(0, 1).flatten(1).std(1, correction=0), rtol=1e-6, atol=0
    )
    order = epoch_order(40, 0, 0)
    padded = nn.functional.pad(data.images, (4, 4, 4, 4)).float()
    kinds = set()
    for step, (images, labels) in enumerate(loader.epoch(0)):
        assert images.is_contiguous()
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            index = order[step * 8 + place]
            assert label == data.labels[index]
            raw = (image * std[:, None, None] + mean[:, None, None]).round()
            matches = [
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (False, True)
                if torch.equal(
                    padded[index, :, top : top + 10, left : left + 10],
                    raw.flip(2) if flip else raw,
                )
            ]
            assert matches
            kinds.add(matches[0])
    tops, lefts, flips = (set(values) for values in zip(*kinds, strict=True))
    assert flips == {False, True}
    assert len(tops) > 4
    assert len(lefts) > 4
    assert len(kinds) > 20  # of 40 images: each has its own
    assert not torch.equal(loader._moves(0), loader._moves(1))


def batches_equal(first, second):
    pairs = list(zip(first, second, strict=True))
    assert pairs
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_an_epoch_can_begin_anywhere():
    data = resident()
    loader = cropping_loader(data, channels_last=True)
    whole = list(loader.epoch(3))
    assert batches_equal(whole[2:], loader.epoch(3, start=2))
    assert not torch.equal(whole[0][0], next(loader.epoch(4))[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of three sizes in four classes."""
    root = tmp_path_factory.mktemp("images")
    data = resident(24, 40)
    for part, places in (("train", range(16)), ("val", range(16, 24))):
        for i in places:
            path = root / part / data.classes[int(data.labels[i])] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (40, 36, 44)[i % 3]
            image = Image.fromarray(data.images[i].permute(1, 2, 0).numpy())
            image.resize((size, 40)).save(path)
    return root


def files_loader(files, batch, *, workers=0, steps=None, **fields):
    recipe = replace(RECIPES["resnet18_ce"], image_size=32, **{"epochs": 4, **fields})
    return training_loader(
        recipe, files, input_spec_of(files), Shard(len(files.labels), batch), device=CPU,
        channels_last=True, workers=workers, steps=steps,
    )  # fmt: skip


@pytest.mark.parametrize("augment", ["imagenet", "imagenet_colour", "crop_flip", "none"])
def test_files_do_not_depend_on_workers_or_on_where_an_epoch_begins(folder, augment):
    files = image_folders(folder, 32, resident=True).train
    assert isinstance(files, Encoded)

    def loader(workers):
        return files_loader(files, 4, workers=workers, augment=augment, seed=5)

    before = torch.get_rng_state()
    alone = list(loader(0).epoch(1))
    assert torch.equal(before, torch.get_rng_state())
    assert batches_equal(alone, loader(2).epoch(1))
    assert batches_equal(alone[1:], loader(2).epoch(1, start=1))
    assert alone[0][0].shape == (4, 3, 32, 32)
    if augment != "none":
        shown = {round(float(images.sum()), 3) for images, _ in alone}
        assert shown.isdisjoint(round(float(images.sum()), 3) for images, _ in loader(0).epoch(2))


def children():
    return {process.pid for process in multiprocessing.active_children()}


def test_workers_go_on_over_epochs_and_end_after_the_last(folder):
    files = image_folders(folder, 32, resident=True).train
    expected = [list(files_loader(files, 4, epochs=3).epoch(epoch)) for epoch in range(3)]
    loader = files_loader(files, 4, workers=2, steps=3, epochs=3)  # the loop may leave some out
    before, kinds = children(), set()
    for epoch in range(3):
        batches = loader.epoch(epoch)
        found = [next(batches) for _ in range(3)]  # as the loop asks: never once too often
        assert batches_equal(found, expected[epoch][:3])
        kinds.add(frozenset(children() - before))
    assert len(kinds) == 2  # the same two processes, and none
    assert {len(kind) for kind in kinds} == {0, 2}


def test_workers_end_with_an_epoch_that_is_left(folder):
    files = image_folders(folder, 32, resident=True).train
    expected = [list(files_loader(files, 4).epoch(epoch)) for epoch in range(2)]
    loader = files_loader(files, 4, workers=1)
    before = children()
    batches = loader.epoch(0)
    next(batches)
    assert len(children() - before) == 1
    batches.close()
    assert children() == before
    assert batches_equal(loader.epoch(1, start=2), expected[1][2:])
    assert len(children() - before) == 1  # for the epoch that comes next
    loader.end()
    assert children() == before


def test_two_readers_of_one_loader_do_not_take_each_others_batches(folder):
    files = image_folders(folder, 32, resident=True).train
    expected = list(files_loader(files, 4).epoch(0))
    loader = files_loader(files, 4)
    one, other = loader.epoch(0), loader.epoch(0)
    pairs = [(next(one), next(other)) for _ in range(4)]
    for found in zip(*pairs, strict=True):
        assert batches_equal(found, expected)


def test_workers_read_nothing_for_nothing(folder, tmp_path):
    """A run reads as many images as it shows."""
    files = image_folders(folder, 32, resident=True).train

    class Noted(Folder):
        def read(self, index):
            with (tmp_path / "read").open("a") as file:
                file.write(f"{index}\n")
            return super().read(index)

    files = files._replace(source=Noted(files.source.paths))
    loader = files_loader(files, 4, workers=2, steps=3, epochs=2)
    assert sum(len(list(loader.epoch(epoch))) for epoch in range(2)) == 6
    assert len((tmp_path / "read").read_text().split()) == 24


def test_workers_leave_signals_to_the_run(folder, monkeypatch):
    """A signal to the whole group must not take them away before the run has saved."""
    files = image_folders(folder, 32, resident=True).train
    loader = files_loader(files, 1, workers=1, augment="none", epochs=1)

    # where the shell has switched it off, the test would see nothing
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def signalled(worker):  # before it is deaf
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        leave(worker)

    leave = pool._leave_signals_to_the_run
    monkeypatch.setattr(pool, "_leave_signals_to_the_run", signalled)
    batches = loader.epoch(0)
    next(batches)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 15
    signal.signal(signal.SIGINT, before)


DEAD = r"a process that reads images has died \(.*by --workers\n"


@pytest.mark.parametrize(
    ("fails", "pause", "message"),
    [
        ("raise ValueError('it is truncated')", 0, r"it is truncated\n"),
        ("index or os._exit(1)", 0, DEAD),
        ("index or os._exit(1)", 1, DEAD),  # while the loader is being made
    ],
)
def test_workers_end_with_a_run_that_fails(fails, pause, message):
    """Deaf to signals, they once outlived it, and Python waited for them."""
    script = (
        "import os, time\n"
        "class Batches(list):\n"
        "    def __iter__(self):\n"
        "        for batch in super().__iter__():\n"
        "            yield batch\n"
        f"            time.sleep({pause})\n"
        "from cenet.data.workers import loaded\n"
        "class Damaged:\n"
        "    def __getitem__(self, index):\n"
        f"        {fails}\n"
        "try:\n"
        "    list(loaded(Damaged(), Batches([[0], [1], [2]]), workers=2, seed=0))\n"
        "except ValueError as error:\n"
        "    raise SystemExit(str(error)) from error\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    assert re.fullmatch(message, found.stderr)


def one_by_one(count, workers):
    return pool.loaded(range(count), [[i] for i in range(count)], workers=workers, seed=0)


def test_workers_end_when_not_all_can_be_started(monkeypatch):
    """And those of another reader go on."""
    other = one_by_one(20, workers=1)
    next(other)
    (others,) = multiprocessing.active_children()
    real, forks = os.fork, []

    def fork():
        forks.append(1)
        if len(forks) == 2:
            raise OSError(errno.EAGAIN, "try again")
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(OSError, match="try again") as kept:
        next(one_by_one(20, workers=3))
    assert kept.value.errno == errno.EAGAIN
    del kept
    gc.collect()  # torch's half-made iterator complains when it goes, and now is a good time
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() != [others] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert multiprocessing.active_children() == [others]
    assert len(list(other)) == 19


def test_one_that_dies_while_workers_end_does_not_save_the_others():
    killed = []

    class Found:
        def _shutdown_workers(self):
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    pool._end(Found(), [SimpleNamespace(kill=lambda: killed.append(1))] * 2)
    assert killed == [1, 1]


def test_processes_free_nothing_that_they_inherit(monkeypatch):
    """Tensors of a GPU, freed in a process that was forked, would kill it."""
    frozen = []
    real = os.fork

    def fork():
        frozen.append(gc.get_freeze_count())
        return real()

    monkeypatch.setattr(os, "fork", fork)
    assert len(list(one_by_one(4, workers=2))) == 4
    assert len(frozen) == 2
    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0


def test_signals_are_held_back_as_they_were_before():
    def blocked():
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with signals.held_back():
            assert blocked() >= {signal.SIGTERM, signal.SIGINT}
        assert blocked() == before | {signal.SIGTERM}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_workers_end_with_an_error_of_their_reader():
    """Nobody catches it, so Python keeps the iterator, and with it they were kept alive."""
    script = (
        "from cenet.data.workers import loaded\n"
        "def read():\n"
        "    batches = loaded(range(60), [[i] for i in range(60)], workers=6, seed=0)\n"
        "    next(batches)\n"
        "    raise RuntimeError('out of memory')\n"
        "read()\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=40
    )
    assert found.returncode == 1
    assert found.stderr.endswith("RuntimeError: out of memory\n")


def gradient(path, size):
    """An image that grows from left to right and from top to bottom, in a file."""
    ramp = torch.arange(size, dtype=torch.uint8)
    image = torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size)])
    image = torch.cat([image, image[:1] + image[1:]])
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(path)
    return image


def raw(images):
    """Pixels before ImageNet's normalization."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return ((images * std + mean) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("augment", ["imagenet", "crop_flip", "none"])
def test_what_happens_to_an_image_file(tmp_path, augment):
    """One file, 32 times: every copy and every epoch has its own chance."""
    image = gradient(tmp_path / "x.png", 32)
    files = Encoded(Folder([tmp_path / "x.png"] * 32), torch.zeros(32, dtype=torch.long), ("a",))
    loader = files_loader(files, 32, augment=augment)
    first, second = (raw(next(loader.epoch(epoch))[0]) for epoch in range(2))
    kinds = [{copy.numpy().tobytes() for copy in epoch} for epoch in (first, second)]
    if augment == "none":
        assert torch.equal(first, image.expand_as(first))
        return
    assert len(kinds[0]) > 16
    assert len(kinds[0] & kinds[1]) < 8
    turned = {bool(copy[0, 16, 8] > copy[0, 16, 24]) for copy in first}
    assert turned == {False, True}
    if augment == "crop_flip":
        padded = nn.functional.pad(image, (4, 4, 4, 4))
        crops = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        crops = {crop.numpy().tobytes() for c in crops for crop in (c.contiguous(), c.flip(2))}
        assert kinds[0] <= crops


def test_test_images_are_cropped_in_their_middle(tmp_path):
    image = gradient(tmp_path / "x.png", 32)
    files = Encoded(Folder([tmp_path / "x.png"]), torch.zeros(1, dtype=torch.long), ("a",))
    ((found, _),) = evaluation_batches(
        files, input_spec_of(files), size=28, batch=1, device=CPU, channels_last=False
    )
    assert torch.equal(raw(found)[0], image[:, 2:30, 2:30])


def test_test_images_are_seen_once_over_all_processes(folder):
    split = image_folders(folder, 32, resident=True)
    for data in (split.test, resident(23)):
        seen = []
        for rank in range(3):
            batches = evaluation_batches(
                data, input_spec_of(data), size=32, batch=2, device=CPU,
                channels_last=False, rank=rank, world=3,
            )  # fmt: skip
            seen += [label for _, labels in batches for label in labels.tolist()]
        assert sorted(seen) == sorted(data.labels.tolist())
