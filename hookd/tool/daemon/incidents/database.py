"""The file of the incident store: its tables, the migration of older files, and the handling of damaged ones.

A step of STEPS leads from one schema to the next. A released step is never changed: new steps are appended.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import sqlite3
import stat
import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.directories import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "incidents.sqlite"
BUSY_S = 2.0
"""How long another program may hold the file's lock before a write fails, in seconds."""
SPARE_BYTES = 1_000_000
"""Maximum number of free bytes in the file."""
MAX_LOG_BYTES = 16_000_000
"""Maximum size of the write-ahead log, which grows during a long read transaction, in bytes."""
_JOURNAL_LIMIT = 1 << 20  # bytes of the write-ahead log that stay after a checkpoint
_INCREMENTAL = 2  # PRAGMA auto_vacuum
KEPT = 0.9
"""Share of the maximum size that is kept when incidents are deleted."""
_EVICT = """
WITH targets AS (
    SELECT id, owner, bytes, SUM(bytes) OVER (PARTITION BY owner, pid, start ORDER BY id DESC) AS total FROM incidents
), owners AS (
    SELECT id, bytes, SUM(bytes) OVER (PARTITION BY owner ORDER BY total, id DESC) AS total FROM targets
), every AS (
    SELECT id, SUM(bytes) OVER (ORDER BY total, id DESC) AS total FROM owners
)
DELETE FROM incidents WHERE id IN (SELECT id FROM every WHERE total > ?)
"""
"""Deletes the oldest incidents of the largest target of the largest owner, and so on until the rest fits."""

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE IF NOT EXISTS incidents (
            id      INTEGER PRIMARY KEY,
            boot    TEXT    NOT NULL,
            pid     INTEGER NOT NULL,
            start   INTEGER NOT NULL,
            page    INTEGER NOT NULL,
            seq     INTEGER NOT NULL,
            time    REAL    NOT NULL,
            run     TEXT    NOT NULL,
            rank    TEXT    NOT NULL,
            kind    TEXT    NOT NULL,
            module  TEXT,
            step    INTEGER,
            message TEXT    NOT NULL,
            detail  TEXT    NOT NULL,
            UNIQUE (boot, pid, start, page, seq)
        )
        """,
        """
        CREATE TABLE IF NOT EXISTS dismissed (  -- processes that a person has detached from: no rule attaches to them again
            boot    TEXT    NOT NULL,
            pid     INTEGER NOT NULL,
            start   INTEGER NOT NULL,
            time    REAL    NOT NULL,
            UNIQUE (boot, pid, start)
        )
        """,
        "CREATE INDEX IF NOT EXISTS incidents_time ON incidents (time)",
        "CREATE INDEX IF NOT EXISTS incidents_run ON incidents (run, time)",
    ),
    (
        # People are shown the number of an incident, so it must never name another one: hence AUTOINCREMENT.
        """
        CREATE TABLE numbered (
            id      INTEGER PRIMARY KEY AUTOINCREMENT,
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
        )
        """,
        """
        INSERT INTO numbered (id, boot, pid, start, page, seq, time, run, rank, kind, module, step, message, detail)
        SELECT id, boot, pid, start, page, seq, time, run, rank, kind, module, step, message, detail FROM incidents
        """,
        "DROP TABLE incidents",
        "ALTER TABLE numbered RENAME TO incidents",
        "CREATE INDEX incidents_time ON incidents (time)",
        "CREATE INDEX incidents_run ON incidents (run, time)",
        """
        CREATE TABLE notices (  -- which receiver is to get which incident
            receiver  TEXT    NOT NULL,  -- a webhook, by a digest of its address
            incident  INTEGER NOT NULL REFERENCES incidents (id) ON DELETE CASCADE,
            delivered REAL,              -- unix seconds; NULL: it still waits
            PRIMARY KEY (receiver, incident)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX notices_incident ON notices (incident)",
        "CREATE INDEX notices_waiting ON notices (receiver, incident) WHERE delivered IS NULL",
        """
        CREATE VIEW readable AS  -- for people: the same with the time as they write it
        SELECT id, strftime('%Y-%m-%d %H:%M:%S', time, 'unixepoch', 'localtime') AS at,
               run, rank, pid, kind, module, step, message
        FROM incidents ORDER BY id
        """,
    ),
    (
        # Equal incidents of a process are one row; older ones stay as they are, each with a key of its own.
        "ALTER TABLE incidents ADD COLUMN owner INTEGER NOT NULL DEFAULT -1",  # uid of the process; -1: not known
        "ALTER TABLE incidents ADD COLUMN same TEXT NOT NULL DEFAULT ''",  # what equal ones have in common
        "ALTER TABLE incidents ADD COLUMN count INTEGER NOT NULL DEFAULT 1",  # how often it was reported
        "ALTER TABLE incidents ADD COLUMN last REAL NOT NULL DEFAULT 0",  # when it was last reported; `time` is the first
        "ALTER TABLE incidents ADD COLUMN last_seq INTEGER NOT NULL DEFAULT 0",  # its number then
        "ALTER TABLE incidents ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0",  # of the row, about
        """
        UPDATE incidents SET same = '#' || seq, last = time, last_seq = seq,
                             bytes = 200 + LENGTH(message) + LENGTH(detail)
        """,
        "CREATE UNIQUE INDEX incidents_same ON incidents (boot, pid, start, page, same)",
        "CREATE INDEX incidents_held ON incidents (owner, pid, start, id, last, bytes)",
        "DROP INDEX incidents_time",
        "CREATE INDEX incidents_last ON incidents (last)",
        "DROP INDEX incidents_run",
        "CREATE INDEX incidents_run ON incidents (run, last)",
        "DROP VIEW readable",
        """
        CREATE VIEW readable AS
        SELECT id, strftime('%Y-%m-%d %H:%M:%S', time, 'unixepoch', 'localtime') AS at,
               run, rank, pid, kind, module, step, message, count,
               strftime('%Y-%m-%d %H:%M:%S', last, 'unixepoch', 'localtime') AS last
        FROM incidents ORDER BY id
        """,
    ),
)
SCHEMA = len(STEPS)
"""Version of the tables, in SQLite's `user_version`."""

COLLAPSED = 3
"""The schema since which equal incidents are one row."""
_AS_COLLAPSED = """
CREATE TEMP VIEW incidents AS
SELECT *, -1 AS owner, '#' || seq AS same, 1 AS count, time AS last, seq AS last_seq FROM main.incidents
"""
"""Shows an older file as one of that schema."""

_log = logging.getLogger(__name__)


class NewerSchemaError(Exception):
    """The file was written by a newer hookd, and is not touched."""


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open the file, create it if necessary, and migrate it; transactions are explicit.

    Raises:
        OSError, sqlite3.Error: it cannot be opened or written.
        NewerSchemaError: it was written by a newer hookd.
    """
    make_private(path.parent)
    _make_private(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private(path: Path) -> None:
    """Create the file with access for its owner alone, whatever the umask is; SQLite gives its log the same mode.

    Raises:
        OSError: others may write to the directory, and could put a file or a link there.
    """
    status, own = path.parent.stat(), os.geteuid()
    if status.st_mode & stat.S_IWOTH or (own and status.st_uid not in (0, own)):
        raise OSError(errno.EPERM, f"others may write to the directory {path.parent}")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _prepare(connection: sqlite3.Connection) -> None:
    _refuse_newer(connection)
    connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")  # holds at once for a file without tables
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA temp_store = MEMORY")  # a sort must not need the disk that is full
    connection.execute("PRAGMA synchronous = FULL")  # what was stored survives a loss of power; a thread waits for it
    connection.execute("PRAGMA foreign_keys = OFF")  # a step may drop a table that others refer to
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_LIMIT}")
    migrate(connection)
    connection.execute("PRAGMA foreign_keys = ON")
    if connection.execute("PRAGMA auto_vacuum").fetchone()[0] != _INCREMENTAL:  # of schema 1
        with contextlib.suppress(sqlite3.OperationalError):  # no room for the copy: the next start tries again
            connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            connection.execute("VACUUM")


def _refuse_newer(connection: sqlite3.Connection) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise NewerSchemaError(f"written by a newer hookd (schema {version}, this one knows {SCHEMA})")
    return version


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the missing steps in one transaction, so that a file is unchanged if the process is killed."""
    if _refuse_newer(connection) == SCHEMA:
        return
    with transaction(connection):
        for step in STEPS[_refuse_newer(connection) :]:  # asked again: another daemon may have been quicker
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def open_to_read(path: Path) -> sqlite3.Connection | None:
    """Open the file for reading, whether or not a daemon writes to it; return None if it does not exist.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    if not path.exists():
        return None
    try:
        return _reader(path, "")
    except sqlite3.OperationalError:  # in a directory that cannot be written SQLite has no place for its shared memory
        if path.with_name(path.name + "-wal").exists():
            raise
        return open_unchanging(path)


def open_unchanging(path: Path) -> sqlite3.Connection:
    """Open a file that no process writes for reading, without its write-ahead log.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    return _reader(path, "&immutable=1")


def _reader(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro{how}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        # No daemon has brought it up to date.
        if 0 < connection.execute("PRAGMA user_version").fetchone()[0] < COLLAPSED:
            connection.execute(_AS_COLLAPSED)
    except BaseException:
        connection.close()
        raise
    return connection


def is_broken(error: sqlite3.Error) -> bool:
    """Whether an error means a damaged file, and not a full disk, a lock, or a bug.

    The texts are SQLite's for SQLITE_CORRUPT and SQLITE_NOTADB; Python 3.10 does not provide the codes.
    """
    return "malformed" in str(error) or "not a database" in str(error)


def check(connection: sqlite3.Connection) -> None:
    """Read the whole file, about 0.2 s for 100 MB in the page cache.

    Raises:
        sqlite3.DatabaseError: it is damaged; `is_broken` is true for this error.
    """
    (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise sqlite3.DatabaseError(f"malformed: {result}")


def rename_damaged(path: Path) -> Path:
    """Rename a damaged file and its write-ahead log; return the new path.

    The log is renamed first: SQLite would replay a remaining log into the next file.
    """
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    first = path.with_name(f"{path.name}.corrupt-{stamp}")
    others = (first.with_name(f"{first.name}-{n}") for n in itertools.count(2))
    renamed = next(path for path in itertools.chain([first], others) if not path.exists())
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(renamed.with_name(renamed.name + suffix))
    return renamed


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Execute the block as one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # on a full disk, SQLite has rolled back itself
            connection.execute("ROLLBACK")
        raise


def bound(connection: sqlite3.Connection, path: Path, max_bytes: float) -> None:
    """Delete incidents if the file is too large, a tenth at a time, and release free pages.

    The oldest incidents of the largest target of the largest owner are deleted first, so small owners lose none.

    Raises:
        OSError: a reader prevents the write-ahead log from being truncated.
    """
    used, free = _sizes(connection)
    while used > max_bytes and (stored := connection.execute("SELECT SUM(bytes) FROM incidents").fetchone()[0]):
        with transaction(connection):
            connection.execute(_EVICT, (int(stored * KEPT * max_bytes / used),))
        used, free = _sizes(connection)
    log = path.with_name(path.name + "-wal")
    if free > max(SPARE_BYTES, used / 4) or _file_bytes(log) > MAX_LOG_BYTES / 2:
        connection.execute("PRAGMA busy_timeout = 0")  # do not wait for readers
        connection.execute("PRAGMA incremental_vacuum").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
    if _file_bytes(log) > MAX_LOG_BYTES:
        raise OSError(f"a reader that does not end keeps {log.name} at {_file_bytes(log)} bytes")


def _sizes(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the bytes of the file's used pages, and of its free pages."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, free * size


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
