"""What runs here, kept from look to look so that the next look is cheap. Tool side; one look at a time.

A look reads a few bytes of each process: the size of its address space. Only one whose size has changed can have loaded
torch, got an agent, lost it, or become another program since, and only such a one is inspected, which costs a
millisecond. Training processes whose size changes all the time (large tensors come and go) take turns.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.attach import discover
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import Budget, account_of
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hookd.tool.attach.discover import Candidate

YOUNG_S = 60.0
"""For so long after it was first seen a process is inspected whenever its size has changed."""
LOOK_S = 0.5
"""So long one look takes at most for the processes of one user, but root's."""
INSPECTION_S = 2.0
"""How long all answers of one process may take together while it is inspected."""
LONGEST_SILENCE_S = 60.0
TURNS = 3
"""So many older ones of a user with torch, and as many without, are inspected in one look."""
_log = logging.getLogger(__name__)


@dataclass
class _Seen:
    """What is remembered of a process: the size at its inspection, and what that found.

    It is not what the process says of itself, which may be as long as it likes. After so many `silences` in a row, in which it
    could not be read, it is left alone until `again`.
    """

    first: float
    size: bytes = b""
    inspected: float = 0.0
    has_torch: bool = False
    silences: int = 0
    again: float = 0.0


def inspected(pid: int) -> Candidate | None:
    """Return what `discover.inspect` does, in bounded time; None as well if it fails, for others are to be looked at too."""
    try:
        with WAITERS.within(INSPECTION_S):
            return discover.inspect(pid)
    except (LookupError, ValueError):  # it ends while it is read
        return None
    except Exception:  # noqa: BLE001  what it may be nobody can tell: a target writes what is read
        _log.exception("process %d cannot be inspected", pid)
        return None


class Census:
    """The processes of this machine.

    Args:
        only: the pids that are of interest, asked anew at each look; None for all.
        clock: monotonic seconds.
    """

    def __init__(self, only: Collection[int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._only = only
        self._clock = clock
        self._seen: dict[int, _Seen] = {}

    def look(self) -> list[Candidate]:
        """Give the Python processes that are new, or may have changed since they were given last, the oldest first."""
        now = self._clock()
        sizes = {pid: size for pid in self._pids() if (size := proc.size(pid))}
        self._seen = {pid: self._seen.get(pid) or _Seen(now) for pid in sizes}
        changed = [pid for pid, seen in self._seen.items() if seen.size != sizes[pid]]
        found, budget = [], Budget(LOOK_S, self._clock)
        for pid, user in self._chosen(changed, now):
            if user and budget.is_over(user):
                continue  # the next look begins with those that have waited longest
            with budget.of(user):
                if candidate := self._inspect(pid, sizes[pid], now):
                    found.append(candidate)
        return sorted(found, key=lambda candidate: (candidate.start, candidate.pid))

    def recheck(self, pid: int) -> None:
        """Have a process inspected at the next look whatever its size: its agent has left. From any thread."""
        if (seen := self._seen.get(pid)) is not None:
            seen.size = b""

    def _pids(self) -> Iterator[int]:
        if self._only is not None:
            return iter(self._only)
        return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  names only, in one call

    def _chosen(self, changed: list[int], now: float) -> Iterator[tuple[int, int]]:
        """Yield which processes to inspect, each with the user who answers for it.

        They are all young ones, and of each user's older ones those that have waited longest.
        """
        taken: Counter[tuple[int, bool]] = Counter()
        for pid in sorted(changed, key=lambda pid: self._seen[pid].inspected):
            seen = self._seen[pid]
            if now < seen.again:
                continue
            user, is_old = account_of(pid), now - seen.first >= YOUNG_S
            taken[user, seen.has_torch] += is_old
            if not is_old or taken[user, seen.has_torch] <= TURNS:
                yield pid, user

    def _inspect(self, pid: int, size: bytes, now: float) -> Candidate | None:
        seen = self._seen[pid]
        seen.size, seen.inspected = size, now  # before the inspection: what `recheck` says meanwhile must hold
        found = inspected(pid)
        seen.has_torch = found is not None and found.has_torch
        if found is not None and found.has_page and found.state != "attached":
            seen.size = b""  # a page without a good header yet: its agent is just coming, and the size may stay
        if found is not None and found.why == discover.SILENT:
            seen.size, seen.again = b"", now + min(2.0**seen.silences, LONGEST_SILENCE_S)
            seen.silences += 1
        else:
            seen.silences = 0
        return found
