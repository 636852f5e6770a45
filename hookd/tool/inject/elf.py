"""Look up symbols of a loaded program or library in the target's memory while it runs.

No file is opened and no section header is used. So this also works for stripped, deleted and replaced files, and for those of
another mount namespace. Source of the layout: the System V gABI, chapter 5, and the GNU hash section as read by glibc's
elf/dl-lookup.c. All sizes are capped: a target may be hostile.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.tool.linux.memory import Memory

MACHINES = {"x86_64": 62, "aarch64": 183}
_LOAD, _DYNAMIC = 1, 2
_HASH, _STRTAB, _SYMTAB, _GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_MAX_SYMBOLS = 1 << 16  # in a table that must be searched linearly; libpython has some 2,000
_MAX_CHAIN = 4096
_PAGE, _MAX_PAGES = 4096, 64


class NotElfError(ValueError):
    """The address is not that of a loaded 64-bit ELF image that we can read."""


@dataclass(frozen=True)
class Header:
    """The identification of an image: `bits` is 32 or 64, `machine` a value of `MACHINES`."""

    bits: int
    machine: int


def header(memory: Memory, base: int) -> Header:
    """Read the first bytes of the image at `base`.

    Raises:
        NotElfError: there is no ELF image.
    """
    start = memory.read(base, 20)
    if start[:4] != b"\x7fELF":
        raise NotElfError(f"no ELF image at {base:#x}")
    return Header(32 * start[4], struct.unpack_from("<H", start, 18)[0])


class Pages:
    """A cache of memory pages: a symbol look-up reads a hundred small pieces of a few pages.

    Args:
        memory: to read from.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._cache: dict[int, bytes] = {}

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of `size` bytes, see `Memory.read`."""
        number, offset = divmod(address, _PAGE)
        if offset + size > _PAGE:
            return self._memory.read(address, size)
        page = self._cache.get(number)
        if page is None:
            if len(self._cache) >= _MAX_PAGES:
                self._cache.clear()
            page = self._cache[number] = self._memory.read(number * _PAGE, _PAGE)
        return page[offset : offset + size]

    def string(self, address: int, most: int) -> bytes:
        """Return the bytes before the next NUL, `most` bytes at most."""
        text = b""
        while len(text) < most:
            piece, zero, _ = self.read(address + len(text), _PAGE - (address + len(text)) % _PAGE).partition(b"\0")
            text += piece
            if zero:
                break
        return text[:most]


class Image:
    """One ELF image in the memory of a process.

    Args:
        memory: of the process.
        base: where the file's first byte is mapped.

    Raises:
        NotElfError: there is no image, or its tables are malformed.
        OSError: the memory cannot be read.
    """

    def __init__(self, memory: Memory, base: int) -> None:
        self._memory = Pages(memory)
        if header(memory, base).bits != 64:
            raise NotElfError("not a 64-bit image")
        self._bias, table = self._segments(base)
        tags = self._dynamic(table)
        if _SYMTAB not in tags or _STRTAB not in tags:
            raise NotElfError("no dynamic symbols")
        self._symbols, self._strings = self._pointer(tags[_SYMTAB]), self._pointer(tags[_STRTAB])
        self._gnu = self._pointer(tags[_GNU_HASH]) if _GNU_HASH in tags else None
        self._sysv = self._pointer(tags[_HASH]) if _HASH in tags else None

    def find(self, names: Iterable[str]) -> dict[str, int]:
        """Return the addresses of those of `names` that the image defines."""
        addresses = {}
        for name in names:
            address = self._find(name.encode())
            if address is not None:
                addresses[name] = address
        return addresses

    def _unpack(self, layout: str, address: int) -> tuple[int, ...]:
        return struct.unpack(layout, self._memory.read(address, struct.calcsize(layout)))

    def _segments(self, base: int) -> tuple[int, tuple[int, int]]:
        """Return the load bias, and address and size of the dynamic section."""
        (offset,) = self._unpack("<Q", base + 32)
        size, count = self._unpack("<HH", base + 54)
        if size != 56 or count > 256 or offset > 1 << 20:
            raise NotElfError("invalid program headers")
        table = self._memory.read(base + offset, size * count)
        bias = dynamic = None
        for i in range(count):
            kind, _, file_offset, address, _, _, length, _ = struct.unpack_from("<IIQQQQQQ", table, i * size)
            if kind == _LOAD and bias is None:
                bias = base - (address - file_offset)
            if kind == _DYNAMIC:
                dynamic = (address, min(length, 1 << 16))
        if bias is None or dynamic is None:
            raise NotElfError("statically linked")
        return bias, (bias + dynamic[0], dynamic[1])

    def _dynamic(self, table: tuple[int, int]) -> dict[int, int]:
        tags: dict[int, int] = {}
        data = self._memory.read(*table)
        for tag, value in struct.iter_unpack("<QQ", data[: len(data) // 16 * 16]):
            if tag == 0:
                break
            tags.setdefault(tag, value)
        return tags

    def _pointer(self, value: int) -> int:
        # glibc adds the bias to these pointers in place; musl and the vDSO leave them as in the file.
        return value if value >= self._bias else value + self._bias

    def _find(self, name: bytes) -> int | None:
        if self._gnu is not None:
            return self._find_gnu(name, self._gnu)
        if self._sysv is not None:
            return self._find_all(name, self._sysv)
        return None

    def _find_gnu(self, name: bytes, table: int) -> int | None:
        buckets, first, bloom, _ = self._unpack("<IIII", table)
        if not buckets:
            return None
        hashed = _gnu_hash(name)
        start = table + 16 + 8 * bloom
        (index,) = self._unpack("<I", start + 4 * (hashed % buckets))
        for _ in range(_MAX_CHAIN if index >= first else 0):
            (value,) = self._unpack("<I", start + 4 * buckets + 4 * (index - first))
            if value | 1 == hashed | 1 and (address := self._symbol(index, name)) is not None:
                return address
            if value & 1:
                break
            index += 1
        return None

    def _find_all(self, name: bytes, table: int) -> int | None:
        _, count = self._unpack("<II", table)
        for index in range(min(count, _MAX_SYMBOLS)):
            if (address := self._symbol(index, name)) is not None:
                return address
        return None

    def _symbol(self, index: int, name: bytes) -> int | None:
        """Return the address of symbol number `index` if its name is `name` and it is defined here."""
        text, _, _, section, value, _ = self._unpack("<IBBHQQ", self._symbols + 24 * index)
        if section == 0 or self._memory.read(self._strings + text, len(name) + 1) != name + b"\0":
            return None
        return self._bias + value


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
