"""All images of a source at once: decoded by as many processes as there are cores."""

import mmap
import multiprocessing
import os
import sys
from typing import Any

import numpy
import torch
from torch import Tensor

import cenet.train.interrupts as interrupts
from cenet.train.decoding import decode
from cenet.train.sources import Source
from cenet.train.workers import untouched

# processes are started for that many images each, at least
SHARE = 2000


def read_all(source: Source, size: int) -> Tensor:
    """All images, (N, 3, size, size) in uint8.

    Raises:
        ValueError: with the names of those that are damaged or of another size.
    """
    count = len(source)
    shape = (count, 3, size, size)
    # of this process and those it starts
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
    """Put images in their places; what is wrong with the others."""
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
    """The same by a process for each part.

    They are forked, and use nothing but Pillow and what the source needs, all of which is imported
    before: other threads of this process may be in the middle of an import.
    """
    from PIL import Image

    Image.init()
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in parts]

    def read(number: int) -> None:
        interrupts.ignore()
        pipes[number][1].send(_read(source, parts[number], images))

    helpers = [fork.Process(target=read, args=(number,)) for number in range(len(parts))]
    try:
        with interrupts.held_back(), untouched():
            for helper in helpers:
                helper.start()
        for _, sender in pipes:
            sender.close()  # so that the death of a process is the end of its pipe
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
