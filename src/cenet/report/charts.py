"""Drawings in SVG: lines, ranges and maps. Colours come from the style of the page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as Tree

from cenet.report.colours import LIGHT, picture
from cenet.report.scales import Axis
from cenet.report.svg import as_text, drawing, put_picture, put_text
from cenet.report.words import brief, short

WIDTH, PLOT = 440, 190  # units; about pixels
LEFT, RIGHT, BOTTOM = 56, 24, 46
LINE = 18  # height of a line of text
LETTER = 8.2  # width of a letter, at most
MANY = 60  # points; with more, only some carry a mark
MAP = 200
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


@dataclass(frozen=True)
class Series:
    """What one run adds to a drawing.

    Attributes:
        run: its number, which decides colour, dashes and marks.
        x: places on the axis.
        y: values; None leaves a gap.
        low: lower edge of the spread.
        high: upper edge.
        notes: what to say at each point.
    """

    run: int
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Rule:
    """A dashed line across a drawing at a value of x or y; what it says stands above the plot."""

    x: float | None = None
    y: float | None = None
    text: str = ""


def line_chart(
    label: str,
    series: Sequence[Series],
    runs: Sequence[str],
    x: Axis,
    y: Axis,
    *,
    marks: bool = False,
    rule: Rule | None = None,
) -> str:
    """Curves, with their spread where there is one.

    Args:
        label: what a reader who does not see it hears.
        series: one per run that has the numbers.
        runs: names of all runs.
        x: axis.
        y: axis.
        marks: draw every point.
        rule: a line to compare with.
    """
    root, frame = _frame(label, series, runs, x, y)
    if rule is not None:
        frame.rule(rule)
    for item in series:
        group = Tree.SubElement(root, "g", {"class": f"run{item.run}"})
        edges = zip(item.x, item.low, item.high, strict=False)
        known = [(at, low, up) for at, low, up in edges if low is not None and up is not None]
        if known:
            path = [(at, up) for at, _, up in known] + [(at, low) for at, low, _ in known[::-1]]
            Tree.SubElement(group, "path", {"class": "band", "d": frame.path(path) + "Z"})
        points = list(zip(item.x, item.y, strict=True))
        curve = {"class": "curve", "d": frame.path(points)}
        if DASHES[item.run]:
            curve["stroke-dasharray"] = DASHES[item.run]
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
    """A map of colours, and under it the scale."""
    height = MAP * len(values) / len(values[0])
    root = drawing(label, MAP, height + 38)
    put_picture(root, picture(values, low, high), (0, 0, MAP, height), PIXELS)
    scale = picture([[step / 99 for step in range(100)]], 0.0, 1.0)
    put_picture(root, scale, (0, height + 8, MAP, 8), PIXELS)
    for x, anchor, value in ((0, "start", low), (MAP, "end", high)):
        put_text(root, x, height + 32, brief(value), anchor)
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
        """How far apart two whole numbers are on x."""
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
        shape = {"class": "mark", "d": MARKS[item.run], "transform": place}
        mark = Tree.SubElement(group, "path", shape)
        if item.notes:
            Tree.SubElement(mark, "title").text = item.notes[index]

    def rule(self, rule: Rule) -> None:
        across, down = self.point(rule.x or self.x.low, rule.y or self.y.low)
        line = f"M{LEFT} {down:g}H{WIDTH - RIGHT}"
        if rule.x is not None:
            line = f"M{across:g} {self.top:g}v{PLOT}"
            share = self.x.place(rule.x)
            anchor = "start" if share < 0.4 else "end" if share > 0.6 else "middle"
            put_text(self.root, across, self.top - 12, rule.text, anchor)
        Tree.SubElement(self.root, "path", {"class": "rule", "d": line})


def _frame(
    label: str, series: Sequence[Series], runs: Sequence[str], x: Axis, y: Axis
) -> tuple[Tree.Element, _Frame]:
    """The drawing so far: legend (if there are several runs), axes and their numbers."""
    names = [(item.run, runs[item.run]) for item in series]
    rows = _legend_rows(names) if len(runs) > 1 else []
    top = LINE * len(rows) + (34 if rows else 26)
    root = drawing(label, WIDTH, top + PLOT + BOTTOM)
    frame = _Frame(root, top, x, y)
    for line, row in enumerate(rows):
        for left, run, name in row:
            _legend(root, left, LINE * line + 9, run, name)
    put_text(root, 4, top - 12, y.title)
    for value in y.ticks():
        _, down = frame.point(x.low, value)
        Tree.SubElement(root, "path", {"class": "grid", "d": f"M{LEFT} {down:g}H{WIDTH - RIGHT}"})
        put_text(root, LEFT - 7, down + 4, y.text(value), "end")
    for value in x.ticks(8 if x.whole else 6):
        across, _ = frame.point(value, y.low)
        Tree.SubElement(root, "path", {"class": "grid", "d": f"M{across:g} {top + PLOT:g}v4"})
        put_text(root, across, top + PLOT + 18, x.text(value), "middle")
    put_text(root, (LEFT + WIDTH - RIGHT) / 2, top + PLOT + 38, x.title, "middle")
    return root, frame


def _legend_rows(names: Sequence[tuple[int, str]]) -> list[list[tuple[float, int, str]]]:
    """Names in as many lines as they need."""
    rows: list[list[tuple[float, int, str]]] = [[]]
    left = 4.0
    for run, name in names:
        text = short(name)
        width = 38 + LETTER * len(text)
        if rows[-1] and left + width > WIDTH:
            rows.append([])
            left = 4.0
        rows[-1].append((left, run, text))
        left += width
    return rows


def _legend(root: Tree.Element, left: float, middle: float, run: int, name: str) -> None:
    group = Tree.SubElement(root, "g", {"class": f"run{run}"})
    line = {"class": "curve", "d": f"M{left:g} {middle:g}h24"}
    if DASHES[run]:
        line["stroke-dasharray"] = DASHES[run]
    Tree.SubElement(group, "path", line)
    place = f"translate({left + 12:g} {middle:g}) scale(3.2)"
    Tree.SubElement(group, "path", {"class": "mark", "d": MARKS[run], "transform": place})
    put_text(root, left + 29, middle + 4, name, of="name")
