"""From the bytes of an image file to its pixels."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy

from cenet.train.sources import Source


def read(source: Source, index: int) -> bytes:
    """The bytes of an image file; ValueError that says where it is if they cannot be read."""
    try:
        return source.read(index)
    except OSError as error:
        raise ValueError(f"{source.where(index)} cannot be read: {error.strerror}") from error


def decode(source: Source, index: int) -> Any:
    """An image of a source in RGB; ValueError that says where it is if it is damaged."""
    return _opened(BytesIO(read(source, index)), source.where(index))


def read_image(path: Path) -> Any:
    """An image file in RGB; ValueError if it is damaged."""
    return _opened(path, str(path))


def _opened(content: Path | BytesIO, where: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(content) as image:
            return eight_bits(image).convert("RGB")
    except UnidentifiedImageError as error:  # whose text is about where the bytes came from
        raise ValueError(
            f"{where} is not an image that can be read: its format is not known"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where} is not an image that can be read: {error}") from error


def eight_bits(image: Any) -> Any:
    """An image whose values are 0 to 255; Pillow's own conversion clips larger ones."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    values = numpy.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its pixels reach {values.max()}; save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(numpy.uint8))
