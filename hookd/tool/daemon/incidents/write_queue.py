"""The queue of writes to the store's file, and the one thread that executes them.

Callers append to the queue and go on, so a slow disk delays nobody. If the disk is full, writes stay in the queue until there
is room. A reader has to look at both the queue and the file, the queue first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.tool.daemon.incidents import database
from hookd.tool.daemon.incidents.rows import fair, insertion, merged, size
from hookd.tool.daemon.incidents.salvage import salvage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from typing import TypeVar

    from hookd.wire.incident import StoredIncident

    T = TypeVar("T")

MAX_WAITING = 10_000
"""Maximum number of pending writes; beyond it, those of the owner with the most are dropped, which is logged."""
MAX_WAITING_BYTES = 30_000_000
"""Approximate maximum size of the pending writes, in bytes."""
MAX_BATCH = 500
"""Maximum number of writes in one transaction."""
RETRY_S = 5.0
"""How long to wait after a failed write, in seconds."""
_log = logging.getLogger(__name__)


@dataclass
class Write:
    """Statements that are executed together.

    Attributes:
        statements: with their values; executed after the one that stores the row.
        row: the incident to store, if there is one; its `count` is the increase since the last write.
        is_announced: whether `prepare_announcement` has seen it.
        detail: of the row, as JSON.
    """

    statements: list[tuple[str, tuple[Any, ...]]]
    row: StoredIncident | None = None
    is_announced: bool = False
    detail: str = field(init=False)

    def __post_init__(self) -> None:
        self.detail = "" if self.row is None else json.dumps(self.row["detail"])

    @property
    def bytes(self) -> int:
        """The approximate size of the write, in bytes."""
        return 0 if self.row is None else size(self.row["message"], self.detail)

    def execute(self, connection: sqlite3.Connection) -> None:
        """Execute the statements.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        first = [] if self.row is None else insertion(self.row, self.detail)
        for sql, values in (*first, *self.statements):
            connection.execute(sql, values)

    def then(self, other: Write) -> Write:
        """Merge two writes of the same incident into one."""
        assert self.row is not None
        assert other.row is not None
        return Write(other.statements, merged(self.row, other.row), self.is_announced)


class WriteQueue:
    """Writes to the file and reads from it; thread-safe, and raises no errors of the disk.

    Args:
        path: of the file; None: there is none, and all writes stay in the queue.
        max_bytes: maximum size of the file, see `database.bound`.
        prepare_announcement: called in the writing thread with writes that it has not seen yet, before they are written. The function
            that it returns is called after the attempt, whether the attempt failed or not.
        retry_s: how long to wait after a failed write, in seconds.

    Attributes:
        repairs: the number of times that a damaged file was replaced.
    """

    def __init__(
        self,
        path: Path | None,
        max_bytes: float,
        prepare_announcement: Callable[[Iterable[Write]], Callable[[], None]],
        retry_s: float = RETRY_S,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._prepare_announcement = prepare_announcement
        self._retry_s = retry_s
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._inode = 0
        self._reading = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[tuple[Any, ...], Write] = {}
        self._bytes = 0
        self._writing: Mapping[tuple[Any, ...], Write] = {}
        self.repairs = 0
        self._lost = 0
        self._failure = ""
        self._is_damaged = self._is_closing = False
        self._was_tried = True
        self._connect()
        self._thread = threading.Thread(target=self._run, name="hookd-incidents", daemon=True)
        self._thread.start()

    def put(self, writes: Mapping[tuple[Any, ...], Write]) -> None:
        """Add writes to the queue by name; counts of one incident are added up, any other write is replaced."""
        with self._changed:
            for name, write in writes.items():
                old = self._waiting.get(name)
                if write.row is None:
                    self._remove(name)
                    old = None
                is_on_its_way = old is not None and self._writing.get(name) is old
                self._set(name, write if old is None or is_on_its_way else old.then(write))
            if len(self._waiting) > MAX_WAITING or self._bytes > MAX_WAITING_BYTES:
                self._make_room()
            self._changed.notify_all()

    def drop(self, is_meant: Callable[[tuple[Any, ...]], bool]) -> None:
        """Remove writes from the queue."""
        with self._changed:
            for name in [name for name in self._waiting if is_meant(name)]:
                self._remove(name)

    def _set(self, name: tuple[Any, ...], write: Write) -> None:
        old = self._waiting.get(name)
        self._bytes += write.bytes - (0 if old is None else old.bytes)
        self._waiting[name] = write

    def _remove(self, name: tuple[Any, ...]) -> None:
        if (old := self._waiting.pop(name, None)) is not None:
            self._bytes -= old.bytes

    def _make_room(self) -> None:
        """Drop a tenth of the pending incidents, or half if they are too large, of the owners with the most. Locked."""
        names = {id(write.row): name for name, write in self._waiting.items() if write.row is not None}
        rows = [write.row for write in reversed(self._waiting.values()) if write.row is not None]
        few = len(rows) // 2 if self._bytes > MAX_WAITING_BYTES else len(rows) - MAX_WAITING // 10
        remaining = {id(row) for row in fair(rows, max(0, few))}
        for name in [name for number, name in names.items() if number not in remaining]:
            self._remove(name)
        self._lost += len(names) - len(remaining)
        while len(self._waiting) > MAX_WAITING:
            self._remove(next(iter(self._waiting)))

    def waiting(self) -> dict[tuple[Any, ...], Write]:
        """Return the pending writes, by name."""
        with self._changed:
            return dict(self._waiting)

    def rows(self) -> list[StoredIncident]:
        """Return the pending incidents in order; one that has grown while being written is returned in both parts."""
        with self._changed:
            grown = [write for name, write in self._writing.items() if self._waiting.get(name, write) is not write]
            return [write.row for write in (*grown, *self._waiting.values()) if write.row is not None]

    def read(self, ask: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Query the file; return `otherwise` if it cannot be read."""
        try:
            with self._reading:
                return otherwise if self._reader is None else ask(self._reader)
        except sqlite3.Error as exc:
            self._suspect(exc)
            return otherwise

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is written or cannot be written; return whether it is empty."""
        with self._changed:
            self._was_tried = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting or (self._was_tried and bool(self._failure)), timeout_s)
            return not self._waiting

    def close(self) -> None:
        """Write the queue, and close the file."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        lost = [write for write in self._waiting.values() if write.row is not None]
        if lost and self._path is not None:
            _log.error("%d incidents are lost: %s: %s", len(lost), self._path, self._failure)
        with self._reading:
            self._disconnect()

    # ---- the thread that writes

    def _run(self) -> None:
        self._check()
        while True:
            with self._changed:
                self._changed.wait_for(self._is_work, self._retry_s if self._failure and self._path else None)
                waiting, is_last = dict(self._waiting), self._is_closing
                batch = self._writing = dict(list(waiting.items())[:MAX_BATCH])
            announce = self._prepare_announcement([write for write in waiting.values() if not write.is_announced])
            self._write(batch)
            announce()
            with self._changed:
                self._was_tried = True
                for name, write in waiting.items():
                    write.is_announced = True
                    if name not in batch and name in self._waiting:
                        self._waiting[name].is_announced = True
                self._changed.notify_all()
                if is_last and (self._failure or not self._waiting):
                    return

    def _is_work(self) -> bool:
        """Whether there is work; after a failure, a write is tried again at once if a caller waits for it. Locked."""
        if self._is_closing or self._is_damaged:
            return True
        if not self._failure:
            return bool(self._waiting)
        return not self._was_tried or any(not write.is_announced for write in self._waiting.values())

    def _write(self, batch: Mapping[tuple[Any, ...], Write]) -> None:
        """Write all or nothing; a failure is logged when it begins and when it ends."""
        try:
            if self._writer is None or self._is_damaged:
                self._repair()
            assert self._writer is not None
            assert self._path is not None
            database.bound(self._writer, self._path, self._max_bytes)
            with database.transaction(self._writer):
                for write in batch.values():
                    write.execute(self._writer)
        except Exception as exc:  # noqa: BLE001  the thread must go on, or nothing would be stored any more
            self._suspect(exc)
            self._failed(str(exc), batch)
        else:
            self._succeeded(batch)

    def _failed(self, why: str, batch: Mapping[tuple[Any, ...], Write]) -> None:
        with self._changed:
            self._writing = {}
            for name, write in batch.items():
                later = self._waiting.get(name)
                if write.row is not None and later is not None and later is not write:
                    self._set(name, write.then(later))
            if not self._failure and self._path is not None:
                _log.warning("incidents cannot be stored in %s: %s; they stay in memory until they can: free space there, or use"
                             " another --state-dir", self._path, why)  # fmt: skip
            self._failure = why

    def _succeeded(self, batch: Mapping[tuple[Any, ...], Write]) -> None:
        with self._changed:
            self._writing = {}
            for name, write in batch.items():
                if self._waiting.get(name) is write:
                    self._remove(name)
            if self._lost:
                _log.error("%d incidents were lost while the disk could not be written", self._lost)
            if self._failure:
                _log.warning("incidents are stored again in %s", self._path)
            self._failure, self._lost = "", 0

    # ---- the file

    def _connect(self) -> None:
        """Open the file before the first query; replace a damaged one, and log other failures."""
        try:
            self._open()
        except (OSError, sqlite3.Error, database.NewerSchemaError) as exc:
            self._suspect(exc)
            if self._is_damaged:
                self._write({})
            else:
                self._failed(str(exc), {})

    def _open(self) -> None:
        if self._path is None:
            raise FileNotFoundError("there is no file")
        try:
            self._writer = database.open_to_write(self._path)
        except (OSError, sqlite3.OperationalError):
            with contextlib.suppress(sqlite3.Error):
                self._reader = database.open_to_read(self._path)  # the disk may be readable, although not writable
            raise
        self._reader = database.open_to_read(self._path)
        self._inode = self._path.stat().st_ino

    def _disconnect(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._reader = self._writer = None

    def _suspect(self, error: Exception) -> None:
        """Schedule a replacement of the file, if an error shows that it is damaged."""
        if isinstance(error, sqlite3.Error) and database.is_broken(error):
            with self._changed:
                self._is_damaged = True
                self._changed.notify_all()

    def _repair(self) -> None:
        """Reopen the file; a damaged one is renamed first, unless another process has replaced it."""
        damaged = None
        with self._reading:
            self._disconnect()
            if self._is_damaged and self._path is not None and self._is_ours(self._path):
                damaged = database.rename_damaged(self._path)
            self._is_damaged, self._inode = False, 0
            self._open()
        if damaged is not None and self._writer is not None:
            saved = salvage(damaged, self._writer)
            self.repairs += 1
            _log.error("the incident store %s is damaged: it is kept as %s, and a new one begins with the %d incidents that"
                       " can be read; more may be saved by `sqlite3 %s .recover`", self._path, damaged.name, saved, damaged)  # fmt: skip

    def _is_ours(self, path: Path) -> bool:
        try:
            return self._inode in (0, os.stat(path).st_ino)  # noqa: PTH116
        except OSError:
            return False

    def _check(self) -> None:
        """Look for damage once at the start, in the background."""
        try:
            reader = database.open_to_read(self._path) if self._path is not None else None
            if reader is not None:
                with contextlib.closing(reader):
                    database.check(reader)
        except sqlite3.Error as exc:
            self._suspect(exc)
