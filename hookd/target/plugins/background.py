"""What plugins have to do beside the training: a thread for each that is there only while there is work. Runs in the target."""

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
"""For how long a detach waits for work under way, and for how long the end of the process does."""
STUCK_S = 5.0
"""What has been under way for so long when hookd detaches is told of as residue."""
MOST = 100
"""So much of one plugin's may wait: work that does not end must not fill the memory."""


class _Queue:
    """What one plugin has asked for.

    Attributes:
        thread: does it; None while there is nothing to do.
        begun: when the piece that is under way has begun, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.begun = 0.0
        self.due: deque[Callable[[], None]] = deque()
        self.thread: Thread | None = None


class Aside:
    """Does one piece of a plugin's work after the other.

    Args:
        failed: is told of what a piece of work raised, with the plugin that asked for it.
        work: of all threads of the agent.
    """

    def __init__(self, failed: Callable[[str, BaseException], None], work: Work) -> None:
        self._failed, self._work = failed, work
        self._lock = Lock()
        self._queues: dict[str, _Queue] = {}
        self._is_halted = False

    def add(self, plugin: str, work: Callable[[], None]) -> None:
        """Have something done soon; any thread may ask, and waits for nothing. What is too much is not done.

        Raises:
            ControlError: reason "no-threads", none can be started.
        """
        with self._lock:
            queue = self._queues.setdefault(plugin, _Queue())
            is_full = len(queue.due) >= MOST
            if queue.thread is None and not self._is_halted:
                self._begin(plugin, queue)
            if not is_full:
                queue.due.append(work)
        if is_full:
            self._failed(plugin, OverflowError(f"{MOST} pieces of work wait, and what comes now is not done"))

    def _begin(self, plugin: str, queue: _Queue) -> None:
        queue.begun = clock.monotonic()
        thread = Thread(functools.partial(self._run, plugin, queue))
        thread.start()
        queue.thread = thread

    def halt(self) -> None:
        """Have each thread end when the piece that it does is done; what waits goes on waiting, until `resume`."""
        self._is_halted = True

    def resume(self) -> bool:
        """Go on after a `halt`; return whether that could be done."""
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
        """Wait until all is done, or what one plugin has asked for, or for so long."""
        end = clock.monotonic() + timeout_s
        for name, queue in list(self._queues.items()):
            while plugin in (None, name) and (thread := queue.thread) is not None and clock.monotonic() < end:
                thread.join(max(0.0, end - clock.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Wait so; what has not begun by then is not done any more."""
        self.finish(timeout_s)
        with self._lock:
            for queue in self._queues.values():
                queue.due.clear()

    def residue(self, registry: Registry) -> list[str]:
        """Say what does not end when the agent leaves."""
        found = []
        for name, queue in list(self._queues.items()):
            thread, since_s = queue.thread, clock.monotonic() - queue.begun
            if thread is not None and since_s > STUCK_S:
                plugin = registry.named(name).plugin if registry.has(name) else None
                at = line_of(thread.ident, plugin)
                found.append(f"a thread in the work aside of the plugin {name}, at {at}")
        return found

    def _run(self, plugin: str, queue: _Queue) -> None:
        while self._goes_on(plugin, queue):
            pass

    def _goes_on(self, plugin: str, queue: _Queue) -> bool:
        """Do the next piece; in a frame of its own, which keeps nothing of it while the next one is awaited."""
        with self._lock:
            if not queue.due or self._is_halted:
                queue.thread = None
                return False
            work, queue.begun = queue.due.popleft(), clock.monotonic()
        try:
            with self._work.piece():
                work()
        except BaseException as failure:  # noqa: BLE001  it is nobody's thread but ours: what comes next must be done
            self._failed(plugin, failure)
        return True
