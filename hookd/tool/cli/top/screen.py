"""Control the whole terminal, and restore it. Only changed lines are written."""

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
"""Switch to the alternate screen, hide the cursor, disable wrapping, clear: the Linux console has no alternate screen."""
_LEAVE = "\x1b[0m\x1b[H\x1b[2J\x1b[?7h\x1b[?25h\x1b[?1049l"
NARROW, LOW = 80, 24
"""Size that is assumed if the terminal does not report one."""


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


class Screen:
    """A terminal under our control. Main thread only.

    Args:
        keys: its input, whose mode is changed.
        out: its output.
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
        """Take control: keys are read one by one without echo; Ctrl-C and Ctrl-Z remain signals."""
        self._mode = termios.tcgetattr(self._in)
        tty.setcbreak(self._in, termios.TCSANOW)
        self._write(_ENTER)
        self.forget()

    def leave(self) -> None:
        """Restore the terminal.

        Idempotent. A terminal that is gone, as after a lost connection, is ignored.
        """
        mode, self._mode = self._mode, None
        if mode is not None:
            with contextlib.suppress(OSError):
                self._write(_LEAVE)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, mode)

    def forget(self) -> None:
        """Draw everything the next time, after a resize or output of another program."""
        self._drawn, self._texts = [], []

    def size(self) -> tuple[int, int]:
        """Return the numbers of columns and lines."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._out)
            if columns and lines:
                return columns, lines
        return NARROW, LOW

    def draw(self, lines: Sequence[Text]) -> int:
        """Write the lines that have changed, and return the number of bytes written."""
        if len(lines) != len(self._drawn):
            self._drawn, self._texts = [""] * len(lines), []
            parts = ["\x1b[2J"]
        else:
            parts = []
        for at, line in enumerate(lines):
            if not self._texts or self._texts[at] != line or self._texts[at].style != line.style:
                text = self._rendered(line)
                if text != self._drawn[at]:
                    # A blank line is erased; any other one has the full width and overwrites the old line.
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
