"""Decode JPEG files on a GPU, and decide which files its decoder handles correctly."""

import struct
from io import BytesIO
from typing import Literal

import torch
from torch import Tensor

Decoding = Literal["cpu", "cuda"]

START, END = b"\xff\xd8", b"\xff\xd9"
ADOBE, SCAN = 0xEE, 0xDA
# baseline, extended and progressive, all with Huffman codes
FRAMES = (0xC0, 0xC1, 0xC2)
# sampling factors of grey images, and of 4:4:4, 4:2:2 and 4:2:0. Grey images with other factors,
# which should make no difference, are decoded to wrong pixels
SAMPLING = (b"\x11", b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11")
GREY = 128
# with this many worker processes, CPUs decode faster than a GPU that trains (docs/training.md)
MANY_WORKERS = 12


def choose(asked: Literal["auto", "cpu", "cuda"], device: torch.device, workers: int) -> Decoding:
    """Choose where the files of a run are decoded; ValueError if `asked` is not possible.

    Args:
        asked: the option `decode`; see `Options`.
        device: device of the run.
        workers: number of worker processes.
    """
    if asked == "cpu" or (asked == "auto" and workers >= MANY_WORKERS):
        return "cpu"
    found = _problem(device)
    if found is None:
        return "cuda"
    if asked == "cuda":
        raise ValueError(f"--decode cuda is not possible: {found}; use --decode cpu")
    return "cpu"


def _problem(device: torch.device) -> str | None:
    """Why a device cannot decode; None if it decodes a small image correctly."""
    from PIL import Image

    if device.type != "cuda":
        return f"this run is on {device.type}"
    file = BytesIO()
    Image.new("L", (16, 16), GREY).save(file, "JPEG")
    try:
        (image,) = decode_jpegs([as_tensor(file.getvalue())], device)
    except (ImportError, RuntimeError) as error:
        return f"torchvision cannot decode on {device} ({str(error).splitlines()[0]})"
    if len(image) != 3 or int((image.int() - GREY).abs().max()) > 2:
        return f"torchvision decodes a grey image on {device} to other pixels"
    return None


def as_tensor(content: bytes) -> Tensor:
    """The bytes of a file as a tensor, for the decoder."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def decode_jpegs(contents: list[Tensor], device: torch.device) -> list[Tensor]:
    """Images in RGB on a GPU, (3, H, W) each; RuntimeError if any cannot be decoded."""
    from torchvision.io import ImageReadMode, decode_jpeg

    with torch.cuda.device(device):
        # the decoder uses a stream of its own, and this one may still read the memory it writes to
        torch.cuda.current_stream().synchronize()
        found: list[Tensor] = decode_jpeg(contents, mode=ImageReadMode.RGB, device=device)
    return found


def jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of a complete JPEG in grey or YCbCr with 8 bits; None for other files.

    For other files the GPU's decoder fails for the whole batch, returns wrong colours, or fills
    missing parts without an error.
    """
    if not (content.startswith(START) and content.endswith(END)):
        return None
    place, is_rgb = len(START), False
    while place + 4 <= len(content) and content[place] == 0xFF:
        kind, length = content[place + 1], int.from_bytes(content[place + 2 : place + 4], "big")
        if kind == 0xFF:  # padding before a marker
            place += 1
            continue
        if kind == SCAN or length < 2:
            return None
        segment = content[place + 4 : place + 2 + length]
        if kind == ADOBE and segment.startswith(b"Adobe") and len(segment) >= 12:
            is_rgb = segment[11] == 0
        elif kind in FRAMES and len(segment) >= 6:
            bits, height, width, components = struct.unpack(">BHHB", segment[:6])
            is_rgb = components == 3 and (is_rgb or segment[6::3] == b"RGB")
            good = bits == 8 and segment[7::3] in SAMPLING and not is_rgb and height and width
            return (height, width) if good else None
        place += 2 + length
    return None
