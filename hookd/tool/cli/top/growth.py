"""How fast counters grow, from one reading of a page to the next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE_S = 5.0


class Growth:
    """What columns of counters have grown by over the last interval in which something was done.

    A reading in which nothing was done begins no interval: of a training whose steps are longer than a refresh the last
    one that is complete is told, until it is stale.

    Args:
        window_s: how far back an interval reaches at least; 0: from one reading to the next.

    Attributes:
        columns: by how much each counter has grown; as long as there was no interval, since it began at 0.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self.columns: list[list[float]] = []
        self._window_s = window_s
        self._kept: deque[tuple[float, float, Sequence[Sequence[float]]]] = deque()

    def advance(self, now: float, done: float, *columns: Sequence[float]) -> None:
        """Take a reading.

        Args:
            now: monotonic seconds.
            done: counts what the columns are about, such as steps; it grows when the counters of one are complete.
            columns: always as many; counters may be added to each at its end.
        """
        kept = self._kept
        if kept and done == kept[-1][1]:
            return
        kept.append((now, done, columns))
        while len(kept) > 2 and now - kept[1][0] >= self._window_s:
            kept.popleft()
        before = kept[0][2] if len(kept) > 1 else [[]] * len(columns)
        self.columns = [_grown(*pair) for pair in zip(before, columns, strict=True)]

    @property
    def elapsed_s(self) -> float:
        """Seconds of the interval; 0 before there is one."""
        return self._kept[-1][0] - self._kept[0][0] if len(self._kept) > 1 else 0.0

    def is_stale(self, now: float) -> bool:
        """Tell whether nothing has grown for much longer than an interval."""
        return 0 < self.elapsed_s < (now - self._kept[-1][0]) / 3 and now - self._kept[-1][0] > STALE_S


def _grown(before: Sequence[float], values: Sequence[float]) -> list[float]:
    grown = [value - old for value, old in zip(values, before, strict=False)]
    return grown + list(values[len(before) :])
