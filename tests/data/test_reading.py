"""Images of a whole data set, decoded by processes."""

import os
import signal

import numpy
import pytest
from PIL import Image

import cenet.data.decoding as decoding
from cenet.data.sources import Folder


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """Thirty files, read by two processes or more."""
    monkeypatch.setattr(decoding, "SHARE", 10)
    monkeypatch.setattr(decoding.os, "sched_getaffinity", lambda _: range(3))
    chance = numpy.random.default_rng(0)
    paths = []
    for i in range(30):
        path = tmp_path / f"{i}.png"
        Image.fromarray(chance.integers(0, 256, (8, 8, 3), dtype=numpy.uint8)).save(path)
        paths.append(path)
    return paths


def test_processes_read_what_one_reads(photographs, monkeypatch):
    started = []
    real = decoding._read_by_processes

    def noted(source, parts, images):
        started.append(len(parts))
        return real(source, parts, images)

    monkeypatch.setattr(decoding, "_read_by_processes", noted)
    found = decoding.read_all(Folder(photographs), 8)
    assert started == [3]
    for image, path in zip(found, photographs, strict=True):
        assert (image.permute(1, 2, 0).numpy() == numpy.asarray(Image.open(path))).all()
    monkeypatch.setattr(decoding, "SHARE", 1000)
    assert (decoding.read_all(Folder(photographs), 8) == found).all()
    assert started == [3]


@pytest.mark.parametrize("share", [10, 1000])
def test_all_images_that_are_no_use_are_counted_and_the_first_named(
    photographs, share, monkeypatch
):
    monkeypatch.setattr(decoding, "SHARE", share)
    photographs[4].write_bytes(b"no image")
    photographs[9].unlink()
    Image.new("RGB", (9, 8)).save(photographs[21])
    with pytest.raises(ValueError, match=r"^3 of 30 images cannot be used: ") as found:
        decoding.read_all(Folder(photographs), 8)
    for part in ("4.png is not an image", "9.png cannot be read: No such file", "21.png is 9×8"):
        assert part in str(found.value)


def test_a_process_that_dies_is_explained(photographs, monkeypatch):
    real = decoding.decode

    def dying(source, index):
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(source, index)

    monkeypatch.setattr(decoding, "decode", dying)
    with pytest.raises(ValueError, match="a process that decodes images has died; is there enough"):
        decoding.read_all(Folder(photographs), 8)
