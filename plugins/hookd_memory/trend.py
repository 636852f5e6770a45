"""Whether a number of bytes grows for good. Runs in the target."""

from __future__ import annotations

SPAN = 8
"""Values in a bucket at first."""
MOST = 64
LEAST = 36
"""Buckets from which on a trend is looked for: with a value a second after five minutes. What warms up more slowly than
that cannot be told from a leak any earlier."""
EVEN = 0.7
"""How evenly it must grow: the least growth from quarter to quarter, relative to the largest.

What warms up (caches, arenas, the first steps' states) slows down: growth with the logarithm of time gives 0.6 at most.
"""
SHARE = 0.02
"""The growth, relative to what there was, below which nothing is told."""


class Trend:
    """The lowest values of equal spans of time, which get longer the longer it lasts.

    The first third is left out as a warm-up; a leak is what grows from each quarter of the rest to the next, and evenly.
    Lowest values, because between two collections of garbage a program grows without a leak.

    Args:
        least: growth in bytes below which nothing is a leak.

    Attributes:
        is_told: whether a person was told.
    """

    def __init__(self, least: int) -> None:
        self.is_told = False
        self._least = least
        self._span = SPAN  # values in a bucket
        self._buckets: list[tuple[int, int]] = []  # (step at its end, its lowest value)
        self._open: list[int] = []

    def add(self, step: int, value: int) -> bool:
        """Add a value; they come at equal distances of time. Whether a trend can be told from now on."""
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
        """The step from which on it was looked at."""
        return self._late[0][0]

    @property
    def grown(self) -> int:
        """The growth since then, in bytes; negative where it shrank."""
        return self._late[-1][1] - self._late[0][1]

    @property
    def per_step(self) -> float:
        """The growth per step since then; 0 where there was no step."""
        late = self._late
        steps = late[-1][0] - late[0][0]
        return self.grown / steps if steps > 0 else 0.0

    @property
    def is_leak(self) -> bool:
        """Whether it grows for good."""
        quarters = self._quarters()
        # What grows evenly has grown by three quarters of the whole between the lowest of the first and of the last.
        if 4 / 3 * (quarters[-1] - quarters[0]) < max(self._least, SHARE * self._late[0][1]):
            return False
        growth = [after - before for before, after in zip(quarters, quarters[1:])]
        return min(growth) > 0 and min(growth) >= EVEN * max(growth)

    def _quarters(self) -> list[int]:
        values = [value for _, value in self._late]
        size = len(values) / 4
        return [min(values[round(k * size) : round((k + 1) * size)]) for k in range(4)]
