"""Scan the processes of this machine repeatedly and cheaply.

Not thread-safe, except for `recheck`. A scan reads a few bytes of each process: the size of its address space. Only a process
whose size has changed can have loaded torch, got or lost an agent, or become another program. Only such a process is
inspected, which takes a millisecond. Training processes whose size changes all the time (large tensors come and go) take
turns.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import discover
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import TimeLimit, account_of
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hookd.tool.attach.discover import Candidate

YOUNG_S = 60.0
"""Age, since it was first seen, up to which a process is inspected at every change of its size."""
SCAN_LIMIT_S = 0.5
"""Time limit of one scan for the processes of one user; root has none."""
INSPECTION_S = 2.0
"""Time limit for all answers of one process in one inspection."""
LONGEST_SILENCE_S = 60.0
"""Longest pause before a process that could not be read is inspected again."""
OLDER_PER_SCAN = 3
"""Older processes of a user that are inspected in one scan: so many with torch, and as many without."""
_log = logging.getLogger(__name__)


@dataclass
class _Seen:
    """The remembered facts of a process: its size at the last inspection, and the result.

    Strings of the process are not kept, because it controls their length. `silences` counts the inspections in a row in which it
    could not be read; it is not inspected again before `again`.
    """

    first: float
    size: bytes = b""
    inspected: float = 0.0
    has_torch: bool = False
    silences: int = 0
    again: float = 0.0


def inspected(pid: int) -> Candidate | None:
    """Return the result of `discover.examine` in bounded time; None if it fails."""
    return _examined(pid)[0]


def _examined(pid: int) -> tuple[Candidate | None, bool]:
    """Inspect a process in bounded time; return the result, and whether it is known: an error is none."""
    try:
        with WAITERS.within(INSPECTION_S):
            return discover.examine(pid), True
    except (HookdError, OSError, LookupError, ValueError):  # the process ended during the read, or is hidden
        return None, False
    except Exception:  # noqa: BLE001  any error is possible: a target controls the data
        _log.exception("process %d cannot be inspected", pid)
        return None, True


class Census:
    """The processes of this machine.

    Args:
        only: the pids of interest, read anew at each scan; None for all.
        clock: monotonic seconds.
    """

    def __init__(self, only: Collection[int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._only = only
        self._clock = clock
        self._seen: dict[int, _Seen] = {}

    def scan(self) -> list[Candidate]:
        """Return the Python processes that are new or may have changed since the last scan, oldest first."""
        now = self._clock()
        sizes = {pid: size for pid in self._pids() if (size := proc.size(pid))}
        self._seen = {pid: self._seen.get(pid) or _Seen(now) for pid in sizes}
        changed = [pid for pid, seen in self._seen.items() if seen.size != sizes[pid]]
        candidates, limit = [], TimeLimit(SCAN_LIMIT_S, self._clock)
        for pid, user in self._chosen(changed, now):
            if user and limit.is_over(user):
                continue  # the next scan begins with the processes that have waited longest
            with limit.of(user):
                if candidate := self._inspect(pid, sizes[pid], now):
                    candidates.append(candidate)
        return sorted(candidates, key=lambda candidate: (candidate.start, candidate.pid))

    def recheck(self, pid: int) -> None:
        """Mark a process for inspection at the next scan, whatever its size.

        Called when its agent has left. Thread-safe.
        """
        if (seen := self._seen.get(pid)) is not None:
            seen.size = b""

    def _pids(self) -> Iterator[int]:
        if self._only is not None:
            return iter(self._only)
        return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  names only, in one call

    def _chosen(self, changed: list[int], now: float) -> Iterator[tuple[int, int]]:
        """Yield the processes to inspect, each with its accountable user.

        These are all young processes, and of each user's older ones those that have waited longest.
        """
        taken: Counter[tuple[int, bool]] = Counter()
        for pid in sorted(changed, key=lambda pid: self._seen[pid].inspected):
            seen = self._seen[pid]
            if now < seen.again:
                continue
            user, is_old = account_of(pid), now - seen.first >= YOUNG_S
            taken[user, seen.has_torch] += is_old
            if not is_old or taken[user, seen.has_torch] <= OLDER_PER_SCAN:
                yield pid, user

    def _inspect(self, pid: int, size: bytes, now: float) -> Candidate | None:
        seen = self._seen[pid]
        seen.size, seen.inspected = size, now  # before the inspection, so that a concurrent `recheck` is not lost
        candidate, is_known = _examined(pid)
        seen.has_torch = candidate is not None and candidate.has_torch
        if candidate is not None and candidate.has_page and candidate.state != "attached":
            # The page has no valid header yet: its agent is starting, and the size may not change again.
            seen.size = b""
        # An error may be of this moment alone, and the size never change again.
        if not is_known or (candidate is not None and candidate.why == discover.SILENT):
            seen.size, seen.again = b"", now + min(2.0**seen.silences, LONGEST_SILENCE_S)
            seen.silences += 1
        else:
            seen.silences = 0
        return candidate
