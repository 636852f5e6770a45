"""Digests of tensors: equal bits, equal digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hookd.api.summary import Summary


class Digest(NamedTuple):
    """The digest of one tensor, as `Context.digest` returns it.

    Attributes:
        bits: 64 bits, equal for tensors whose elements have the same bits in the same order, whatever their strides and addresses; the
            shape is not part of it. It is XXH3-64 of the bytes of a contiguous copy, with seed 0, which other programs can compute:
            https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
        summary: the statistics of the elements; None if the tensor has no floating-point numbers.
    """

    bits: int
    summary: Summary | None
