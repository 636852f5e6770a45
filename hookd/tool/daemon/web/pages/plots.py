"""Plots as SVG, with tooltips (`<title>`). All words are escaped by `text`."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages.text import text
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
        label: its name.
        colour: number of a colour of the stylesheet.
        points: `{"step", "seconds", "longest"}` each, by step.
    """

    label: str
    colour: int
    points: Sequence[CurvePoint]


@dataclass(frozen=True)
class Mark:
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


def step_times(curves: Sequence[Curve], marks: Sequence[Mark] = ()) -> str:
    """Plot step time over steps; with a single curve also the longest step of each point."""
    points = [point for curve in curves for point in curve.points]
    if len(points) < 2:
        return '<p class="soft">Too few steps to draw.</p>'
    scale = _scale(points, has_longest=len(curves) == 1)
    parts = [*_axes(scale), *_marks(scale, marks)]
    if len(curves) == 1:
        parts += _longest(scale, curves[0].points)
    parts += [_line(scale, curve) for curve in curves]
    said = text(f"time of a step, from step {scale.first:.0f} to {scale.last:.0f}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{"".join(parts)}</svg>'


def cut_off(points: Sequence[CurvePoint]) -> tuple[int, float]:
    """Return how many points a plot of one curve cuts off, and the longest step in seconds."""
    if len(points) < 2:
        return 0, 0.0
    top = _scale(points, has_longest=True).top
    longest = [point["longest"] for point in points]
    return sum(1 for one in longest if one > top), max(longest)


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


def _axes(scale: _Scale) -> Iterator[str]:
    each, floor = tick(scale.top), HEIGHT - BOTTOM
    for n in range(round(scale.top / each) + 1):
        y = scale.y(n * each)
        yield f'<line class="{"grid" if n else "axis"}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{wording.seconds(n * each) if n else 0}</text>'
    each = max(1.0, tick(scale.last - scale.first, 2 * TICKS))
    n = math.ceil(scale.first / each)
    while n * each <= scale.last:
        yield f'<text x="{scale.x(n * each):.1f}" y="{floor + 17}" text-anchor="middle">{n * each:.0f}</text>'
        n += 1
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>'


def _line(scale: _Scale, curve: Curve) -> str:
    points = " ".join(f"{scale.x(one['step']):.1f},{scale.y(one['seconds']):.1f}" for one in curve.points)
    return (
        f'<polyline points="{points}" fill="none" stroke="var(--c{curve.colour})" stroke-width="1.8"'
        f' stroke-linejoin="round"><title>{text(curve.label)}</title></polyline>'
    )


def _longest(scale: _Scale, points: Sequence[CurvePoint]) -> Iterator[str]:
    """Draw a thin line from each point to its longest step, with a mark if that is cut off."""
    for one in points:
        if one["longest"] > 1.05 * one["seconds"]:
            x, top = scale.x(one["step"]), scale.y(one["longest"])
            said = f"<title>step {one['step']}: up to {wording.seconds(one['longest'])}</title>"
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{scale.y(one["seconds"]):.1f}" y2="{top:.1f}" stroke="var(--c0)"'
                f' stroke-opacity=".35" stroke-width="1.5">{said}</line>'
            )
            if one["longest"] > scale.top:
                yield f'<path d="M{x - 4:.1f} {TOP - 3} l4 -7 l4 7 z" fill="var(--c0)">{said}</path>'


def _marks(scale: _Scale, marks: Sequence[Mark]) -> Iterator[str]:
    for mark in marks:
        if scale.first <= mark.step <= scale.last:
            x = scale.x(mark.step)
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--bad)"'
                f' stroke-dasharray="4 3"/><circle cx="{x:.1f}" cy="{TOP}" r="5" fill="var(--bad)">'
                f"<title>{text(mark.what)}</title></circle>"
            )


def shares(parts: Sequence[tuple[str, float, int]]) -> str:
    """Draw shares of a whole as one bar: label, share from 0 to 1, colour."""
    x, drawn = 0.0, []
    for label, share, colour in parts:
        width = share * WIDTH
        drawn.append(
            f'<rect x="{x:.1f}" y="0" width="{max(0.0, width - 2):.1f}" height="26" rx="3" fill="var(--c{colour})">'
            f"<title>{text(label)}: {wording.percent(share)}</title></rect>"
        )
        x += width
    return f'<svg viewBox="0 0 {WIDTH} 26" role="img" aria-label="shares of a step">{"".join(drawn)}</svg>'


def bar(share: float) -> str:
    """Draw a share from 0 to 1 as a small bar in a table."""
    width = max(0.0, min(1.0, share)) * 100
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none"><rect width="{width:.1f}" height="10"/></svg>'
