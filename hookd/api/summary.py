"""Statistics over all elements of a tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Largest(NamedTuple):
    """The largest magnitudes in tensors of one device and dtype.

    Attributes:
        value: for tensors in host memory a number, the largest magnitude of all; otherwise a tensor [n] on their device, with the
            largest magnitude of each.
        at: the indices of these tensors in the argument.
    """

    value: float | Tensor
    at: Sequence[int]


class Summary(NamedTuple):
    """All statistics of one tensor, as `Context.summary` returns them.

    Attributes:
        count: number of elements. In a sparse tensor only stored elements count, each once; in a complex tensor real and imaginary
            parts count separately.
        mean: of the finite elements, like the rest down to `norm`; NaN if there are none.
        std: population standard deviation.
        min: the smallest finite element.
        max: the largest finite element.
        absmax: the largest magnitude.
        norm: the L2 norm; 0 if no element is finite.
        zeros: elements that are exactly 0.
        nans: elements that are NaN.
        infs: elements that are infinite, of either sign.
        negative_infs: how many of those are `-inf`, which attention masks contain.
    """

    count: int  # type: ignore[assignment]  # hides the method of tuple, which is not needed here
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
        """Whether all elements are finite."""
        return not self.nans and not self.infs

    @property
    def zero_ratio(self) -> float:
        """The share of elements that are exactly 0."""
        return self.zeros / self.count

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> Summary:
        """Return the summary for sums that the kernel, or torch's operations in its place, have computed.

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
            if low == high:  # exact, unlike the rounded sums
                mean, squares = low, 0.0
            std, norm = math.sqrt(squares / finite), math.sqrt(squares + finite * mean * mean)
            peak = abs(max(-low, high))  # abs: a magnitude must not be -0.0
        return cls(count, mean, std, low, high, peak, norm, int(zeros), int(nans), int(odd), int(negative))
