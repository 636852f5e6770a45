"""Limits on the number of targets: per user, and by file descriptors.

Each target takes two or three descriptors. A daemon without free descriptors can neither look at a process nor answer a scrape.
Without the limit per user, one user with endless targets could use up the descriptors, memory and scrape time of all others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from typing import TYPE_CHECKING

from hookd.tool.linux.owner import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PER_USER = 256
RESERVE = 128
"""Descriptors reserved for scrapes, attaches and polls.

If the limit is below four times this number, a quarter of it is reserved.
"""
MARGIN = 8
"""Further descriptors that must be free before refused processes are looked at again.

A scrape that has just ended frees some.
"""
QUIET_S = 60.0
"""Time without another warning. Looks at many new processes take descriptors for a moment, and then there is room again."""
_log = logging.getLogger(__name__)


def widen() -> None:
    """Raise our soft limit to the hard one. systemd and containers set the hard limit far above the soft one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # "unlimited" may be more than the kernel's `nr_open`
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class TargetLimits:
    """Knows whether one more target has room, and logs once if it has not.

    Attributes:
        refused: the processes that were refused for lack of a descriptor and are not served yet, and whether each is still to
            be looked at again.
        beyond: by user, the processes that were refused because the user has the maximum number of targets.
    """

    def __init__(self, per_user: int = PER_USER, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_user = per_user
        self._clock = clock
        self._is_logged = False
        self._quiet_until = 0.0
        self.refused: dict[int, bool] = {}
        self.beyond: dict[int, dict[int, None]] = {}

    def refuse_user(self, pid: int, uid: int) -> None:
        """Note a process whose user has the maximum number of targets."""
        if uid not in self.beyond:
            _log.warning(
                "process %d and those found after it are not served: user %s has %d targets, and targets_per_user of the "
                "configuration allows no more. Those that are served go on", pid, user_name(uid), self.per_user,
            )  # fmt: skip
        self.beyond.setdefault(uid, {})[pid] = None

    def has(self, fd: int) -> bool:
        """Whether the newest descriptor is below the reserve. The kernel assigns the lowest free number."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit < 0 or fd < limit - min(RESERVE, limit // 4)

    def refuse(self, pid: int) -> None:
        """Note a process that is not served for lack of a descriptor.

        This is logged only if all processes that were refused before are served or gone by now: room for some of them does
        not end the shortage. A shortage that follows another one within `QUIET_S` is part of it.
        """
        self._is_logged &= any(map(_is_there, list(self.refused)))
        self.refused[pid] = True
        now = self._clock()
        if not self._is_logged and now >= self._quiet_until:
            self._is_logged, self._quiet_until = True, now + QUIET_S
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _log.warning(
                "process %d and those found after it are not served: hookd may open %d files, and each target takes up to "
                "three; raise it (LimitNOFILE= of the service, ulimit -Hn). Those that are served go on",
                pid, limit,
            )  # fmt: skip

    def forget(self, pid: int) -> None:
        """Forget a process that is served now, or has no page any more."""
        self.refused.pop(pid, None)

    def reopened(self, served: Mapping[int, int]) -> list[int]:
        """Return the refused processes if there is room again.

        Of each user there are not more than there is room for.

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
        """Return the processes refused for lack of a descriptor, if there is room. Each is returned once per refusal."""
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
