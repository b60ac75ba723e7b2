"""Crop and resize images of many sizes at once on their device: bilinear, with antialiasing.

A view is two matrix products, rows · image · columnsᵀ. Each row of a matrix holds the weights of
the pixels that make up one pixel of the result: a triangle around its centre, as wide as the scale,
cut off at the edges of the part that is shown and normalized to 1.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cenet.data.views import View
from cenet.internals import copy_each

# pixels of the images that are resized together, each padded to the largest of them
PIXELS = 2**26
ALIGNED = 8


def resized(images: list[Tensor], views: list[View], size: int) -> Tensor:
    """The view of each image, (N, C, size, size), not rounded; float16 on a GPU.

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
    """Indices of views that are resized together, views of similar size in one chunk."""
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
    """A multiple of 8 larger than the length, which makes matrix products fast."""
    return (length // ALIGNED + 1) * ALIGNED


def _resized(images: list[Tensor], views: list[View], size: int, dtype: torch.dtype) -> Tensor:
    """(N, size, C, size)."""
    count, channels, device = len(images), len(images[0]), images[0].device
    height, width = (_room(max(view.box[axis] for view in views)) for axis in (2, 3))
    # copied first: later, the copy would wait for work queued on the device
    numbers = torch.tensor([(*v.box[2:], *v.scaled, *v.corner, v.flip) for v in views])
    heights, widths, rows, columns, tops, lefts, flips = numbers.to(device).unbind(1)
    # zeros, because 0 · NaN would be NaN
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
    """Copy the part of each image that its view shows into `padded`, channels side by side."""
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
    copy_each(targets, parts)


def _taps(scale: float) -> int:
    """Largest number of pixels with a weight, if `scale` pixels become one."""
    return 2 * math.ceil(max(scale, 1)) + 1


def _weights(lengths: Tensor, scaled: Tensor, places: Tensor, room: int, taps: int) -> Tensor:
    """Weights of all pixels of a side for each pixel of the result, (N, places, room).

    Args:
        lengths: lengths of the sides.
        scaled: lengths that the sides are scaled to.
        places: pixels of the scaled sides, (N, places); those outside get weights of 0.
        room: padded length of a side, more than its length.
        taps: largest number of pixels with a weight.
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
    # pixels outside have a weight of 0; it is written to the padding
    pixels = torch.where(inside & known[:, :, None], pixels, room - 1).long()
    found = torch.zeros(*places.shape, room, device=places.device)
    return found.scatter_(2, pixels, weights)
