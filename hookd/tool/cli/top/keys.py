"""Decode the keys that a terminal sends, byte by byte."""

from __future__ import annotations

import codecs

ESCAPE = "\x1b"
_SEQUENCES = {
    **dict(zip(("[A", "[B", "[C", "[D", "[H", "[F"), ("up", "down", "right", "left", "home", "end"), strict=True)),
    **dict(zip(("OA", "OB", "OC", "OD", "OH", "OF"), ("up", "down", "right", "left", "home", "end"), strict=True)),
    **dict(zip(("[1~", "[4~", "[5~", "[6~", "[7~", "[8~"), ("home", "end", "pageup", "pagedown", "home", "end"), strict=True)),
    **dict(zip(("OP", "[11~", "[[A"), ("f1",) * 3, strict=True)),
    "OS": "f4", "[14~": "f4", "[[D": "f4", "[15~": "f5", "[[E": "f5", "[17~": "f6", "[21~": "f10",
}  # fmt: skip
"""Keys by their sequence after ESC: of xterm, VT220 and the Linux console (terminfo xterm, screen, linux)."""
_PLAIN = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", ESCAPE: "escape", "\t": "tab"}
_LONGEST = 32


class Keys:
    """Decodes the input of a terminal, in which a sequence may arrive in parts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    @property
    def is_waiting(self) -> bool:
        """Whether an ESC has arrived that may be the key itself, or the beginning of a sequence."""
        return bool(self._text)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys in the input, each as a name or as the character itself."""
        self._text += self._decoder.decode(data)
        keys = []
        while self._text and (taken := self._take()):
            key, length = taken
            self._text = self._text[length:]
            keys.append(key)
        return [key for key in keys if key]

    def flush(self) -> list[str]:
        """Return the keys in an incomplete sequence, when nothing has followed it for a while."""
        text, self._text = self._text, ""
        return ["escape"] if text[:1] == ESCAPE and len(text) < 3 else []

    def _take(self) -> tuple[str, int] | None:
        """Return the first key, "" if unknown, and its length; None if it is incomplete."""
        text = self._text
        if text[0] != ESCAPE:
            return _PLAIN.get(text[0], text[0] if text[0].isprintable() else ""), 1
        if len(text) == 1:
            return None
        if text[1] == ESCAPE:
            return "escape", 1
        if text[1] not in "[O":
            return "", 2  # Alt and a character
        length = _length(text)
        return None if length is None else (_SEQUENCES.get(text[1:length], ""), length)


def _length(text: str) -> int | None:
    """Return the length of the sequence at the beginning of a text; None if it is incomplete.

    Source: ECMA-48: parameters, then one character of @ to ~.
    """
    start = 3 if text[1:3] == "[[" else 2
    for at in range(start, len(text)):
        if "@" <= text[at] <= "~":
            return at + 1
    return _LONGEST if len(text) >= _LONGEST else None
