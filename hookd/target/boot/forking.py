"""No thread of hookd's while the process forks. Runs in the target.

What another thread holds at a fork stays held in the child for ever, so CPython (3.12 and newer) warns of a process that
forks and has several threads, and a program may turn that warning into an error. A training of one thread is to stay one: its
fork waits until hookd's threads have ended, as the kernel counts them, and they are started again after it.

They are not started in the hook that runs after the fork: CPython 3.12 and 3.13 count the threads behind it
(Modules/posixmodule.c, `warn_about_fork_with_threads`). They are started as soon as `os.fork` has returned.
"""

from __future__ import annotations

import functools
import posix
from typing import TYPE_CHECKING

from hookd.target.boot import spawn
from hookd.target.boot.fork import AtFork
from hookd.target.plugins.faults import is_from_signal_handler
from hookd.wire.originals import clock, thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.plugins.background import Aside
    from hookd.target.plugins.lifecycle_hooks import Cold
    from hookd.target.remote.control import Control

_LOOK_S = 0.0002
_LEAST_S, _SHARE = 0.005, 0.01
"""How long each fork may wait, and the part of the time that all of them may wait beyond that."""


class Forks:
    """Ends the threads of an agent before a fork, and starts them again.

    It takes no lock: a signal handler may fork while another fork of the same thread is under way.

    Args:
        control, aside, cold: what has threads.
        silence: called in the child.
    """

    def __init__(self, control: Control, aside: Aside, cold: Cold, silence: Callable[[], None]) -> None:
        self._control, self._aside, self._cold = control, aside, cold
        self._silence = silence
        self._pid = posix.getpid()
        self._is_halted = False
        self._errors: list[BaseException] = []
        self._began, self._waited_s = clock.monotonic(), 0.0

    def calls(self) -> AtFork:
        """Return what is to be called at a fork."""
        return AtFork(self._before, self._in_parent, self._returned, self._in_child)

    def _before(self) -> bool:
        if not spawn.is_own():  # an expression that somebody evaluates here forks: it cannot wait for itself
            self._guarded(functools.partial(self._end_all, clock.monotonic()))
        return bool(thread.is_main())

    def _end_all(self, since: float) -> None:
        """Wait until no thread is left, or for as long as what they do may hold a fork up."""
        most_s = min(spawn.PATIENCE_S, spawn.PATIENCE_S + _SHARE * (since - self._began) - self._waited_s)
        while True:
            # Each time: a fork inside of this one (in a signal handler) and a step's end in another thread resume.
            self._aside.halt()
            self._control.halt()
            self._cold.halt()  # one that was busy for the control thread is idle now
            left, waited_s = spawn.remaining(), clock.monotonic() - since
            self._is_halted = True
            if not left or waited_s >= max(_LEAST_S, most_s):
                break
            clock.sleep(_LOOK_S)
        for one in left:
            one.awaited_s += waited_s
        self._waited_s += max(0.0, waited_s - _LEAST_S)

    def _in_parent(self) -> None:
        # Beside the main thread there was another one anyhow, and the main thread may not come back for long.
        if not thread.is_main():
            self._guarded(self.resume)

    def _returned(self) -> None:
        self.resume()
        errors, self._errors = self._errors, []
        if errors and posix.getpid() == self._pid:
            raise errors[0]

    def resume(self) -> None:
        """Start the threads again that a fork has ended; may be called at any time, in any thread."""
        if not self._is_halted or posix.getpid() != self._pid:
            return
        self._is_halted = False
        settled = [self._control.resume(), self._aside.resume()]
        if not all(settled):
            self._is_halted = True

    def _in_child(self) -> None:
        spawn.forget_all()
        self._silence()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call what must not raise here: the interpreter would only print it. What a signal handler raises is the program's."""
        while True:
            try:
                act()
            except BaseException as error:  # noqa: BLE001
                if is_from_signal_handler(error):
                    self._errors.append(error)
                    continue
            return
