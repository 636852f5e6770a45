"""hookd's own threads in somebody else's process. Runs in the target.

`threading` does not know them: a program that joins all threads that it finds there would never end, and a library may have
put greenlets in the place of threads (`hookd.originals`).
"""

from __future__ import annotations

import contextlib
import posix
import threading
from typing import TYPE_CHECKING

from hookd.descriptors import write
from hookd.errors import ControlError
from hookd.originals import Event, thread

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "hookd"
OWN: set[int] = set()
"""The idents of all of them."""


class Thread:
    """A thread that receives no signal, and that the end of the process does not wait for.

    Args:
        function: what it does.

    Attributes:
        ident: its number as `sys._current_frames` has it; None before it has begun.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self.ident: int | None = None
        self._begun, self._over = Event(), Event()

    def start(self) -> None:
        """Start it, and wait until it has begun.

        Raises:
            ControlError: reason "no-threads", the system gives none.
        """
        try:
            thread.start(self._run)
        except RuntimeError as exc:
            hint = "Raise pids.max of its container or job, or its RLIMIT_NPROC."
            raise ControlError(f"process {posix.getpid()} gets no thread", reason="no-threads", hint=hint) from exc
        self._begun.wait()

    def join(self, timeout_s: float) -> None:
        """Wait until it is over, or for so long."""
        if self.ident is not None:
            self._over.wait(timeout_s)

    def _run(self) -> None:
        thread.block_signals()
        self.ident = thread.get_ident()
        OWN.add(self.ident)
        with contextlib.suppress(OSError):  # for `top -H`; in a container without /proc it has none
            write(f"/proc/self/task/{thread.get_native_id()}/comm", NAME.encode())
        self._begun.set()
        try:
            self._function()
        finally:
            forget()
            self._over.set()
            OWN.discard(self.ident)


def is_own() -> bool:
    """Whether the caller runs in one of them."""
    return thread.get_ident() in OWN


def forget() -> None:
    """Take out of `threading` what it made up for this thread because somebody asked there who it is: it would stay for ever."""
    known, ident = threading._active, threading.get_ident()  # type: ignore[attr-defined]
    if isinstance(known.get(ident), threading._DummyThread):
        known.pop(ident, None)
