"""Digests of tensors: equal bits, equal digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hookd.api.summary import Summary

XXH3, MIX64 = "xxh3", "mix64"


class Digest(NamedTuple):
    """The digest of one tensor, as `Context.digest` computes it.

    Attributes:
        bits: 64 bits, equal for tensors whose elements have the same bits in the same order, whatever their strides and addresses; the
            shape is not part of it. Only digests of the same algorithm can be compared.
        summary: the statistics of the elements; None if the tensor has no floating-point numbers, or only those of 8 bits.
        algorithm: `xxh3` for a tensor in host memory: XXH3-64 of the bytes of a contiguous copy, with seed 0, which other programs can
            compute: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
            `mix64` for one on a device: a sum of 64-bit words, each mixed with its position, as the file
            `hookd/target/tensors/device_digest.py` defines it.
    """

    bits: int
    summary: Summary | None
    algorithm: str = XXH3
