"""Compare the cost of two variants that alternate in one process and one thread.

The blocks run in the order A B B A A B B A ... Each pair consists of a plain block and an adjacent observed one, and no block
is in two pairs. Every other pair has the opposite order, so slow drifts cancel. The control compares consecutive plain blocks.
The bounds of a median depend only on the order of the ratios, not on their distribution: the k-th smallest of n lies above the
median if fewer than k lie below it, and the number below it is binomial. A median does not show costs that occur in few blocks
only. For those there is the mean, with bounds from a bootstrap of 2,000 draws of pairs.
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
"""Minimum number of pairs, little more than a 95 % bound of the control needs."""


@dataclass(frozen=True)
class Estimate:
    """A median or a mean, with its lower and upper bound (one-sided, 95 % each).

    Attributes:
        quarters: first and third quartile of the figures.
    """

    value: float
    low: float
    high: float
    quarters: tuple[float, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the median of at least five figures."""
        ordered = sorted(values)
        at = _bound(len(ordered))
        first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), ordered[-1 - at], ordered[at], (first, third))

    @classmethod
    def certain(cls, value: float) -> Estimate:
        """Return an exact value, whose bounds equal it."""
        return cls(value, value, value, (value, value))


def _bound(n: int) -> int:
    """Return the index of the smallest of n ordered figures that is above the median with 95 % confidence."""
    below = 0
    for at in range(n):
        below += comb(n, at)
        if below >= CONFIDENCE * 2**n:
            return at
    raise ValueError(f"{n} figures are too few for a bound of {CONFIDENCE:.0%}")


@dataclass
class Pairs:
    """The blocks of one comparison, plain and observed, in the order of their pairs, in ns of CPU time."""

    plain: list[float] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)

    def __iadd__(self, more: Pairs) -> Self:
        """Add the blocks of another run of the same comparison."""
        self.plain += more.plain
        self.observed += more.observed
        return self

    @property
    def ratio(self) -> Estimate:
        """The ratio of an observed block to the plain one of its pair."""
        return Estimate.of([observed / plain for plain, observed in zip(self.plain, self.observed, strict=True)])

    @property
    def added(self) -> Estimate:
        """The difference between an observed block and the plain one of its pair, in ns."""
        return Estimate.of([observed - plain for plain, observed in zip(self.plain, self.observed, strict=True)])

    @property
    def control(self) -> Estimate:
        """The ratio of a plain block to the plain block directly before it."""
        return Estimate.of(
            [later / earlier for earlier, later in zip(self.plain[1::2], self.plain[2::2], strict=False)]
        )

    @property
    def mean(self) -> Estimate:
        """The ratio of all observed blocks to all plain ones, with bounds from a bootstrap of the pairs."""
        both = list(zip(self.plain, self.observed, strict=True))
        draw = random.Random(0)  # noqa: S311
        drawn = sorted(_quotient(draw.choices(both, k=len(both))) for _ in range(DRAWS))
        at = round(CONFIDENCE * DRAWS)
        first, _, third = statistics.quantiles((observed / plain for plain, observed in both), n=4, method="inclusive")
        return Estimate(_quotient(both), drawn[DRAWS - at], drawn[at], (first, third))


def _quotient(pairs: list[tuple[float, float]]) -> float:
    return sum(observed for _, observed in pairs) / sum(plain for plain, _ in pairs)


def enough(text: str) -> int:
    """Parse a number of pairs from a command line, and refuse fewer than QUICK_PAIRS."""
    if int(text) < QUICK_PAIRS:
        raise argparse.ArgumentTypeError(f"{text} are too few for a bound of {CONFIDENCE:.0%}: {QUICK_PAIRS} or more")
    return int(text)


def alternate(
    block: Callable[[], float],
    switched: Callable[[], AbstractContextManager[object]],
    pairs: int,
    settle: Callable[[], object] = lambda: None,
) -> Pairs:
    """Measure pairs of blocks, plain ones and those inside `switched()`; call `settle` after each switch.

    The garbage collector stays on, because collecting what a tool leaves is part of its cost. Objects that existed before are
    exempt (`gc.freeze`); otherwise one large collection would fall into an arbitrary block.
    """
    measured = Pairs()
    with switched():
        settle()
    settle()
    gc.collect()
    gc.freeze()
    try:
        measured.plain.append(block())
        for _ in range(pairs // 2):
            with switched():
                settle()
                measured.observed += [block(), block()]
            settle()
            measured.plain += [block(), block()]
    finally:
        gc.unfreeze()
    measured.plain.pop()  # the first of a pair without a second
    return measured
