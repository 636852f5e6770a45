"""The step boundaries that this rank has passed, by their marks (`hookd.wire.agreement`)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hookd.wire.originals import clock

if TYPE_CHECKING:
    from hookd.target.boot.identity import Process
    from hookd.target.plugins.listeners import Loaded

MOST = 64
"""Number of boundaries that are remembered."""


class Marks:
    """The last boundaries, with the time of each; empty in a job of one rank."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._marks: deque[tuple[int, float]] = deque(maxlen=MOST)

    def note(self, mark: int) -> None:
        """Record a boundary that this rank has reached."""
        self._marks.append((mark, clock.monotonic()))

    def last(self) -> int:
        """Return the mark of the last boundary; 0 if there is none."""
        return self._marks[-1][0] if self._marks else 0

    def has_passed(self, mark: int) -> bool:
        """Whether this rank has reached the boundary `mark`, or a later one."""
        return bool(self._marks) and self._marks[-1][0] >= mark

    def all(self) -> tuple[list[int], float]:
        """Return all marks, oldest first, and the seconds between the first and the last."""
        marks = list(self._marks)
        return [mark for mark, _ in marks], marks[-1][1] - marks[0][1] if marks else 0.0

    def failed(self, loaded: Loaded) -> None:
        """Report to the other ranks that a plugin has failed in this one since its last boundary."""
        if loaded.agreement is not None and self._marks:
            loaded.agreement.end(self._process.rank, max(1, self._marks[-1][0]))
