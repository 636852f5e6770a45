"""The digest of a tensor on a device, by torch's own operations, so that nothing waits for the device.

XXH3 has no torch operation, and a checksum such as `torch.hash_tensor` forgets where each element is. So this digest, `mix64`,
is a sum of mixed words. The bytes of a contiguous copy are read as little-endian words of 64 bits, the last one padded with zeros.
Modulo 2**64:

    digest = mixed(STRIDE * size + sum(mixed(word + STRIDE * (at + 1)) for at, word in enumerate(words)))

where `size` is the number of bytes, and `mixed(x)` does this three times: `x ^= x >> 32`, and the first two times `x *= FACTOR`. Each
word is mixed together with its position before it is added, so that no two changes cancel each other by being alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STRIDE, FACTOR = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Odd numbers with their bits in disorder: the golden ratio's, and that of the mixer `degski64`."""
CHUNK = 1 << 26
"""Bytes that are mixed at a time, a multiple of 8; this takes as much temporary memory."""
PARTS = 4
_BITS = (1 << 64) - 1
_WORD = 8


def digest_parts(block: Tensor) -> Tensor:
    """Return what `digest_of_parts` needs, [PARTS] int16 on the tensor's own device, without waiting for it.

    Small integers arrive unchanged, although `Later` copies them as floats.

    Args:
        block: contiguous, of real numbers.
    """
    # Not `view(-1)`: a single element may have any stride, which the view as bytes does not take.
    flat = block.detach().as_strided((block.numel(),), (1,)).view(torch.uint8)
    total = None
    for at, part in enumerate(torch.split(flat, CHUNK)):
        mixed = _mixed_words(_words(part), at * (CHUNK // _WORD)).sum(0, keepdim=True)
        total = mixed if total is None else total + mixed
    assert total is not None  # an empty tensor is split into an empty one
    return total.view(torch.int16)


def digest_of_parts(parts: Sequence[float], size: int) -> int:
    """Return the digest of a tensor of `size` bytes."""
    total = sum((int(part) & 0xFFFF) << 16 * at for at, part in enumerate(parts))
    return _mixed(total + STRIDE * size & _BITS)


def _words(part: Tensor) -> Tensor:
    """Return [n] bytes as words; a copy only if they are not aligned, or do not fill the last one."""
    if lacking := -part.numel() % _WORD:
        part = torch.cat([part, part.new_zeros(lacking)])
    elif part.storage_offset() % _WORD or part.data_ptr() % _WORD:
        part = part.clone()
    return part.view(torch.int64)


def _mixed_words(words: Tensor, before: int) -> Tensor:
    """Return [n] words, each mixed with its position, in new memory; `before` is the number of words before them."""
    mixed = torch.arange(before + 1, before + 1 + words.numel(), device=words.device)
    torch.add(words, mixed, alpha=_signed(STRIDE), out=mixed)
    halves = mixed.view(torch.int32)
    low, high = halves[::2], halves[1::2]  # the shift by 32 bits without its temporaries
    low.bitwise_xor_(high)
    for _ in range(2):
        mixed.mul_(_signed(FACTOR))
        low.bitwise_xor_(high)
    return mixed


def _mixed(number: int) -> int:
    """Return a number below 2**64 mixed as the words are."""
    number ^= number >> 32
    for _ in range(2):
        number = number * FACTOR & _BITS
        number ^= number >> 32
    return number


def _signed(number: int) -> int:
    """Return the number that has the same 64 bits in two's complement: torch's integers have a sign, and wrap."""
    return number - (1 << 64)
