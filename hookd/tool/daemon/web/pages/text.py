"""What a target says, as text of a page."""

from __future__ import annotations

from html import escape

MAX_TEXT = 4000


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Make text of anything, for a browser: escaped, bounded, without characters that turn or hide others."""
    told = str(value)
    clean = "".join(char if char.isprintable() or char == "\n" else " " for char in told[:limit])
    return escape(clean + ("…" if len(told) > limit else ""))
