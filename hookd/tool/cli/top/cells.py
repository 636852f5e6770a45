"""Text for a place of so many columns on the terminal. It may be a target's, and do its worst."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len, set_cell_size

LONGEST = 400
"""Characters of a text that are looked at: no terminal is wider, and its two ends say enough."""
_RIGHT_TO_LEFT = ("R", "AL", "AN")


def safe(text: str) -> str:
    """Write out as escapes what would do something to a terminal, or to its neighbours.

    That is control characters, what combines with the character before it (any number of them fit into one column), and
    letters that run from right to left (some terminals turn the whole line).
    """
    if len(text) > LONGEST:
        text = text[: LONGEST // 2] + "…" + text[-LONGEST // 2 :]
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if _is_safe(one) else _escaped(one) for one in unicodedata.normalize("NFC", text))


def _is_safe(one: str) -> bool:
    is_combining = unicodedata.category(one).startswith("M")
    return one.isprintable() and not is_combining and unicodedata.bidirectional(one) not in _RIGHT_TO_LEFT


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode()


def cut(text: str, width: int) -> str:
    """Cut a safe text to `width` columns: both ends stay, for the end of a module's name says more than its middle."""
    size = cell_len(text)
    if size <= width:
        return text
    if width < 4:
        return set_cell_size(text, max(0, width))
    head = width // 2
    tail = text[max(0, len(text) - width) :]
    while cell_len(tail) > width - head - 1:
        tail = tail[1:]
    return set_cell_size(text, head) + "…" + tail


def fit(text: str, width: int, *, is_right: bool = False) -> str:
    """Make a safe text exactly `width` columns wide."""
    text = cut(text, width)
    space = " " * (width - cell_len(text))
    return space + text if is_right else text + space
