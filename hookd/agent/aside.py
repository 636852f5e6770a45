"""What plugins have to do beside the training: one thread that is there only while there is work. Runs in the target."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from hookd.agent import spawn

if TYPE_CHECKING:
    from collections.abc import Callable

DETACH_S, EXIT_S = 30.0, 10.0
"""For how long a detach waits for work under way, and for how long the end of the process does."""


class Aside:
    """Does one piece of work after the other.

    Args:
        failed: is told of what a piece of work raised, with the plugin that asked for it.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._due: deque[tuple[str, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, plugin: str, work: Callable[[], None]) -> None:
        """Have something done soon; any thread may ask, and waits for nothing."""
        with self._lock:
            self._due.append((plugin, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hookd", daemon=True)
                spawn.start(self._thread)

    def finish(self, timeout_s: float) -> None:
        """Wait until all is done, or for so long."""
        end = time.monotonic() + timeout_s
        while (thread := self._thread) is not None and time.monotonic() < end:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                plugin, work = self._due.popleft()
            try:
                work()
            except BaseException as failure:  # noqa: BLE001  it is nobody's thread but ours: what comes next must be done
                self._failed(plugin, failure)
