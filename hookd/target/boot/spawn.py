"""Hookd's own threads in the target.

They are hidden from `threading`: a program that joins all threads listed there would never end, and a library may have replaced
threads by greenlets (`hookd.wire.originals`).
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
_POLL_S = 0.05
OWN: set[int] = set()
"""The idents of hookd's threads."""
_LIVING: set[Thread | _Visitor] = set()
"""The threads that the kernel may still know: it counts a thread until shortly after the end of its work."""
PATIENCE_S = 1.0
"""Total time that forks wait for a thread that does not end."""


class Thread:
    """A thread without signals, which does not delay the end of the process.

    Attributes:
        ident: its key in `sys._current_frames`; None before it has begun.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self.ident: int | None = None
        self.native, self.awaited_s = 0, 0.0
        self._begun, self._over = Event(), Event()

    def start(self) -> None:
        """Start the thread, and wait until it has begun.

        Raises:
            ControlError: reason "no-threads": the system does not create one.
        """
        beginning = functools.partial(self._run)
        reference = weakref.ref(beginning)
        _forget_gone()
        _LIVING.add(self)
        try:
            thread.start(beginning)
        except RuntimeError as exc:
            self._forget()
            raise _no_thread() from exc
        del beginning
        # Without memory for its first frame, the thread ends before it begins, and releases `beginning`.
        while not self._begun.wait(_POLL_S):
            if reference() is None:
                self._forget()
                raise _no_thread()

    def _forget(self) -> None:
        _LIVING.discard(self)
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether its function has returned."""
        return self._over.is_set()

    def join(self, timeout_s: float) -> None:
        """Wait until it is over, for at most `timeout_s`."""
        if self.ident is not None:
            self._over.wait(timeout_s)

    def _run(self) -> None:
        thread.block_signals()
        self.ident, self.native = thread.get_ident(), thread.get_native_id()
        OWN.add(self.ident)
        with contextlib.suppress(OSError):  # the name for `top -H`; not possible in a container without /proc
            write(f"/proc/self/task/{self.native}/comm", NAME.encode())
        self._begun.set()
        function, self._function = self._function, _nothing  # it refers to a whole agent, which this object may outlive
        try:
            function()
        finally:
            del function
            forget()
            self._over.set()
            OWN.discard(self.ident)


def _nothing() -> None:
    """Replace the function of a thread that has begun."""


class _Visitor:
    """The injected thread that brought the agent in. hookd did not start it here, and it ends by itself."""

    is_over = True

    def __init__(self) -> None:
        self.native, self.awaited_s = thread.get_native_id(), 0.0


def note_visitor() -> None:
    """Make forks wait for the end of the calling thread as well."""
    _LIVING.add(_Visitor())


def remaining() -> list[Thread | _Visitor]:
    """Return the threads for which a fork waits. The kernel still knows them."""
    _forget_gone()
    return [living for living in [*_LIVING] if living.awaited_s < PATIENCE_S]


def _forget_gone() -> None:
    for living in [*_LIVING]:
        if living.is_over and not _is_known(living.native):
            _LIVING.discard(living)


def _is_known(native: int) -> bool:
    try:
        posix.stat(f"/proc/self/task/{native}")
    except OSError:
        return False  # also without /proc; other programs cannot count the threads then, either
    return True


def forget_all() -> None:
    """Forget all threads: a forked child has only the thread that forked."""
    _LIVING.clear()
    OWN.clear()


def _no_thread() -> ControlError:
    hint = "Raise pids.max of its container or job, its RLIMIT_NPROC, or its RLIMIT_AS."
    return ControlError(f"process {posix.getpid()} gets no thread", reason="no-threads", hint=hint)


def is_own() -> bool:
    """Whether the caller runs in a thread of hookd's."""
    return thread.get_ident() in OWN


def forget() -> None:
    """Remove the dummy that `threading` creates for this thread when asked for its name; it would stay forever."""
    known, ident = threading._active, threading.get_ident()  # type: ignore[attr-defined]
    if isinstance(known.get(ident), threading._DummyThread):
        known.pop(ident, None)
