"""The writer of a page."""

from __future__ import annotations

import contextlib
import errno
import itertools
import posix
from typing import TYPE_CHECKING

from hookd.wire.order import barrier
from hookd.wire.originals import clock
from hookd.wire.page.layout import (
    BEAT_CELLS,
    END_OF_TIME,
    HEAD_WORDS,
    HEARTBEATS,
    MAGIC,
    MAGIC_WORD,
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
    Region,
    clean,
    divide,
    jsonable,
)
from hookd.wire.page.log import Log, object_of
from hookd.wire.page.memory import allocate, unshare
from hookd.wire.page.series import SeriesWriter

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from hookd.wire.descriptors import Descriptor


class PageWriter(SeriesWriter):
    """The page of this process.

    Any thread may call any method; a forked child may call only `abandon` and `sever`. Frequent stores go directly to `cells`, at
    indexes that the methods return: `cells[i] = x`, or `cells[i] += x` in one expression that contains no call (with a call,
    increments of other threads are lost). Do not slice `cells`.

    No method waits for long or raises for lack of space. A series without space gets the index of scratch cells, which are
    never read, and is counted in `dropped`; so does one that a signal handler requests during a registration.

    Attributes:
        cells: float64 view of the whole page. It is released on close; a store then raises ValueError.
        dropped: number of series for which there was no space.
        recorder: index of the recorder's first cell, and the number of records that fit.
        next_seq: returns the number of the next record.
        sharers: by family, the objects of `hookd.api.metrics` that have declared it.
    """

    def __init__(self, file: Descriptor, memory: mmap.mmap, identity: Mapping[str, object]) -> None:
        """Write an empty page into zeroed memory, which `create` allocates."""
        self._file = file
        self._memory = memory
        self._view = memoryview(memory)
        words = self._view.cast("Q")
        regions = divide(len(memory))
        self._logs = {name: Log(memory, words, name, regions[name]) for name in HEAD_WORDS}
        super().__init__(self._view.cast("d"), words, self._logs["schema"], regions["values"])
        self._identity: dict[str, object] = {}
        self._last_seq = {"incidents": 0, "logs": 0}
        self._lay_out_threads(regions["heartbeat"], regions["recorder"])
        self._write_header(regions, identity)

    @classmethod
    def create(cls, identity: Mapping[str, object], *, size: int = SIZE) -> PageWriter:
        """Create the page of this process, of `size` bytes, or fewer (down to MIN_SIZE) if its limits require it.

        Raises:
            PageError: reason "no-memory" or "no-memfd", with a hint.
        """
        file, memory = allocate(size)
        return cls(file, memory, identity)

    @property
    def fd(self) -> int:
        """The memfd; -1 once closed."""
        return self._file.number

    def duplicate(self) -> int:
        """Return a duplicate of the memfd's descriptor.

        Raises:
            OSError: it is closed.
        """
        if not self._file.is_ours():
            raise OSError(errno.EBADF, "the page is closed")
        return posix.dup(self._file.number)

    def _lay_out_threads(self, heartbeat: Region, recorder: Region) -> None:
        self._beats = heartbeat.offset // 8
        self._shared_beat = self._beats + (HEARTBEATS - 1) * BEAT_CELLS
        self._free_beats = list(range(HEARTBEATS - 2, -1, -1))
        self.recorder = self._ring, self._ring_length = recorder.offset // 8, recorder.length // RECORD.size
        self.next_seq = itertools.count(1).__next__

    def _write_header(self, regions: dict[str, Region], identity: Mapping[str, object]) -> None:
        words = self._words
        words[PROTOCOL_WORD], words[SIZE_WORD] = PROTOCOL, len(self._memory)
        for number, name in enumerate(REGIONS):
            words[TABLE_WORD + 2 * number], words[TABLE_WORD + 2 * number + 1] = regions[name]
        self._write_identity(identity)
        barrier()
        words[MAGIC_WORD] = MAGIC  # last: from here on it is a page

    # -- identity and state

    def set_state(self, state: str) -> None:
        """Publish one of STATES."""
        number = STATES.index(state)
        with contextlib.suppress(ValueError):  # closed
            self._words[STATE_WORD] = number

    def update_identity(self, **changes: object) -> None:
        """Change some keys of the identity, a JSON object."""
        self._exclusive(self._write_identity, changes)

    def _write_identity(self, changes: Mapping[str, object]) -> None:
        self._identity.update(changes)
        payload = object_of(self._identity)
        if not self._logs["identity"].append(payload):
            self._logs["identity"].replace([payload])

    # -- threads, events

    def thread(self, tid: int, name: str) -> int:
        """Return the base cell of a thread's heartbeat (TID to STEP); threads beyond the last free one share it."""
        base = self._exclusive(self._add_thread, tid, name)
        return self._shared_beat if base is None else base

    def _add_thread(self, tid: int, name: str) -> int:
        slot = self._free_beats.pop() if self._free_beats else HEARTBEATS - 1
        base = self._beats + slot * BEAT_CELLS
        for cell in range(base, base + BEAT_CELLS):
            self.cells[cell] = 0.0
        start = (self._beats + HEARTBEATS * BEAT_CELLS) * 8 + slot * NAME_BYTES
        text = "(others)" if base == self._shared_beat else clean(name)
        raw = text.encode()[:NAME_BYTES].decode("utf-8", "ignore").encode()
        self._memory[start : start + NAME_BYTES] = raw.ljust(NAME_BYTES, b"\0")
        barrier()
        self.cells[base + TID] = tid  # last: it makes the heartbeat visible
        return base

    def release_thread(self, base: int) -> None:
        """Release a heartbeat, to which its thread must not store any more."""
        self._exclusive(self._release_thread, base)

    def _release_thread(self, base: int) -> None:
        slot = (base - self._beats) // BEAT_CELLS
        if base != self._shared_beat and slot not in self._free_beats:
            self.cells[base + TID] = 0.0
            self._free_beats.append(slot)

    def record(self, kind: int, module: int, step: int, value: float = 0.0, when: float | None = None) -> None:
        """Record an event in place of the oldest one, without a lock.

        Args:
            kind: a number; the agent defines its meaning.
            module: its id, 0 for none.
            step: number of the step.
            value: any float.
            when: unix seconds; None for now.

        Raises:
            ValueError: the page is closed.
        """
        seq = self.next_seq()
        base = self._ring + (seq - 1) % self._ring_length * 6
        cells = self.cells
        cells[base] = 0.0  # marks the record as incomplete
        barrier()
        cells[base + 1] = clock.time() if when is None else when
        cells[base + 2] = kind
        cells[base + 3] = module
        cells[base + 4] = step
        cells[base + 5] = value
        barrier()
        cells[base] = seq

    def incident(self, incident: Mapping[str, object]) -> int:
        """Store an incident, with `seq` and, unless it has one, `time` added; when the log is full, the oldest are dropped.

        Returns:
            Its number, 1 or more; 0 if it could not be stored.
        """
        return self._exclusive(self._tell, "incidents", dict(incident)) or 0

    def log(self, level: str, message: str) -> None:
        """Add a line to the agent's log; when it is full, the oldest are dropped."""
        self._exclusive(self._tell, "logs", {"level": level, "message": message})

    def _tell(self, name: str, fields: dict[str, object]) -> int:
        seq = self._last_seq[name] = self._last_seq[name] + 1
        when = jsonable(fields.pop("time", None))
        if not isinstance(when, (int, float)) or not 0 <= when < END_OF_TIME:
            when = clock.time()
        fields.pop("seq", None)
        payload = object_of({"seq": seq, "time": float(when), **fields})
        if not self._logs[name].append(payload):
            self._logs[name].drop_oldest()
            self._logs[name].append(payload)
        return seq

    # -- the end

    def close(self) -> None:
        """Release memory and descriptor. Idempotent."""
        if not self._exclusive(self.abandon):
            self.abandon()

    def abandon(self) -> bool:
        """Close without the lock, which in a forked child may belong to a thread that does not exist there."""
        self._is_closed = True
        for view in (self.cells, self._words, self._view):
            view.release()
        self._memory.close()
        self._file.close()
        return True

    def sever(self) -> None:
        """Release the page but keep `cells` valid, for frames of a forked child that still store to them, without effect."""
        self._is_closed = True
        unshare(self._memory)
        self._file.close()
