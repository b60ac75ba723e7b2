"""From the bytes of image files to pixels: one image, or a whole source by many processes."""

import mmap
import multiprocessing
import os
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import cenet.signals as signals
from cenet.data.sources import Source
from cenet.data.workers import untouched

# smallest number of images per process
SHARE = 2000
REMOVE = "remove or replace it"


def read(source: Source, index: int) -> bytes:
    """The bytes of an image file; ValueError that names its place if it cannot be read."""
    try:
        return source.read(index)
    except OSError as error:
        raise ValueError(f"{source.where(index)} cannot be read: {error.strerror}") from error


def decode(source: Source, index: int) -> Any:
    """An image of a source in RGB; ValueError that names its place if it is damaged."""
    return _opened(BytesIO(read(source, index)), source.where(index))


def read_image(path: Path) -> Any:
    """An image file in RGB; ValueError if it is damaged."""
    return _opened(path, str(path))


def _opened(content: Path | BytesIO, where: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(content) as image:
            return eight_bits(image).convert("RGB")
    except UnidentifiedImageError as error:  # its own message names the buffer, not the file
        raise ValueError(
            f"{where} is not an image that can be read: its format is not known; {REMOVE}"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where} is not an image that can be read: {error}; {REMOVE}") from error


def eight_bits(image: Any) -> Any:
    """The image with values from 0 to 255; Pillow's own conversion would clip 16-bit values."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    values = numpy.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its pixels reach {values.max()}; save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(numpy.uint8))


def read_all(source: Source, size: int) -> Tensor:
    """All images of a source, (N, 3, size, size) in uint8, decoded by one process per core.

    Raises:
        ValueError: images are damaged or of another size; the message lists some of them.
    """
    count = len(source)
    shape = (count, 3, size, size)
    # memory that is shared with the processes
    memory = mmap.mmap(-1, count * 3 * size * size)
    images = numpy.frombuffer(memory, numpy.uint8).reshape(shape)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    helpers = min(cores, count // SHARE)
    if helpers < 2:
        problems = _read(source, range(count), images)
    else:
        parts = [range(first, count, helpers) for first in range(helpers)]
        problems = _read_by_processes(source, parts, images)
    if problems:
        shown = "; ".join(problems[:5]) + ("; …" if len(problems) > 5 else "")
        raise ValueError(f"{len(problems)} of {count} images cannot be used: {shown}")
    return torch.from_numpy(images)


def _read(source: Source, places: range, images: Any) -> list[str]:
    """Decode some images into their places of `images`, and return the problems of the others."""
    size = images.shape[-1]
    problems = []
    for i in places:
        try:
            image = decode(source, i)
        except ValueError as error:
            problems.append(str(error))
            continue
        if image.size != (size, size):
            width, height = image.size
            problems.append(f"{source.where(i)} is {width}×{height}, not {size}×{size}")
            continue
        images[i] = numpy.asarray(image).transpose(2, 0, 1)
    return problems


def _read_by_processes(source: Source, parts: list[range], images: Any) -> list[str]:
    """`_read` with one forked process for each part.

    The processes import nothing: Pillow and the packages of the source are imported before the
    fork, because another thread may hold the lock of an import at that moment.
    """
    from PIL import Image

    Image.init()
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in parts]

    def read(number: int) -> None:
        signals.ignore()
        pipes[number][1].send(_read(source, parts[number], images))

    helpers = [fork.Process(target=read, args=(number,)) for number in range(len(parts))]
    try:
        with signals.held_back(), untouched():
            for helper in helpers:
                helper.start()
        for _, sender in pipes:
            sender.close()  # so that the pipe ends when its process dies
        return [problem for receiver, _ in pipes for problem in receiver.recv()]
    except EOFError as error:
        raise ValueError(
            "a process that decodes images has died; is there enough memory?"
        ) from error
    finally:
        for helper in helpers:
            if helper.pid is not None:
                helper.kill()
                helper.join()
