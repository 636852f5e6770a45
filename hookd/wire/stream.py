"""A stream of records from a plugin in the target to one tool, through memory that the tool has made.

The tool creates the memory, sealed against a change of its size, and sends its descriptor with the request `stream`; the agent maps
it. A plugin's records are written there at once, so what was written last is read also when the process was killed. If there is no
room, because the tool reads too slowly, records are dropped and counted; the training never waits.

Layout, in 64-bit words of the machine: a magic number, the capacity in bytes, the bytes written, the bytes read, the records
dropped. The data follow at DATA, in a ring of the capacity. A record is its length and its crc32, of 32 bits each, and its bytes.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING
from zlib import crc32

from hookd.errors import ControlError
from hookd.wire.order import barrier

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = 0x31_6D_61_65_72_74_73_68  # "hstream1"
DATA = 4096
_MAGIC, _CAPACITY, _WRITTEN, _READ, _DROPPED = range(5)
_PREFIX = struct.Struct("=II")


class _Ring:
    """The memory of a stream, as either side has mapped it."""

    def __init__(self, number: int, size: int) -> None:
        self._memory = mmap.mmap(number, size)
        self._words = memoryview(self._memory)[: 8 * (_DROPPED + 1)].cast("Q")
        self._capacity = size - DATA

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._memory.close()


class StreamWriter(_Ring):
    """The target's side; one thread at a time.

    Args:
        number: the descriptor, which stays the caller's.
        size: of the memory, in bytes.

    Raises:
        ControlError: reason "bad-request": the memory is not a stream's.
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size)
        if size <= DATA or self._words[_MAGIC] != MAGIC or self._words[_CAPACITY] != self._capacity:
            self.close()
            raise ControlError("the memory is not a stream's", reason="bad-request")
        self._written = 0

    def write(self, record: bytes) -> bool:
        """Append a record; False, and it counts as dropped, if there is no room for it."""
        data = _PREFIX.pack(len(record), crc32(record)) + record
        if len(data) > self._capacity - (self._written - self._words[_READ]):
            self._words[_DROPPED] += 1
            return False
        at = self._written % self._capacity
        first = data[: self._capacity - at]
        self._memory[DATA + at : DATA + at + len(first)] = first
        self._memory[DATA : DATA + len(data) - len(first)] = data[len(first) :]
        self._written += len(data)
        barrier()  # the bytes are there before the word says so
        self._words[_WRITTEN] = self._written
        return True


class StreamReader(_Ring):
    """The tool's side, which does not trust what the target has written.

    Args:
        number: the descriptor of memory that is all zero.
        size: of the memory, in bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size)
        self._words[_CAPACITY] = self._capacity
        self._words[_MAGIC] = MAGIC
        self._done = 0

    @property
    def dropped(self) -> int:
        """The number of records for which there was no room."""
        return self._words[_DROPPED]

    def records(self) -> Iterator[bytes]:
        """Yield the records that have arrived, and make room for more.

        Raises:
            ControlError: reason "foreign": it is not a stream that hookd writes.
        """
        written = self._words[_WRITTEN]
        if not 0 <= written - self._done <= self._capacity:
            raise _foreign()
        barrier()  # the bytes are loaded after the word
        while self._done < written:
            length, crc = _PREFIX.unpack(self._bytes(self._done, _PREFIX.size))
            end = self._done + _PREFIX.size + length
            if end > written:
                raise _foreign()
            record = self._bytes(self._done + _PREFIX.size, length)
            if crc32(record) != crc:
                raise _foreign()
            self._done = end
            self._words[_READ] = end  # after the bytes were loaded: whether it is stored depends on their crc32
            yield record

    def _bytes(self, start: int, length: int) -> bytes:
        at = start % self._capacity
        first = self._memory[DATA + at : DATA + min(at + length, self._capacity)]
        return first + self._memory[DATA : DATA + length - len(first)]


def _foreign() -> ControlError:
    return ControlError("the process has written something else than records into its stream", reason="foreign",
                        hint="Is it a training that you trust?")  # fmt: skip
