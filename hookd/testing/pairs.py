"""Two things in turn, inside one process and one thread: what the second costs beside the first.

The blocks come as A B B A A B B A ..., so each pair has a plain block and one with the thing beside it that belong to
no other pair, every other pair in the other order, so that what drifts slowly cancels. The control is of plain blocks
that follow one another. The bounds of a median come from the order of the ratios alone, whatever their distribution is:
the k-th smallest of n lies above the median if fewer than k lie below it, and how many do is binomial. What happens in
few blocks only no median shows: of that the mean is taken, and its bounds from 2,000 draws of pairs (bootstrap).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from dataclasses import dataclass, field
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Self

CONFIDENCE = 0.95
DRAWS = 2000
PAIRS = 100
QUICK_PAIRS = 12
"""Hardly more than what a bound of 95 % of the control can be told from."""


@dataclass(frozen=True)
class Estimate:
    """The median of some figures, or their mean, between its lower and its upper bound (one-sided, 95 % each).

    Attributes:
        quarters: where the middle half of the figures lies.
    """

    value: float
    low: float
    high: float
    quarters: tuple[float, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Make the median of these figures, at least five."""
        ordered = sorted(values)
        at = _bound(len(ordered))
        first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), ordered[-1 - at], ordered[at], (first, third))

    @classmethod
    def certain(cls, value: float) -> Estimate:
        """Give what has no spread."""
        return cls(value, value, value, (value, value))


def _bound(n: int) -> int:
    """Give the place of the smallest of n ordered figures that is above their median with 95 % confidence."""
    below = 0
    for at in range(n):
        below += comb(n, at)
        if below >= CONFIDENCE * 2**n:
            return at
    raise ValueError(f"{n} figures are too few for a bound of {CONFIDENCE:.0%}")


@dataclass
class Pairs:
    """The blocks of one comparison, by what was there and in the order of their pairs, in ns of CPU time."""

    plain: list[float] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)

    def __iadd__(self, more: Pairs) -> Self:
        """Take over the blocks of another run of the same comparison."""
        self.plain += more.plain
        self.observed += more.observed
        return self

    @property
    def ratio(self) -> Estimate:
        """The ratios of each block with it to the plain one of its pair."""
        return Estimate.of([one / plain for plain, one in zip(self.plain, self.observed, strict=True)])

    @property
    def added(self) -> Estimate:
        """What each block with it took more than the plain one of its pair."""
        return Estimate.of([one - plain for plain, one in zip(self.plain, self.observed, strict=True)])

    @property
    def control(self) -> Estimate:
        """The ratios of plain blocks to the plain blocks before them, where none was between."""
        return Estimate.of([later / one for one, later in zip(self.plain[1::2], self.plain[2::2], strict=False)])

    @property
    def mean(self) -> Estimate:
        """All blocks with it to all plain ones, with bounds from a bootstrap of the pairs."""
        both = list(zip(self.plain, self.observed, strict=True))
        draw = random.Random(0)  # noqa: S311
        drawn = sorted(_quotient(draw.choices(both, k=len(both))) for _ in range(DRAWS))
        at = round(CONFIDENCE * DRAWS)
        first, _, third = statistics.quantiles((one / plain for plain, one in both), n=4, method="inclusive")
        return Estimate(_quotient(both), drawn[DRAWS - at], drawn[at], (first, third))


def _quotient(pairs: list[tuple[float, float]]) -> float:
    return sum(one for _, one in pairs) / sum(plain for plain, _ in pairs)


def enough(text: str) -> int:
    """Read a number of pairs from a command line."""
    if int(text) < QUICK_PAIRS:
        raise argparse.ArgumentTypeError(f"{text} are too few for a bound of {CONFIDENCE:.0%}: {QUICK_PAIRS} or more")
    return int(text)


def alternate(
    block: Callable[[], float],
    switched: Callable[[], AbstractContextManager[object]],
    pairs: int,
    settle: Callable[[], object] = lambda: None,
) -> Pairs:
    """Measure pairs of blocks, plain and inside of `switched()`; `settle` comes after each switch.

    The collector of garbage stays on, because what a tool leaves to it is part of its price; but it is spared what was
    there before (`gc.freeze`), or one large collection would fall on this block or that.
    """
    found = Pairs()
    with switched():
        settle()
    settle()
    gc.collect()
    gc.freeze()
    try:
        found.plain.append(block())
        for _ in range(pairs // 2):
            with switched():
                settle()
                found.observed += [block(), block()]
            settle()
            found.plain += [block(), block()]
    finally:
        gc.unfreeze()
    found.plain.pop()  # begins a pair that nothing follows
    return found
