"""Ends hookd's threads while the process forks.

A lock that another thread holds at a fork stays locked in the child forever. So CPython (3.12 and newer) warns if a process with
several threads forks, and a program may turn that warning into an error. A training with one thread must not get this warning: its
fork waits until hookd's threads have ended, as the kernel counts them, and they are started again afterwards.

They are not started in the hook that runs after the fork, because CPython 3.12 and 3.13 count the threads after that hook
(Modules/posixmodule.c, `warn_about_fork_with_threads`). They are started as soon as `os.fork` has returned.
"""

from __future__ import annotations

import functools
import posix
import sys
from typing import TYPE_CHECKING

from hookd.target.boot import spawn
from hookd.target.boot.fork import AtFork
from hookd.target.plugins.faults import is_from_signal_handler
from hookd.wire.originals import clock, thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hookd.target.plugins.background import Background
    from hookd.target.plugins.lifecycle_hooks import LifecycleHooks
    from hookd.target.remote.control import Control

_POLL_S = 0.0002
_LEAST_S, _SHARE = 0.005, 0.01
"""How long each fork may wait in any case, and the share of the time since the attach that all forks may wait beyond that."""


class Forks:
    """Ends the threads of an agent before a fork, and starts them again.

    It takes no lock, because a signal handler may fork during another fork of the same thread.

    Args:
        silence: called in the child.
    """

    def __init__(
        self, control: Control, background: Background, lifecycle_hooks: LifecycleHooks, silence: Callable[[], None]
    ) -> None:
        self._control, self._background, self._lifecycle_hooks = control, background, lifecycle_hooks
        self._silence = silence
        self._pid = posix.getpid()
        self._is_halted = False
        self._errors: list[BaseException] = []
        self._began, self._waited_s = clock.monotonic(), 0.0

    def calls(self) -> AtFork:
        """Return the functions to call at a fork."""
        return AtFork(self._before, self._in_parent, self._returned, self._in_child)

    def _before(self) -> bool:
        # A user's expression that is evaluated in hookd's thread may fork; it cannot wait for itself.
        if not spawn.is_own():
            self._guarded(functools.partial(self._end_all, clock.monotonic()))
        return bool(thread.is_main())

    def _end_all(self, since: float) -> None:
        """Wait until no thread is left, or the fork's time is up."""
        most_s = min(spawn.PATIENCE_S, spawn.PATIENCE_S + _SHARE * (since - self._began) - self._waited_s)
        while True:
            # Repeated, because a nested fork (in a signal handler) or the end of a step in another thread may resume them.
            self._background.halt()
            self._control.halt()
            self._lifecycle_hooks.halt()  # last: a thread that worked for the control thread is idle now
            left, waited_s = spawn.remaining(), clock.monotonic() - since
            self._is_halted = True
            if not left or waited_s >= max(_LEAST_S, most_s):
                break
            clock.sleep(_POLL_S)
        for living in left:
            living.awaited_s += waited_s
        self._waited_s += max(0.0, waited_s - _LEAST_S)

    def _in_parent(self) -> None:
        # There were two threads anyway, and the main thread may not reach its next safe point for a long time.
        if not thread.is_main():
            self._guarded(self.resume)

    def _returned(self) -> FrameType | None:
        self.resume()
        # CPython 3.12 and newer may warn in `os.fork` that the program has several threads, and drop what is raised meanwhile.
        if self._errors and (frame := _warning()):
            return frame
        errors, self._errors = self._errors, []
        if errors and posix.getpid() == self._pid:
            raise errors[0]
        return None

    def resume(self) -> None:
        """Restart the threads that a fork has ended. May be called at any time, in any thread."""
        if not self._is_halted or posix.getpid() != self._pid:
            return
        self._is_halted = False
        settled = [self._control.resume(), self._background.resume()]
        if not all(settled):
            self._is_halted = True

    def _in_child(self) -> None:
        spawn.forget_all()
        self._silence()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call a function and suppress its exceptions, which the interpreter would only print.

        An exception from a signal handler belongs to the program: it is raised after the fork, and the function is called again.
        """
        while True:
            try:
                act()
            except BaseException as error:  # noqa: BLE001
                if is_from_signal_handler(error):
                    self._errors.append(error)
                    continue
            return


def _warning() -> FrameType | None:
    """Return the outermost frame of the calling thread that formats or shows a warning; None without one."""
    found, frame = None, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "warnings":
            found = frame
    return found
