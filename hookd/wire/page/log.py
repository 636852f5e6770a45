"""Records and writer of a page's logs, see `layout`. Used on both sides."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import struct
from typing import TYPE_CHECKING
from zlib import crc32

from hookd.wire.order import barrier
from hookd.wire.page.layout import HEAD_WORDS, LOW32, MAX_RECORD, Region, jsonable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PREFIX = struct.Struct("=II")  # length and crc32 of the payload

decode = json.JSONDecoder().decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def array_of(*items: object) -> bytes:
    """Encode a record of the schema."""
    return _encode(items).encode()


def object_of(fields: Mapping[str, object]) -> bytes:
    """Encode an object, such as an incident, within MAX_RECORD.

    If it is too long, nested values are dropped, and texts are cut until it fits.
    """
    payload = _encode(jsonable(fields)).encode()
    for limit in (1000, 200, 40):
        if len(payload) < MAX_RECORD - 64:
            break
        few = ((key, value) for key, value in fields.items() if not isinstance(value, (dict, list, tuple)))
        payload = _encode(jsonable(dict(itertools.islice(few, 16)), limit)).encode()
    return payload


def frame(payload: bytes) -> bytes:
    """Make a log record of a JSON payload, padded with spaces so that every record starts aligned."""
    payload = payload.ljust(len(payload) + 7 & ~7)
    return _PREFIX.pack(len(payload), crc32(payload)) + payload


def split(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the payload and the end of each record; stop at the first damaged or incomplete one."""
    end, last = 0, len(data) - _PREFIX.size
    while end <= last:
        length, crc = _PREFIX.unpack_from(data, end)
        start = end + _PREFIX.size
        end = start + length
        payload = data[start:end]
        if not length or length % 8 or end > len(data) or end - start > MAX_RECORD or crc32(payload) != crc:
            return
        yield payload, end


class Log:
    """The writer of a log, used by one thread at a time."""

    def __init__(self, memory: mmap.mmap, words: memoryview, name: str, region: Region) -> None:
        self._memory, self._words, self._head = memory, words, HEAD_WORDS[name]
        self._offset, self._half = region.offset, region.length // 2

    def append(self, payload: bytes) -> bool:
        """Add a record; False when it does not fit."""
        data = frame(payload)
        head = self._words[self._head]
        used = head & LOW32
        if len(data) > MAX_RECORD or used + len(data) > self._half:
            return False
        start = self._start(head >> 32) + used
        self._memory[start : start + len(data)] = data
        self._publish(head + len(data))
        return True

    def replace(self, payloads: Iterable[bytes]) -> None:
        """Replace all records at once, and return the memory of the old ones to the system."""
        flips = (self._words[self._head] >> 32) + 1
        data = b"".join(map(frame, payloads))
        start = self._start(flips)
        self._memory[start : start + len(data)] = data
        self._publish(flips << 32 | len(data))
        barrier()  # a reader that sees later stores, to freed cells or over the old records, sees the new head too
        with contextlib.suppress(OSError):  # only memory is lost
            self._memory.madvise(mmap.MADV_REMOVE, self._start(flips - 1), self._half)

    def drop_oldest(self) -> None:
        """Drop all but the newest records that fit into half of the space."""
        head = self._words[self._head]
        start = self._start(head >> 32)
        kept: list[bytes] = []
        room = self._half // 2
        for payload, _ in reversed(list(split(self._memory[start : start + (head & LOW32)]))):
            room -= len(frame(payload))
            if room < 0:
                break
            kept.append(payload)
        self.replace(reversed(kept))

    def _start(self, flips: int) -> int:
        return self._offset + (flips & 1) * self._half

    def _publish(self, head: int) -> None:
        """Store the head after the bytes."""
        barrier()
        self._words[self._head] = head
