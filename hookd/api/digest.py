"""Digests of tensors: equal bits, equal digest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

XXH3, MIX64 = "xxh3", "mix64"


class Extent(NamedTuple):
    """How large the elements of one tensor are; `Summary` has more, and takes longer.

    Attributes:
        finite: number of finite elements.
        norm: the L2 norm of the finite elements; 0 if there are none.
        min: the smallest finite element; NaN if there are none.
        max: the largest finite element.
        nonfinite: number of elements that are NaN or infinite.
    """

    finite: int
    norm: float
    min: float
    max: float
    nonfinite: int

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> Extent:
        """Return the extent for sums that the kernel, or torch's operations in its place, have computed.

        Args:
            sums: [5] how many elements are finite, the sum of their squares, their minimum and maximum, and how many are not finite.
        """
        finite, squares, low, high, nonfinite = sums
        if not finite:
            low = high = math.nan
        return cls(int(finite), math.sqrt(squares), low, high, int(nonfinite))


class Digest(NamedTuple):
    """The digest of one tensor, as `Context.digest` computes it.

    Attributes:
        bits: 64 bits, equal for tensors whose elements have the same bits in the same order, whatever their strides and addresses; the
            shape is not part of it. Only digests of the same algorithm can be compared.
        extent: how large the elements are; None if the tensor has no floating-point numbers, or only those of 8 bits.
        algorithm: `xxh3` for a tensor in host memory: XXH3-64 of the bytes of a contiguous copy, with seed 0, which other programs can
            compute: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
            `mix64` for one on a device: a sum of 64-bit words, each mixed with its position, as the file
            `hookd/target/tensors/device_digest.py` defines it.
    """

    bits: int
    extent: Extent | None
    algorithm: str = XXH3
