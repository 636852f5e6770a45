"""Background work of plugins: a thread for each plugin, alive only while there is work."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

from hookd.errors import ControlError
from hookd.target.boot.spawn import Thread
from hookd.wire.originals import Lock, clock
from hookd.wire.plugin_frames import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.boot.work import Work
    from hookd.target.plugins.listeners import Registry

DETACH_S, EXIT_S = 30.0, 10.0
"""How long a detach waits for work in progress, and how long the end of the process does."""
STUCK_S = 5.0
"""Work in progress for longer than this at a detach is reported as residue."""
MOST = 100
"""The most pieces of work that one plugin may have waiting, so that work that does not end cannot fill the memory."""


class _Queue:
    """The waiting work of one plugin.

    Attributes:
        begun: the time at which the piece in progress began, by the monotonic clock.
        due: the pieces that wait.
        thread: the thread that does the work; None while there is none.
    """

    def __init__(self) -> None:
        self.begun = 0.0
        self.due: deque[Callable[[], None]] = deque()
        self.thread: Thread | None = None


class Background:
    """Runs each plugin's pieces of work one after the other.

    Args:
        failed: called with a plugin's name and the exception that its work raised.
    """

    def __init__(self, failed: Callable[[str, BaseException], None], work: Work) -> None:
        self._failed, self._work = failed, work
        self._lock = Lock()
        self._queues: dict[str, _Queue] = {}
        self._is_halted = False

    def add(self, plugin: str, work: Callable[[], None]) -> None:
        """Queue a piece of work, without waiting; any thread may call this. More than `MOST` pieces are refused.

        Raises:
            ControlError: reason "no-threads": no thread can be started.
        """
        with self._lock:
            queue = self._queues.setdefault(plugin, _Queue())
            is_full = len(queue.due) >= MOST
            if queue.thread is None and not self._is_halted:
                self._begin(plugin, queue)
            if not is_full:
                queue.due.append(work)
        if is_full:
            self._failed(plugin, OverflowError(f"{MOST} pieces of background work are waiting; this one is dropped"))

    def _begin(self, plugin: str, queue: _Queue) -> None:
        queue.begun = clock.monotonic()
        thread = Thread(functools.partial(self._run, plugin, queue))
        thread.start()
        queue.thread = thread

    def halt(self) -> None:
        """End each thread after its piece in progress; the pieces that wait are kept until `resume`."""
        self._is_halted = True

    def resume(self) -> bool:
        """Continue after a `halt`; return whether that was possible."""
        self._is_halted = False
        if not self._lock.acquire(False):  # noqa: FBT003  the thread that holds it may be below us
            return False
        try:
            for plugin, queue in self._queues.items():
                if queue.due and queue.thread is None:
                    self._begin(plugin, queue)
        except ControlError:
            return False
        finally:
            self._lock.release()
        return True

    def finish(self, timeout_s: float, plugin: str | None = None) -> None:
        """Wait up to `timeout_s` until all work, or that of one plugin, is done."""
        end = clock.monotonic() + timeout_s
        for name, queue in list(self._queues.items()):
            while plugin in (None, name) and (thread := queue.thread) is not None and clock.monotonic() < end:
                thread.join(max(0.0, end - clock.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for all work, and discard the pieces that have not begun by then."""
        self.finish(timeout_s)
        with self._lock:
            for queue in self._queues.values():
                queue.due.clear()

    def residue(self, registry: Registry) -> list[str]:
        """Return descriptions of the threads that still run when the agent leaves."""
        residue = []
        for name, queue in list(self._queues.items()):
            thread, since_s = queue.thread, clock.monotonic() - queue.begun
            if thread is not None and since_s > STUCK_S:
                plugin = registry.named(name).plugin if registry.has(name) else None
                at = line_of(thread.ident, plugin)
                residue.append(f"a thread in the background work of plugin {name}, at {at}")
        return residue

    def _run(self, plugin: str, queue: _Queue) -> None:
        while self._goes_on(plugin, queue):
            pass

    def _goes_on(self, plugin: str, queue: _Queue) -> bool:
        """Run the next piece; return whether to go on."""
        # In a frame of its own, so that the thread keeps no reference to a finished piece.
        with self._lock:
            if not queue.due or self._is_halted:
                queue.thread = None
                return False
            work, queue.begun = queue.due.popleft(), clock.monotonic()
        try:
            with self._work.piece():
                work()
        except BaseException as failure:  # noqa: BLE001  the thread is ours alone, and the next pieces must run
            self._failed(plugin, failure)
        return True
