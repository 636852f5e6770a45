"""Escaping of strings that come from a target."""

from __future__ import annotations

from html import escape

MAX_TEXT = 4000


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Return any value as HTML text: escaped, truncated, without characters that reorder or hide others."""
    told = str(value)
    clean = "".join(char if char.isprintable() or char == "\n" else " " for char in told[:limit])
    return escape(clean + ("…" if len(told) > limit else ""))
