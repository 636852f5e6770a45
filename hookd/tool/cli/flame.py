"""Write recordings in speedscope's format, and as a flame graph in one SVG without scripts."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hookd.tool.attach.sampler import Recording, Stack, Track

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
WIDTH, ROW, LETTER = 1200, 18, 6.6
"""Width of the picture, height of a row, and width of a letter, in pixels."""
NARROWEST = 0.2
"""Frames narrower than this, in pixels, are not drawn."""
_TOP = 44
_PHASES = {
    "forward": "#f2b25c",
    "backward": "#7fa8d9",
    "collectives": "#8f8fd0",
    "optimizer": "#8cc08a",
    "data": "#d99bc3",
    "paused": "#d98880",
    "inference": "#c9b458",
}
_PLAIN = "#d5d5d0"


def speedscope(recording: Recording, name: str) -> dict[str, object]:
    """Return a recording in speedscope's format: one sampled profile per thread, the busiest first.

    Source: https://www.speedscope.app/file-format-schema.json (`FileFormat.SampledProfile`).
    """
    frames: dict[str, int] = {}
    profiles = []
    for track in _busiest(recording):
        pairs = [([frames.setdefault(text, len(frames)) for text in stack], s) for stack, s in recording.stacks(track)]
        profiles.append({
            "type": "sampled", "name": f"{track.name} ({track.tid})", "unit": "seconds", "startValue": 0,
            "endValue": sum(s for _, s in pairs), "samples": [stack for stack, _ in pairs],
            "weights": [s for _, s in pairs],
        })  # fmt: skip
    shared = {"frames": [{"name": text} for text in frames]}
    return {"$schema": SCHEMA, "shared": shared, "profiles": profiles, "name": name, "activeProfileIndex": 0,
            "exporter": f"hookd@{__version__}"}  # fmt: skip


@dataclass
class Node:
    """A frame, with the time spent in it and in the frames that it called."""

    name: str
    seconds: float = 0.0
    below: dict[str, Node] = field(default_factory=dict)

    def add(self, stack: Iterable[str], seconds: float) -> None:
        """Add a stack below this frame."""
        node = self
        node.seconds += seconds
        for name in stack:
            node = node.below.setdefault(name, Node(name))
            node.seconds += seconds

    @property
    def depth(self) -> int:
        """The number of rows that the frame and those below it take."""
        return 1 + max((node.depth for node in self.below.values()), default=0)


def tree(recording: Recording) -> Node:
    """Sum all stacks of a recording; if it has several threads, each has its own frame."""
    root = Node("all")
    for track in _busiest(recording):
        first: Stack = (f"{track.name} ({track.tid})",) if len(recording.tracks) > 1 else ()
        for stack, seconds in recording.stacks(track):
            root.add((*first, *stack), seconds)
    return root


def svg(recording: Recording, title: str) -> str:
    """Draw a recording as a flame graph, callers above callees, width for time.

    Every text is escaped.
    """
    root = tree(recording)
    height = _TOP + root.depth * ROW + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        "<style>text { font: 11px Menlo, Consolas, monospace } g:hover rect { stroke: #000 }</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fffefa"/>',
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" style="font-size: 15px">{_text(title)}</text>',
        *_drawn(root, root, 10.0, _TOP, (WIDTH - 20) / (root.seconds or 1.0)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _drawn(node: Node, root: Node, x: float, y: float, pixels: float) -> Iterator[str]:
    width = node.seconds * pixels
    if width < NARROWEST:
        return
    tooltip = f"{node.name}: {node.seconds:.3f} s, {node.seconds / (root.seconds or 1.0):.1%}"
    room = int((width - 6) / LETTER)
    label = node.name if len(node.name) <= room else f"{node.name[: room - 1]}…" if room >= 4 else ""
    yield (f'<g><title>{_text(tooltip)}</title><rect x="{x:.2f}" y="{y}" width="{max(width - 0.5, NARROWEST):.2f}"'
           f' height="{ROW - 1}" rx="2" fill="{_colour(node.name)}"/>'
           + (f'<text x="{x + 3:.2f}" y="{y + 13}">{_text(label)}</text>' if label else "") + "</g>")  # fmt: skip
    for below in node.below.values():
        yield from _drawn(below, root, x, y + ROW, pixels)
        x += below.seconds * pixels


def _colour(name: str) -> str:
    """Return the colour of a frame: one per phase, and one per module class."""
    if name in _PHASES or not name.endswith(")"):
        return _PHASES.get(name, _PLAIN)
    checksum = zlib.crc32(name.rpartition("(")[2].encode("utf-8", "replace"))
    return f"hsl({20 + checksum % 40}, {60 + checksum // 64 % 30}%, {62 + checksum // 4096 % 18}%)"


def _text(text: str) -> str:
    """Escape for XML, which cannot carry control characters at all."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _busiest(recording: Recording) -> list[Track]:
    def busy(track: Track) -> float:
        return sum(seconds for place, seconds in track.spans if place != ("other", 0))

    return sorted(recording.tracks, key=busy, reverse=True)
