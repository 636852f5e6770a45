"""Fit text into columns of the terminal. The text may come from a target, which is not trusted."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len, set_cell_size

LONGEST = 400
"""Characters kept of a text, from both ends; no terminal is wider."""
_RIGHT_TO_LEFT = ("R", "AL", "AN")


def safe(text: str) -> str:
    """Escape characters that would affect the terminal or neighboring text.

    These are control characters, combining characters (any number of them fit into one column), and right-to-left letters
    (some terminals reverse the whole line).
    """
    if len(text) > LONGEST:
        text = text[: LONGEST // 2] + "…" + text[-LONGEST // 2 :]
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_safe(char) else _escaped(char) for char in unicodedata.normalize("NFC", text))


def _is_safe(char: str) -> bool:
    is_combining = unicodedata.category(char).startswith("M")
    return char.isprintable() and not is_combining and unicodedata.bidirectional(char) not in _RIGHT_TO_LEFT


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def cut(text: str, width: int) -> str:
    """Shorten a safe text to `width` columns in its middle.

    The end of a module's name says more than its middle.
    """
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
    """Return a safe text, shortened or padded to exactly `width` columns."""
    text = cut(text, width)
    space = " " * (width - cell_len(text))
    return space + text if is_right else text + space
