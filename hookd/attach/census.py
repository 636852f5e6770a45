"""What runs here, kept from look to look so that the next look is cheap. Tool side; one look at a time.

A look reads a few bytes of each process: the size of its address space. Only one whose size has changed can have loaded
torch, got an agent, lost it, or become another program since, and only such a one is inspected, which costs a
millisecond. Training processes whose size changes all the time (large tensors come and go) take turns.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.attach import discover, proc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hookd.attach.discover import Candidate

YOUNG_S = 60.0
"""For so long after it was first seen a process is inspected whenever its size has changed."""
TURNS = 3
"""So many older ones with torch, and as many without, are inspected in one look."""


@dataclass
class _Seen:
    """What is remembered of a process: the size at its inspection, and what that found."""

    first: float
    size: bytes = b""
    inspected: float = 0.0
    found: Candidate | None = None

    @property
    def has_torch(self) -> bool:
        return self.found is not None and self.found.has_torch


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
        found = [candidate for pid in self._chosen(changed, now) if (candidate := self._inspect(pid, sizes[pid], now))]
        return sorted(found, key=lambda candidate: (candidate.start, candidate.pid))

    def recheck(self, pid: int) -> None:
        """Have a process inspected at the next look whatever its size: its agent has left. From any thread."""
        if (seen := self._seen.get(pid)) is not None:
            seen.size = b""

    def _pids(self) -> Iterator[int]:
        if self._only is not None:
            return iter(self._only)
        return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  names only, in one call

    def _chosen(self, changed: list[int], now: float) -> Iterator[int]:
        """Give the young ones all, of the others those that have waited longest."""
        turns = {True: TURNS, False: TURNS}
        for pid in sorted(changed, key=lambda pid: self._seen[pid].inspected):
            seen = self._seen[pid]
            if now - seen.first < YOUNG_S:
                yield pid
            elif turns[seen.has_torch]:
                turns[seen.has_torch] -= 1
                yield pid

    def _inspect(self, pid: int, size: bytes, now: float) -> Candidate | None:
        seen = self._seen[pid]
        seen.size, seen.inspected = size, now  # before the inspection: what `recheck` says meanwhile must hold
        seen.found = discover.inspect(pid)
        if seen.found is not None and seen.found.has_page and seen.found.state != "attached":
            seen.size = b""  # a page without a good header yet: its agent is just coming, and the size may stay
        return seen.found
