"""Batches prepared ahead, on the CPU with Pillow in the place of the GPU's decoder."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cenet.data.loaders as loaders
import cenet.data.pipeline as pipeline
from _files import decode_here, jpeg, photograph, photographs, write_files
from _training import TINY, assert_same_run, stop_at, trainer
from cenet.data.datasets import Split, input_spec_of
from cenet.data.decoding import decode as decode_image
from cenet.data.order import Shard, epoch_order
from cenet.data.views import Viewing
from cenet.signals import Interrupted
from cenet.train import RECIPES

CPU = torch.device("cpu")


@pytest.fixture
def stand_in(monkeypatch):
    """A CPU that passes for a GPU with a decoder."""
    monkeypatch.setattr(loaders, "choose", lambda asked, device, workers: asked)
    monkeypatch.setattr(loaders, "decode_jpegs", decode_here)
    monkeypatch.setattr(loaders, "resizes", lambda device: True)


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path, photographs(24))


def loader(files, decode="cuda", *, workers=2, batch=8, steps=None, **fields):
    recipe = replace(RECIPES["resnet18_ce"], **{"image_size": 32, "epochs": 2, **fields})
    return loaders.training_loader(
        recipe, files, input_spec_of(files), Shard(len(files.labels), batch), device=CPU,
        channels_last=True, workers=workers, decode=decode, steps=steps,
    )  # fmt: skip


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("cenet prepares")]


def assert_close(found, expected):
    """Labels are the same; pixels are within one level, on a scale of 57 for a deviation."""
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    for (images, labels), (own, same) in pairs:
        assert torch.equal(labels, same)
        assert images.stride() == own.stride()
        assert 57 * (images - own).abs().max() < 1.05
        assert 57 * (images - own).abs().mean() < 0.4


def on_a_cpu(batches):
    """What `batches` gives where processes decode, crop and resize."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "resizes", lambda device: False)
        return list(batches())


@pytest.mark.parametrize("decode", ["cuda", "cpu"])
@pytest.mark.parametrize("augment", ["imagenet", "imagenet_colour", "crop_flip", "none"])
def test_batches_are_those_of_worker_processes(files, stand_in, augment, decode):
    before = torch.get_rng_state()
    found, other = (loader(files, kind, augment=augment) for kind in (decode, "cpu"))
    assert found.decoding == decode
    for epoch in range(2):
        assert_close(found.epoch(epoch), on_a_cpu(lambda epoch=epoch: other.epoch(epoch)))
        other.end()
    assert torch.equal(before, torch.get_rng_state())
    assert not threads()


@pytest.mark.parametrize("decode", ["cuda", "cpu"])
def test_test_batches_too(files, stand_in, decode):
    found, expected = (
        loaders.evaluation_batches(
            files, input_spec_of(files), size=32, batch=5, device=CPU, channels_last=False,
            workers=2, rank=1, world=2, decode=kind,
        )
        for kind in (decode, "cpu")
    )  # fmt: skip
    assert_close(found, on_a_cpu(lambda: expected))
    assert not threads()


@pytest.mark.parametrize("size", [16, 48])
def test_few_pixels_are_moved_for_a_large_image(files, stand_in, size):
    """Of 60×80, those resized to 16×16 by the processes are the same to the last bit."""
    found, other = (
        loader(files, "cpu", augment="none", image_size=size, workers=0) for _ in range(2)
    )
    pairs = zip(found.epoch(0), on_a_cpu(lambda: other.epoch(0)), strict=True)
    same = [torch.equal(images, expected) for (images, _), (expected, _) in pairs]
    assert same == [size == 16] * 3


@pytest.mark.parametrize("size", [8, 48])
@pytest.mark.parametrize("decode", ["cuda", "cpu"])
def test_colours_are_moved_by_the_same_amount_as_on_a_cpu(files, stand_in, size, decode):
    """Of an image resized by the processes (to 8×8) and of one resized later."""
    fields = {"image_size": size, "workers": 0, "batch": 6}

    def moved(augment):
        views = loader(files, decode, augment=augment, **fields).epoch(0)
        return torch.cat([images for images, _ in views])

    std = torch.tensor([58.395, 57.12, 57.375])[:, None, None]
    differences = (moved("imagenet_colour") - moved("imagenet")) * std
    viewing = Viewing("imagenet_colour", size, RECIPES["resnet18_ce"].seed)
    order = epoch_order(24, viewing.seed, 0).tolist()
    shapes = [decode_image(files.source, number) for number in order]
    expected = [
        viewing.view((0, number), image.height, image.width).colour
        for number, image in zip(order, shapes, strict=True)
    ]
    expected = torch.tensor(expected)[:, :, None, None].expand_as(differences)
    torch.testing.assert_close(differences, expected, rtol=0, atol=1e-3)
    assert expected.abs().mean() > 1


def test_batches_do_not_depend_on_workers_or_on_where_an_epoch_begins(files, stand_in):
    whole = list(loader(files).epoch(1))
    for other in (loader(files, workers=0).epoch(1), loader(files, workers=3).epoch(1)):
        assert all(map(torch.equal, sum_up(whole), sum_up(other)))
    again = sum_up(loader(files).epoch(1, start=2))
    assert all(map(torch.equal, sum_up(whole)[4:], again))


def sum_up(batches):
    return [part for batch in batches for part in batch]


def test_few_pixels_at_a_time(files, stand_in, monkeypatch):
    whole = sum_up(loader(files).epoch(0))
    monkeypatch.setattr(pipeline, "PIXELS", 10_000)  # two images
    for one, other in zip(whole, sum_up(loader(files).epoch(0)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_groups_have_as_many_files_as_fit(monkeypatch):
    monkeypatch.setattr(pipeline, "PIXELS", 10)
    found = [SimpleNamespace(pixels=pixels) for pixels in (4, 5, 6, 4, 12, 1, 2)]
    groups = [[file.pixels for file in group] for group in pipeline._groups(found)]
    assert groups == [[4, 5], [6, 4], [12], [1, 2]]


def test_threads_go_on_over_epochs_and_end_after_the_last(files, stand_in, monkeypatch):
    calls = []

    def counted(contents, device):
        calls.append(1)
        return decode_here(contents)

    monkeypatch.setattr(loaders, "decode_jpegs", counted)
    found = loader(files)
    assert len(list(found.epoch(0))) == 3
    kept = threads()
    assert kept
    deadline = time.monotonic() + 20
    while len(calls) < 6 and time.monotonic() < deadline:  # nobody has asked for them yet
        time.sleep(0.01)
    batches = found.epoch(1)
    next(batches)
    assert threads() == kept
    assert len(list(batches)) == 2
    assert not threads()
    assert len(calls) == 6


def test_leaving_an_epoch_ends_the_threads(files, stand_in):
    found = loader(files)
    batches = found.epoch(0)
    next(batches)
    assert threads()
    batches.close()
    assert not threads()
    list(found.epoch(0))
    assert threads()
    found.end()
    assert not threads()


def test_a_damaged_file_is_named(files, stand_in):
    path = files.source.paths[7]
    good = path.read_bytes()
    # a decoder that refuses one file refuses the batch; and what is not given to it at all
    for content in (good[:300] + b"\xff\xd9", good[:-900], b"no image", b""):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^.*7\.jpg is not an image that can be read: [^\n]*$"
        ):
            list(loader(files).epoch(0))
        assert not threads()
    path.unlink()
    with pytest.raises(ValueError, match=r"^.*7\.jpg cannot be read: No such file or directory$"):
        list(loader(files).epoch(0))


def test_a_batch_that_the_decoder_refuses_is_decoded_here(files, stand_in, monkeypatch):
    expected = sum_up(loader(files).epoch(0))

    def refuse(contents, device):
        raise RuntimeError("Unknown chroma subsampling")

    monkeypatch.setattr(loaders, "decode_jpegs", refuse)
    with pytest.warns(UserWarning, match="refuses some of .* images .Unknown chroma subsampling.;"):
        found = sum_up(loader(files).epoch(0))
    assert all(map(torch.equal, found, expected))


def test_what_the_decoder_is_not_given(tmp_path, stand_in, monkeypatch):
    """Pillow and it agree on what they show, so only the list tells."""
    image = photograph(60, 70)
    contents = [jpeg(image), jpeg(image.convert("CMYK")), jpeg(image, keep_rgb=True)]
    contents += [photographs(3)[2], jpeg(image) + b"\0"]
    given = []

    def noted(contents, device):
        given.extend(content.numpy().tobytes() for content in contents)
        return decode_here(contents)

    monkeypatch.setattr(loaders, "decode_jpegs", noted)
    files = write_files(tmp_path, contents)
    found = list(loader(files, batch=5, epochs=1, workers=0).epoch(0))
    assert given == contents[:1]
    assert_close(found, on_a_cpu(loader(files, "cpu", batch=5, epochs=1).epoch(0).__iter__))


def test_an_interrupted_run(files, stand_in, tmp_path):
    recipe = replace(TINY, augment="imagenet", image_size=16, dataset="imagenet", batch_size=4)
    data = Split(files, files)
    trainer(recipe, tmp_path / "whole", data, decode="cuda").run()
    first = trainer(recipe, tmp_path / "cut", data, decode="cuda")
    stop_at(first, 4)
    with pytest.raises(Interrupted):
        first.run()
    second = trainer(recipe, tmp_path / "cut", data, decode="cuda", workers=3)
    assert second.resume()
    second.run()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


ENDLESS = """
import sys, time
from pathlib import Path
import test_pipeline as tests
tests.loaders.choose = lambda asked, device, workers: asked
tests.loaders.resizes = lambda device: True
def slowly(contents, device):
    time.sleep(0.05)
    return tests.decode_here(contents)
tests.loaders.decode_jpegs = slowly
files = tests.write_files(Path(sys.argv[1]), tests.photographs(24))
found = tests.loader(files, epochs=10_000)
batches = found.epoch(0)
next(batches)
"""


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("raise RuntimeError('out of memory')", 1, "RuntimeError: out of memory\n"),
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.slow),
        pytest.param("pass", 0, "", marks=pytest.mark.slow),
        pytest.param("print('ready', flush=True)\nwhile True: time.sleep(0.01)", -2,
                     "KeyboardInterrupt\n", marks=pytest.mark.slow),
        ("list(batches)\nprint('ready', flush=True)\n"
         "for epoch in range(1, 10_000): list(found.epoch(epoch))", -2, "KeyboardInterrupt\n"),
    ],
)  # fmt: skip
def test_threads_end_with_python(tmp_path, then, code, said):
    """However it ends, quickly, and without a word from threads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS + then, str(tmp_path)], stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        if "ready" in then:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        try:  # if threads were waited for, they would prepare epochs for many minutes
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert errors.rstrip().endswith(said.rstrip())
    assert "cenet prepares" not in errors
    assert "Exception ignored" not in errors
