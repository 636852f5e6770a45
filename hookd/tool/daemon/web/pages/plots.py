"""Plots as SVG, with tooltips (`<title>`)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages.html import Markup, tag
from hookd.tool.reports import wording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd.wire.report import CurvePoint


WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 34
TICKS = 5
COLOURS = 7
"""Number of distinct colours; the one after them is grey, for the rest."""
FAR = 4.0
"""Steps longer than this multiple of the 95th percentile are cut off, so that the others stay readable."""


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        colour: number of a colour of the stylesheet.
        points: `{"step", "seconds", "longest"}` each, by step.
    """

    label: str
    colour: int
    points: Sequence[CurvePoint]


@dataclass(frozen=True)
class Event:
    """Something that happened at a step."""

    step: float
    what: str


@dataclass(frozen=True)
class _Scale:
    """Maps steps and seconds to coordinates in the plot."""

    first: float
    last: float
    top: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        return HEIGHT - BOTTOM - min(seconds, self.top) / self.top * (HEIGHT - TOP - BOTTOM)


def step_times(curves: Sequence[Curve], events: Sequence[Event] = ()) -> Markup:
    """Plot step time over steps; with a single curve also the longest step of each point."""
    points = [point for curve in curves for point in curve.points]
    if len(points) < 2:
        return tag("p", "Too few steps to draw.", class_="soft")
    scale = _scale(points, has_longest=len(curves) == 1)
    parts = [*_axes(scale), *_events(scale, events)]
    if len(curves) == 1:
        parts += _longest(scale, curves[0].points)
    parts += [_line(scale, curve) for curve in curves]
    label = f"time of a step, from step {scale.first:.0f} to {scale.last:.0f}"
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def cut_off(points: Sequence[CurvePoint]) -> tuple[int, float]:
    """Return how many points a plot of one curve cuts off, and the longest step in seconds."""
    if len(points) < 2:
        return 0, 0.0
    top = _scale(points, has_longest=True).top
    longest = [point["longest"] for point in points]
    return sum(1 for seconds in longest if seconds > top), max(longest)


def _scale(points: Sequence[CurvePoint], *, has_longest: bool) -> _Scale:
    steps = [point["step"] for point in points]
    seconds = sorted(point["longest" if has_longest else "seconds"] for point in points)
    usual = max(seconds[int(0.95 * (len(seconds) - 1))], statistics.median(point["seconds"] for point in points))
    top = min(seconds[-1], FAR * usual)
    return _Scale(min(steps), max(*steps, min(steps) + 1), ceiling(top * 1.05 or 1e-9))


def ceiling(value: float) -> float:
    """Round up to a multiple of the tick distance."""
    return math.ceil(value / tick(value) - 1e-9) * tick(value)


def tick(value: float, ticks: int = TICKS) -> float:
    """Return a round distance for at most `ticks` ticks."""
    rough = value / ticks
    power = float(10 ** math.floor(math.log10(rough)))
    return next(power * n for n in (1, 2, 5, 10) if rough <= power * n * (1 + 1e-9))


def _axes(scale: _Scale) -> Iterator[Markup]:
    each, floor = tick(scale.top), HEIGHT - BOTTOM
    for n in range(round(scale.top / each) + 1):
        y = scale.y(n * each)
        height = f"{y:.1f}"
        yield tag("line", class_="grid" if n else "axis", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height)
        label = wording.seconds(n * each) if n else "0"
        yield tag("text", label, x=LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end")
    each = max(1.0, tick(scale.last - scale.first, 2 * TICKS))
    n = math.ceil(scale.first / each)
    while n * each <= scale.last:
        yield tag("text", f"{n * each:.0f}", x=f"{scale.x(n * each):.1f}", y=floor + 17, text_anchor="middle")
        n += 1
    yield tag("text", "step", x=WIDTH - RIGHT, y=HEIGHT - 2, text_anchor="end")


def _line(scale: _Scale, curve: Curve) -> Markup:
    points = " ".join(f"{scale.x(point['step']):.1f},{scale.y(point['seconds']):.1f}" for point in curve.points)
    style = {"fill": "none", "stroke": f"var(--c{curve.colour})", "stroke_width": 1.8, "stroke_linejoin": "round"}
    return tag("polyline", tag("title", curve.label), points=Markup(points), **style)


def _longest(scale: _Scale, points: Sequence[CurvePoint]) -> Iterator[Markup]:
    """Draw a thin line from each point to its longest step, with a mark if that is cut off."""
    style = {"stroke": "var(--c0)", "stroke_opacity": ".35", "stroke_width": 1.5}
    for point in points:
        if point["longest"] > 1.05 * point["seconds"]:
            x, low, top = scale.x(point["step"]), scale.y(point["seconds"]), scale.y(point["longest"])
            title = tag("title", f"step {point['step']}: up to {wording.seconds(point['longest'])}")
            yield tag("line", title, x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{low:.1f}", y2=f"{top:.1f}", **style)
            if point["longest"] > scale.top:
                yield tag("path", title, d=f"M{x - 4:.1f} {TOP - 3} l4 -7 l4 7 z", fill="var(--c0)")


def _events(scale: _Scale, events: Sequence[Event]) -> Iterator[Markup]:
    for event in events:
        if scale.first <= event.step <= scale.last:
            x = f"{scale.x(event.step):.1f}"
            yield tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, stroke="var(--bad)", stroke_dasharray="4 3")
            yield tag("circle", tag("title", event.what), cx=x, cy=TOP, r=5, fill="var(--bad)")


def shares(parts: Sequence[tuple[str, float, int]]) -> Markup:
    """Draw shares of a whole as one bar: label, share from 0 to 1, colour."""
    x, drawn = 0.0, []
    for label, share, colour in parts:
        width = share * WIDTH
        title = tag("title", f"{label}: {wording.percent(share)}")
        size = {"x": f"{x:.1f}", "y": 0, "width": f"{max(0.0, width - 2):.1f}", "height": 26, "rx": 3}
        drawn.append(tag("rect", title, **size, fill=f"var(--c{colour})"))
        x += width
    return tag("svg", *drawn, viewBox=f"0 0 {WIDTH} 26", role="img", aria_label="shares of a step")


def bar(share: float) -> Markup:
    """Draw a share from 0 to 1 as a small bar in a table."""
    rect = tag("rect", width=f"{max(0.0, min(1.0, share)) * 100:.1f}", height=10)
    return tag("svg", rect, class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none")
