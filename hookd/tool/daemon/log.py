"""The daemon's log on stderr, written in its own thread so that an unread pipe blocks nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from hookd.wire.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "%(asctime)s hookd %(levelname)s: %(message)s"
MAX_WAITING = 1000
"""Maximum number of queued lines; further ones are dropped and counted."""
END_S = 1.0
"""Time that the daemon's shutdown waits for the last lines."""
_STDERR = 2


class Plain(logging.Formatter):
    """Formats a message as one line without control characters, because it may quote a target."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class's name
        """Return the line; tracebacks follow it."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  the base class's name
        """Return a traceback as lines without control characters."""
        return printable(super().formatException(ei), keep="\n")


def to_terminal() -> None:
    """Log warnings to stderr in the style of CLI messages, for a daemon in the foreground."""
    handler = logging.StreamHandler()
    handler.setFormatter(Plain("hookd: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class Waiting(logging.Handler):
    """Queues lines for a thread that writes them. Lines that cannot be written, say on a full disk, are lost silently.

    Args:
        fd: descriptor to write to, unbuffered: a thread that blocks there holds no lock of Python's.
    """

    def __init__(self, fd: int = _STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="hookd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; called under the handler's lock."""
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
        """Write the queued lines, for END_S at most."""
        while True:
            try:
                self._lines.put_nowait(None)
                break
            except queue.Full:  # drop the oldest line, or the thread would never get the end marker
                with contextlib.suppress(queue.Empty):
                    self._lines.get_nowait()
        self._thread.join(END_S)
        super().close()


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Log to stderr for the duration of a block, at level INFO and above."""
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
