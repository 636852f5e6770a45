"""Read and write the safetensors format, whose files are read without running code, with only torch and the standard library.

Source: https://github.com/huggingface/safetensors, README "Format" (0.8). A file has:
- the length of the header: 8 bytes, little-endian;
- the header: JSON padded with spaces, `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, with offsets counted
  from the end of the header;
- the data: without gaps, row-major and little-endian.
"""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

_ALIGNED = 8
_PIECE = 16 << 20
LONGEST_HEADER = 64 << 20
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "U16": "uint16", "U32": "uint32", "U64": "uint64",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in _NAMES.items() if hasattr(torch, own)}
_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


class FormatError(ValueError):
    """A file or a JSON text breaks the format; the message says where."""


def storable(tensor: Tensor) -> Tensor:
    """Return a view that the format can store: complex numbers as pairs, rare one-byte types as bytes.

    The format has complex numbers only since 0.7, and does not have the rarest 8-bit types.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _OF_DTYPE and tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    return tensor


def restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `storable`.

    Raises:
        FormatError: `storable` does not make such a tensor from this dtype.
    """
    if tensor.dtype is dtype:
        return tensor
    if dtype.is_complex and tensor.dim() and tensor.shape[-1] == 2:
        made = torch.view_as_complex(tensor)
    elif tensor.dtype is torch.uint8 and dtype not in _OF_DTYPE and _size(dtype) == 1:
        made = tensor.view(dtype)
    else:
        made = tensor
    if made.dtype is not dtype:
        raise FormatError(f"a tensor of {tensor.dtype} with shape {list(tensor.shape)} cannot represent one of {dtype}")
    return made


def is_known(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be stored."""
    return dtype in _OF_DTYPE or dtype.is_complex or _size(dtype) == 1


def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors in host memory, as `storable` returns them, and release the GIL while writing."""
    # Tensors with the largest elements come first, so that each tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), _OF_DTYPE[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.writelines(_pieces(tensor))


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    size = tensor.numel() * tensor.element_size()
    if size:
        whole = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))
        yield from (whole[at : at + _PIECE] for at in range(0, size, _PIECE))


def read(data: bytes | bytearray) -> dict[str, Tensor]:
    """Return the tensors in a file's contents; each has its own memory.

    Raises:
        FormatError: the data breaks the format.
    """
    entries, start = _header(data)
    found, at = {}, 0
    for name, dtype, shape, begin, end in sorted(entries, key=lambda one: one[3:]):
        if begin != at:
            raise FormatError(f"tensor {name!r} begins at byte {begin}, but the one before ends at {at}")
        if end - begin != _count(name, shape) * _size(dtype):
            raise FormatError(f"tensor {name!r} of {dtype} and shape {shape} cannot have {end - begin} bytes")
        if start + end > len(data):
            raise FormatError(f"the file is truncated: tensor {name!r} ends at byte {start + end} of {len(data)}")
        found[name] = _tensor(data, start + begin, end - begin, dtype, shape)
        at = end
    if start + at != len(data):
        raise FormatError(f"there are {len(data) - start - at} bytes after the last tensor")
    return found


def _header(data: bytes | bytearray) -> tuple[list[tuple[str, torch.dtype, list[int], int, int]], int]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LONGEST_HEADER, len(data) - 8):
        raise FormatError(f"the file of {len(data)} bytes is truncated, or the length of its header is wrong")
    header = parse(bytes(data[8 : 8 + length]))
    return [_entry(name, one) for name, one in header.items() if name != "__metadata__"], 8 + length


def _entry(name: str, entry: Any) -> tuple[str, torch.dtype, list[int], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"tensor {name!r} has no dtype, shape or data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"tensor {name!r} has the dtype {dtype!r}, which this torch does not know")
    if not isinstance(shape, list) or not all(is_size(one) for one in (*shape, begin, end)) or end < begin:
        raise FormatError(f"tensor {name!r} has an impossible shape or offset: {shape}, {begin} to {end}")
    return name, DTYPES[dtype], shape, begin, end


def is_size(value: Any) -> bool:
    """Whether a value is an integer that can be a size."""
    return type(value) is int and 0 <= value < 1 << 48


def parse(text: bytes) -> dict[str, object]:
    """Parse a JSON object without duplicate keys.

    Raises:
        FormatError: the text is not such an object.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except FormatError:
        raise
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"not JSON: {exc}") from None
    if not isinstance(found, dict):
        raise FormatError("not a JSON object")
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("a JSON object has the same key twice")
    return found


def _count(name: str, shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
        if count >= 1 << 48:
            raise FormatError(f"tensor {name!r} has an impossible shape: {shape}")
    return count


def _size(dtype: torch.dtype) -> int:
    size = getattr(dtype, "itemsize", None)  # torch 2.1+
    return torch.empty(0, dtype=dtype).element_size() if size is None else int(size)


def _tensor(data: bytes | bytearray, at: int, size: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not size:
        return torch.empty(shape, dtype=dtype)
    # A copy, because the data in the file need not be aligned to its elements.
    own = torch.frombuffer(bytearray(memoryview(data)[at : at + size]), dtype=torch.uint8)
    return (own.ne(0) if dtype is torch.bool else own.view(dtype)).reshape(shape)
