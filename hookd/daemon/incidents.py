"""The incident store: what was worth telling a person, kept beyond the life of target and daemon. SQLite."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.daemon import database
from hookd.daemon.database import NAME
from hookd.daemon.ledger import RETRY_S, Ledger, Write
from hookd.daemon.rows import COLUMNS, FIELDS, KEY, MAX_ROWS, fits, key, query, row_of, values_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hookd.daemon.receivers import Receiver

__all__ = ["END", "MAX_BYTES", "MAX_ROWS", "NAME", "IncidentStore", "query", "read_only"]

END = -1
"""The number of the incident that tells of a target's end: there is one at most."""
OVER = "_over"
"""What lasts is told by a kind, that it is over by the same with this behind it: `hang`, `hang_over`."""
MAX_BYTES = 100_000_000
"""Bytes of the file where nobody says otherwise."""
ANSWER_S = 1.0
"""How long who asks waits for what is being written; then it comes from the list."""

_log = logging.getLogger(__name__)

_IS = " AND ".join(f"{name} = ?" for name in KEY)
_NUMBER = f"SELECT id FROM incidents WHERE {_IS}"  # noqa: S608  ours, as below
_ID = f"({_NUMBER})"
_MARKS = ", ".join("?" * (len(COLUMNS) - 1))
_INSERT = f"INSERT OR IGNORE INTO incidents ({', '.join(COLUMNS[1:])}) VALUES ({_MARKS})"  # noqa: S608
_NOTICE = f"INSERT OR IGNORE INTO notices SELECT ?, id, NULL FROM incidents WHERE {_IS}"  # noqa: S608
_WAS_NOTICED = f"SELECT 1 FROM notices WHERE receiver = ? AND incident = {_ID}"  # noqa: S608
_DELIVERED = f"UPDATE notices SET delivered = ? WHERE receiver = ? AND incident = {_ID}"  # noqa: S608
_UNDELIVERED = (
    f"SELECT {', '.join(COLUMNS)} FROM incidents WHERE id IN"  # noqa: S608
    " (SELECT incident FROM notices WHERE receiver = ? AND delivered IS NULL) ORDER BY id LIMIT ?"
)
_OWN = (
    "SELECT seq, kind, time, message FROM incidents WHERE boot = ? AND pid = ? AND start = ? AND page = ? AND seq < 0"
)
_IS_DISMISSED = "SELECT 1 FROM dismissed WHERE boot = ? AND pid = ? AND start = ?"


class Own(NamedTuple):
    """What daemons have seen of one target themselves.

    Attributes:
        told: by kind, how many incidents.
        ongoing: by kind, `time` and `message` of those that are not over; not the end.
    """

    told: dict[str, int]
    ongoing: dict[str, dict[str, Any]]


class IncidentStore:
    """Takes incidents in and gives them out. Any thread may call; nothing is raised for what the disk does.

    Only `flush`, `close` and who asks for incidents wait for the disk; see `Ledger`.

    Args:
        path: of the file; None: in memory only.
        max_bytes: how large the file may become; then the oldest incidents go.
        retry_s: how long to wait after a write that failed.
    """

    def __init__(self, path: Path | None, *, max_bytes: float = MAX_BYTES, retry_s: float = RETRY_S) -> None:
        self._boot = boot_id()
        self._receivers: list[Receiver] = []
        self._telling = threading.Lock()
        self._ledger = Ledger(path, max_bytes, self._news, retry_s)

    @classmethod
    def open(cls, state_dir: Path | None, *, max_bytes: float = MAX_BYTES) -> IncidentStore:
        """Open the store in `state_dir`; without one it is in memory alone.

        Where the file cannot be written that is logged, the incidents are kept in memory, and it is tried again.
        """
        return cls(None if state_dir is None else state_dir / NAME, max_bytes=max_bytes)

    # ---- what is told to it

    def listen(self, receiver: Receiver) -> None:
        """Tell a receiver of each incident that is new to it. To be called before the first one comes."""
        self._receivers.append(receiver)

    def add(self, target: tuple[int, int, int], run: str, rank: str, incidents: Iterable[Mapping[str, Any]]) -> None:
        """Store incidents of one page; those that are there already stay as they are.

        Args:
            target: pid, start ticks, inode of the page.
            run: as it is served.
            rank: as it is served.
            incidents: with `seq`, and as far as they have them `time`, `kind`, `module`, `step`, `message`.
        """
        self._put(self._row(target, run, rank, incident) for incident in incidents)

    def tell(self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any]) -> bool:
        """Store what the daemon itself has seen. Without a `seq` it gets the next free number below 0.

        Returns:
            False if it was told already: there is one of this number, or what lasts is not over. Several daemons may
            look at one target; the receivers of each are told nevertheless.
        """
        with self._telling:  # no other thread gives such numbers
            own = self._own(target)
            known = _told_as(incident, own)
            number = min([END, *own]) - 1 if known is None else known
            self._put([self._row(target, run, rank, {**incident, "seq": incident.get("seq", number)})])
        return known is None

    def own(self, target: tuple[int, int, int]) -> Own:
        """Sum up what daemons have seen of a target themselves, whichever daemon it was."""
        told: dict[str, int] = {}
        ongoing: dict[str, dict[str, Any]] = {}
        for number, own in sorted(self._own(target).items(), reverse=True):  # as they were told
            kind = own["kind"]
            told[kind] = told.get(kind, 0) + 1
            if kind.endswith(OVER):
                ongoing.pop(kind.removesuffix(OVER), None)
            elif number != END:
                ongoing[kind] = {"time": own["time"], "message": own["message"]}
        return Own(told, ongoing)

    def prune(self, before: float) -> None:
        """Forget what is older than `before`, in unix seconds, also of what no disk has taken yet."""
        waiting = {name for name, one in self._ledger.waiting().items() if one.row and one.row["time"] < before}
        self._ledger.drop(waiting.__contains__)
        old = ("DELETE FROM incidents WHERE time < ?", (before,))
        self._ledger.put({("pruned",): Write([old, ("DELETE FROM dismissed WHERE boot != ?", (self._boot,))])})

    def dismiss(self, pid: int, start: int) -> None:
        """Remember that somebody has detached from a process."""
        row = (self._boot, pid, start, time.time())
        write = Write([("INSERT OR IGNORE INTO dismissed VALUES (?, ?, ?, ?)", row)])
        self._ledger.put({("dismissed", pid, start): write})

    def recall(self, pid: int) -> None:
        """Forget it: somebody has attached to the process again."""
        self._ledger.drop(lambda name: name[:2] == ("dismissed", pid))
        write = Write([("DELETE FROM dismissed WHERE boot = ? AND pid = ?", (self._boot, pid))])
        self._ledger.put({("recalled", pid): write})

    def is_dismissed(self, pid: int, start: int) -> bool:
        """Tell whether somebody has detached from the process and nobody has attached since."""
        waiting = self._ledger.waiting()
        if ("dismissed", pid, start) in waiting or ("recalled", pid) in waiting:
            return ("dismissed", pid, start) in waiting
        asked = (self._boot, pid, start)
        return self._ledger.read(lambda one: one.execute(_IS_DISMISSED, asked).fetchone(), None) is not None

    def delivered(self, receiver: str, incidents: Iterable[Mapping[str, Any]]) -> None:
        """Remember that a receiver need not be told of these incidents again."""
        now = time.time()
        names = [key(incident) for incident in incidents]
        self._ledger.put(
            {("delivered", receiver, *name): Write([(_DELIVERED, (now, receiver, *name))]) for name in names}
        )

    # ---- what is asked of it

    def query(self, of: Collection[tuple[int, int]] | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """Give incidents, the newest first; see `rows.query`. `of`: only those of these processes, by pid and start ticks.

        What is not in the file yet has no `id`.
        """
        processes = None if of is None else [(self._boot, *one) for one in of]
        self.flush(ANSWER_S)
        waiting = [row for row in self._waiting() if fits(row, processes, **wanted)]
        stored: list[dict[str, Any]] = self._ledger.read(lambda one: query(one, processes=processes, **wanted), [])
        if not waiting:
            return stored
        written = {key(row) for row in stored}
        found = [*(row for row in waiting if key(row) not in written), *stored]
        if wanted.get("order") != "id":
            found.sort(key=lambda row: row["time"], reverse=True)
        return found[: max(0, min(wanted.get("limit", MAX_ROWS), MAX_ROWS))]

    def undelivered(self, receiver: str, limit: int) -> list[dict[str, Any]]:
        """Give the incidents in the file of which a receiver was not told yet, the oldest first."""
        self.flush(ANSWER_S)
        waiting = self._ledger.waiting()
        found: list[Any] = self._ledger.read(lambda one: one.execute(_UNDELIVERED, (receiver, limit)).fetchall(), [])
        return [row for row in map(row_of, found) if ("delivered", receiver, *key(row)) not in waiting]

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all is in the file, or cannot be written; tell whether it is."""
        return self._ledger.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._ledger.close()

    # ---- rows

    def _row(self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any]) -> dict[str, Any]:
        row = dict(zip(FIELDS, (self._boot, *target, *values_of(incident, run, rank)), strict=True))
        return {"id": None, **row, "detail": dict(incident)}

    def _put(self, rows: Iterable[dict[str, Any]]) -> None:
        self._ledger.put({key(row): self._write(row) for row in rows})

    def _write(self, row: dict[str, Any]) -> Write:
        name = key(row)
        insert = (_INSERT, (*(row[field] for field in FIELDS), json.dumps(row["detail"])))
        return Write([insert, *((_NOTICE, (one.name, *name)) for one in self._receivers if one.wants(row))], row)

    def _waiting(self) -> list[dict[str, Any]]:
        """Give what is on its way. To be asked before the file is: then nothing falls between the two."""
        return [write.row for write in self._ledger.waiting().values() if write.row is not None]

    def _own(self, target: tuple[int, int, int]) -> dict[int, dict[str, Any]]:
        """Give the numbers below 0 of a target, with `kind`, `time` and `message`."""
        of = (self._boot, *target)
        own = {row["seq"]: row for row in self._waiting() if key(row)[:-1] == of and row["seq"] < 0}
        rows: list[Any] = self._ledger.read(lambda one: one.execute(_OWN, of).fetchall(), [])
        return own | {number: {"kind": kind, "time": when, "message": text} for number, kind, when, text in rows}

    def _news(self, writes: Iterable[Write]) -> Callable[[], None]:
        """Find out who is to be told of what. The file is asked, so that a restart tells nothing twice."""
        news = [
            (receiver, write.row)
            for write in writes
            if write.row is not None
            for receiver in self._receivers
            if receiver.wants(write.row) and not self._was_noticed(receiver, write.row)
        ]

        def tell() -> None:
            for receiver, row in news:
                try:
                    receiver.receive({**row, "id": self._number(row)})
                except Exception:  # noqa: BLE001  whatever it is, incidents are stored
                    _log.exception("%s cannot be told of an incident", receiver.name)

        return tell

    def _number(self, row: Mapping[str, Any]) -> int | None:
        found = self._ledger.read(lambda one: one.execute(_NUMBER, key(row)).fetchone(), None)
        return None if found is None else int(found[0])

    def _was_noticed(self, receiver: Receiver, row: Mapping[str, Any]) -> bool:
        asked = (receiver.name, *key(row))
        return self._ledger.read(lambda one: one.execute(_WAS_NOTICED, asked).fetchone(), None) is not None


def _told_as(incident: Mapping[str, Any], own: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Find the number under which something is told already: its own, or that of the last word on what lasts."""
    if "seq" in incident:
        number: int = incident["seq"]
        return number if number in own else None
    lasting = str(incident["kind"]).removesuffix(OVER)
    words = [number for number, one in own.items() if one["kind"] in (lasting, lasting + OVER)]
    return min(words) if words and own[min(words)]["kind"] == incident["kind"] else None


def read_only(state_dir: Path) -> sqlite3.Connection | None:
    """Open the store for reading, beside a daemon that writes or without one; None when there is none."""
    return database.open_to_read(state_dir / NAME)


def boot_id() -> str:
    """Name this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
