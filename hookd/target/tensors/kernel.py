"""The numeric kernel, `hookd/native/kernel.c`, loaded from memory and called. Runs in the target.

It travels in the payload as a shared object without dependencies, and is loaded through a memory file: no file system
is written, and one mounted noexec does not matter. Where there is no kernel (hookd was installed without a compiler),
or where the target may not have such a file, torch's own operations take its place: `hookd/target/tensors/statistics.py`.
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
"""The types that it takes, by their numbers in kernel.c."""
WIDTHS = {torch.float32: 4, torch.float64: 8, torch.float16: 2, torch.bfloat16: 2}
BRIEF = 1 << 16
"""Elements for which the lock is kept: some microseconds, in which no other thread of Python can free the memory. To get
the lock back from a busy thread can take 5 ms."""
VERSION = 2
"""What `hookd_version` of a kernel returns that is called as below."""
SUMS = 9
FINITE, MASKED, BAD = range(3)
"""What the gate says: no infinity and no NaN; none but -inf; any."""
_Sums = ctypes.c_double * (SUMS + 1)  # the last is the kernel's own


class _Calls(NamedTuple):
    """The functions of the library, called in one way."""

    dense: Any
    strided: Any
    gate: Any
    largest: Any


class Kernel:
    """The functions of kernel.c for tensors of `DTYPES` in the host's memory.

    All addresses come from `hookd.target.tensors.host_memory`: where the memory is not there, nothing is read. The interpreter's lock
    is released for more than BRIEF elements.
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
            # Dimensions of one element say nothing; without them no tensor has as many as the kernel has room for.
            shape = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
            sizes, strides = zip(*shape)
            _storage, address = host_memory.locate(tensor, host_memory.span_of(sizes, strides))
            if address:
                # Not ctypes arrays: each length would make a class, which only the cycle collector frees.
                arrays = array("q", sizes), array("q", strides)
                at = (values.buffer_info()[0] for values in arrays)
                self._for(math.prod(sizes)).strided(address, len(shape), *at, *how)
        return out[:SUMS] if address else None

    def gate(self, tensor: Tensor) -> int:
        """Say whether a tensor is FINITE, MASKED or BAD; FINITE where it is empty or its memory is not there."""
        if tensor.is_contiguous() or (tensor := in_memory_order(tensor)).is_contiguous():
            elements = tensor.numel()
            _storage, address = host_memory.locate(tensor, elements)
            return self._for(elements).gate(address, elements, DTYPES[tensor.dtype], self.level) if address else FINITE
        *_, nans, infs, negative = self.sums(tensor) or (0, 0, 0)
        return BAD if nans or infs else MASKED if negative else FINITE

    def addresses(self) -> tuple[int | None, int | None, int | None]:
        """Return where the functions are that `gate`, `largest` and `sums` call."""
        made = self._brief
        gate, largest, dense = (
            ctypes.cast(one, ctypes.c_void_p).value for one in (made.gate, made.largest, made.dense)
        )
        return gate, largest, dense

    def is_finite(self, tensor: Tensor) -> bool:
        """Say whether all is finite, of a tensor of `DTYPES` that is contiguous; False if its memory is not there."""
        elements = tensor.numel()
        _storage, address = host_memory.locate(tensor, elements)
        return bool(address) and not self._for(elements).gate(address, elements, DTYPES[tensor.dtype], self.level)

    def largest(self, tensors: Sequence[Tensor]) -> float | None:
        """Return the largest magnitude in contiguous tensors of one of `DTYPES`: NaN if there is one, 0 of nothing.

        Returns:
            None if of any of them the memory is not there.
        """
        dtype = tensors[0].dtype
        located = host_memory.locate_all(tensors, WIDTHS[dtype])
        if located is None:
            return None
        _storages, places, sizes = located
        at = places.buffer_info()[0], sizes.buffer_info()[0]
        found: float = self._for(sum(sizes)).largest(*at, len(sizes), DTYPES[dtype], self.level)
        return found

    def _for(self, elements: int) -> _Calls:
        return self._brief if elements <= BRIEF else self._long

    def close(self) -> None:
        """Give its memory back (musl's dlclose keeps it mapped). No thread may be inside it, or call it later."""
        native.unload(self.library)


def _calls(library: Any) -> _Calls:
    number, size, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    largest = native.function(library, "hookd_largest", place, place, number, number, number)
    largest.restype = ctypes.c_double
    return _Calls(
        native.function(library, "hookd_summary", place, size, number, number, place),
        native.function(library, "hookd_summary_strided", place, number, place, place, number, number, place),
        native.function(library, "hookd_is_finite", place, size, number, number),
        largest,
    )


def in_memory_order(tensor: Tensor) -> Tensor:
    """Order the dimensions as they lie in memory: one that is transposed only is contiguous then."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def load() -> Kernel | None:
    """Load the kernel that came with this code; None where that cannot be."""
    try:
        return load_image(native.image_of("kernel"))
    except (OSError, AttributeError):  # not built, no memory file, not executable, another machine's, an older kernel
        return None


def load_image(image: bytes, level: int | None = None) -> Kernel:
    """Load a kernel from its bytes; `level`: the instructions to use, the best that this processor has if None.

    Raises:
        OSError: the system does not allow it, or it is made for another machine.
        AttributeError: it is another version's.
    """
    library = native.load("hookd-kernel", image)
    if native.function(library, "hookd_version")() != VERSION:
        raise AttributeError("a kernel of another version")
    return Kernel(library, level)
