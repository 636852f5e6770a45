"""The memory layout of torch's tensors, so that `hookd/native/entry.c` reads their attributes directly.

Reading nine attributes of a tensor by name takes longer than reading its elements. The attributes lie at fixed offsets in
torch's `TensorImpl` and `StorageImpl` (c10/core/TensorImpl.h, StorageImpl.h), which differ between versions of torch. So the
offsets are found by looking at tensors with known attributes: an offset is accepted only if it is the only one that has the
right value in all of them. If any offset is not found, or anything else is wrong, attributes are read by name.

Only plain tensors in memory of torch's own allocator are read directly. All others are recognized by their dispatch keys and
by the function that frees their memory, and are read by name.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch

from hookd.target.plugins.faults import Failure
from hookd.target.tensors import torch_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

_STORAGE, _COUNTER = 64, 24
"""Number of bytes that are searched in a `StorageImpl` and a version counter; none is smaller in torch 2.1 to 2.15."""
_PLACES = ("impl", "keys", "dtype", "numel", "start", "contiguous", "mask", "storage", "version")
_TRIES = 5
"""Number of tries: in one try of 200, other bytes match by chance."""
_LARGEST = 256
_POINTERS = range(1 << 20, 1 << 47)
"""The values that may be a pointer, in a 64-bit process."""


class Layout(ctypes.Structure):
    """The offsets found, in the form of entry.c's struct."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in (*_PLACES, "count", "base", "nbytes", "deleter", "autograd", "grad")),
        *((name, ctypes.c_uint64) for name in ("plain", "owner", "nothing")),
        ("dtypes", ctypes.c_uint16 * 10),
    )


def find(dtypes: Sequence[torch.dtype]) -> Layout | None:
    """Return the layout, with the codes of these ten dtypes; None if it cannot be determined."""
    undo: list[Any] = []
    others: list[list[Tensor]] = []  # kept from earlier tries, so that the next tensors lie elsewhere
    try:
        if not torch_state.enter(undo):
            return None
        with torch.inference_mode(mode=False), torch.no_grad():
            for _ in range(_TRIES):
                with contextlib.suppress(ValueError):
                    return _found(dtypes)
                others.append(_plain())
    except Failure:  # an unknown version of torch
        pass
    finally:
        torch_state.leave(undo)
    return None


def _found(dtypes: Sequence[torch.dtype]) -> Layout:
    plain, odd = _plain(), _odd()
    foreign = torch.frombuffer(bytearray(64), dtype=torch.float32)
    impl = _only(_at(range(16, type(plain[0]).__basicsize__, 8), plain, id, _word, lambda one: one._cdata))
    size = _size_of(_impl(plain[0]))
    impls, storages = range(8, size - 7, 8), range(8, _STORAGE, 8)
    layout = Layout(impl=impl)
    layout.numel = _only(_at(impls, plain, _impl, _word, lambda one: one.numel()))
    layout.start = _only(_at(impls, plain, _impl, _word, lambda one: one.storage_offset()))
    layout.storage = _only(_at(impls, plain, _impl, _word, _storage))
    all_memory = [*plain, foreign]
    layout.base = _only(_at(storages, all_memory, _storage, _word, lambda one: one.untyped_storage().data_ptr()))
    layout.nbytes = _only(_at(storages, all_memory, _storage, _word, lambda one: one.untyped_storage().nbytes()))
    layout.deleter, layout.owner = _only(_deleters(plain, foreign))
    layout.keys = _only(_at(impls, [*plain, *odd], _impl, _word, _keys))
    layout.plain = _keys(plain[0])
    if {_keys(tensor) for tensor in plain} != {layout.plain} or layout.plain in map(_keys, odd):
        raise ValueError("plain tensors cannot be distinguished from others")
    layout.dtype, codes = _dtype_at(dtypes, size)
    layout.dtypes[:] = codes
    layout.version, layout.count = _version_at(plain, impls)
    layout.contiguous, layout.mask = _contiguous_at(plain, size)
    layout.autograd, layout.grad, layout.nothing = _gradient_at(impls)
    return layout


def _deleters(tensors: list[Tensor], foreign: Tensor) -> Iterator[tuple[int, int]]:
    """Yield offsets in a storage that hold one function in all of torch's own storages, and another in a foreign one."""
    for at in range(8, _STORAGE, 8):
        functions = {_word(_storage(tensor) + at) for tensor in tensors}
        other = _word(_storage(foreign) + at)
        if len(functions) == 1 and other not in functions and all(one in _POINTERS for one in (other, *functions)):
            yield at, functions.pop()


def _plain() -> list[Tensor]:
    """Return tensors in host memory that differ in all attributes to be found, each with another version."""

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    roots = [made(*shape) for shape in ((1009,), (6, 5), (2, 3, 7), (2, 3, 5, 11), (3, 1, 4, 1, 5, 1), (1, 1))]
    learns = made(13, 2).requires_grad_()
    with torch.enable_grad():
        result = learns * 2
    for times, one in enumerate((*roots, result), start=1):
        for _ in range(3 * times):
            one.zero_()
    parts = [roots[0][17:230], roots[1][2:], roots[2][1], roots[3][1, 2, 3:]]
    return [*roots, *parts, learns, learns.detach(), result, torch.nn.Parameter(made(19))]


def _odd() -> list[Tensor]:
    """Return tensors that are not plain, one of each kind that is recognized by its dispatch keys."""
    kept = torch.empty(5, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        inference = torch.empty(5, dtype=torch.float32, device="cpu")
    return [inference, torch._neg_view(kept), torch.empty(5, dtype=torch.float32, device="meta")]


def _dtype_at(dtypes: Sequence[torch.dtype], size: int) -> tuple[int, list[int]]:
    pairs = [[torch.empty(n, dtype=dtype, device="cpu") for n in (3, 4)] for dtype in dtypes]
    images = [[_bytes(_impl(one), size) for one in pair] for pair in pairs]
    candidates = {}
    for at in range(8, size - 1, 2):
        codes = [one[at : at + 2] for one, other in images if one[at : at + 2] == other[at : at + 2]]
        if len(set(codes)) == len(dtypes):
            candidates[at] = [int.from_bytes(code, "little") for code in codes]
    at = _only(candidates)
    return at, candidates[at]


def _version_at(tensors: list[Tensor], impls: range) -> tuple[int, int]:
    """Return the offset of the pointer to the version counter, and the offset of the number in the counter."""
    known = {value for tensor in tensors for value in (id(tensor), _storage(tensor))}
    candidates = []
    for at in impls:
        counters = [_word(_impl(tensor) + at) for tensor in tensors]
        # A pointer that all tensors share is something else.
        is_own = len(set(counters)) >= len({_storage(tensor) for tensor in tensors})
        if is_own and all(one in _POINTERS and not one % 8 and one not in known for one in counters):
            versions = [(counter, tensor._version) for counter, tensor in zip(counters, tensors)]  # noqa: SLF001
            places = range(8, _COUNTER, 4)
            candidates += [(at, place) for place in places if all(_number(c + place, 4) == v for c, v in versions)]
    at, place = _only(candidates)
    return at, place


def _contiguous_at(tensors: list[Tensor], size: int) -> tuple[int, int]:
    """Return the offset of the byte, and the bit in it, that says that a tensor is contiguous."""
    flat = torch.empty(6, 4, dtype=torch.float32, device="cpu")
    deep = torch.empty(2, 3, 5, 7, 2, dtype=torch.float32, device="cpu")
    apart = [
        flat.t(), flat[:, ::2], flat[:, 1:], flat[0].expand(3, 4), deep.permute(0, 2, 1, 3, 4), deep[..., 0],
        deep[..., 1].contiguous(memory_format=torch.channels_last), deep.contiguous(memory_format=torch.channels_last_3d),
    ]  # fmt: skip
    one_row = [torch.empty(2, 1, 5, 7, dtype=torch.float32, device="cpu"), flat[:1], deep[:, :1]]
    side_by_side = [tensor for tensor in (*tensors, *one_row) if tensor.is_contiguous()]
    apart = [tensor for tensor in (*apart, *one_row) if not tensor.is_contiguous()]
    bits = ~0  # the bits set in all contiguous tensors, and in none of the others
    for tensor in side_by_side:
        bits &= _number(_impl(tensor) + 8, size - 8)
    for tensor in apart:
        bits &= ~_number(_impl(tensor) + 8, size - 8)
    (bit,) = (bit for bit in range(bits.bit_length()) if bits >> bit & 1)
    return 8 + bit // 8, 1 << bit % 8


def _gradient_at(impls: range) -> tuple[int, int, int]:
    """Return the offset of the pointer to autograd's metadata, the gradient's offset there, and its value without a gradient."""
    without = torch.empty(3, dtype=torch.float32, device="cpu")
    learns = [torch.empty(3, dtype=torch.float32, device="cpu").requires_grad_() for _ in range(3)]
    at = _only(
        at
        for at in impls
        if not _word(_impl(without) + at) and all(_word(_impl(one) + at) in _POINTERS for one in learns)
    )
    *having, last = learns
    for tensor in having:
        tensor.grad = torch.empty(3, dtype=torch.float32, device="cpu")
    autograd = [_word(_impl(one) + at) for one in learns]
    places = range(8, _size_of(autograd[0]) - 7, 8)
    place = _only(
        place
        for place in places
        if all(_word(where + place) == _impl(tensor.grad) for where, tensor in zip(autograd, having))
    )
    assert last.grad is None
    return at, place, _word(autograd[-1] + place)


def _at(
    places: Iterable[int],
    tensors: list[Tensor],
    where: Callable[[Any], int],
    read: Callable[[int], int],
    value: Callable[[Any], int],
) -> list[int]:
    """Return the offsets at which all tensors hold their known value."""
    return [at for at in places if all(read(where(tensor) + at) == value(tensor) for tensor in tensors)]


def _only(found: Iterable[Any]) -> Any:
    (one,) = found
    return one


def _impl(tensor: Any) -> int:
    return int(tensor._cdata)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size_of(address: int) -> int:
    """Return the size in bytes of the malloc block at an address, at most `_LARGEST`."""
    usable = ctypes.CDLL(None)["malloc_usable_size"]  # by index: an attribute access would keep it in a cycle
    usable.argtypes, usable.restype = (ctypes.c_void_p,), ctypes.c_size_t
    return min(int(usable(address)), _LARGEST)


def _keys(tensor: Any) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _word(address: int) -> int:
    return _number(address, 8)


def _number(address: int, size: int) -> int:
    return int.from_bytes(_bytes(address, size), "little")


def _bytes(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)
