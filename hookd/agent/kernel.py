"""The numeric kernel, `hookd/native/kernel.c`, loaded from memory and called. Runs in the target.

It travels in the payload as a shared object without dependencies, and is loaded through a memory file: no file system
is written, and one mounted noexec does not matter. Where there is no kernel (hookd was installed without a compiler),
or where the target may not have such a file, torch's own operations take its place: `hookd/agent/numeric.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""The types that it takes, by their numbers in kernel.c."""
VERSION = 2
"""What `hookd_version` of a kernel returns that is called as below."""
SUMS = 9
FINITE, MASKED, BAD = range(3)
"""What the gate says: no infinity and no NaN; none but -inf; any."""
_MFD_EXEC = 0x10  # Linux 6.3: without it, a machine with vm.memfd_noexec = 1 makes files that cannot be mapped as code
_Sums = ctypes.c_double * (SUMS + 1)  # the last is the kernel's own


class Kernel:
    """The functions of kernel.c for tensors of `DTYPES` in the host's memory; all release the interpreter's lock."""

    def __init__(self, library: Any, level: int | None = None) -> None:
        self.library = library
        number, size, memory = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.level = _function(library, "hookd_level")() if level is None else level
        self._dense = _function(library, "hookd_summary", memory, size, number, number, memory)
        gaps = memory, number, memory, memory, number, number, memory
        self._strided = _function(library, "hookd_summary_strided", *gaps)
        self._gate = _function(library, "hookd_is_finite", memory, size, number, number)
        self._largest = _function(library, "hookd_largest", memory, memory, number, number, number)
        self._largest.restype = ctypes.c_double

    def sums(self, tensor: Tensor) -> list[float]:
        """Give the [9] sums of `Summary.of_sums` of a tensor that is not empty."""
        out = _Sums()
        dtype = DTYPES[tensor.dtype]
        if tensor.is_contiguous() or (tensor := in_memory_order(tensor)).is_contiguous():
            self._dense(tensor.data_ptr(), tensor.numel(), dtype, self.level, ctypes.addressof(out))
        else:
            dims = tensor.dim()
            sizes, strides = ((ctypes.c_int64 * dims)(*of) for of in (tensor.shape, tensor.stride()))
            self._strided(tensor.data_ptr(), dims, sizes, strides, dtype, self.level, ctypes.addressof(out))
        return out[:SUMS]

    def gate(self, tensor: Tensor) -> int:
        """Say whether a tensor that is not empty is FINITE, MASKED or BAD."""
        if tensor.is_contiguous() or (tensor := in_memory_order(tensor)).is_contiguous():
            return self._gate(tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], self.level)  # type: ignore[no-any-return]
        *_, nans, infs, negative = self.sums(tensor)
        return BAD if nans or infs else MASKED if negative else FINITE

    def is_finite(self, tensor: Tensor) -> bool:
        """Say whether all is finite, of a tensor of `DTYPES` that is contiguous; `gate` without its questions."""
        return not self._gate(tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], self.level)

    def largest(self, tensors: Sequence[Tensor]) -> float:
        """Give the largest magnitude in contiguous tensors of one of `DTYPES`; NaN if there is one, 0 of nothing."""
        places, sizes = array("Q", map(Tensor.data_ptr, tensors)), array("q", map(Tensor.numel, tensors))
        dtype = DTYPES[tensors[0].dtype]
        at = places.buffer_info()[0], sizes.buffer_info()[0]
        return self._largest(*at, len(tensors), dtype, self.level)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give its memory back (musl's dlclose keeps it mapped). No thread may be inside it, or call it later."""
        import _ctypes  # noqa: PLC0415  # where there is ctypes there is this

        _ctypes.dlclose(self.library._handle)


def _function(library: Any, name: str, *arguments: Any) -> Any:
    function = library[name]  # by index, for an attribute access would keep it in the library's dict: a cycle
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def in_memory_order(tensor: Tensor) -> Tensor:
    """Order the dimensions as they lie in memory: one that is transposed only is contiguous then."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def load() -> Kernel | None:
    """Load the kernel that came with this code; None where that cannot be."""
    try:
        image = _image()
        return load_image(image) if image else None
    except (OSError, AttributeError):  # no memory file, not executable, another machine's, an older kernel
        return None


def load_image(image: bytes, level: int | None = None) -> Kernel:
    """Load a kernel from its bytes; `level`: the instructions to use, the best that this processor has if None.

    Raises:
        OSError: the system does not allow it, or it is made for another machine.
        AttributeError: it is another version's.
    """
    descriptor = _memory_file()
    try:
        view = memoryview(image)
        while view:
            view = view[os.write(descriptor, view) :]
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if _function(library, "hookd_version")() != VERSION:
        raise AttributeError("a kernel of another version")
    return Kernel(library, level)


def _image() -> bytes:
    """Read the shared object beside us: a file of the payload, or where hookd is installed."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "native", "kernel.so")
    return bytes(__spec__.loader.get_data(path))  # type: ignore[union-attr]  # all loaders that we meet have it


def _memory_file() -> int:
    flags: int = os.MFD_CLOEXEC
    try:
        return os.memfd_create("hookd-kernel", flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("hookd-kernel", flags)  # Linux before 6.3 does not know the flag
