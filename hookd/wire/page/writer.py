"""The agent's end of a page. Runs in the target."""

from __future__ import annotations

import contextlib
import errno
import itertools
import posix
from typing import TYPE_CHECKING, Any

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
    plain,
)
from hookd.wire.page.log import Log, object_of
from hookd.wire.page.memory import allocate, unshare
from hookd.wire.page.series import SeriesWriter

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from hookd.wire.descriptors import Descriptor


class PageWriter(SeriesWriter):
    """The page of this process. Any thread may call any method; a forked child may call `abandon` only.

    Hot stores go straight to `cells`, with indexes that the methods hand out: `cells[i] = x`, or `cells[i] += x` in one
    expression without a call inside (with one, increments of other threads are lost). Do not slice it.

    Nothing here waits for long or raises for want of room. A series that finds none gets the index of scratch cells, which
    nobody reads, and is counted in `dropped`; so does one that a signal handler asks for in the middle of a registration.

    Attributes:
        cells: float64 view of the whole page; released once closed: a store then raises ValueError.
        dropped: how many series found no room.
        recorder: the first cell of the recorder, and how many records it has.
        next_seq: returns the number of its next record.
        sharers: by family, the objects of `hookd.api.metrics` that have declared it.
    """

    def __init__(self, file: Descriptor, memory: mmap.mmap, identity: dict[str, Any]) -> None:
        """Lay out an empty page in memory of zeros; `create` finds the memory."""
        self._file = file
        self._memory = memory
        self._view = memoryview(memory)
        words = self._view.cast("Q")
        regions = divide(len(memory))
        self._logs = {name: Log(memory, words, name, regions[name]) for name in HEAD_WORDS}
        super().__init__(self._view.cast("d"), words, self._logs["schema"], regions["values"])
        self._identity: dict[str, Any] = {}
        self._told = {"incidents": 0, "logs": 0}
        self._lay_out_threads(regions["heartbeat"], regions["recorder"])
        self._write_header(regions, identity)

    @classmethod
    def create(cls, identity: dict[str, Any], *, size: int = SIZE) -> PageWriter:
        """Create the page of this process, smaller than `size` bytes (down to MIN_SIZE) where its limits ask for that.

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
        """Return a further descriptor of the memfd.

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

    def _write_header(self, regions: dict[str, Region], identity: dict[str, Any]) -> None:
        words = self._words
        words[PROTOCOL_WORD], words[SIZE_WORD] = PROTOCOL, len(self._memory)
        for number, name in enumerate(REGIONS):
            words[TABLE_WORD + 2 * number], words[TABLE_WORD + 2 * number + 1] = regions[name]
        self._write_identity(identity)
        words[MAGIC_WORD] = MAGIC  # last: from here on it is a page

    # -- identity and state

    def set_state(self, state: str) -> None:
        """Publish one of STATES."""
        number = STATES.index(state)
        with contextlib.suppress(ValueError):  # closed
            self._words[STATE_WORD] = number

    def update_identity(self, **changes: Any) -> None:
        """Change some keys of the identity, a JSON object."""
        self._exclusive(self._write_identity, changes)

    def _write_identity(self, changes: dict[str, Any]) -> None:
        self._identity.update(changes)
        payload = object_of(self._identity)
        if not self._logs["identity"].append(payload):
            self._logs["identity"].replace([payload])

    # -- threads, events

    def thread(self, tid: int, name: str) -> int:
        """Return the base cell of a thread's heartbeat (TID to STEP); whoever comes too late shares the last one."""
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
        self.cells[base + TID] = tid  # last: it makes the heartbeat visible
        return base

    def release_thread(self, base: int) -> None:
        """Give a heartbeat back; its thread must not store to it any more."""
        self._exclusive(self._release_thread, base)

    def _release_thread(self, base: int) -> None:
        slot = (base - self._beats) // BEAT_CELLS
        if base != self._shared_beat and slot not in self._free_beats:
            self.cells[base + TID] = 0.0
            self._free_beats.append(slot)

    def record(self, kind: int, module: int, step: int, value: float = 0.0, when: float | None = None) -> None:
        """Put an event over the oldest one in the recorder, without a lock.

        Args:
            kind: a number to which the agent gives the meaning.
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
        cells[base] = 0.0  # no record until it is whole
        cells[base + 1] = clock.time() if when is None else when
        cells[base + 2] = kind
        cells[base + 3] = module
        cells[base + 4] = step
        cells[base + 5] = value
        cells[base] = seq

    def incident(self, incident: Mapping[str, Any]) -> int:
        """Store something worth telling a person, with `seq` and, unless it has one, `time` added; the newest are kept.

        Returns:
            Its number, from 1 up; 0 when it could not be stored.
        """
        return self._exclusive(self._tell, "incidents", dict(incident)) or 0

    def log(self, level: str, message: str) -> None:
        """Add a line to the agent's log, of which the newest are kept."""
        self._exclusive(self._tell, "logs", {"level": level, "message": message})

    def _tell(self, name: str, fields: dict[str, Any]) -> int:
        seq = self._told[name] = self._told[name] + 1
        when = plain(fields.pop("time", None))
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
        """Do as `close` without the lock, which in a forked child may be held by a thread that is not there."""
        self._is_closed = True
        for view in (self.cells, self._words, self._view):
            view.release()
        self._memory.close()
        self._file.close()
        return True

    def sever(self) -> None:
        """Let go of the page, but not of `cells`: in a forked child whose frames still store to them, to no effect."""
        self._is_closed = True
        unshare(self._memory)
        self._file.close()
