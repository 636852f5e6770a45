"""The terminal of `hookd top`: textual's driver, made to survive a slow line, a lost one, and bytes that are not text."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import os
import select
import sys
from typing import TYPE_CHECKING, Any

from textual.drivers import linux_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import App

NARROW, LOW = 80, 24
"""Size that is assumed if the terminal does not report one."""
REFUSED = (
    "\x1b[?2026$p", "\x1b[?2048$p",  # questions: an answer that comes after the end would be typed into the shell
    "\x1b[?1003h", "\x1b[?1015h",  # each move of the mouse: bytes on a slow line, and 1 ms of a processor each
    "\x1b[>25u",  # keys as escape codes: after a SIGKILL a shell could not read so much as `reset`
    "\x1b[?1004h",  # whether the window has the focus: not used
)  # fmt: skip
"""Sequences that textual writes to a terminal at the start; top leaves them out."""
POINTER = "\x1b]22;"
"""Prefix of the sequence that sets the shape of the mouse pointer. textual does not reset the shape at exit."""
EXIT_TIMEOUT_S = 2.0
"""Timeout at exit for a terminal that does not read its output, such as a stopped one, in seconds."""


def _decoder(encoding: str) -> Any:
    """Return a decoder that ignores bytes that are not text."""
    return functools.partial(codecs.getincrementaldecoder(encoding), errors="ignore")


# Textual's decoder is strict: one byte that is not UTF-8 ends its thread, and the keys that were read with it are lost.
linux_driver.getincrementaldecoder = _decoder  # type: ignore[attr-defined]


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


class Output:
    """The file to which textual's thread writes. A terminal that is gone takes everything.

    Attributes:
        written: number of writes that have ended.
    """

    def __init__(self) -> None:
        self.written = 0
        self._fd = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        self._encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """Return the descriptor of the terminal."""
        return self._fd

    def write(self, text: str) -> int:
        """Write text, with `?` for characters that the terminal's encoding does not have."""
        left = memoryview(text.encode(self._encoding, "replace"))
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._fd, left) :]
        self.written += 1
        return len(text)

    def flush(self) -> None:
        """Return at once: writes are not buffered."""


class Driver(linux_driver.LinuxDriver):
    """Textual's driver for terminals, on stdout instead of stderr."""

    def __init__(self, app: App[Any], **settings: Any) -> None:
        super().__init__(app, **settings)
        self._file: Any = Output()
        self._begun = 0
        self._is_stopped = True

    def start_application_mode(self) -> None:
        """Take the terminal. In the background that fails, and the writing thread is not started."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        writer = self._writer_thread
        self._is_stopped = writer is None or not writer.is_alive()
        if writer is not None:  # its `stop` joins it; a daemon thread, it does not outlive the process
            writer.join = functools.partial(writer.join, EXIT_TIMEOUT_S)  # type: ignore[method-assign]

    def stop_application_mode(self) -> None:
        """Restore the terminal."""
        self._is_stopped = True
        super().stop_application_mode()

    def write(self, data: str) -> None:
        """Queue text for the writing thread, unless it is something that top does without."""
        if data in REFUSED or data.startswith(POINTER):
            return
        self._begun += 1
        super().write(data)

    @property
    def is_behind(self) -> bool:
        """Whether the line has not yet taken what was written: drawing more would only delay it."""
        return bool(0 < self._file.written < self._begun)

    @property
    def is_gone(self) -> bool:
        """Whether the terminal was closed. It then reads as empty for ever."""
        poll = select.poll()
        poll.register(self.fileno, 0)
        return any(event & (select.POLLHUP | select.POLLNVAL | select.POLLERR) for _, event in poll.poll(0))

    def _get_terminal_size(self) -> tuple[int, int]:
        """Return columns and lines from the terminal, not from COLUMNS and LINES, which do not follow a resize."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._file.fileno())
            if columns and lines:
                return columns, lines
        return NARROW, LOW

    def _run_input_thread(self) -> None:
        """Decode keys until the end."""
        with contextlib.suppress(OSError):  # EIO: the terminal is gone, which the app notices by itself
            self.run_input_thread()

    # A signal may interrupt the thread where it holds a lock of the queue or waits for the writing thread. Both are taken
    # to stop and to start, so that is left to the loop, which after a Ctrl-Z goes on when the process does.

    def _sigtstp_application(self, *_: Any) -> None:
        """Restore the terminal soon, and stop."""
        self._soon(self._suspend)

    def _sigcont_application(self, *_: Any) -> None:
        """Take the terminal again soon."""
        self._soon(self._resume)

    def _soon(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            asyncio.get_running_loop().call_soon_threadsafe(act)

    def _suspend(self) -> None:
        if not self._is_stopped:
            super()._sigtstp_application()

    def _resume(self) -> None:
        """Take the terminal again. After a SIGSTOP from outside, which nothing announces, give it back first."""
        if not self._is_stopped:
            self.suspend_application_mode()
            self._must_signal_resume = True
        if self._must_signal_resume:  # else the app is ending: the kernel sends SIGCONT with SIGHUP
            super()._sigcont_application()
