"""Checks whether the elements of a tensor are in memory, and returns their address.

All code that passes a tensor's address to C, or a tensor of the training to an operation of torch, checks here first: both
crash the process if the memory is not there. The memory is not there if
- the storage was freed (`resize_(0)`, as in offloading and FSDP);
- it never existed (wrapper subclasses; meta, fake, functional and zero tensors; leftovers of a transform);
- it is a mapped file that has been truncated since.
Memory that is not aligned to the element size is not read either, as from `torch.frombuffer` with an odd offset: compiled C
requires the alignment.

Two races remain: another thread may free a storage while C reads it without the interpreter's lock, or a file may be truncated
at that moment. Linux before 5.14 cannot check a mapped file, so it is read as the training reads it.
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
"""The classes whose tensors behave as torch's own operations expect."""
STRIDED = torch.strided
_WITH_STORAGE = ("cpu", "cuda", "xpu")
"""Devices whose tensors have a storage; on others only the device's own operations can find the elements."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14: make all pages readable, or fail if reading one would cause a SIGBUS."""
_MISSING = (errno.EFAULT, errno.ENOMEM, getattr(errno, "EHWPOISON", 133))
_PAGE = posix.sysconf("SC_PAGE_SIZE")
_madvise = ctypes.CDLL(None, use_errno=True)["madvise"]  # by index: an attribute access would keep it in a cycle
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_storage_of: Any = getattr(Tensor, "untyped_storage", None) or Tensor._storage  # type: ignore[attr-defined]  # before 2.0
_Storage: Any = type(_storage_of(torch.empty(0)))
_offset_of = Tensor.storage_offset
_is_ours: Any = getattr(_Storage, "resizable", bool)
"""Whether torch's allocator owns the memory, so that it is not a mapped file. (Always False before torch 2.1.)"""


def locate(tensor: Tensor, span: int) -> tuple[Any, int]:
    """Return a tensor's storage, and the address of its first element; (None, 0) if not all of its memory is there.

    Keep the storage until the memory has been read: another thread may give the tensor another one.

    Args:
        tensor: strided, and of a class in PLAIN.
        span: number of elements from its first to its furthest, inclusive; see `span_of`.
    """
    try:
        storage = _storage_of(tensor)
        width = tensor.element_size()
        start = _offset_of(tensor) * width
        base = storage.data_ptr()  # raises RuntimeError for a storage that has a size and never had memory
        address = base + start
        is_there = span and base and start + span * width <= storage.nbytes() and not address % width
        if is_there and (_is_ours(storage) or not tensor.is_cpu or _is_mapped(address, span * width)):
            return storage, address
    except RuntimeError:  # also NotImplementedError: the tensor has no storage
        pass
    return None, 0


def locate_all(tensors: Sequence[Tensor], width: int) -> tuple[list[Any], array[int], array[int]] | None:
    """Locate many contiguous tensors, in half the time of `locate` for each.

    Args:
        tensors: one or more, all of one dtype and on one device.
        width: size of an element in bytes.

    Returns:
        Their storages, addresses and numbers of elements; None if the memory of any of them is not there.
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
    # Only host memory can be a mapped file; madvise does not know a device's addresses.
    if all(map(_is_ours, storages)) or not tensors[0].is_cpu:
        return storages, places, sizes
    return (storages, places, sizes) if all(map(_is_mapped, places, [n * width for n in sizes])) else None


def _is_mapped(address: int, size: int) -> bool:
    """Whether all pages of a mapped file can be read; pages behind the end of the file cannot."""
    begin = address - address % _PAGE
    if not size or not _madvise(begin, address + size - begin, _POPULATE_READ):
        return True
    return ctypes.get_errno() not in _MISSING


def span_of(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Return the number of elements from the first to the furthest one, inclusive, of a non-empty tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))


def is_readable(tensor: Tensor) -> bool:
    """Implement `Context.is_readable`."""
    if type(tensor) not in PLAIN or tensor.layout is not STRIDED or getattr(tensor, "is_nested", False):
        return False
    elements = tensor.numel()
    if not elements or tensor.is_meta:  # a fake tensor warns when its address is read
        return False
    if tensor.device.type not in _WITH_STORAGE:
        return True
    span = elements if tensor.is_contiguous() else span_of(tensor.shape, tensor.stride())
    return bool(locate(tensor, span)[1])
