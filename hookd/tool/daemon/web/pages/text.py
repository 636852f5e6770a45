"""Escaping of strings that come from a target."""

from __future__ import annotations

from html import escape

from hookd.wire.text import printable

MAX_TEXT = 4000


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Return any value as HTML text: escaped, truncated, without characters that reorder or hide others."""
    whole = str(value)
    return escape(printable(whole[:limit], keep="\n") + ("…" if len(whole) > limit else ""))
