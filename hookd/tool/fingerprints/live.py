"""Record several processes at the same time, so that they can be compared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hookd.tool.fingerprints.recording import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hookd.tool.fingerprints.recording import Recorded

MAX_BYTES = 1 << 30
TIMEOUT_S = 10.0
"""Of an attach."""
OPTIONS = {"every": "1"}


def record_together(paths: Mapping[int, Path], steps: int) -> list[Recorded]:
    """Record processes, each until all of them have this many steps since the last of them began, or has ended.

    Args:
        paths: by pid, the file, which must not exist.
        steps: their number.

    Raises:
        HookdError: an attach fails, or a file cannot be written; then the others end, too.
    """
    race = _Race(len(paths), steps)
    with ThreadPoolExecutor(len(paths)) as pool:

        def run(pid: int, path: Path) -> Recorded:
            try:
                return record(pid, path, OPTIONS, steps=None, max_bytes=MAX_BYTES, timeout_s=TIMEOUT_S,
                              began=lambda _: race.begin(pid), is_over=race.watcher(pid))  # fmt: skip
            except BaseException:
                race.end()  # the others would wait for this one
                raise
            finally:
                race.leave(pid)

        jobs = [pool.submit(run, pid, path) for pid, path in paths.items()]
        try:
            return [job.result() for job in jobs]
        except BaseException:  # Ctrl-C, too
            race.end()
            raise


class _Race:
    """Knows when all have enough steps; thread-safe."""

    def __init__(self, runners: int, steps: int) -> None:
        self._lock = threading.Lock()
        self._waited_for, self._steps = runners, steps  # runners that have not begun
        self._at_start: dict[int, int] = {}  # the steps that each had once all had begun
        self._done: dict[int, bool] = {}
        self._is_over = False

    def begin(self, pid: int) -> None:
        """Note that the recording of a process has begun."""
        with self._lock:
            self._waited_for -= 1
            self._done[pid] = False

    def leave(self, pid: int) -> None:
        """Note that it has ended: nobody waits for it."""
        with self._lock:
            self._done[pid] = True

    def end(self) -> None:
        """End all."""
        self._is_over = True

    def watcher(self, pid: int) -> Callable[[int], bool]:
        """Return what tells a recording whether it is over, from its number of steps."""

        def is_over(recorded: int) -> bool:
            with self._lock:
                if not self._waited_for:
                    start = self._at_start.setdefault(pid, recorded)
                    self._done[pid] = self._done[pid] or recorded - start >= self._steps
                return self._is_over or (not self._waited_for and all(self._done.values()))

        return is_over
