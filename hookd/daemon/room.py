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
    """Knows whether one more target has room, and logs once when it has not.

    Attributes:
        refused: the processes that were turned away and are not served yet, and whether each is still to be looked at again.
    """

    def __init__(self) -> None:
        self.refused: dict[int, bool] = {}

    def has(self, fd: int) -> bool:
        """Tell whether the newest descriptor leaves the reserve alone: the kernel gives the lowest number that is free."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit < 0 or fd < limit - min(RESERVE, limit // 4)

    def refuse(self, pid: int) -> None:
        """Note a process that is not served for want of a descriptor.

        It is logged where all others that were turned away are served or gone by now. Room that opens for some of them
        only is not the end of the shortage.
        """
        was_told = any(map(_is_there, list(self.refused)))
        self.refused[pid] = True
        if not was_told:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _log.warning(
                "process %d and those found after it are not served: hookd may open %d files, and each target takes up to "
                "three; raise it (LimitNOFILE= of the service, ulimit -Hn). Those that are served go on",
                pid, limit,
            )  # fmt: skip

    def forget(self, pid: int) -> None:
        """Forget a process that is served now, or holds no page any more."""
        self.refused.pop(pid, None)

    def reopened(self) -> list[int]:
        """Return the pids that were turned away, once there is room again; each once, until it is turned away again."""
        waiting = sorted(pid for pid, waits in self.refused.items() if waits)
        if not waiting or not self._has_opened():
            return []
        for pid in waiting:
            self.refused[pid] = False
            if not _is_there(pid):
                self.forget(pid)
        return waiting

    def _has_opened(self) -> bool:
        try:
            fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        os.close(fd)
        return self.has(fd + MARGIN)


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110  asked of many
