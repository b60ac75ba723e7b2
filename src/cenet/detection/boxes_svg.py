"""Images with labelled boxes, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width
from xml.etree import ElementTree as Tree

from cenet.formatting import short
from cenet.report.charts import as_text, drawing, put_picture, put_text

# background colours of names, which have dark letters, in both themes
COLOURS = ("#ffb000", "#35c9e8", "#ff7a6b", "#7fd95b", "#d59bff", "#f2e64a", "#ff8fc7", "#5fe0b5")
NARROWEST, FLATTEST = 1.0, 0.3  # width by height, and height by width, of a drawing
TALL, PAD = 28.0, 7.0  # height of a name, and the space before and after it
LETTER, CAPITAL, WIDE = 12.5, 16.0, 21.0  # widths of letters, at most


@dataclass(frozen=True)
class Box:
    """A box on a picture: left, top, width and height, its name, and the number of its colour."""

    place: tuple[float, float, float, float]
    name: str
    colour: int


def colour(number: int) -> str:
    """The colour of a box."""
    return COLOURS[number % len(COLOURS)]


def draw_boxes(
    label: str, uri: str, size: tuple[float, float], boxes: Sequence[Box], words: str = ""
) -> str:
    """A picture with boxes; names are placed so that they overlap as little as possible.

    Args:
        label: text for screen readers.
        uri: data URI of the picture.
        size: width and height of the picture in units, which are about pixels.
        boxes: in the same units.
        words: text across the middle of the picture.
    """
    wide, high = max(size[0], NARROWEST * size[1]), max(size[1], FLATTEST * size[0])
    left, top = (wide - size[0]) / 2, (high - size[1]) / 2
    root = drawing(label, wide, high)
    put_picture(root, uri, (left, top, *size))
    moved = [(left + box.place[0], top + box.place[1], *box.place[2:]) for box in boxes]
    for box, place in zip(boxes, moved, strict=True):
        _outline(root, place, colour(box.colour))
    taken: list[tuple[float, float, float]] = []
    for box, place in zip(boxes, moved, strict=True):
        text = short(box.name)
        width = min(_width(text), wide)
        spot = _free(place, width, (wide, high), taken)
        taken.append((*spot, width))
        _tag(root, spot, width, text, colour(box.colour))
    if words:
        width = _width(words)
        _tag(root, ((wide - width) / 2, (high - TALL) / 2), width, words, "#f3f5f7")
    return as_text(root)


def _width(text: str) -> float:
    """Width of a name with its background."""
    letters = (
        WIDE if east_asian_width(letter) in "WF" or letter in "MWmw@%"
        else CAPITAL if letter.isupper()
        else LETTER
        for letter in text
    )  # fmt: skip
    return 2 * PAD + sum(letters)


def _outline(root: Tree.Element, place: tuple[float, ...], paint: str) -> None:
    x, y, width, height = (f"{value:.1f}" for value in place)
    shape = {"x": x, "y": y, "width": width, "height": height, "fill": "none"}
    for stroke, thick in (("#10141a", "5"), (paint, "3")):
        Tree.SubElement(root, "rect", shape | {"stroke": stroke, "stroke-width": thick})


def _free(
    place: tuple[float, ...],
    width: float,
    room: tuple[float, float],
    taken: Sequence[tuple[float, float, float]],
) -> tuple[float, float]:
    """Place of a name above, in or below its box: the first with the fewest overlaps."""
    x, y, wide, high = place
    across = (x - 1, x + wide + 1 - width)
    down = (y - TALL, y, y + high - TALL, y + high, y - 2 * TALL, y + high + TALL)
    spots = [
        (min(max(left, 0.0), room[0] - width), min(max(top, 0.0), room[1] - TALL))
        for top in down
        for left in across
    ]

    def covered(spot: tuple[float, float]) -> int:
        return sum(
            spot[0] < left + other and left < spot[0] + width and abs(spot[1] - top) < TALL
            for left, top, other in taken
        )

    return min(spots, key=covered)


def _tag(
    root: Tree.Element, spot: tuple[float, float], width: float, text: str, paint: str
) -> None:
    shape = {"x": f"{spot[0]:.1f}", "y": f"{spot[1]:.1f}", "width": f"{width:.1f}"}
    Tree.SubElement(root, "rect", shape | {"height": f"{TALL:g}", "rx": "3", "fill": paint})
    put_text(root, spot[0] + width / 2, spot[1] + 20.5, text, "middle", "tag")
