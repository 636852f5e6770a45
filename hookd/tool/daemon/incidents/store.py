"""The incident store, an SQLite file that outlives targets and daemons."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from hookd.tool.daemon.incidents import database
from hookd.tool.daemon.incidents.database import NAME
from hookd.tool.daemon.incidents.rows import (
    COLUMNS,
    KEY,
    MAX_ROWS,
    UNKNOWN,
    fair,
    fits,
    key,
    merged,
    named,
    query,
    row_of,
    values_of,
)
from hookd.tool.daemon.incidents.write_queue import RETRY_S, Write, WriteQueue

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Mapping

    from typing_extensions import Unpack

    from hookd.tool.daemon.incidents.receivers import Receiver
    from hookd.tool.daemon.incidents.rows import Query
    from hookd.wire.incident import IncidentRow, StoredIncident
    from hookd.wire.target import Ongoing

__all__ = ["END", "MAX_BYTES", "MAX_ROWS", "NAME", "IncidentStore", "query", "read_only"]

END = -1
"""The number of the incident that reports a target's end; there is at most one."""
DROPPED = "dropped"
"""The kind of the incident that counts dropped incidents; it never ends."""
OVER = "_over"
"""The suffix of the kind that reports the end of a lasting incident: `hang`, `hang_over`."""
MAX_BYTES = 100_000_000
"""Default maximum size of the file, in bytes."""
ANSWER_S = 1.0
"""How long a query waits for pending writes, in seconds; after that it merges them from the queue."""

_log = logging.getLogger(__name__)

_IS = " AND ".join(f"{name} = ?" for name in KEY)
_NUMBER = f"SELECT id FROM incidents WHERE {_IS}"  # noqa: S608  ours, as below
_ID = f"({_NUMBER})"
_REPLACE = f"UPDATE incidents SET message = ?, detail = ?, last = ? WHERE {_IS}"  # noqa: S608
_NOTICE = f"INSERT OR IGNORE INTO notices SELECT ?, id, NULL FROM incidents WHERE {_IS}"  # noqa: S608
_WAS_NOTICED = f"SELECT 1 FROM notices WHERE receiver = ? AND incident = {_ID}"  # noqa: S608
_DELIVERED = f"UPDATE notices SET delivered = ? WHERE receiver = ? AND incident = {_ID}"  # noqa: S608
_UNDELIVERED = f"""
SELECT {", ".join(COLUMNS)} FROM incidents WHERE id IN (
    SELECT incident FROM notices JOIN incidents ON id = incident WHERE receiver = ? AND delivered IS NULL
    ORDER BY ROW_NUMBER() OVER (PARTITION BY owner ORDER BY incident), incident LIMIT ?
) ORDER BY id
"""  # noqa: S608  ours
_OWN = (
    "SELECT seq, kind, time, message FROM incidents WHERE boot = ? AND pid = ? AND start = ? AND page = ? AND seq < 0"
)
_SEEN = "SELECT MAX(last_seq) FROM incidents WHERE boot = ? AND pid = ? AND start = ? AND page = ?"
_IS_DISMISSED = "SELECT 1 FROM dismissed WHERE boot = ? AND pid = ? AND start = ?"


class _OwnIncident(TypedDict):
    kind: str
    time: float
    message: str


class Own(NamedTuple):
    """The incidents of one target that daemons have reported themselves.

    Attributes:
        counts: the number of incidents, by kind.
        ongoing: `time` and `message` of those that have not ended, by kind; without the target's end.
    """

    counts: dict[str, int]
    ongoing: dict[str, Ongoing]


class IncidentStore:
    """Stores incidents and answers queries; thread-safe, and raises no errors of the disk.

    Only `flush`, `close` and queries wait for the disk; see `WriteQueue`.

    Args:
        path: of the file; None: in memory only.
        max_bytes: maximum size of the file; beyond it the oldest incidents are deleted.
        retry_s: how long to wait after a failed write, in seconds.
    """

    def __init__(self, path: Path | None, *, max_bytes: float = MAX_BYTES, retry_s: float = RETRY_S) -> None:
        self._boot = boot_id()
        self._receivers: list[Receiver] = []
        self._numbering = threading.Lock()
        self._queue = WriteQueue(path, max_bytes, self._prepare_announcement, retry_s)

    @classmethod
    def open(cls, state_dir: Path | None, *, max_bytes: float = MAX_BYTES) -> IncidentStore:
        """Open the store in `state_dir`, or in memory only if that is None.

        If the file cannot be written, this is logged, incidents are kept in memory, and the write is tried again.
        """
        return cls(None if state_dir is None else state_dir / NAME, max_bytes=max_bytes)

    # ---- writing

    def listen(self, receiver: Receiver) -> None:
        """Add a receiver, which gets each incident that is new to it; call this before the first incident."""
        self._receivers.append(receiver)

    def add(
        self,
        target: tuple[int, int, int],
        run: str,
        rank: str,
        incidents: Iterable[Mapping[str, Any]],
        *,
        owner: int = UNKNOWN,
    ) -> None:
        """Store incidents of one page; equal ones become one row with a count, see `collapse.same`.

        Args:
            target: pid, start ticks, inode of the page.
            run: as it is served.
            rank: as it is served.
            incidents: with `seq`, which grows on a page, and optionally `time`, `kind`, `module`, `step`, `message`.
            owner: the uid of the process.
        """
        rows: dict[tuple[Any, ...], StoredIncident] = {}
        for incident in incidents:
            row = self._row(target, run, rank, incident, owner)
            rows[key(row)] = merged(rows[key(row)], row) if key(row) in rows else row
        self._queue.put({name: self._write(row) for name, row in rows.items()})

    @property
    def repairs(self) -> int:
        """The number of times that a damaged file was replaced; incidents still on a page can be added again."""
        return self._queue.repairs

    def seen(self, target: tuple[int, int, int]) -> int:
        """Return the highest number on the page of a target that is stored, 0 if none is."""
        asked = (self._boot, *target)
        last_seq = self._queue.read(lambda database: database.execute(_SEEN, asked).fetchone()[0], None)
        return max(0, last_seq or 0)

    def free_number(self, target: tuple[int, int, int]) -> int:
        """Return the next number below 0 that no incident of a target has."""
        return min([END, *self._own(target)]) - 1

    def replace(
        self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any], *, owner: int = UNKNOWN
    ) -> None:
        """Store an incident of the daemon itself, with its `seq` and `last`, in place of its previous version."""
        row = self._row(target, run, rank, incident, owner)
        row["last"] = incident["last"]
        values = (row["message"], json.dumps(row["detail"]), row["last"], *key(row))
        self._put(row, (_REPLACE, values))

    def add_own(
        self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any], *, owner: int = UNKNOWN
    ) -> bool:
        """Store an incident of the daemon itself; without a `seq` it gets the next free number below 0.

        Returns:
            False if it was reported already: its number exists, or a lasting incident has not ended. Several daemons may
            watch one target; the receivers of each get the incident nevertheless.
        """
        with self._numbering:  # only one thread at a time allocates numbers
            own = self._own(target)
            known = _reported_as(incident, own)
            number = min([END, *own]) - 1 if known is None else known
            self._put(self._row(target, run, rank, {**incident, "seq": incident.get("seq", number)}, owner))
        return known is None

    def own(self, target: tuple[int, int, int]) -> Own:
        """Summarize the incidents of a target that this and other daemons have reported themselves."""
        counts: dict[str, int] = {}
        ongoing: dict[str, Ongoing] = {}
        for number, own in sorted(self._own(target).items(), reverse=True):  # in the order of their reports
            kind = own["kind"]
            counts[kind] = counts.get(kind, 0) + 1
            if kind.endswith(OVER):
                ongoing.pop(kind.removesuffix(OVER), None)
            elif number != END and kind != DROPPED:
                ongoing[kind] = {"time": own["time"], "message": own["message"]}
        return Own(counts, ongoing)

    def prune(self, before: float) -> None:
        """Delete incidents older than `before`, in unix seconds, including those that are not written yet."""
        waiting = {name for name, write in self._queue.waiting().items() if write.row and write.row["last"] < before}
        self._queue.drop(waiting.__contains__)
        old = ("DELETE FROM incidents WHERE last < ?", (before,))
        self._queue.put({("pruned",): Write([old, ("DELETE FROM dismissed WHERE boot != ?", (self._boot,))])})

    def dismiss(self, pid: int, start: int) -> None:
        """Record that a person has detached from a process."""
        row = (self._boot, pid, start, time.time())
        write = Write([("INSERT OR IGNORE INTO dismissed VALUES (?, ?, ?, ?)", row)])
        self._queue.put({("dismissed", pid, start): write})

    def recall(self, pid: int) -> None:
        """Undo `dismiss`, because a person has attached to the process again."""
        self._queue.drop(lambda name: name[:2] == ("dismissed", pid))
        write = Write([("DELETE FROM dismissed WHERE boot = ? AND pid = ?", (self._boot, pid))])
        self._queue.put({("recalled", pid): write})

    def is_dismissed(self, pid: int, start: int) -> bool:
        """Whether a person has detached from the process, and none has attached since."""
        waiting = self._queue.waiting()
        if ("dismissed", pid, start) in waiting or ("recalled", pid) in waiting:
            return ("dismissed", pid, start) in waiting
        asked = (self._boot, pid, start)
        return self._queue.read(lambda database: database.execute(_IS_DISMISSED, asked).fetchone(), None) is not None

    def delivered(self, receiver: str, incidents: Iterable[StoredIncident]) -> None:
        """Record that a receiver does not need these incidents again."""
        now = time.time()
        names = [key(incident) for incident in incidents]
        self._queue.put(
            {("delivered", receiver, *name): Write([(_DELIVERED, (now, receiver, *name))]) for name in names}
        )

    # ---- reading

    def query(self, of: Collection[tuple[int, int]] | None = None, **filters: Unpack[Query]) -> list[IncidentRow]:
        """Return incidents, the newest first; see `rows.query`.

        An incident that is not in the file yet has no `id`.

        Args:
            of: limits the result to these processes, by pid and start ticks.
            filters: see `rows.Query`.
        """
        processes = None if of is None else [(self._boot, *process) for process in of]
        self.flush(ANSWER_S)
        # The pending rows are read before the file, so that no row is missed in between.
        waiting = named(row for row in self._queue.rows() if fits(row, processes, **filters))
        nothing: list[IncidentRow] = []
        stored = self._queue.read(lambda database: query(database, processes, **filters), nothing)
        if not waiting:
            return stored
        rows_by_key = {key(row): row for row in stored}
        by_key: dict[tuple[Any, ...], list[IncidentRow]] = {}
        for row in waiting:
            by_key.setdefault(key(row), []).append(row)
        for name, rows in reversed(by_key.items()):
            for row in rows:
                old = rows_by_key.get(name)
                if old is None or old["last_seq"] < row["last_seq"]:  # else it was written meanwhile
                    rows_by_key[name] = (
                        row if old is None else {**merged(old, row), "id": old["id"], "user": old["user"]}
                    )
        limit = max(0, min(filters.get("limit", MAX_ROWS), MAX_ROWS))
        if filters.get("order") == "id":  # rows without a number are the newest
            order = sorted(
                rows_by_key.values(), key=lambda row: (row["id"] is None, row["id"] or row["last"]), reverse=True
            )
        else:
            order = sorted(rows_by_key.values(), key=lambda row: row["last"], reverse=True)
        return fair(order, limit)

    def undelivered(self, receiver: str, limit: int) -> list[IncidentRow]:
        """Return incidents in the file that a receiver has not got yet, the oldest first; owners have equal shares."""
        self.flush(ANSWER_S)
        waiting = self._queue.waiting()
        rows: list[Any] = self._queue.read(
            lambda database: database.execute(_UNDELIVERED, (receiver, limit)).fetchall(), []
        )
        return named(row for row in map(row_of, rows) if ("delivered", receiver, *key(row)) not in waiting)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all incidents are in the file or cannot be written; return whether they are in it."""
        return self._queue.flush(timeout_s)

    def close(self) -> None:
        """Write pending incidents, and close the file."""
        self._queue.close()

    # ---- rows

    def _row(
        self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any], owner: int
    ) -> StoredIncident:
        names = zip(KEY, (self._boot, *target), strict=False)
        values = {**dict(names), **values_of(incident, run, rank, owner)}
        return cast("StoredIncident", {"id": None, **values, "detail": dict(incident)})

    def _put(self, row: StoredIncident, *more: tuple[str, tuple[Any, ...]]) -> None:
        self._queue.put({key(row): self._write(row, *more)})

    def _write(self, row: StoredIncident, *more: tuple[str, tuple[Any, ...]]) -> Write:
        notices = [(_NOTICE, (receiver.name, *key(row))) for receiver in self._receivers if receiver.wants(row)]
        return Write([*more, *notices], row)

    def _own(self, target: tuple[int, int, int]) -> dict[int, _OwnIncident]:
        """Return the incidents of a target with numbers below 0."""
        of = (self._boot, *target)
        own: dict[int, _OwnIncident] = {
            row["seq"]: row for row in self._queue.rows() if key(row)[:-1] == of and row["seq"] < 0
        }
        rows: list[Any] = self._queue.read(lambda database: database.execute(_OWN, of).fetchall(), [])
        return own | {number: {"kind": kind, "time": when, "message": text} for number, kind, when, text in rows}

    def _prepare_announcement(self, writes: Iterable[Write]) -> Callable[[], None]:
        """Determine the receivers of each incident; the file prevents duplicates after a restart."""
        rows = [self._whole(write.row) for write in writes if write.row is not None]
        news = [
            (receiver, row)
            for row, grown in rows
            for receiver in self._receivers
            if receiver.wants(row) and (grown or not self._was_noticed(receiver, row))
        ]

        def announce() -> None:
            rows = named(row for _, row in news)
            for (receiver, _), row in zip(news, rows, strict=True):
                try:
                    receiver.receive({**row, "id": self._number(row)})
                except Exception:  # noqa: BLE001  a failing receiver must not stop the store
                    _log.exception("%s cannot be notified of an incident", receiver.name)

        return announce

    def _whole(self, row: StoredIncident) -> tuple[StoredIncident, bool]:
        """Return a row merged with the one in the file, and whether its count has gained a digit."""
        sql = f"SELECT {', '.join(COLUMNS)} FROM incidents WHERE {_IS}"  # noqa: S608  ours
        values: Any = self._queue.read(lambda database: database.execute(sql, key(row)).fetchone(), None)
        old = None if values is None else row_of(values)
        if old is None or row["seq"] < 0 or row["last_seq"] <= old["last_seq"]:
            return row, False
        merged_row = merged(old, row)
        return merged_row, len(str(merged_row["count"])) > len(str(old["count"]))

    def _number(self, row: StoredIncident) -> int | None:
        values = self._queue.read(lambda database: database.execute(_NUMBER, key(row)).fetchone(), None)
        return None if values is None else int(values[0])

    def _was_noticed(self, receiver: Receiver, row: StoredIncident) -> bool:
        asked = (receiver.name, *key(row))
        return self._queue.read(lambda database: database.execute(_WAS_NOTICED, asked).fetchone(), None) is not None


def _reported_as(incident: Mapping[str, Any], own: Mapping[int, _OwnIncident]) -> int | None:
    """Return the number under which an incident is reported already: its own, or the last one of its kind."""
    if "seq" in incident:
        number: int = incident["seq"]
        return number if number in own else None
    lasting = str(incident["kind"]).removesuffix(OVER)
    words = [number for number, row in own.items() if row["kind"] in (lasting, lasting + OVER)]
    return min(words) if words and own[min(words)]["kind"] == incident["kind"] else None


def read_only(state_dir: Path) -> sqlite3.Connection | None:
    """Open the store for reading, whether or not a daemon writes to it; return None if it does not exist."""
    return database.open_to_read(state_dir / NAME)


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
