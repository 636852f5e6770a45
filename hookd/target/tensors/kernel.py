"""Loads and calls the numeric kernel, `hookd/native/kernel.c`.

The payload contains it as a shared object without dependencies, which is loaded through a memory file: nothing is written
to a file system, and noexec mounts do not matter. Without a kernel (hookd was installed without a compiler), or if the
target may not create such a file, torch's own operations take its place: `hookd/target/tensors/statistics.py`.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookd.target.boot import native
from hookd.target.tensors import host_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""The dtypes that the kernel takes, with their numbers in kernel.c."""
WIDTHS = {torch.float32: 4, torch.float64: 8, torch.float16: 2, torch.bfloat16: 2}
BRIEF = 1 << 16
"""Up to this number of elements the interpreter's lock is kept: for some microseconds, in which no other Python thread can
free the memory. To get the lock back from a busy thread can take 5 ms."""
VERSION = 4
"""The result of `hookd_version` for a kernel with the functions and signatures used below."""
SUMS = 9
FINITE, MASKED, BAD = range(3)
"""Results of the gate: no infinity or NaN; only -inf; any other."""
_Ends = ctypes.c_double * 5
_Sums = ctypes.c_double * (SUMS + 1)  # the last one is for the kernel's internal use


class _Calls(NamedTuple):
    """The functions of the library, all called either with or without the interpreter's lock."""

    dense: Any
    strided: Any
    gate: Any
    largest: Any
    digest: Any
    digest_extent: Any


class Kernel:
    """The functions of kernel.c for tensors of `DTYPES` in the host's memory.

    All addresses come from `hookd.target.tensors.host_memory`, so that memory that is not there is not read. The interpreter's
    lock is released for more than BRIEF elements.
    """

    def __init__(self, library: Any, level: int | None = None) -> None:
        self.library = library
        self.level = native.function(library, "hookd_level")() if level is None else level
        self._long = _calls(library)
        self._brief = _calls(ctypes.PyDLL(library._name, handle=library._handle))

    def sums(self, tensor: Tensor) -> list[float] | None:
        """Return the [9] sums of `Summary.of_sums` of a tensor that is not empty; None if its memory is not there."""
        out = _Sums()
        how = DTYPES[tensor.dtype], self.level, ctypes.addressof(out)
        if tensor.is_contiguous() or (tensor := in_memory_order(tensor)).is_contiguous():
            elements = tensor.numel()
            _storage, address = host_memory.locate(tensor, elements)
            if address:
                self._for(elements).dense(address, elements, *how)
        else:
            # Drop dimensions of size 1: without them no tensor has more dimensions than the kernel supports.
            shape = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
            sizes, strides = zip(*shape)
            _storage, address = host_memory.locate(tensor, host_memory.span_of(sizes, strides))
            if address:
                # Not ctypes arrays: each length would create a class, which only the cycle collector frees.
                arrays = array("q", sizes), array("q", strides)
                at = (values.buffer_info()[0] for values in arrays)
                self._for(math.prod(sizes)).strided(address, len(shape), *at, *how)
        return out[:SUMS] if address else None

    def digest(self, tensor: Tensor) -> tuple[int, list[float] | None] | None:
        """Return the digest of a contiguous tensor, and the [5] sums of `Extent.of_sums`, None for other dtypes than DTYPES.

        None if its memory is not there.
        """
        elements = tensor.numel()
        if not elements:
            return self._brief.digest(None, 0, self.level), None
        _storage, address = host_memory.locate(tensor, elements)
        if not address:
            return None
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            size = elements * tensor.element_size()
            return self._for(size).digest(address, size, self.level), None
        out = _Ends()
        bits = self._for(elements).digest_extent(address, elements, dtype, self.level, ctypes.addressof(out))
        return bits, list(out)

    def gate(self, tensor: Tensor) -> int:
        """Return whether a tensor is FINITE, MASKED or BAD; FINITE if it is empty or its memory is not there."""
        if tensor.is_contiguous() or (tensor := in_memory_order(tensor)).is_contiguous():
            elements = tensor.numel()
            _storage, address = host_memory.locate(tensor, elements)
            return self._for(elements).gate(address, elements, DTYPES[tensor.dtype], self.level) if address else FINITE
        *_, nans, infs, negative = self.sums(tensor) or (0, 0, 0)
        return BAD if nans or infs else MASKED if negative else FINITE

    def addresses(self) -> tuple[int | None, ...]:
        """Return the [4] addresses of the functions behind `gate`, `largest`, `sums` and `digest`."""
        calls = self._brief
        return tuple(
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (calls.gate, calls.largest, calls.dense, calls.digest_extent)
        )

    def is_finite(self, tensor: Tensor) -> bool:
        """Whether all elements of a contiguous tensor of `DTYPES` are finite; False if its memory is not there."""
        elements = tensor.numel()
        _storage, address = host_memory.locate(tensor, elements)
        return bool(address) and not self._for(elements).gate(address, elements, DTYPES[tensor.dtype], self.level)

    def largest(self, tensors: Sequence[Tensor]) -> float | None:
        """Return the largest magnitude in contiguous tensors of one of `DTYPES`, NaN if there is one, 0 without elements.

        None if the memory of any of them is not there.
        """
        dtype = tensors[0].dtype
        located = host_memory.locate_all(tensors, WIDTHS[dtype])
        if located is None:
            return None
        _storages, places, sizes = located
        at = places.buffer_info()[0], sizes.buffer_info()[0]
        magnitude: float = self._for(sum(sizes)).largest(*at, len(sizes), DTYPES[dtype], self.level)
        return magnitude

    def _for(self, elements: int) -> _Calls:
        return self._brief if elements <= BRIEF else self._long

    def close(self) -> None:
        """Unload the kernel (musl's dlclose keeps it mapped). No thread may be inside it, or call it later."""
        native.unload(self.library)


def _calls(library: Any) -> _Calls:
    number, size, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    largest = native.function(library, "hookd_largest", place, place, number, number, number)
    largest.restype = ctypes.c_double
    digest = native.function(library, "hookd_digest", place, size, number)
    digest_extent = native.function(library, "hookd_digest_extent", place, size, number, number, place)
    digest.restype = digest_extent.restype = ctypes.c_uint64
    return _Calls(
        native.function(library, "hookd_summary", place, size, number, number, place),
        native.function(library, "hookd_summary_strided", place, number, place, place, number, number, place),
        native.function(library, "hookd_is_finite", place, size, number, number),
        largest,
        digest,
        digest_extent,
    )


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view with the dimensions in memory order; a tensor that was merely transposed becomes contiguous."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def load() -> Kernel | None:
    """Load the kernel from the payload; return None if that is not possible."""
    try:
        return load_image(native.image_of("kernel"))
    except (OSError, AttributeError):  # not built, no memory file, not executable, another machine's, an older kernel
        return None


def load_image(image: bytes, level: int | None = None) -> Kernel:
    """Load a kernel from its bytes.

    Args:
        image: the shared object.
        level: the instruction set to use; None: the best one of this processor.

    Raises:
        OSError: the system does not allow it, or the kernel was built for another machine.
        AttributeError: the kernel has another version.
    """
    library = native.load("hookd-kernel", image)
    if native.function(library, "hookd_version")() != VERSION:
        raise AttributeError("a kernel of another version")
    return Kernel(library, level)
