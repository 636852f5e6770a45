"""Text that comes from a target, for lines and pages that people read."""

from __future__ import annotations

MAX_LINE = 400
"""Maximum length of a line, in characters."""


def printable(text: str, keep: str = "") -> str:
    """Replace characters that are not printable by spaces, except those in `keep`: they may control a terminal."""
    return "".join(char if char.isprintable() or char in keep else " " for char in text)


def one_line(value: object) -> str:
    """Return a value as one line of printable text, cut to MAX_LINE characters."""
    text = printable(str(value)[: MAX_LINE + 1])
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 1] + "…"
