"""Line charts of the last minutes, and bar charts over the modules of a model, as SVG."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.web.pages.html import Markup, tag
from hookd.tool.daemon.web.pages.plots import tick
from hookd.tool.reports import wording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.tool.daemon.web.pages.heat import ColourScale, Column
    from hookd.tool.daemon.web.pages.tree import Tree

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 26
BARS = 240
"""Maximum bars of a profile; in a larger model each bar shows the largest value of several modules."""
BARS_HEIGHT = 64
ORDERS = 2.0
"""Minimum range of a profile of sizes, in orders of magnitude, so that a factor of 1.1 does not look like a cliff."""
FAR = 4.0
"""Values above this multiple of the 95th percentile are cut off, so that the others stay readable."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        colour: number of a colour of the stylesheet.
        points: Unix time in seconds and value; NaN leaves a gap, an infinity also a mark at the top.
        unfinished: the beginning and the duration so far, in seconds, of a step in progress that already takes long.
    """

    label: str
    colour: int
    points: Sequence[tuple[float, float]]
    unfinished: tuple[float, float] | None = None


class Mark(NamedTuple):
    """Something that happened, at a Unix time in seconds."""

    time: float
    what: str


GAP_S = 8.0
"""Points that are further apart are not connected, unless most points of the line are about as far apart."""
GAP = 3.0
"""The same, in median distances of the line's points."""
STRIPS = 60
"""Parts of the time axis; each shows the values of its last points when the pointer is on it."""
MARKS = 50
"""Maximum marks of a chart, the last ones."""

LARGEST = 1e300
"""Limit for drawn values: the difference of two larger ones could overflow."""


def _drawn(value: float) -> float:
    return max(-LARGEST, min(LARGEST, value))


class _Frame:
    """Maps times and values to coordinates in a chart, whose right end is the present."""

    def __init__(self, lines: Sequence[Line], now: float, *, is_from_zero: bool) -> None:
        times = [when for line in lines for when, _ in line.points]
        values = sorted(_drawn(value) for line in lines for _, value in line.points if math.isfinite(value))
        values = sorted((*values, *(line.unfinished[1] for line in lines if line.unfinished)))
        self.first, self.last = min(times), max(*times, now, min(times) + 1.0)
        self.largest = values[-1]
        low, top = _range(values, is_from_zero=is_from_zero)
        self.each = tick(max(top - low, 1e-6 * abs(top), 1e-300), 4)
        self.low = math.floor(low / self.each + 1e-9) * self.each
        self.top = self.low + max(1, math.ceil((top - self.low) / self.each - 1e-9)) * self.each

    def x(self, when: float) -> float:
        return LEFT + (when - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.top) - self.low) / (self.top - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _range(values: Sequence[float], *, is_from_zero: bool) -> tuple[float, float]:
    """Return the range of an axis: from 0, except for small changes of a large value.

    A change of 1 % must not look like a cliff, and a few values far above all others are cut off.
    """
    low, top = values[0], values[-1]
    if low >= 0:
        top = min(top, FAR * max(values[int(0.95 * (len(values) - 1))], statistics.median(values)))
        if is_from_zero or low < 0.6 * top:
            low = 0.0
    if top - low < 0.1 * abs(top):
        low, top = low - 0.05 * abs(top), top + 0.05 * abs(top)
    return low, top if top > low else low + 1.0


def chart(  # noqa: PLR0913
    title: str, lines: Sequence[Line], write: Callable[[float], str], *, now: float, marks: Sequence[Mark] = (),
    is_from_zero: bool = False,
) -> Markup:  # fmt: skip
    """Draw lines over time, with a legend if there are several.

    Args:
        title: title of the chart.
        lines: the lines to draw.
        write: formats a number of the axis.
        now: the right end of the time axis, Unix time in seconds.
        marks: what happened meanwhile.
        is_from_zero: whether the axis begins at 0 if no value is below.
    """
    drawn = [line for line in lines if sum(math.isfinite(value) for _, value in line.points) > 1]
    if not drawn:
        return tag("figure", tag("figcaption", title), tag("p", "Nothing to draw yet.", class_="soft"))
    frame = _Frame(drawn, now, is_from_zero=is_from_zero)
    beyond = f", up to {write(frame.largest)}" if frame.largest > frame.top else ""
    head = tag("figcaption", tag("span", title, beyond), *_now(drawn, write))
    parts = [
        *_axes(frame, write),
        *_marks(frame, marks),
        *(part for line in drawn for part in _line(frame, line, write)),
        *_strips(frame, drawn, write),
    ]
    picture = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=_said(title, frame))
    return tag("figure", head, picture, legend(drawn) if len(drawn) > 1 else None)


def course(title: str, line: Line, write: Callable[[float], str]) -> Markup:
    """Draw a line over steps: its points have a step in the place of the time."""
    frame = _Frame([line], line.points[-1][0], is_from_zero=False)
    ends = ((frame.first, "start"), (frame.last, "end"))
    labels = (
        tag("text", f"step {step:,.0f}", x=f"{frame.x(step):.1f}", y=HEIGHT - 8, text_anchor=at) for step, at in ends
    )
    marks = (
        tag(
            "circle",
            tag("title", f"step {step:,.0f}: {write(value)}"),
            cx=f"{frame.x(step):.1f}",
            cy=f"{frame.y(value):.1f}",
            r=4,
            class_="point",
        )
        for step, value in line.points
        if math.isfinite(value)
    )
    parts = [*_heights(frame, write), *labels, *_line(frame, line, write), *marks]
    head = tag("figcaption", tag("span", title), *_now([line], write))
    return tag("figure", head, tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title))


def _said(title: str, frame: _Frame) -> str:
    return f"{title}, the last {wording.span(frame.last - frame.first)}"


def _now(lines: Sequence[Line], write: Callable[[float], str]) -> Iterator[Markup]:
    if len(lines) == 1:
        last = lines[0].points[-1][1]
        yield tag("b", write(last) if math.isfinite(last) else "not finite")


def legend(lines: Sequence[Line]) -> Markup:
    """Return the legend of colours."""
    return tag("ul", *(tag("li", tag("i", class_=f"c{line.colour}"), line.label) for line in lines), class_="legend")


def _axes(frame: _Frame, write: Callable[[float], str]) -> Iterator[Markup]:
    yield from _heights(frame, write)
    yield from _minutes(frame)


def _heights(frame: _Frame, write: Callable[[float], str]) -> Iterator[Markup]:
    """Label the axis of values."""
    for n in range(round((frame.top - frame.low) / frame.each) + 1):
        value = frame.low + n * frame.each
        y = f"{frame.y(value):.1f}"
        yield tag("line", class_="grid" if n else "axis", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        label = "0" if abs(value) < frame.each / 2 else write(value)
        yield tag("text", label, x=LEFT - 6, y=f"{frame.y(value) + 4:.1f}", text_anchor="end")


def _minutes(frame: _Frame) -> Iterator[Markup]:
    """Label the time axis with ages at round intervals."""
    span = frame.last - frame.first
    each = next(interval for interval in (5, 10, 15, 30, 60, 120, 300, 600, 10**9) if span / interval <= 5)
    for n in range(int(span // each) + 1):
        x, ago = frame.x(frame.last - n * each), n * each
        if x >= LEFT - 1:
            label = "now" if not n else f"{ago} s ago" if each < 60 else f"{ago // 60} min ago"
            at = {"x": f"{x:.1f}", "text_anchor": "middle" if n else "end"}
            yield tag("text", label, y=HEIGHT - 8, **at)


def _line(frame: _Frame, line: Line, write: Callable[[float], str]) -> Iterator[Markup]:
    """Draw a line as one piece between each two gaps, and a step in progress as it grows."""
    piece: list[str] = []
    gap, before = _gap(line), -math.inf
    for when, value in line.points:
        if when - before > gap:
            yield from _piece(piece, line)
            piece = []
        if math.isfinite(value):
            piece.append(f"{frame.x(when):.1f},{frame.y(value):.1f}")
            before = when
            continue
        yield from _piece(piece, line)
        piece = []
        x = frame.x(when)
        if not math.isnan(value):  # NaN: no value was shown; otherwise one was, and is not finite
            yield tag(
                "path", tag("title", "not finite"), d=f"M{x - 4:.1f} {TOP - 8} l8 8 m0 -8 l-8 8", class_="notfinite"
            )
    yield from _piece(piece, line)
    if line.unfinished is not None:
        began, seconds = line.unfinished
        title = tag("title", f"{line.label}: a step that is not over after {write(seconds)}")
        ends = f"{frame.x(began):.1f},{frame.y(0.0):.1f} {frame.x(frame.last):.1f},{frame.y(seconds):.1f}"
        yield tag("polyline", title, points=Markup(ends), class_=f"line unfinished c{line.colour}")


def _gap(line: Line) -> float:
    """Return the distance in seconds from which on two points are not connected."""
    distances = [after - before for (before, _), (after, _) in itertools.pairwise(line.points)]
    return max(GAP_S, GAP * statistics.median(distances)) if distances else GAP_S


def _piece(points: Sequence[str], line: Line) -> Iterator[Markup]:
    if points:
        points = points if len(points) > 1 else [*points, *points]
        title = tag("title", line.label)
        yield tag("polyline", title, points=Markup(" ".join(points)), class_=f"line c{line.colour}")


def _marks(frame: _Frame, marks: Sequence[Mark]) -> Iterator[Markup]:
    """Draw what happened as vertical lines."""
    shown = sorted(mark for mark in marks if frame.first <= mark.time <= frame.last)[-MARKS:]
    for mark in shown:
        x = f"{frame.x(mark.time):.1f}"
        title = tag("title", f"{_ago(frame, mark.time)}: {mark.what}")
        yield tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")
        yield tag("circle", title, cx=x, cy=TOP, r=4, class_="mark")


def _strips(frame: _Frame, lines: Sequence[Line], write: Callable[[float], str]) -> Iterator[Markup]:
    """Draw invisible strips, each with the last values of its time as a tooltip."""
    width = (frame.last - frame.first) / STRIPS
    values: dict[int, dict[str, str]] = {}
    for line in lines:
        for when, value in line.points:
            strip = min(STRIPS - 1, int((when - frame.first) / width))
            if not math.isnan(value):
                values.setdefault(strip, {})[line.label] = write(value) if math.isfinite(value) else "not finite"
    for strip, at in sorted(values.items()):
        said = [text if len(lines) == 1 else f"{label}: {text}" for label, text in at.items()]
        title = tag("title", "\n".join([_ago(frame, frame.first + (strip + 1) * width), *said]))
        x, wide = f"{frame.x(frame.first + strip * width):.1f}", f"{(WIDTH - LEFT - RIGHT) / STRIPS:.2f}"
        yield tag("rect", title, x=x, y=TOP + 6, width=wide, height=HEIGHT - TOP - BOTTOM - 6, class_="strip")


def _ago(frame: _Frame, when: float) -> str:
    seconds = frame.last - when
    return "now" if seconds < 1 else f"{wording.span(seconds)} ago"


def profile(column: Column, tree: Tree) -> Markup:
    """Draw one column as bars, one for each module with a value, in the order of the model."""
    named = [(name, column.values[name]) for name in tree.nodes if name in column.values]
    shown = [(name, value) for name, value in named if value or column.scale == "size"]
    if len(shown) < 2:
        return Markup()
    each = math.ceil(len(shown) / BARS)
    groups = [max(shown[at : at + each], key=_size) for at in range(0, len(shown), each)]
    colour_scale, top = column.colour_scale(), max((abs(one) for _, one in groups if math.isfinite(one)), default=0.0)
    width = WIDTH * 2 / len(groups)
    bars = []
    for n, (name, value) in enumerate(groups):
        tall = max(2.0, _height(value, top, colour_scale) * BARS_HEIGHT)
        title = tag("title", f"{name}: {column.write(value) if math.isfinite(value) else value}")
        at = {
            "x": f"{n * width:.1f}",
            "y": f"{BARS_HEIGHT - tall:.1f}",
            "width": f"{max(0.5, width - min(2.0, width / 4)):.1f}",
        }
        bars.append(tag("rect", title, **at, height=f"{tall:.1f}", class_=colour_scale.of(value)))
    said = f"{column.name} from the first module to the last"
    box = f"0 0 {WIDTH * 2} {BARS_HEIGHT}"
    return tag("svg", *bars, viewBox=box, role="img", aria_label=said, class_="profile", preserveAspectRatio="none")


def _size(one: tuple[str, float]) -> float:
    return abs(one[1]) if math.isfinite(one[1]) else math.inf


def _height(value: float, top: float, colour_scale: ColourScale) -> float:
    """Return the height of a bar, from 0 to 1; sizes are on a logarithmic scale."""
    if not math.isfinite(value):
        return 1.0
    if colour_scale.scale != "size":
        return abs(value) / top if top else 0.0
    orders = max(ORDERS, math.log10(colour_scale.top / colour_scale.low)) if colour_scale.low > 0 else ORDERS
    return 1.0 - 0.95 * math.log10(colour_scale.top / abs(value)) / orders if value else 0.0
