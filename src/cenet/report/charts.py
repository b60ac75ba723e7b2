"""Charts in SVG: colours and axes, curves, ranges and maps.

Colours come from the style of the page. Text reaches a drawing only through ElementTree, which
escapes it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as Tree

from PIL import Image

from cenet.analysis.diagnosis import data_uri
from cenet.formatting import Kind, abbreviate, percent, short, show

# colours of runs differ also for readers with red-green blindness; so do dashes and marks
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
WIDTH, PLOT = 440, 190  # units; about pixels
LEFT, RIGHT, BOTTOM = 56, 24, 52
LINE = 18  # height of a line of text
LETTER = 8.2  # width of a letter, at most
NAME, NAMES = 14, 20  # letters of a name at an axis, and the largest number of names
MANY = 60  # points; with more, only some carry a mark
MAP, BAR = 200, 260
PIXELS = "image-rendering:pixelated"
DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3")
# in a box of -1 to 1
MARKS = (
    "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.2 1.1.9H-1.1Z",
    "M0-1.3 1.2 0 0 1.3-1.2 0Z",
    "M0 1.2 1.1-.9H-1.1Z",
    "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "M-1.2-.5H1.2V.5H-1.2Z",
    "M-.5-1.2H.5V1.2H-.5Z",
)
STYLE = (
    """.drawing{font:12px system-ui,sans-serif}
.drawing text{fill:var(--soft);stroke:none}
.drawing .name{fill:var(--ink)}
.drawing .grid{stroke:var(--line);stroke-width:1;fill:none}
.drawing .rule{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 4;fill:none}
.drawing .curve{stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;fill:none}
.drawing .band{fill:currentColor;opacity:.16}
.drawing .mark{fill:currentColor}
.drawing .tag{fill:#10141a;font:600 21px system-ui,sans-serif}
"""
    + "".join(f".drawing .run{i}{{color:var(--run{i})}}\n" for i in range(8))
)  # fmt: skip
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """An axis with its range and the format of its numbers.

    Attributes:
        title: name of the quantity.
        low: first value.
        high: last value.
        kind: number or percent.
        log: logarithmic; low and high must be above 0.
        whole: label whole numbers only.
        names: labels of the positions 1, 2, … in place of numbers.
    """

    title: str
    low: float
    high: float
    kind: Kind = "number"
    log: bool = False
    whole: bool = False
    names: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """Position of a value from 0 (low end) to 1 (high end); values outside are clamped."""
        low, high = self.low, self.high
        if self.log:
            low, high = math.log10(low), math.log10(high)
            value = math.log10(value) if value > 0 else low
        share = (value - low) / (high - low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """At most `most` round numbers."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, step)]
        apart = nice_step((self.high - self.low) / (most - 1))
        if self.whole:
            apart = max(1.0, float(math.ceil(apart)))
        low = math.ceil(self.low / apart - 1e-9)
        high = math.floor(self.high / apart + 1e-9)
        found = [index * apart for index in range(low, high + 1)]
        if self.whole and self.low <= 1 < found[0]:
            found.insert(0, 1.0)
        return found

    def text(self, value: float) -> str:
        """The label of a number."""
        if self.kind == "percent":
            return percent(value if abs(value) >= 1e-9 else 0.0, "g")
        if self.log:
            return f"{value:g}" if 1e-3 <= value <= 1e3 else f"{value:.0e}".replace("e-0", "e-")
        return show(int(value)) if self.whole else f"{value:.6g}"


def by_epoch(epochs: list[int]) -> Axis:
    """The axis of epochs, from the first to the last; a single one lies in the middle."""
    low, high = min(epochs), max(epochs)
    margin = 0.0 if high > low else 0.5
    return Axis("epoch", low - margin, high + margin, whole=True)


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is no smaller than `least`."""
    if least <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in STEPS if power * step >= least * (1 - 1e-9))


def around(title: str, values: list[float], kind: Kind = "number", *, zero: bool = False) -> Axis:
    """An axis that spans all values, between round numbers; with `zero`, it starts at 0."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(low), abs(high))
    if high - low < max(1e-4 * largest, 1e-12):  # the labels of the axis would all be equal
        high += largest if largest > 1e-6 else 1.0
    step = nice_step((high - low) / 5)
    return Axis(
        title, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, kind
    )


@dataclass(frozen=True)
class Series:
    """One curve of a run.

    Attributes:
        run: number of the run; sets colour, dashes and marks.
        x: positions on the axis.
        y: values; None leaves a gap.
        low: lower edge of the spread.
        high: upper edge of the spread.
        notes: tooltip of each point.
        name: in the legend; by default that of the run.
        look: number that sets dashes and marks instead, if a run has several curves.
    """

    run: int
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    notes: Sequence[str] = ()
    name: str = ""
    look: int | None = None

    @property
    def dashes(self) -> str:
        """Dash pattern of the curve."""
        return DASHES[self.run if self.look is None else self.look]

    @property
    def shape(self) -> str:
        """SVG path of the marks."""
        return MARKS[self.run if self.look is None else self.look]


@dataclass(frozen=True)
class Rule:
    """A dashed line across a drawing at a value of x or y.

    Attributes:
        x: value of x, for a vertical line.
        y: value of y, for a horizontal line.
        text: above the plot.
        anchor: "end" puts the text to the left of a line at x, "start" to its right.
    """

    x: float | None = None
    y: float | None = None
    text: str = ""
    anchor: str = "start"


def line_chart(
    label: str,
    series: Sequence[Series],
    runs: Sequence[str],
    x: Axis,
    y: Axis,
    *,
    marks: bool = False,
    rules: Sequence[Rule] = (),
) -> str:
    """Curves, with their spread where there is one.

    Args:
        label: text for screen readers.
        series: one per run that has the numbers.
        runs: names of all runs.
        x: axis.
        y: axis.
        marks: mark every point.
        rules: reference lines.
    """
    root, frame = _frame(label, series, runs, x, y, rules)
    for item in series:
        group = Tree.SubElement(root, "g", {"class": f"run{item.run}"})
        edges = zip(item.x, item.low, item.high, strict=False)
        known = [(at, low, up) for at, low, up in edges if low is not None and up is not None]
        if known:
            path = [(at, up) for at, _, up in known] + [(at, low) for at, low, _ in known[::-1]]
            Tree.SubElement(group, "path", {"class": "band", "d": frame.path(path) + "Z"})
        points = list(zip(item.x, item.y, strict=True))
        curve = {"class": "curve", "d": frame.path(points)}
        if item.dashes:
            curve["stroke-dasharray"] = item.dashes
        Tree.SubElement(group, "path", curve)
        step = 1 if marks and len(points) <= MANY else max(1, len(points) // 6)
        for index in range((item.run * step) // 4 if step > 1 else 0, len(points), step):
            frame.mark(group, item, index)
    return as_text(root)


def range_chart(label: str, series: Sequence[Series], runs: Sequence[str], x: Axis, y: Axis) -> str:
    """A bar from the low to the high value of every point, with a mark in between."""
    root, frame = _frame(label, series, runs, x, y)
    for place, item in enumerate(series):
        # runs stand beside each other
        shift = (place - (len(series) - 1) / 2) * min(3.5, frame.unit() / (len(series) + 1))
        move = {"class": f"run{item.run}", "transform": f"translate({shift:.1f} 0)"}
        group = Tree.SubElement(root, "g", move)
        for index, (at, low, high) in enumerate(zip(item.x, item.low, item.high, strict=True)):
            if low is not None and high is not None:
                ends = frame.path([(at, low), (at, high)])
                Tree.SubElement(group, "path", {"class": "curve", "d": ends})
            frame.mark(group, item, index)
    return as_text(root)


def heat_map(label: str, values: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    """A matrix as colours; `colour_bar` draws the scale."""
    height = MAP * len(values) / len(values[0])
    root = drawing(label, MAP, height)
    put_picture(root, picture(values, low, high), (0, 0, MAP, height), PIXELS)
    return as_text(root)


def colour_bar(low: str, high: str) -> str:
    """The colour scale of maps, with a text at each end."""
    root = drawing(f"Colours from {low} to {high}", BAR, 28)
    put_picture(root, picture([[step / 99 for step in range(100)]], 0.0, 1.0), (0, 0, BAR, 8))
    for x, anchor, text in ((0, "start", low), (BAR, "end", high)):
        put_text(root, x, 24, text, anchor)
    return as_text(root)


def standalone(svg: str) -> str:
    """The drawing as a file of its own, with the colours of the light page."""
    style = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], STYLE)
    head, rest = svg.split(">", 1)
    return f"{head}><style>{style}</style>{rest}\n"


@dataclass(frozen=True)
class _Frame:
    """The rectangle between the axes."""

    root: Tree.Element
    top: float
    x: Axis
    y: Axis

    def point(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(self.top + (1 - self.y.place(y)) * PLOT, 1)

    def unit(self) -> float:
        """Distance of two neighbouring whole numbers on x."""
        return (WIDTH - LEFT - RIGHT) / (self.x.high - self.x.low)

    def path(self, points: Sequence[tuple[float, float | None]]) -> str:
        """Lines through the points, with a gap where a value is not known."""
        steps, pen = [], "M"
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            across, down = self.point(x, y)
            steps.append(f"{pen}{across:g} {down:g}")
            pen = "L"
        return "".join(steps)

    def mark(self, group: Tree.Element, item: Series, index: int) -> None:
        value = item.y[index]
        if value is None:
            return
        across, down = self.point(item.x[index], value)
        size = 2.4 if len(item.x) > 24 else 3.2
        place = f"translate({across:g} {down:g}) scale({size})"
        shape = {"class": "mark", "d": item.shape, "transform": place}
        mark = Tree.SubElement(group, "path", shape)
        if item.notes:
            Tree.SubElement(mark, "title").text = item.notes[index]

    def rule(self, rule: Rule) -> None:
        across, down = self.point(rule.x or self.x.low, rule.y or self.y.low)
        line = f"M{LEFT} {down:g}H{WIDTH - RIGHT}"
        if rule.x is not None:
            line = f"M{across:g} {self.top:g}v{PLOT}"
            put_text(self.root, across, self.top - 8, rule.text, rule.anchor)
        Tree.SubElement(self.root, "path", {"class": "rule", "d": line})

    def names(self) -> None:
        """Names below the axis of x, as many as fit; rotated unless they are short."""
        texts = _abbreviated(self.x.names)
        for place in range(0, len(texts), -(-len(texts) // NAMES)):
            across, _ = self.point(place + 1, self.y.low)
            self._tick(across)
            below = self.top + PLOT
            if self.flat():
                label = put_text(self.root, across, below + 23, texts[place], "middle", "layer")
            else:
                turn = f"translate({across + 4:g} {below + 9:g}) rotate(-90)"
                label = put_text(self.root, 0, 0, texts[place], "end", "layer", turn=turn)
            Tree.SubElement(label, "title").text = self.x.names[place]

    def flat(self) -> bool:
        """Whether all names fit beside each other."""
        return self.unit() >= LETTER * (1 + _longest(self.x.names))

    def numbers(self) -> None:
        """Numbers below the axis of x."""
        for value in self.x.ticks(8 if self.x.whole else 6):
            across, _ = self.point(value, self.y.low)
            self._tick(across)
            put_text(self.root, across, self.top + PLOT + 23, self.x.text(value), "middle")

    def _tick(self, across: float) -> None:
        line = f"M{across:g} {self.top + PLOT:g}v4"
        Tree.SubElement(self.root, "path", {"class": "grid", "d": line})


def _frame(
    label: str,
    series: Sequence[Series],
    runs: Sequence[str],
    x: Axis,
    y: Axis,
    rules: Sequence[Rule] = (),
) -> tuple[Tree.Element, _Frame]:
    """A drawing with legend (if there are several curves), axes, labels and rules."""
    named = len(runs) > 1 or any(item.name for item in series)
    rows = _legend_rows([(item, item.name or runs[item.run]) for item in series] if named else [])
    above = LINE if any(rule.text for rule in rules) else 0  # texts of rules, below the title
    top = LINE * len(rows) + (40 if rows else 32) + above
    root = drawing(label, WIDTH, 0)
    frame = _Frame(root, top, x, y)
    upright = x.names and not frame.flat()
    bottom = 28 + LETTER * _longest(x.names) if upright else BOTTOM
    root.set("viewBox", f"0 0 {WIDTH} {top + PLOT + bottom:g}")
    for line, row in enumerate(rows):
        for left, item, name in row:
            _legend(root, left, LINE * line + 9, item, name)
    put_text(root, 4, top - 17 - above, y.title)
    for value in y.ticks():
        _, down = frame.point(x.low, value)
        Tree.SubElement(root, "path", {"class": "grid", "d": f"M{LEFT} {down:g}H{WIDTH - RIGHT}"})
        put_text(root, LEFT - 7, down + 4, y.text(value), "end")
    if x.names:
        frame.names()
    else:
        frame.numbers()
    put_text(root, (LEFT + WIDTH - RIGHT) / 2, top + PLOT + bottom - 8, x.title, "middle")
    for rule in rules:
        frame.rule(rule)
    return root, frame


def _abbreviated(names: Sequence[str]) -> list[str]:
    """Abbreviated names, without an ending that all share, such as `.relu`."""
    heads, _, ends = zip(*(name.rpartition(".") for name in names), strict=True)
    kept = heads if all(heads) and len(set(ends)) == 1 else names
    return [abbreviate(name, NAME) for name in kept]


def _longest(names: Sequence[str]) -> int:
    return max(map(len, _abbreviated(names)))


def _legend_rows(names: Sequence[tuple[Series, str]]) -> list[list[tuple[float, Series, str]]]:
    """Names in lines of the legend, as many lines as they need."""
    rows: list[list[tuple[float, Series, str]]] = [[]] if names else []
    left = 4.0
    for item, name in names:
        text = short(name)
        width = 38 + LETTER * len(text)
        if rows[-1] and left + width > WIDTH:
            rows.append([])
            left = 4.0
        rows[-1].append((left, item, text))
        left += width
    return rows


def _legend(root: Tree.Element, left: float, middle: float, item: Series, name: str) -> None:
    group = Tree.SubElement(root, "g", {"class": f"run{item.run}"})
    line = {"class": "curve", "d": f"M{left:g} {middle:g}h24"}
    if item.dashes:
        line["stroke-dasharray"] = item.dashes
    Tree.SubElement(group, "path", line)
    place = f"translate({left + 12:g} {middle:g}) scale(3.2)"
    Tree.SubElement(group, "path", {"class": "mark", "d": item.shape, "transform": place})
    put_text(root, left + 29, middle + 4, name, of="name")


def ramp(share: float) -> tuple[int, int, int]:
    """The colour of a value between 0 and 1."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    part = place - index
    pairs = zip(RAMP[index], RAMP[index + 1], strict=True)
    red, green, blue = (round(low + part * (high - low)) for low, high in pairs)
    return red, green, blue


def picture(values: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    """A PNG with one pixel per value, as a data URI; unknown values are grey."""
    span = (high - low) or 1.0
    pixels = bytes(
        part
        for row in values
        for value in row
        for part in (UNKNOWN if value is None else ramp((value - low) / span))
    )
    return data_uri(Image.frombytes("RGB", (len(values[0]), len(values)), pixels))


def drawing(label: str, width: float, height: float) -> Tree.Element:
    """An empty drawing; `label` is its text for screen readers."""
    return Tree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:g} {height:g}",
            "class": "drawing",
            "role": "img",
            "aria-label": label,
        },
    )


def put_picture(
    root: Tree.Element, uri: str, box: tuple[float, float, float, float], style: str = ""
) -> None:
    """A picture that fills a box: left, top, width, height."""
    place = dict(zip(("x", "y", "width", "height"), (f"{value:g}" for value in box), strict=True))
    look = {"preserveAspectRatio": "none"} | ({"style": style} if style else {})
    Tree.SubElement(root, "image", {"href": uri, **place, **look})


def put_text(
    root: Tree.Element,
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    of: str = "",
    *,
    turn: str = "",
) -> Tree.Element:
    """Text on a line; `of` is its class, `turn` how it is moved and rotated."""
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    place |= {"class": of} if of else {}
    place |= {"transform": turn} if turn else {}
    element = Tree.SubElement(root, "text", place)
    element.text = text
    return element


def as_text(root: Tree.Element) -> str:
    """The drawing as SVG."""
    return Tree.tostring(root, encoding="unicode")
