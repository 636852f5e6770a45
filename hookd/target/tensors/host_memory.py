"""Whether the elements of a tensor are in memory, and where. Runs in the target.

Whatever hands the address of a tensor to C, or a tensor of the training to an operation of torch, asks here first: both
end the process where the memory is not there. It is not there when the storage was freed (`resize_(0)`, as offloading
and FSDP do it), when there never was any (wrapper subclasses; meta, fake, functional and zero tensors; what a transform
has left behind), or when it is a file that was mapped and has been cut off since. Nor is memory read that does not lie at a
multiple of an element's size, as `torch.frombuffer` with an odd offset makes it: compiled C may read it in no other way.

Left open: another thread that frees a storage while C reads it without the interpreter's lock, or a file that is cut off
in that moment. Linux before 5.14 cannot say whether a mapped file is still there, so it is read as the training reads it.
"""

from __future__ import annotations

import ctypes
import errno
import posix
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Classes whose tensors are what torch's own operations take them for."""
STRIDED = torch.strided
_WITH_STORAGE = ("cpu", "cuda")
"""Devices whose tensors have a storage; on others only the device's own operations know where the elements are."""
_POPULATE_READ = (
    22  # MADV_POPULATE_READ, Linux 5.14: make all pages readable, or say that reading one would be a SIGBUS
)
_MISSING = (errno.EFAULT, errno.ENOMEM, getattr(errno, "EHWPOISON", 133))
_PAGE = posix.sysconf("SC_PAGE_SIZE")
_madvise = ctypes.CDLL(None, use_errno=True)["madvise"]  # by index: an attribute access would keep it in a cycle
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_storage_of: Any = getattr(Tensor, "untyped_storage", None) or Tensor._storage  # type: ignore[attr-defined]  # before 2.0
_Storage: Any = type(_storage_of(torch.empty(0)))
_offset_of = Tensor.storage_offset
_is_ours: Any = getattr(_Storage, "resizable", bool)
"""Whether torch's allocator has made the memory: no file of anybody's. (Before torch 2.1 that cannot be asked.)"""


def locate(tensor: Tensor, span: int) -> tuple[Any, int]:
    """Return a tensor's storage, and the address of its first element; 0 where not all of its memory is there.

    Keep the storage until the memory has been read: another thread may give the tensor another one.

    Args:
        tensor: strided, and of a class in PLAIN.
        span: elements from its first to its furthest, inclusive; see `span_of`.
    """
    try:
        storage = _storage_of(tensor)
        width = tensor.element_size()
        start = _offset_of(tensor) * width
        base = storage.data_ptr()  # raises RuntimeError for one that has a size and has never had memory
        address = base + start
        is_there = span and base and start + span * width <= storage.nbytes() and not address % width
        if is_there and (_is_ours(storage) or not tensor.is_cpu or _is_mapped(address, span * width)):
            return storage, address
    except RuntimeError:  # NotImplementedError among them: it has no storage
        pass
    return None, 0


def locate_all(tensors: Sequence[Tensor], width: int) -> tuple[list[Any], array[int], array[int]] | None:
    """Do the same for many tensors that are contiguous, in half the time.

    Args:
        tensors: all on the host.
        width: the bytes of an element.

    Returns:
        Their storages, addresses and numbers of elements; None if of any of them the memory is not there.
    """
    try:
        storages = list(map(_storage_of, tensors))
        sizes = array("q", map(Tensor.numel, tensors))
        rows = zip(map(_Storage.data_ptr, storages), map(_Storage.nbytes, storages), map(_offset_of, tensors), sizes)
        places = array("Q", [
            base + start * width for base, room, start, n in rows
            if (start + n) * width <= room and (base or not n) and not base % width
        ])  # fmt: skip
    except RuntimeError:
        return None
    if len(places) < len(sizes):
        return None
    if not all(map(_is_ours, storages)) and not all(map(_is_mapped, places, [n * width for n in sizes])):
        return None
    return storages, places, sizes


def _is_mapped(address: int, size: int) -> bool:
    """Whether all pages of a mapped file can be read; what lies behind the end of a file cannot."""
    begin = address - address % _PAGE
    if not size or not _madvise(begin, address + size - begin, _POPULATE_READ):
        return True
    return ctypes.get_errno() not in _MISSING


def span_of(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Return how many elements there are from the first to the furthest one, inclusive, of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))


def is_readable(tensor: Tensor) -> bool:
    """Do what `Context.is_readable` says."""
    if type(tensor) not in PLAIN or tensor.layout is not STRIDED or getattr(tensor, "is_nested", False):
        return False
    elements = tensor.numel()
    if not elements or tensor.is_meta:  # to ask a fake one for its address raises a warning
        return False
    if tensor.device.type not in _WITH_STORAGE:
        return True
    span = elements if tensor.is_contiguous() else span_of(tensor.shape, tensor.stride())
    return bool(locate(tensor, span)[1])
