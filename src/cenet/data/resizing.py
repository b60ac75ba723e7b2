"""Views of images of many sizes at once, on their device: bilinear, with antialiasing.

A view is two matrix products, rows · image · columnsᵀ. Each row of a matrix weighs the pixels that
one pixel of the result is made of: by a triangle around its centre as wide as the image shrinks,
inside the part that is shown, so that the weights add up to 1.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cenet.data.views import View

# of images that are worked on at once, each as large as the largest of them
PIXELS = 2**26
ALIGNED = 8


def resized(images: list[Tensor], views: list[View], size: int) -> Tensor:
    """What is shown of each image, (N, C, size, size), not rounded; float16 on a GPU.

    Args:
        images: (C, H, W) each, with the same channels, on one device.
        views: one for each image.
        size: height and width of the result.
    """
    first = images[0]
    dtype = torch.float16 if first.is_cuda else torch.float32
    found = torch.empty(
        len(images), size, len(first), size, dtype=dtype, device=first.device
    )  # rows, channels, columns, as the products leave them
    for chosen in _chunks(views):
        places = torch.tensor(chosen, device=first.device)
        own = [views[i] for i in chosen]
        found.index_copy_(0, places, _resized([images[i] for i in chosen], own, size, dtype))
    return found.permute(0, 2, 1, 3)


def _chunks(views: list[View]) -> Iterator[list[int]]:
    """Numbers of views whose parts are padded to the same size, similar ones together."""
    chosen: list[int] = []
    height = width = 0
    for i in sorted(range(len(views)), key=lambda i: views[i].box[2] * views[i].box[3]):
        grown = (max(height, views[i].box[2]), max(width, views[i].box[3]))
        if chosen and (len(chosen) + 1) * _room(grown[0]) * _room(grown[1]) > PIXELS:
            yield chosen
            chosen, grown = [], (views[i].box[2], views[i].box[3])
        chosen.append(i)
        height, width = grown
    yield chosen


def _room(length: int) -> int:
    """At least one more than a length, as matrix products like it."""
    return (length // ALIGNED + 1) * ALIGNED


def _resized(images: list[Tensor], views: list[View], size: int, dtype: torch.dtype) -> Tensor:
    """(N, size, C, size)."""
    count, channels, device = len(images), len(images[0]), images[0].device
    height, width = (_room(max(view.box[axis] for view in views)) for axis in (2, 3))
    # before there is work on the device for which the copy would wait
    numbers = torch.tensor([(*v.box[2:], *v.scaled, *v.corner, v.flip) for v in views])
    heights, widths, rows, columns, tops, lefts, flips = numbers.to(device).unbind(1)
    # zeros: what is no number there would stay so under a weight of 0
    padded = torch.zeros(count, height, channels, width, dtype=dtype, device=device)
    _copy_parts(padded, images, views)
    taps = [_taps(max(v.box[2 + axis] / v.scaled[axis] for v in views)) for axis in (0, 1)]
    places = torch.arange(size, device=device).expand(count, size)
    down = _weights(heights, rows, places + tops[:, None], height, taps[0])
    across = torch.where(flips[:, None] > 0, places.flip(1), places) + lefts[:, None]
    along = _weights(widths, columns, across, width, taps[1])
    shrunk = down.to(dtype).bmm(padded.view(count, height, channels * width))
    found = shrunk.view(count, size * channels, width).bmm(along.to(dtype).transpose(1, 2))
    return found.view(count, size, channels, size)


def _copy_parts(padded: Tensor, images: list[Tensor], views: list[View]) -> None:
    """Put the part of each image that a view shows into its place, channels side by side."""
    stride = padded.stride()
    order = (stride[2], stride[1], stride[3])
    parts, targets = [], []
    for i, (image, view) in enumerate(zip(images, views, strict=True)):
        top, left, height, width = view.box
        shape = (len(image), height, width)
        strides = image.stride()
        start = image.storage_offset() + top * strides[1] + left * strides[2]
        parts.append(image.as_strided(shape, strides, start))
        targets.append(padded.as_strided(shape, order, i * stride[0]))
    copy: Any = torch._foreach_copy_  # one call of Python for all
    copy(targets, parts)


def _taps(scale: float) -> int:
    """Most pixels that have a weight, where so many become one."""
    return 2 * math.ceil(max(scale, 1)) + 1


def _weights(lengths: Tensor, scaled: Tensor, places: Tensor, room: int, taps: int) -> Tensor:
    """Of every pixel for every place of the scaled side, (N, places, room).

    Args:
        lengths: of the sides.
        scaled: what the sides are scaled to.
        places: (N, places); a place outside of the scaled side has weights of 0.
        room: pixels of a side, more than its length.
        taps: pixels that have a weight.
    """
    scale = (lengths / scaled)[:, None]
    support = scale.clamp_min(1)
    centres = (places + 0.5) * scale
    pixels = (centres - support).floor()[:, :, None] + torch.arange(taps, device=places.device)
    distances = (pixels + 0.5 - centres[:, :, None]).abs() / support[:, :, None]
    inside = (pixels >= 0) & (pixels < lengths[:, None, None])
    weights = (1 - distances).clamp_min(0) * inside
    known = (places >= 0) & (places < scaled[:, None])
    weights = torch.where(known[:, :, None], weights / weights.sum(2, keepdim=True), 0.0)
    # those outside, whose weight is 0, go where there is no pixel
    pixels = torch.where(inside & known[:, :, None], pixels, room - 1).long()
    found = torch.zeros(*places.shape, room, device=places.device)
    return found.scatter_(2, pixels, weights)
