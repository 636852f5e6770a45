"""The record of a step, and how it is encoded for the tool.

A record is the length of a JSON object in four bytes, the object, and the entries. The object has the step, its mark (see `Context.mark`), the settings of the
optimizers, the number of tensors that could not be read, and the keys that are new: a key is a list of phase, name, number of the call
in the step, slot, dtype and shape. `at` is the number of the first new key; earlier keys with that number or a higher one are forgotten.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd import Digest

ENTRY = Struct("=IIBQddd")
"""An entry: the number of its key, elements that are not finite, the algorithm of the digest as its place in `ALGORITHMS`, the digest,
norm, least and greatest finite element; 0 without numbers."""
ALGORITHMS = ("xxh3", "mix64")
UNREAD = 255
"""The algorithm of a tensor whose digest did not arrive."""
NOTHING = (0.0, 0.0, 0.0)
MOST_BYTES = 32 << 20
"""Limit on the entries of a step."""
MOST = 0xFFFFFFFF
"""The largest number of elements that are not finite."""

LONGEST = 1000
"""Characters of a name."""

Key = tuple[str, str, int, str, str, "tuple[int, ...]"]
"""A `Place`, with the dtype and the shape of what was there."""


def shortened(text: str) -> str:
    """Return a text that the tool accepts: of a longer one the beginning, and a digest that tells it from others."""
    if len(text) <= LONGEST:
        return text
    digest = blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{text[: LONGEST - len(digest) - 1]}…{digest}"


class Keys:
    """The keys of a stream, numbered from 0.

    Attributes:
        known: how many of them the tool has.
    """

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._keys: list[Key] = []
        self.known = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._keys)

    def number(self, key: Key) -> int:
        """Return the number of a key, which may be new."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._keys)
            phase, name, call, slot, *kind = key
            self._keys.append((phase, shortened(name), call, shortened(slot), *kind))  # type: ignore[arg-type]
        return number

    def unknown(self, end: int) -> list[Key]:
        """Return the keys up to a number that the tool does not have."""
        return self._keys[self.known : end]


class Record:
    """The record of one step, of which some numbers may still be on their way from a device.

    Args:
        keys: of the stream.
        complete: called when the last number arrives after the end of the step.

    Attributes:
        waiting: how many numbers are on their way.
        unread: number of tensors that could not be read.
        is_full: whether the step has more entries than are kept.
        step: its number, once it is over.
    """

    def __init__(self, keys: Keys, complete: Callable[[], None]) -> None:
        self._keys, self._complete = keys, complete
        self._entries = bytearray()
        self._head: Mapping[str, object] | None = None
        self._end = 0
        self.waiting = self.unread = self.step = 0
        self.is_full = False

    def append(self, key: Key, digest: Digest | None) -> int:
        """Append an entry, and return its place; without a digest `fill` is needed."""
        at = len(self._entries)
        if at >= MOST_BYTES:
            self.is_full = True
        elif digest is None:
            self._entries += ENTRY.pack(self._keys.number(key), 0, UNREAD, 0, *NOTHING)
        else:
            self._entries += _packed(self._keys.number(key), digest)
        return at

    def fill(self, at: int, digest: Digest) -> None:
        """Complete the entry at a place."""
        if at < len(self._entries):
            number = ENTRY.unpack_from(self._entries, at)[0]
            self._entries[at : at + ENTRY.size] = _packed(number, digest)

    def wait(self) -> None:
        """Note that a number is on its way, after which `arrive` follows."""
        self.waiting += 1

    def arrive(self) -> None:
        """Note that a number has arrived, or is lost."""
        self.waiting -= 1
        if not self.waiting and self._head is not None:
            self._complete()

    def close(self, step: int, head: Mapping[str, object]) -> None:
        """End the step: no entry will follow."""
        self.step, self._head, self._end = step, {"step": step, **head}, len(self._keys)

    def encoded(self) -> bytes:
        """Return the bytes for the tool."""
        keys = {"at": self._keys.known, "keys": self._keys.unknown(self._end)}
        head = json.dumps({**(self._head or {}), "unread": self.unread, **keys}).encode()
        return len(head).to_bytes(4, "little") + head + self._entries

    def know(self) -> None:
        """Note that the tool has the record."""
        self._keys.known = self._end


class Reading:
    """The digest of one tensor, which may arrive after the step, and the entries that have it.

    Args:
        record: that has the entries.

    Attributes:
        is_lost: whether there is no digest.
    """

    __slots__ = ("_digest", "_places", "_record", "is_lost")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._digest: Digest | None = None
        self._places: list[int] = []
        self.is_lost = False

    def add(self, key: Key) -> None:
        """Append an entry to the record."""
        if self.is_lost:
            self._record.unread += 1
        elif self._digest is not None:
            self._record.append(key, self._digest)
        else:
            if not self._places:
                self._record.wait()
            self._places.append(self._record.append(key, None))

    def arrive(self, digest: Digest) -> None:
        """Complete the entries, and those that follow."""
        self._digest = digest
        for at in self._places:
            self._record.fill(at, digest)
        if self._places:
            self._record.arrive()

    def lose(self) -> None:
        """Leave the entries without a digest."""
        self.is_lost = True
        if self._places:
            self._record.arrive()


def _packed(number: int, digest: Digest) -> bytes:
    found, algorithm = digest.extent, ALGORITHMS.index(digest.algorithm)
    if found is None:
        return ENTRY.pack(number, 0, algorithm, digest.bits, *NOTHING)
    ends = (found.norm, found.min, found.max) if found.finite else NOTHING
    return ENTRY.pack(number, min(found.nonfinite, MOST), algorithm, digest.bits, *ends)
