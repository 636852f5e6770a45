"""The terminal: taken as a whole, given back as it was. Only the lines that have changed are written."""

from __future__ import annotations

import contextlib
import io
import os
import termios
import tty
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text
    from typing_extensions import Self

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J"
"""Another screen, no cursor, no line goes on in the next one; the Linux console has no other screen, so it is cleared."""
_LEAVE = "\x1b[0m\x1b[H\x1b[2J\x1b[?7h\x1b[?25h\x1b[?1049l"
NARROW, LOW = 80, 24
"""What a terminal is taken for that does not tell its size."""


def is_dumb() -> bool:
    """Tell whether the terminal only writes one line below the other."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


class Screen:
    """A terminal, while it is entered. Main thread only.

    Args:
        keys: where it is read from; its mode is changed.
        out: where it is written to.
    """

    def __init__(self, keys: TextIO, out: TextIO) -> None:
        self._in, self._out = keys.fileno(), out.fileno()
        self._encoding = out.encoding or "utf-8"
        self._mode: list[Any] | None = None
        self._drawn: list[str] = []
        self._texts: list[Text] = []
        self._console = Console(
            file=io.StringIO(), force_terminal=True, highlight=False, markup=False, legacy_windows=False
        )

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Take the terminal: single keys, no echo; Ctrl-C and Ctrl-Z remain signals."""
        self._mode = termios.tcgetattr(self._in)
        tty.setcbreak(self._in, termios.TCSANOW)
        self._write(_ENTER)
        self.forget()

    def leave(self) -> None:
        """Give it back. Idempotent; a terminal that has gone (a connection was cut) is no error."""
        mode, self._mode = self._mode, None
        if mode is not None:
            with contextlib.suppress(OSError):
                self._write(_LEAVE)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, mode)

    def forget(self) -> None:
        """Draw everything the next time: it was resized, or something else has written there."""
        self._drawn, self._texts = [], []

    def size(self) -> tuple[int, int]:
        """Give columns and lines."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._out)
            if columns and lines:
                return columns, lines
        return NARROW, LOW

    def draw(self, lines: Sequence[Text]) -> int:
        """Write the lines that differ from those that stand there; give the number of bytes."""
        if len(lines) != len(self._drawn):
            self._drawn, self._texts = [""] * len(lines), []
            parts = ["\x1b[2J"]
        else:
            parts = []
        for at, line in enumerate(lines):
            if not self._texts or self._texts[at] != line or self._texts[at].style != line.style:
                text = self._rendered(line)
                if text != self._drawn[at]:
                    # A blank line is erased; a full one overwrites what stood there.
                    parts.append(f"\x1b[{at + 1};1H" + (text if line.plain.strip() or line.style else "\x1b[K"))
                    self._drawn[at] = text
        self._texts = list(lines)
        return self._write("".join(parts))

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True)
        return captured.get()

    def _write(self, text: str) -> int:
        data = text.encode(self._encoding, "replace")
        left = memoryview(data)
        while left:
            left = left[os.write(self._out, left) :]
        return len(data)
