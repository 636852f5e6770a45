"""hookd's own threads in somebody else's process. Runs in the target.

`threading` does not know them: a program that joins all threads that it finds there would never end, and a library may have
put greenlets in the place of threads (`hookd.wire.originals`).
"""

from __future__ import annotations

import contextlib
import functools
import posix
import threading
import weakref
from typing import TYPE_CHECKING

from hookd.errors import ControlError
from hookd.wire.descriptors import write
from hookd.wire.originals import Event, thread

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "hookd"
_LOOK_S = 0.05
OWN: set[int] = set()
"""The idents of all of them."""
_LIVING: set[Thread | _Visitor] = set()
"""All that the kernel may still know: a thread is counted until a moment after it has done its work."""
PATIENCE_S = 1.0
"""For how long forks wait in all for a thread that does not end."""


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
        self.native, self.awaited_s = 0, 0.0
        self._begun, self._over = Event(), Event()

    def start(self) -> None:
        """Start it, and wait until it has begun.

        Raises:
            ControlError: reason "no-threads", the system gives none.
        """
        beginning = functools.partial(self._run)
        held = weakref.ref(beginning)
        _forget_gone()
        _LIVING.add(self)
        try:
            thread.start(beginning)
        except RuntimeError as exc:
            self._forget()
            raise _no_thread() from exc
        del beginning
        # Without memory for its first frame it ends before that, and lets go of what it was to call.
        while not self._begun.wait(_LOOK_S):
            if held() is None:
                self._forget()
                raise _no_thread()

    def _forget(self) -> None:
        _LIVING.discard(self)
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether it has done its work."""
        return self._over.is_set()

    def join(self, timeout_s: float) -> None:
        """Wait until it is over, or for so long."""
        if self.ident is not None:
            self._over.wait(timeout_s)

    def _run(self) -> None:
        thread.block_signals()
        self.ident, self.native = thread.get_ident(), thread.get_native_id()
        OWN.add(self.ident)
        with contextlib.suppress(OSError):  # for `top -H`; in a container without /proc it has none
            write(f"/proc/self/task/{self.native}/comm", NAME.encode())
        self._begun.set()
        function, self._function = self._function, _nothing  # it has all of an agent, which this may outlive
        try:
            function()
        finally:
            del function
            forget()
            self._over.set()
            OWN.discard(self.ident)


def _nothing() -> None:
    """Stand in for what a thread has done."""


class _Visitor:
    """A thread that hookd has not started here and that ends by itself: the one that brought the agent in."""

    is_over = True

    def __init__(self) -> None:
        self.native, self.awaited_s = thread.get_native_id(), 0.0


def note_visitor() -> None:
    """Have forks wait for the end of the calling thread as well."""
    _LIVING.add(_Visitor())


def remaining() -> list[Thread | _Visitor]:
    """Return the threads that the kernel still knows and for which a fork waits."""
    _forget_gone()
    return [one for one in [*_LIVING] if one.awaited_s < PATIENCE_S]


def _forget_gone() -> None:
    for one in [*_LIVING]:
        if one.is_over and not _is_known(one.native):
            _LIVING.discard(one)


def _is_known(native: int) -> bool:
    try:
        posix.stat(f"/proc/self/task/{native}")
    except OSError:
        return False  # also without /proc, where nobody else can count them either
    return True


def forget_all() -> None:
    """Know of no thread: in a forked child there is only the one that forked."""
    _LIVING.clear()
    OWN.clear()


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
