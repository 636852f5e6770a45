"""Copy the readable incidents of a damaged store into a new one, with their numbers."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

from hookd.tool.daemon.incidents import database
from hookd.tool.daemon.incidents.rows import COLUMNS, row_of, size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_INSERT = f"""
INSERT OR IGNORE INTO incidents ({", ".join(COLUMNS)}, bytes) VALUES ({", ".join("?" * (len(COLUMNS) + 1))})
"""  # noqa: S608  ours
_TYPES = {
    **dict.fromkeys(("id", "pid", "start", "page", "seq", "owner", "count", "last_seq"), int),
    **dict.fromkeys(("time", "last"), float),
    **dict.fromkeys(("boot", "same", "run", "rank", "kind", "message"), str),
    "detail": dict,
}


def salvage(damaged: Path, into: sqlite3.Connection) -> int:
    """Copy the readable incidents; return their number.

    Raises:
        sqlite3.Error: the new store cannot be written.
    """
    with database.transaction(into):
        return sum(into.execute(_INSERT, values).rowcount for values in _rows(damaged))


def _rows(damaged: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the values of COLUMNS and the size of each readable row, from the first row on, then from the last row back."""
    with contextlib.suppress(sqlite3.Error, OSError):
        has_log = damaged.with_name(damaged.name + "-wal").exists()
        old = (database.open_to_read if has_log else database.open_unchanging)(damaged)
        if old is None:
            return
        with contextlib.closing(old):
            for order in ("ASC", "DESC"):
                with contextlib.suppress(sqlite3.Error):
                    for values in old.execute(f"SELECT {', '.join(COLUMNS)} FROM incidents ORDER BY id {order}"):  # noqa: S608
                        if _is_whole(values):
                            yield (*values, size(values[COLUMNS.index("message")], values[-1]))


def _is_whole(values: tuple[Any, ...]) -> bool:
    try:
        row = row_of(values)
    except (ValueError, TypeError):
        return False
    return all(isinstance(value, _TYPES.get(name, object)) for name, value in row.items())
