"""Measure how counters grow between readings of a page."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE_S = 5.0


class Growth:
    """The growth of columns of counters over the last interval with progress.

    A reading without progress does not begin an interval. If steps take longer than a refresh, the last complete interval
    is therefore reported until it is stale.

    Args:
        window_s: minimum length of an interval; 0 for one reading to the next.

    Attributes:
        columns: the growth of each counter; before the first interval, its growth from 0.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self.columns: list[list[float]] = []
        self._window_s = window_s
        self._readings: deque[tuple[float, float, Sequence[Sequence[float]]]] = deque()

    def advance(self, now: float, done: float, *columns: Sequence[float]) -> None:
        """Add a reading.

        Args:
            now: monotonic seconds.
            done: counter of progress, such as steps; it grows when the counters of a step are complete.
            columns: always the same number of columns; each may have new counters at its end.
        """
        readings = self._readings
        if readings and done == readings[-1][1]:
            return
        readings.append((now, done, columns))
        while len(readings) > 2 and now - readings[1][0] >= self._window_s:
            readings.popleft()
        before = readings[0][2] if len(readings) > 1 else [[]] * len(columns)
        self.columns = [_grown(*pair) for pair in zip(before, columns, strict=True)]

    @property
    def elapsed_s(self) -> float:
        """Length of the interval in seconds; 0 before the first one."""
        return self._readings[-1][0] - self._readings[0][0] if len(self._readings) > 1 else 0.0

    def is_stale(self, now: float) -> bool:
        """Whether the last progress is older than three intervals and `STALE_S`."""
        return 0 < self.elapsed_s < (now - self._readings[-1][0]) / 3 and now - self._readings[-1][0] > STALE_S


def _grown(before: Sequence[float], values: Sequence[float]) -> list[float]:
    grown = [value - old for value, old in zip(values, before, strict=False)]
    return grown + list(values[len(before) :])
