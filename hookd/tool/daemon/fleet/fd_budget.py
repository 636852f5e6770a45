"""How many targets are served: of each user a bounded number, of all as many as there are descriptors.

Each target takes two or three, and a daemon without any left can neither look at a process nor answer a scrape. A user who
makes targets without end has the descriptors, the memory and the scrapes of all others, but for the bound.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from typing import TYPE_CHECKING

from hookd.tool.linux.owner import user_name

if TYPE_CHECKING:
    from collections.abc import Mapping

PER_USER = 256
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

    Args:
        per_user: living targets of one user.

    Attributes:
        refused: the processes that were turned away for want of a descriptor and are not served yet, and whether each is
            still to be looked at again.
        beyond: by user, those that were turned away because the user has enough.
    """

    def __init__(self, per_user: int = PER_USER) -> None:
        self.per_user = per_user
        self.refused: dict[int, bool] = {}
        self.beyond: dict[int, dict[int, None]] = {}

    def refuse_user(self, pid: int, uid: int) -> None:
        """Note a process that is not served because its user has as many targets as a user may have."""
        if uid not in self.beyond:
            _log.warning(
                "process %d and those found after it are not served: user %s has %d targets, and targets_per_user of the "
                "configuration allows no more. Those that are served go on", pid, user_name(uid), self.per_user,
            )  # fmt: skip
        self.beyond.setdefault(uid, {})[pid] = None

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

    def reopened(self, served: Mapping[int, int]) -> list[int]:
        """Return those that were turned away, once there is room again; of a user no more than there is room for.

        Args:
            served: living targets by user.
        """
        again = []
        for uid, pids in list(self.beyond.items()):
            again += list(pids)[: max(0, self.per_user - served.get(uid, 0))]
            self.beyond[uid] = dict.fromkeys(pid for pid in pids if pid not in set(again))
            if not self.beyond[uid]:
                del self.beyond[uid]
        return again + self._with_descriptors()

    def _with_descriptors(self) -> list[int]:
        """Return those that were turned away, once there is room again; each once, until it is turned away again."""
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
