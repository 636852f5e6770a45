"""Checksums of tensors: the sum of their bits."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = 8
"""Bytes of an integer in the sum: sums of narrower integers are 25 times slower on a CPU (torch 2.13)."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECES = (24, 24, 16)
"""Bits of each piece in which a sum is read: floats of any device represent them exactly."""


def sum_of(tensor: Tensor) -> Tensor:
    """Return [] int64, on the tensor's device: the sum of its bits as 64-bit integers, with wraparound.

    The remainder at the end, and a tensor whose memory does not begin at a multiple of 8 bytes, are summed as integers
    of the element's size. The tensor is not changed, and the call does not wait for the device.
    """
    flat = _flat(tensor.detach())
    size = flat.element_size()
    if size > WIDE:  # complex128
        return torch.view_as_real(flat).reshape(-1).view(torch.int64).sum()
    per = WIDE // size
    if flat.storage_offset() % per:
        return flat.view(INTEGERS[size]).sum()
    whole = flat.numel() - flat.numel() % per
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == flat.numel() else total + flat[whole:].view(INTEGERS[size]).sum()


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension, in memory order if the memory has no gaps."""
    for order in (None, (0, 2, 3, 1), (0, 2, 3, 4, 1)):  # contiguous, channels last
        if order is None or tensor.dim() == len(order):
            view = tensor if order is None else tensor.permute(order)
            if view.is_contiguous():
                return view.reshape(-1)
    return tensor.reshape(-1)


def pieces(sums: Tensor) -> list[Tensor]:
    """Split [n] int64 into pieces that a float represents exactly."""
    cut, shift = [], 0
    for bits in PIECES:
        cut.append((sums >> shift) & ((1 << bits) - 1))
        shift += bits
    return cut


def joined(numbers: list[float], count: int) -> list[int]:
    """Return the sums, below 2**64, from their pieces."""
    found, shift = [0] * count, 0
    for n, bits in enumerate(PIECES):
        for at in range(count):
            found[at] += int(numbers[n * count + at]) << shift
        shift += bits
    return found
