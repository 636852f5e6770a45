"""The digest and the sums of a tensor on a device in one pass over its memory, as a kernel of Triton.

Torch's operations (`device_digest.py`, `device_sums` in `statistics.py`) take 60 launches for the same, and 25 without the mean and the zeros. This is used only if
`HOOKD_TRITON=1` is in the environment of the training, since it has run in Triton's interpreter only, never on a GPU.
Importing this file imports Triton. Compiling the kernel, once for each width of elements, takes seconds in which the training waits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Words of 64 bits that one program of the kernel reads."""
SUMS = 9
WIDTHS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
"""Bits of an element, of types that have sums."""


def launch(block: Tensor, *, has_sums: bool) -> tuple[Tensor, Tensor | None] | None:
    """Return what `digest_parts` returns, and the [n, 9] sums of the parts of a tensor; nothing waits for its device.

    Args:
        block: contiguous, of real numbers, and not empty.
        has_sums: whether sums are wanted, of a type in WIDTHS.

    Returns:
        None if the memory does not begin at a multiple of 8.
    """
    if block.data_ptr() % 8:
        return None
    size = block.numel() * block.element_size()
    programs = triton.cdiv(size, 8 * BLOCK)
    digests = torch.empty(programs, dtype=torch.int64, device=block.device)
    rows = torch.empty((programs, SUMS), dtype=torch.float64, device=block.device) if has_sums else digests
    flat = block.detach().as_strided((block.numel(),), (1,)).view(torch.uint8)
    width = WIDTHS[block.dtype] if has_sums else 0
    is_cuda = block.device.type == "cuda"
    with torch.cuda.device(block.device) if is_cuda else contextlib.nullcontext():
        _kernel[(programs,)](flat, digests, rows, size, BLOCK, width, block.dtype is torch.bfloat16)
    return digests.sum(0, keepdim=True).view(torch.int16), rows if has_sums else None


# The arguments in capitals are constants at the time of compilation.


@triton.jit(do_not_specialize=["size"])
def _kernel(memory, digests, rows, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr, IS_BFLOAT16: tl.constexpr):
    """Write the sum of the mixed words of one block, and the sums of its elements if they have a width."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    word = _word(memory, at, size).to(tl.uint64, bitcast=True)  # unsigned, so that a shift brings in zeros
    mixed = _mixed(word + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    mixed = tl.where(at * 8 < size, mixed.to(tl.int64, bitcast=True), 0)
    tl.store(digests + program, tl.sum(mixed, 0))
    if WIDTH > 0:
        _write_sums(rows + program * 9, word, at, size, BLOCK, WIDTH, IS_BFLOAT16)


@triton.jit
def _word(memory, at, size):
    """Return the words of a block; those behind the end are 0, and the last one is filled with zeros."""
    whole = size // 8
    word = tl.load(memory.to(tl.pointer_type(tl.int64)) + at, mask=at < whole, other=0)
    for byte in tl.static_range(7):
        place = at * 8 + byte
        one = tl.load(memory + place, mask=(at == whole) & (place < size), other=0)
        word = word | (one.to(tl.int64) << (8 * byte))
    return word


@triton.jit
def _mixed(x):
    """Return words mixed as `device_digest` defines it."""
    x = x ^ (x >> 32)
    x = x * 0xD6E8FEB86659FD93
    x = x ^ (x >> 32)
    x = x * 0xD6E8FEB86659FD93
    return x ^ (x >> 32)


@triton.jit
def _element(word, part, WIDTH: tl.constexpr, IS_BFLOAT16: tl.constexpr):
    """Return one of the elements that each word has, as float32 or float64."""
    if WIDTH == 64:
        x = word.to(tl.float64, bitcast=True)
    elif WIDTH == 32:
        x = (word >> (part * 32)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif IS_BFLOAT16:
        x = ((word >> (part * 16)).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = (word >> (part * 16)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _write_sums(row, word, at, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr, IS_BFLOAT16: tl.constexpr):
    """Write the [9] sums of a block, as `statistics._part_sums` computes them."""
    PARTS: tl.constexpr = 64 // WIDTH
    KIND: tl.constexpr = tl.float64 if WIDTH == 64 else tl.float32
    there = size // (WIDTH // 8)
    low, high = tl.full([BLOCK], float("inf"), KIND), tl.full([BLOCK], float("-inf"), KIND)
    total, squares = tl.zeros([BLOCK], KIND), tl.zeros([BLOCK], KIND)
    count, zeros, nans = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    infs, negative = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(PARTS):
        x = _element(word, part, WIDTH, IS_BFLOAT16)
        is_there = at * PARTS + part < there
        is_finite = is_there & (tl.abs(x) < float("inf"))
        low = tl.minimum(low, tl.where(is_finite, x, float("inf")))
        high = tl.maximum(high, tl.where(is_finite, x, float("-inf")))
        count += is_finite.to(tl.int32)
        zeros += (is_there & (x == 0)).to(tl.int32)
        nans += (is_there & (x != x)).to(tl.int32)
        infs += (is_there & (x == float("inf"))).to(tl.int32)
        negative += (is_there & (x == float("-inf"))).to(tl.int32)
    least, greatest, finite = tl.min(low, 0), tl.max(high, 0), tl.sum(count, 0)
    peak = tl.maximum(greatest, -least)
    scale = tl.where(peak > 0, peak, 1.0).to(KIND)  # of the largest, so that squares neither overflow nor underflow
    for part in tl.static_range(PARTS):
        x = _element(word, part, WIDTH, IS_BFLOAT16)
        is_finite = (at * PARTS + part < there) & (tl.abs(x) < float("inf"))
        total += tl.where(is_finite, x / scale, 0.0)
    mean = tl.sum(total.to(tl.float64), 0) / tl.maximum(finite, 1)
    for part in tl.static_range(PARTS):
        x = _element(word, part, WIDTH, IS_BFLOAT16)
        is_finite = (at * PARTS + part < there) & (tl.abs(x) < float("inf"))
        apart = tl.where(is_finite, x / scale - mean.to(KIND), 0.0)
        squares += apart * apart
    width = scale.to(tl.float64)
    tl.store(row, finite.to(tl.float64))
    tl.store(row + 1, mean * width)
    tl.store(row + 2, tl.sum(squares.to(tl.float64), 0) * width * width)
    tl.store(row + 3, least.to(tl.float64))
    tl.store(row + 4, greatest.to(tl.float64))
    tl.store(row + 5, tl.sum(zeros, 0).to(tl.float64))
    tl.store(row + 6, tl.sum(nans, 0).to(tl.float64))
    tl.store(row + 7, tl.sum(infs, 0).to(tl.float64))
    tl.store(row + 8, tl.sum(negative, 0).to(tl.float64))
