"""Descriptors: each target takes two or three, and who has none left can neither look at a process nor answer a scrape."""

from __future__ import annotations

import contextlib
import logging
import os
import resource

RESERVE = 128
"""So many are kept for scrapes, attaches and looks; a quarter of all where there are fewer than four times as many."""
MARGIN = 8
"""So many more must be free before those that were turned away are looked at again: a scrape that has just ended frees some."""
_log = logging.getLogger(__name__)


def widen() -> None:
    """Raise our soft limit to the hard one, which systemd and containers leave far above it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # an unlimited one may be more than the kernel's `nr_open`
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Room:
    """Knows whether one more target has room, and says so once when it has not.

    Attributes:
        refused: the processes that were turned away.
    """

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self._is_told = False

    def has(self, fd: int) -> bool:
        """Tell whether the newest descriptor leaves the reserve alone: the kernel gives the lowest number that is free."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit < 0 or fd < limit - min(RESERVE, limit // 4)

    def refuse(self, pid: int) -> None:
        """Note a process that is not served for want of a descriptor; the first of them is logged."""
        self.refused.add(pid)
        if not self._is_told:
            self._is_told = True
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _log.warning(
                "process %d and those found after it are not served: hookd may open %d files, and each target takes up to "
                "three; raise it (LimitNOFILE= of the service, ulimit -Hn). Those that are served go on",
                pid, limit,
            )  # fmt: skip

    def reopened(self) -> list[int]:
        """Give those that were turned away, once there is room again."""
        if not self.refused or not self._is_there():
            return []
        again, self.refused, self._is_told = sorted(self.refused), set(), False
        return again

    def _is_there(self) -> bool:
        try:
            fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        os.close(fd)
        return self.has(fd + MARGIN)
