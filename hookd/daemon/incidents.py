"""The incident store: what was worth telling a person, kept beyond the life of target and daemon. SQLite."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

SCHEMA = 1
"""Version of the tables, in SQLite's `user_version`."""
NAME = "incidents.sqlite"
END = -1
"""The number of the incident that tells of a target's end: there is one at most."""
MAX_ROWS = 1000
"""What one query gives at most."""

_log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE IF NOT EXISTS incidents (
    id      INTEGER PRIMARY KEY,
    boot    TEXT    NOT NULL,  -- of the machine: pids and inodes mean nothing beyond it
    pid     INTEGER NOT NULL,
    start   INTEGER NOT NULL,  -- field 22 of /proc/PID/stat
    page    INTEGER NOT NULL,  -- inode of the page: one attach
    seq     INTEGER NOT NULL,  -- number on that page; below 0 what the daemon itself saw, -1 the end
    time    REAL    NOT NULL,  -- unix seconds
    run     TEXT    NOT NULL,
    rank    TEXT    NOT NULL,
    kind    TEXT    NOT NULL,
    module  TEXT,
    step    INTEGER,
    message TEXT    NOT NULL,
    detail  TEXT    NOT NULL,  -- the whole incident as JSON
    UNIQUE (boot, pid, start, page, seq)
);
CREATE TABLE IF NOT EXISTS dismissed (  -- processes that a person has detached from: no rule attaches to them again
    boot    TEXT    NOT NULL,
    pid     INTEGER NOT NULL,
    start   INTEGER NOT NULL,
    time    REAL    NOT NULL,
    UNIQUE (boot, pid, start)
);
CREATE INDEX IF NOT EXISTS incidents_time ON incidents (time);
CREATE INDEX IF NOT EXISTS incidents_run ON incidents (run, time);
"""
_INSERT = "INSERT OR IGNORE INTO incidents VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_OWN = "FROM incidents WHERE boot = ? AND pid = ? AND start = ? AND page = ? AND seq < 0"
_LOWEST = f"SELECT MIN(seq) {_OWN}"
_TOLD = f"SELECT kind, COUNT(*) {_OWN} GROUP BY kind"
_PROCESS = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(3))
_COLUMNS = ("id", "pid", "seq", "time", "run", "rank", "kind", "module", "step", "message", "detail")


class IncidentStore:
    """Writes incidents. Any thread may call; an incident that cannot be stored is logged, never raised."""

    def __init__(self, connection: sqlite3.Connection, boot: str) -> None:
        self._connection = connection
        self._boot = boot
        self._lock = threading.Lock()

    @classmethod
    def open(cls, state_dir: Path | None) -> IncidentStore:
        """Open the store in `state_dir`; in memory without one, or where it cannot be written (which is logged)."""
        connection: sqlite3.Connection | None = None
        if state_dir is not None:
            try:
                connection = _connect(state_dir)
            except (OSError, sqlite3.Error, ValueError) as exc:
                _log.warning("incidents are kept in memory only: %s: %s", state_dir / NAME, exc)
        if connection is None:
            connection = sqlite3.connect(":memory:", check_same_thread=False)
            connection.executescript(_TABLES)
        return cls(connection, boot_id())

    def add(self, target: tuple[int, int, int], run: str, rank: str, incidents: Iterable[Mapping[str, Any]]) -> None:
        """Store incidents of one page; those that are there already stay as they are.

        Args:
            target: pid, start ticks, inode of the page.
            run: as it is served.
            rank: as it is served.
            incidents: with `seq`, and as far as they have them `time`, `kind`, `module`, `step`, `message`.
        """
        rows = [(self._boot, *target, *_row(incident, run, rank)) for incident in incidents]
        if not rows:
            return
        with self._lock, self._logged():
            self._connection.executemany(_INSERT, rows)

    def tell(self, target: tuple[int, int, int], run: str, rank: str, incident: Mapping[str, Any]) -> bool:
        """Store what the daemon itself has seen. Without a `seq` it gets the next free number below 0.

        Returns:
            False if there is one of this number already.
        """
        stored = 0
        with self._lock, self._logged():
            if "seq" not in incident:
                (lowest,) = self._connection.execute(_LOWEST, (self._boot, *target)).fetchone()
                incident = {"seq": min(lowest or 0, END) - 1, **incident}
            row = (self._boot, *target, *_row(incident, run, rank))
            stored = self._connection.execute(_INSERT, row).rowcount
        return stored > 0

    def told(self, target: tuple[int, int, int]) -> dict[str, int]:
        """Count by kind what the daemon itself has seen of a target, whichever daemon it was."""
        with self._lock:
            return dict(self._connection.execute(_TOLD, (self._boot, *target)).fetchall())

    def prune(self, before: float) -> None:
        """Forget what is older than `before`, in unix seconds."""
        with self._lock, self._logged():
            self._connection.execute("DELETE FROM incidents WHERE time < ?", (before,))
            self._connection.execute("DELETE FROM dismissed WHERE boot != ?", (self._boot,))

    def dismiss(self, pid: int, start: int) -> None:
        """Remember that somebody has detached from a process."""
        with self._lock, self._logged():
            row = (self._boot, pid, start, time.time())
            self._connection.execute("INSERT OR IGNORE INTO dismissed VALUES (?, ?, ?, ?)", row)

    def recall(self, pid: int) -> None:
        """Forget it: somebody has attached to the process again."""
        with self._lock, self._logged():
            self._connection.execute("DELETE FROM dismissed WHERE boot = ? AND pid = ?", (self._boot, pid))

    def is_dismissed(self, pid: int, start: int) -> bool:
        """Tell whether somebody has detached from the process and nobody has attached since."""
        with self._lock:
            row = (self._boot, pid, start)
            asked = self._connection.execute("SELECT 1 FROM dismissed WHERE boot = ? AND pid = ? AND start = ?", row)
            return asked.fetchone() is not None

    def query(self, of: Collection[tuple[int, int]] | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """Give incidents, the newest first; see `query`. `of`: only those of these processes, by pid and start ticks."""
        processes = None if of is None else [(self._boot, *one) for one in of]
        with self._lock:
            return query(self._connection, processes=processes, **wanted)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Commit; a full disk costs incidents, not the daemon."""
        try:
            with self._connection:
                yield
        except sqlite3.Error as exc:
            _log.warning("incidents cannot be stored: %s", exc)


def query(
    connection: sqlite3.Connection,
    *,
    run: str | None = None,
    pid: int | None = None,
    kind: str | None = None,
    since: float | None = None,
    limit: int = MAX_ROWS,
    processes: Collection[tuple[str, int, int]] | None = None,
) -> list[dict[str, Any]]:
    """Give incidents that match all that is asked for, the newest first, `MAX_ROWS` at most.

    `processes` are named by boot, pid and start ticks; `since` is in unix seconds.
    """
    asked = {"run = ?": run, "pid = ?": pid, "kind = ?": kind, "time >= ?": since}
    wanted = {condition: value for condition, value in asked.items() if value is not None}
    where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
    values = [*wanted.values()]
    if processes is not None:
        conditions = [*wanted, f"(boot, pid, start) IN (SELECT {_PROCESS} FROM json_each(?))"]  # noqa: S608  ours
        where, values = f"WHERE {' AND '.join(conditions)}", [*values, json.dumps([list(one) for one in processes])]
    rows = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM incidents {where} ORDER BY time DESC, id DESC LIMIT ?",  # noqa: S608  ours
        (*values, max(0, min(limit, MAX_ROWS))),
    )
    found = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
    return [{**incident, "detail": json.loads(incident["detail"])} for incident in found]


def read_only(state_dir: Path) -> sqlite3.Connection | None:
    """Open the store for reading, beside a daemon that writes or without one; None when there is none."""
    path = state_dir / NAME
    if not path.exists():
        return None
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def boot_id() -> str:
    """Name this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _connect(state_dir: Path) -> sqlite3.Connection:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection = sqlite3.connect(state_dir / NAME, timeout=5, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise ValueError(f"written by a newer hookd (schema {version}, this one knows {SCHEMA})")  # noqa: TRY301  closed below
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _row(incident: Mapping[str, Any], run: str, rank: str) -> tuple[Any, ...]:
    """Give the columns from `seq` on; the page may hold anything under these names."""
    seq, when, step, module = (incident.get(key) for key in ("seq", "time", "step", "module"))
    return (
        seq if _is_number(seq, int) else 0,
        float(when) if when is not None and _is_number(when, (int, float)) else time.time(),
        run,
        rank,
        str(incident.get("kind", "")),
        module if isinstance(module, str) else None,
        step if _is_number(step, int) else None,
        str(incident.get("message", "")),
        json.dumps(incident),
    )


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and -(2**63) <= value < 2**63  # type: ignore[operator]
