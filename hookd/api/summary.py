"""What all the elements of a tensor come to. Runs in the target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Largest(NamedTuple):
    """The largest magnitudes in tensors of one place and type.

    Attributes:
        value: of all of them a number, where they are in the host's memory; else [n], of each one, where they are.
        at: which of those that were given they are, by their places there.
    """

    value: float | Tensor
    at: Sequence[int]


class Summary(NamedTuple):
    """All statistics of one tensor, as `Context.summary` gives them.

    Attributes:
        count: elements in all; of a sparse tensor those stored, each once, of a complex one its real and imaginary parts.
        mean: of the finite elements, as the rest down to `norm`; NaN where there are none.
        std: population standard deviation.
        min: the smallest finite element.
        max: the largest finite element.
        absmax: the largest magnitude.
        norm: the L2 norm; 0 where no element is finite.
        zeros: elements that are exactly 0.
        nans: elements that are NaN.
        infs: elements that are infinite, of either sign.
        negative_infs: how many of those are `-inf`, of which attention masks are made.
    """

    count: int  # type: ignore[assignment]  # hides tuple's method, which nobody needs here
    mean: float
    std: float
    min: float
    max: float
    absmax: float
    norm: float
    zeros: int
    nans: int
    infs: int
    negative_infs: int

    @property
    def finite(self) -> int:
        """How many elements are finite."""
        return self.count - self.nans - self.infs

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nans + self.infs

    @property
    def is_finite(self) -> bool:
        """Whether all elements are."""
        return not self.nans and not self.infs

    @property
    def zero_ratio(self) -> float:
        """The share of elements that are exactly 0."""
        return self.zeros / self.count

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> Summary:
        """Make one of the sums that the kernel makes, and torch's operations in its place.

        Args:
            sums: [9] how many elements are finite, their mean, the sum of their squared differences from it, their
                minimum and maximum, and how many elements are 0, NaN, inf and -inf.
        """
        finite, mean, squares, low, high, zeros, nans, infs, negative = sums
        odd = infs + negative
        count = int(finite + nans + odd)
        if not finite:
            mean = std = low = high = peak = math.nan
            norm = 0.0
        else:
            if low == high:  # exactly, where sums are rounded
                mean, squares = low, 0.0
            std, norm = math.sqrt(squares / finite), math.sqrt(squares + finite * mean * mean)
            peak = abs(max(-low, high))  # -0.0 is no magnitude
        return cls(count, mean, std, low, high, peak, norm, int(zeros), int(nans), int(odd), int(negative))
