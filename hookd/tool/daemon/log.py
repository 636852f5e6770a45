"""The daemon's log on stderr, written by a thread of its own: a pipe that nobody reads holds up nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "%(asctime)s hookd %(levelname)s: %(message)s"
MAX_WAITING = 1000
"""Lines that wait to be written; more are dropped and counted."""
END_S = 1.0
"""How long the end of the daemon waits for the last lines."""
_STDERR = 2


class Plain(logging.Formatter):
    """Makes one line of a message, without anything that a terminal would obey: it may quote a target."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class's name
        """Put the line together; tracebacks follow it."""
        record.message = _printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  the base class's name
        """Put a traceback into lines."""
        return _printable(super().formatException(ei), keep="\n")


def _printable(text: str, keep: str = "") -> str:
    return "".join(char if char.isprintable() or char in keep else " " for char in text)


def to_terminal() -> None:
    """Send warnings to stderr as a command's own words: the log of a daemon in the foreground."""
    handler = logging.StreamHandler()
    handler.setFormatter(Plain("hookd: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class Waiting(logging.Handler):
    """Hands lines to a thread that writes them. What cannot be written, on a full disk say, is lost in silence.

    Args:
        fd: where they are written, with no buffer in between: a thread that is stuck there holds no lock of Python's.
    """

    def __init__(self, fd: int = _STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="hookd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a line in the queue; called under the handler's lock."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            self._write(line + (f"\nhookd: {dropped} lines of this log are lost: nobody read it" if dropped else ""))

    def _write(self, text: str) -> None:
        left = memoryview(f"{text}\n".encode(errors="replace"))
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        """Write what waits, as far as it can be written now."""
        while True:
            try:
                self._lines.put_nowait(None)
                break
            except queue.Full:  # the oldest line makes room, or the thread would never hear of the end
                with contextlib.suppress(queue.Empty):
                    self._lines.get_nowait()
        self._thread.join(END_S)
        super().close()


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Send what is logged to stderr, from INFO on."""
    handler = Waiting()
    handler.setFormatter(Plain(FORMAT))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
