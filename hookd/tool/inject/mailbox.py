"""The mailbox: control words, the injected code and the payload, shared with the target.

The tool and the injector use this module. The mailbox is private memory of the target, which the tool reads and writes through
`memory.py`. If the target is not stopped (CPython 3.14), it is a file that both sides read and write. Each word has one writer.

    0    token      tool    the injected code acts only if this equals its own token
    8    sent       tool    how often the code was queued
    16   length     tool    bytes of data, written after the data
    24   seen       tool    the answer was read
    32   cancelled  tool    the tool no longer waits; its last write, because the target may now free the mailbox
    40   size       tool    of the whole mailbox, in bytes
    64   ran        target  how often the code ran, whatever the token; written after `state`
    72   state      target  STARTS before the thread starts, NO_THREAD if it could not, RUNS once it runs, NO_MEMORY if it gets none
    80   answered   target  bytes of the answer, written after the answer
    128  the code (see `queued.py`), a C string
    4096 the data, later replaced by the answer

The data are: the lengths of `hookd/target/boot/stub.py` as source and as compiled code, both of these, the length of the request,
the request as JSON, the payload.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.linux.memory import Memory
    from hookd.wire.agent import Started

TOKEN, SENT, LENGTH, SEEN, CANCELLED, SIZE = 0, 8, 16, 24, 32, 40
RAN, STATE, ANSWERED = 64, 72, 80
CODE, DATA = 128, 4096
STARTS, NO_THREAD, RUNS, NO_MEMORY = 1, 2, 3, 4
"""Values of `state`."""
UNUSED = frozenset({0, NO_THREAD, NO_MEMORY})
"""Values of `state` with which no thread of the target uses the mailbox."""
MORE_MEMORY = "Raise its RLIMIT_AS or RLIMIT_DATA, or the limit of its container or job."
"""The hint for a target that gets no memory; the same as in `hookd/target/boot/stub.py`, which is sent alone."""
_MAX_ANSWER = 65536


class Box(Protocol):
    """Bytes shared by the tool and the target."""

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`."""

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""

    def expect(self, until: float) -> None:
        """Set until when the mailbox is known to exist, in seconds of the monotonic clock."""


class MemoryBox:
    """A mailbox in the memory of a process.

    It refuses late writes, because the target may use the memory for something else by then.
    """

    def __init__(self, memory: Memory, address: int) -> None:
        self._memory, self.address = memory, address
        self._until = math.inf

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`; OSError if they are gone."""
        return self._memory.read(self.address + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`; OSError if the memory is gone, or may be gone (ETIMEDOUT)."""
        try:
            self._memory.write(self.address + offset, data, self._until)
        except TimeoutError:
            text = f"process {self._memory.pid} no longer waits at its mailbox"
            raise OSError(errno.ETIMEDOUT, text) from None

    def expect(self, until: float) -> None:
        """See `Box`."""
        self._until = until


class FileBox:
    """A mailbox in a file. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`, fewer at the end of the file."""
        return os.pread(self._fd, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done

    def expect(self, until: float) -> None:
        """See `Box`. No effect: our descriptor stays valid."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def word(box: Box, offset: int) -> int:
    """Read one word."""
    return int.from_bytes(box.read(offset, 8), "little")


def set_word(box: Box, offset: int, value: int) -> None:
    """Write one word."""
    box.write(offset, struct.pack("<Q", value))


def opening(token: int, size: int) -> bytes:
    """Return the initial words of a mailbox, up to the code."""
    return struct.pack("<QQQQQQ", token, 1, 0, 0, 0, size).ljust(CODE, b"\0")


def data(stub: tuple[bytes, bytes], request: Mapping[str, object], archive: bytes) -> bytes:
    """Return the packed data for the target's thread; for `stub` see `attach.payload.stub`."""
    text = json.dumps(request).encode()
    lengths = struct.pack("<QQ", *map(len, stub))
    return b"".join((lengths, *stub, struct.pack("<Q", len(text)), text, archive))


def answer(box: Box) -> Started | None:
    """Read the target's answer, None if it has not answered yet.

    Raises:
        ValueError: the answer is not a JSON object.
    """
    length = word(box, ANSWERED)
    if not length:
        return None
    if length > _MAX_ANSWER:
        raise ValueError("the answer is too long")
    try:
        value = json.loads(box.read(DATA, length))
    except RecursionError as exc:
        raise ValueError("the answer is nested too deep") from exc
    if not isinstance(value, dict):
        raise ValueError("the answer is not an object")  # noqa: TRY004  bad data, not a caller's mistake
    return cast("Started", value)
