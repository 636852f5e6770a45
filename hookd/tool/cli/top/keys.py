"""Keys: what a terminal sends for them, decoded byte by byte as it comes."""

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
"""After ESC: xterm's, VT220's and the Linux console's (terminfo xterm, screen, linux)."""
_PLAIN = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", ESCAPE: "escape", "\t": "tab"}
_LONGEST = 32


class Keys:
    """Decodes what is read from a terminal. A sequence may come in parts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    @property
    def is_waiting(self) -> bool:
        """Whether an ESC has come that may be the key itself, or the beginning of more."""
        return bool(self._text)

    def feed(self, data: bytes) -> list[str]:
        """Give the keys in what was read: a name, or the character itself."""
        self._text += self._decoder.decode(data)
        keys = []
        while self._text and (taken := self._take()):
            key, length = taken
            self._text = self._text[length:]
            keys.append(key)
        return [key for key in keys if key]

    def flush(self) -> list[str]:
        """Take what has come as it is: nothing has followed it for a while."""
        text, self._text = self._text, ""
        return ["escape"] if text[:1] == ESCAPE and len(text) < 3 else []

    def _take(self) -> tuple[str, int] | None:
        """Give the first key and its length; "" for one that we do not know, None where it is not whole yet."""
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
    """Measure the sequence that a text begins with; None while it is not whole (ECMA-48: parameters, then one of @ to ~)."""
    start = 3 if text[1:3] == "[[" else 2
    for at in range(start, len(text)):
        if "@" <= text[at] <= "~":
            return at + 1
    return _LONGEST if len(text) >= _LONGEST else None
