"""Colours of the page and of its drawings, and numbers as colours."""

import base64
import struct
import zlib
from collections.abc import Sequence

# runs: told apart by people who see no red or no green; dashes and marks differ too
LIGHT = {
    "paper": "#fdfdfc", "card": "#ffffff", "ink": "#1d232b", "soft": "#5a6472",
    "line": "#dfe3e8", "wash": "#f3f5f7", "focus": "#0b57d0",
    "run0": "#0067a8", "run1": "#b84a00", "run2": "#007a5a", "run3": "#a3478a",
    "run4": "#6b5300", "run5": "#3d62c6", "run6": "#b0223a", "run7": "#57606c",
}  # fmt: skip
DARK = {
    "paper": "#12161b", "card": "#191e25", "ink": "#e8ebef", "soft": "#a3adba",
    "line": "#323a45", "wash": "#20262e", "focus": "#9cc2ff",
    "run0": "#5cb8f2", "run1": "#ff9f5c", "run2": "#3fcf9f", "run3": "#e796cf",
    "run4": "#d9bd55", "run5": "#9db4ff", "run6": "#ff8b97", "run7": "#bcc5cf",
}  # fmt: skip
# from low to high, each lighter than the one before
RAMP = (
    (13, 27, 62),
    (22, 73, 116),
    (38, 122, 142),
    (88, 171, 143),
    (178, 212, 140),
    (250, 240, 190),
)
UNKNOWN = (128, 128, 128)


def ramp(share: float) -> tuple[int, int, int]:
    """The colour of a value between 0 and 1."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    part = place - index
    pairs = zip(RAMP[index], RAMP[index + 1], strict=True)
    red, green, blue = (round(low + part * (high - low)) for low, high in pairs)
    return red, green, blue


def picture(values: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    """A PNG with one pixel per value, as a data URI; what is not known is grey."""
    span = (high - low) or 1.0
    lines = b"".join(
        b"\0"  # no filter
        + bytes(
            part
            for value in row
            for part in (UNKNOWN if value is None else ramp((value - low) / span))
        )
        for row in values
    )
    header = struct.pack(">IIBBBBB", len(values[0]), len(values), 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()
