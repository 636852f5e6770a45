"""Detect steady growth of a number of bytes."""

from __future__ import annotations

SPAN = 8
"""Values in a bucket at first."""
MOST = 64
"""Number of buckets at which they are merged in pairs."""
LEAST = 36
"""Buckets that a trend needs: five minutes at one value per second. Before, a slow warm-up looks like a leak."""
EVEN = 0.7
"""Evenness of a leak: the least growth from one quarter to the next, relative to the largest.

A warm-up (caches, arenas, the states of the first steps) slows down: growth with the logarithm of time has at most 0.6.
"""
SHARE = 0.02
"""Least growth of a leak, relative to the memory before it."""


class Trend:
    """The lowest values of equal spans of time; the spans double as the observed time grows.

    The first third is left out as a warm-up. A leak grows from each quarter of the rest to the next, and evenly.
    Only the lowest values count, because a program grows without a leak between two garbage collections.

    Args:
        least: growth in bytes that a leak needs.

    Attributes:
        is_reported: the leak has been reported.
    """

    def __init__(self, least: int) -> None:
        self.is_reported = False
        self._least = least
        self._span = SPAN  # values in a bucket
        self._buckets: list[tuple[int, int]] = []  # (step at its end, its lowest value)
        self._open: list[int] = []

    def add(self, step: int, value: int) -> bool:
        """Add a value, at equal intervals of time; return whether there are enough for a trend."""
        self._open.append(value)
        if len(self._open) == self._span:
            self._buckets.append((step, min(self._open)))
            self._open.clear()
            if len(self._buckets) == MOST:
                pairs = zip(self._buckets[::2], self._buckets[1::2])
                self._buckets = [(last[0], min(first[1], last[1])) for first, last in pairs]
                self._span *= 2
        return len(self._buckets) >= LEAST

    @property
    def _late(self) -> list[tuple[int, int]]:
        return self._buckets[len(self._buckets) // 3 :]

    @property
    def since(self) -> int:
        """The first step after the warm-up."""
        return self._late[0][0]

    @property
    def grown(self) -> int:
        """The growth since then, in bytes; negative if it shrank."""
        return self._late[-1][1] - self._late[0][1]

    @property
    def per_step(self) -> float:
        """The growth per step since then, in bytes; 0 if there was no step."""
        late = self._late
        steps = late[-1][0] - late[0][0]
        return self.grown / steps if steps > 0 else 0.0

    @property
    def is_leak(self) -> bool:
        """Whether the growth is steady and large enough for a leak."""
        quarters = self._quarters()
        # From the minimum of the first quarter to that of the last, even growth reaches three quarters of the total.
        if 4 / 3 * (quarters[-1] - quarters[0]) < max(self._least, SHARE * self._late[0][1]):
            return False
        growth = [after - before for before, after in zip(quarters, quarters[1:])]
        return min(growth) > 0 and min(growth) >= EVEN * max(growth)

    def _quarters(self) -> list[int]:
        values = [value for _, value in self._late]
        size = len(values) / 4
        return [min(values[round(k * size) : round((k + 1) * size)]) for k in range(4)]
