"""The reader of a page, which does not trust the contents. Runs on the tool side.

It reads only with `pread`, within its own limits: mapping a sparse page would allocate its memory, and mapping a page that
then shrinks would raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import itertools
import posix
import stat
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hookd.errors import PageError
from hookd.wire.descriptors import fcntl
from hookd.wire.page.layout import (
    BEAT,
    BEAT_CELLS,
    DROPPED_WORD,
    END_OF_TIME,
    F_GET_SEALS,
    HEAD_WORDS,
    HEARTBEATS,
    LOW32,
    MAGIC,
    MAGIC_WORD,
    MIN_SIZE,
    NAME_BYTES,
    PROTOCOL,
    PROTOCOL_WORD,
    RECORD,
    REGIONS,
    SIZE,
    SIZE_WORD,
    STATE_WORD,
    STATES,
    TABLE_WORD,
    TID,
    WORDS,
    Region,
    divide,
    jsonable,
    phase_name,
)
from hookd.wire.page.log import decode, split
from hookd.wire.page.schema import UNTRUSTED, Schema
from hookd.wire.page.snapshot import Heartbeat, Record, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.wire.identity import Identity
    from hookd.wire.incident import Incident, LogLine

    JsonObject = dict[str, Any]
    """An object of a log, with whatever another process has put into it."""

T = TypeVar("T")

READ_ATTEMPTS = 50  # a copy of a small page takes 0.1 ms; under load, five in a row have each hit a compaction
READ_PATIENCE_S = 1.0
MOST_AGAIN = 4096
"""Maximum number of cells that are read again: a page whose cells all change continually must not delay the daemon."""
TRIES = 8
_ZEROS = bytes(1 << 12)
_MAX_IDENTITY = 1 << 20  # bytes, of a page of another protocol


class PageReader:
    """A page of another process.

    Any thread may call any method, and every method raises PageError for contents that cannot be trusted.

    Args:
        fd: a page, opened for reading. The reader becomes its owner, and closes it even if it refuses the page.
        any_protocol: accept a page of another protocol too; only its `identity` and `state` can be read.

    Raises:
        PageError: reason "corrupt" ("it is not written yet": try again), or "protocol" for another hookd's page.
    """

    def __init__(self, fd: int, *, any_protocol: bool = False) -> None:
        self.fd = fd
        self._lock = threading.Lock()  # one copy at a time
        self._fd_lock = threading.Lock()  # a closed descriptor's number is soon another file's
        self._schema: Schema | None = None
        self._last: Snapshot | None = None
        self._objects_seen: dict[str, tuple[int, list[JsonObject]]] = {}
        try:
            self._regions = self._check(any_protocol=any_protocol)
        except PageError:
            self.close()
            raise

    def identity(self) -> Identity:
        """Return the identity of the agent."""
        return self._consistent(self._identity)

    def state(self) -> str:
        """Return one of STATES."""
        return _state(self._words())

    def heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of all threads, in a few hundred microseconds."""
        data = self._pread(*self._regions["heartbeat"])
        names_at = HEARTBEATS * BEAT_CELLS * 8
        tids = array("d")
        tids.frombytes(data[:names_at])
        beats = []
        for slot, tid in enumerate(tids[TID::BEAT_CELLS]):  # mostly empty
            if _whole(tid):
                _, module, events, phase, step = BEAT.unpack_from(data, slot * BEAT_CELLS * 8)
                start = names_at + slot * NAME_BYTES
                name = data[start : start + NAME_BYTES].partition(b"\0")[0].decode("utf-8", "replace")
                numbers = (_whole(module), _whole(events), phase_name(phase), _whole(step))
                beats.append(Heartbeat(_whole(tid), name, *numbers))
        return beats

    def read(self) -> Snapshot:
        """Copy the page, without the recorder; return the last copy if it is rewritten faster than it can be copied."""
        try:
            snapshot = self._consistent(self._copy)
        except _RestlessError:
            if self._last is None:
                raise
            return self._last
        self._last = snapshot
        return snapshot

    def recent(self, count: int) -> list[Record]:
        """Return about the last `count` events of the recorder, in a few milliseconds."""
        region = self._regions["recorder"]
        numbers = array("d")
        numbers.frombytes(_written(self._pread(*region)))
        ring = region.length // RECORD.size
        last = _whole(max(numbers[:: RECORD.size // 8], default=0.0))
        slots = sorted({(number - 1) % ring for number in range(max(1, last - count + 1), last + 1)})
        records = [record for slot in slots if (record := self._record(slot, ring, last - count)) is not None]
        return sorted(records, key=lambda record: record.seq)

    def _record(self, slot: int, ring: int, after: int) -> Record | None:
        """Return the record in a slot if it is complete, belongs there, and is newer than number `after`."""
        start = self._regions["recorder"].offset + slot * RECORD.size
        first, second = self._pread(start, RECORD.size), self._pread(start, RECORD.size)
        record = _record_of(RECORD.unpack(first))
        return record if first == second and record.seq > max(after, 0) and (record.seq - 1) % ring == slot else None

    def records(self) -> list[Record]:
        """Return the recorder's events in order, without those that differ between two copies: a single copy may be torn.

        This takes about 100 ms when the recorder is full.
        """
        region = self._regions["recorder"]
        first = _written(self._pread(*region))
        second = self._pread(region.offset, len(first))
        ring = region.length // RECORD.size
        records = []
        for slot, cells in enumerate(RECORD.iter_unpack(first)):
            record = _record_of(cells)
            own = slice(slot * RECORD.size, (slot + 1) * RECORD.size)
            if record.seq and (record.seq - 1) % ring == slot and first[own] == second[own]:
                records.append(record)
        return sorted(records, key=lambda record: record.seq)

    def close(self) -> None:
        """Close the descriptor. Idempotent; a thread that is reading gets a PageError."""
        with self._fd_lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                with contextlib.suppress(OSError):  # it was never a descriptor, or other code has closed it
                    posix.close(fd)

    def _consistent(self, copy: Callable[[tuple[int, ...]], T]) -> T:
        """Call `copy` with the header's words until no log was rewritten meanwhile."""
        deadline = time.monotonic() + READ_PATIENCE_S
        with self._lock:
            words = self._words()
            for _ in range(READ_ATTEMPTS):
                error = None
                try:
                    result = copy(words)
                except PageError as exc:
                    self._schema = None
                    error = exc
                before, words = words, self._words()
                if all(before[head] >> 32 == words[head] >> 32 for head in HEAD_WORDS.values()):
                    if error:
                        raise error
                    return result
                if time.monotonic() > deadline:
                    break
        raise _RestlessError("the page is rewritten faster than it can be read", reason="corrupt")

    def _copy(self, words: tuple[int, ...]) -> Snapshot:
        schema = self._parse_schema(words)
        cells = self._cells(schema.end)
        return Snapshot(
            identity=self._identity(words),
            state=_state(words),
            generation=schema.generation,
            families=[family.freeze(cells) for family in schema.families.values()],
            modules=dict(schema.modules),
            heartbeats=self.heartbeats(),
            incidents=cast("list[Incident]", self._objects("incidents", words)),
            logs=cast("list[LogLine]", self._objects("logs", words)),
            dropped=words[DROPPED_WORD],
        )

    def _cells(self, count: int) -> array[float]:
        """Copy the first `count` cells twice, and read again each cell on which the copies differ.

        The kernel copies bytes (x86's `rep movsb`). If the copy is interrupted within a number, the rest may be of the number
        that is written there next.
        """
        offset, length = self._regions["values"].offset, 8 * count
        first, second = self._pread(offset, length), self._pread(offset, length)
        copy, left = bytearray(second), MOST_AGAIN
        for start in range(0, length, len(_ZEROS)) if first != second else ():
            end = min(start + len(_ZEROS), length)
            if first[start:end] == second[start:end]:
                continue
            for at in range(start, end, 8):
                number = second[at : at + 8]
                if left and first[at : at + 8] != number:
                    left -= 1
                    copy[at : at + 8] = self._settled(offset + at, number)
        cells = array("d")
        cells.frombytes(copy)
        return cells

    def _settled(self, offset: int, number: bytes) -> bytes:
        """Read a number until two readings agree, at most TRIES times; return the last reading."""
        for _ in range(TRIES):
            before, number = number, self._pread(offset, 8)
            if before == number:
                break
        return number

    def _parse_schema(self, words: tuple[int, ...]) -> Schema:
        start, used, flips = self._used("schema", words)
        schema = self._schema
        if schema is None or schema.generation != flips or schema.parsed > used:
            schema = self._schema = Schema(flips, self._regions["values"])
        try:
            schema.feed(self._pread(start + schema.parsed, used - schema.parsed))
        except UNTRUSTED as exc:
            raise _corrupt(f"its schema is malformed: {exc}") from exc
        return schema

    def _identity(self, words: tuple[int, ...]) -> Identity:
        objects = self._objects("identity", words)
        if not objects:
            raise _corrupt("it has no identity")
        return cast("Identity", objects[-1])

    def _objects(self, name: str, words: tuple[int, ...]) -> list[JsonObject]:
        """Return the objects of a log, which is parsed again only if its head has moved."""
        head, objects = self._objects_seen.get(name, (None, []))
        if head == words[HEAD_WORDS[name]]:
            return objects
        start, used, _ = self._used(name, words)
        end = 0
        parsed: list[Any] = []
        try:
            for payload, end in split(self._pread(start, used)):  # noqa: B007
                parsed.append(jsonable(decode(payload.decode())))
        except UNTRUSTED as exc:
            raise _corrupt(f"its {name} cannot be parsed: {exc}") from exc
        if not all(isinstance(item, dict) and (name == "identity" or _is_dated(item)) for item in parsed):
            raise _corrupt(f"its {name} contain malformed records")
        if end == used:
            self._objects_seen[name] = (words[HEAD_WORDS[name]], parsed)
        return parsed

    def _used(self, name: str, words: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the offset of a log's current half, the number of bytes used in it, and its flips."""
        region, head = self._regions[name], words[HEAD_WORDS[name]]
        half, flips, used = region.length // 2, head >> 32, head & LOW32
        if used > half:
            raise _corrupt(f"its {name} are longer than their region")
        return region.offset + (flips & 1) * half, used, flips

    def _check(self, *, any_protocol: bool) -> dict[str, Region]:
        """Check the constant parts: kind of file, size, magic, protocol and regions; return the regions."""
        size = _memory_file_size(self.fd)
        words = self._words()
        if words[MAGIC_WORD] != MAGIC:
            raise _corrupt("it does not begin like a page" if words[MAGIC_WORD] else "it is not written yet")
        words = self._words()  # the others again, after the magic word: inside one copy nothing is ordered
        if words[PROTOCOL_WORD] != PROTOCOL:
            if any_protocol:
                return {"identity": _region_of_any(words, size)}
            raise PageError(
                f"the page speaks protocol {words[PROTOCOL_WORD]}, this hookd speaks {PROTOCOL}",
                reason="protocol",
                hint="use the version of hookd that attached it; `hookd attach PID` replaces an older agent, "
                "`hookd detach PID` ends any",
            )
        if words[SIZE_WORD] != size or size & (size - 1) or not MIN_SIZE <= size <= SIZE:
            raise _corrupt(f"it has {size} bytes, and its header says {words[SIZE_WORD]}")
        regions = divide(size)
        if tuple(itertools.chain(*regions.values())) != words[TABLE_WORD : TABLE_WORD + 2 * len(REGIONS)]:
            raise _corrupt("its regions are not where they belong")
        return regions

    def _words(self) -> tuple[int, ...]:
        return WORDS.unpack(self._pread(0, WORDS.size))

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            with self._fd_lock:
                data = posix.pread(self.fd, length, offset)
        except OSError as exc:
            raise _corrupt(f"it cannot be read: {exc}") from exc
        if len(data) != length:
            raise _corrupt("it has shrunk")
        return data


def _region_of_any(words: tuple[int, ...], size: int) -> Region:
    """Find the identity in a page of another protocol."""
    offset, length = words[TABLE_WORD : TABLE_WORD + 2]
    if not 0 < length <= _MAX_IDENTITY or offset + length > size:
        raise _corrupt("its identity is outside the file, or too large")
    return Region(offset, length)


class _RestlessError(PageError):
    """The page was rewritten at every attempt to copy it."""


def _corrupt(why: str) -> PageError:
    return PageError(
        f"the page cannot be trusted: {why}", reason="corrupt", hint="detach and attach that process again"
    )


def _memory_file_size(fd: int) -> int:
    """Return the size of a memory file; refuse other files, because reading a pipe or a file of FUSE or NFS could hang."""
    try:
        status = posix.fstat(fd)
        fcntl(fd, F_GET_SEALS, 0)
    except OSError as exc:
        raise _corrupt(f"it is not a memory file ({exc})") from exc
    if not stat.S_ISREG(status.st_mode):
        raise _corrupt("it is not a regular file")
    return status.st_size


def _written(ring: bytes) -> bytes:
    """Cut off the records that were never written, in steps: `bytes.rstrip` alone takes 5 ns for each byte."""
    end = len(ring)
    while end >= len(_ZEROS) and ring.startswith(_ZEROS, end - len(_ZEROS)):
        end -= len(_ZEROS)
    written = len(ring[:end].rstrip(b"\0"))
    return ring[: -(-written // RECORD.size) * RECORD.size]


def _state(words: tuple[int, ...]) -> str:
    if words[STATE_WORD] >= len(STATES):
        raise _corrupt(f"its state is {words[STATE_WORD]}")
    return STATES[words[STATE_WORD]]


def _is_dated(item: Mapping[str, object]) -> bool:
    seq, when = item.get("seq"), item.get("time")
    return type(seq) is int and type(when) is float and 0 <= when < END_OF_TIME


def _record_of(cells: tuple[float, ...]) -> Record:
    seq, when, kind, module, step, value = cells
    return Record(_whole(seq), when, _whole(kind), _whole(module), _whole(step), value)


def _whole(value: float) -> int:
    """Return a count that was stored as a float; 0 for values that are not counts, such as NaN."""
    return int(value) if 0 <= value < 2**53 else 0
