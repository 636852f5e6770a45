"""hookd's own threads in somebody else's process. Runs in the target.

`threading` does not know them: a program that joins all threads that it finds there would never end, and a library may have
put greenlets in the place of threads (`hookd.originals`).
"""

from __future__ import annotations

import contextlib
import functools
import posix
import threading
import weakref
from typing import TYPE_CHECKING

from hookd.descriptors import write
from hookd.errors import ControlError
from hookd.originals import Event, thread

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "hookd"
_LOOK_S = 0.05
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
        beginning = functools.partial(self._run)
        held = weakref.ref(beginning)
        try:
            thread.start(beginning)
        except RuntimeError as exc:
            raise _no_thread() from exc
        del beginning
        # Without memory for its first frame it ends before that, and lets go of what it was to call.
        while not self._begun.wait(_LOOK_S):
            if held() is None:
                raise _no_thread()

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


def _no_thread() -> ControlError:
    hint = "Raise pids.max of its container or job, its RLIMIT_NPROC, or its RLIMIT_AS."
    return ControlError(f"process {posix.getpid()} gets no thread", reason="no-threads", hint=hint)


def is_own() -> bool:
    """Whether the caller runs in one of them."""
    return thread.get_ident() in OWN


def forget() -> None:
    """Take out of `threading` what it made up for this thread because somebody asked there who it is: it would stay for ever."""
    known, ident = threading._active, threading.get_ident()  # type: ignore[attr-defined]
    if isinstance(known.get(ident), threading._DummyThread):
        known.pop(ident, None)
