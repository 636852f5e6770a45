"""The rows of the incident store: how an incident becomes one, and how they are asked for."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Mapping, Sequence

MAX_ROWS = 1000
"""What one query gives at most."""
AHEAD_S = 60.0
"""How far a target's clock may be ahead of ours."""
KEY = ("boot", "pid", "start", "page", "seq")
"""The columns that name an incident."""
FIELDS = (*KEY, "time", "run", "rank", "kind", "module", "step", "message")
COLUMNS = ("id", *FIELDS, "detail")
_PROCESS = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(3))


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Give what names an incident."""
    return tuple(row[name] for name in KEY)


def query(
    connection: sqlite3.Connection,
    *,
    id: int | None = None,  # noqa: A002  the column's name
    after: int | None = None,
    run: str | None = None,
    pid: int | None = None,
    kind: str | None = None,
    since: float | None = None,
    limit: int = MAX_ROWS,
    order: str = "time",
    processes: Collection[tuple[str, int, int]] | None = None,
) -> list[dict[str, Any]]:
    """Give incidents that match all that is asked for, the newest first, `MAX_ROWS` at most.

    Args:
        connection: to the file.
        id: the one of this number.
        after: those of a higher number, the lowest first.
        run: as it is served.
        pid: of the target.
        kind: as it was told.
        since: unix seconds.
        limit: how many at most.
        order: "time", or "id" for the order in which they were stored.
        processes: only of these, by boot, pid and start ticks.
    """
    asked = {"run = ?": run, "pid = ?": pid, "kind = ?": kind, "time >= ?": since, "id = ?": id, "id > ?": after}
    wanted = {condition: value for condition, value in asked.items() if value is not None}
    conditions, values = list(wanted), [*wanted.values()]
    if not all(isinstance(value, str) or -(2**63) <= value < 2**63 for value in values):
        return []  # SQLite has no such numbers
    if processes is not None:
        conditions.append(f"(boot, pid, start) IN (SELECT {_PROCESS} FROM json_each(?))")  # noqa: S608  ours
        values.append(json.dumps([list(one) for one in processes]))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    by = "id" if after is not None else "id DESC" if order == "id" else "time DESC, id DESC"
    rows = connection.execute(
        f"SELECT {', '.join(COLUMNS)} FROM incidents {where} ORDER BY {by} LIMIT ?",  # noqa: S608  ours
        (*values, max(0, min(limit, MAX_ROWS))),
    )
    return [row_of(row) for row in rows]


def fits(
    row: Mapping[str, Any],
    processes: Collection[tuple[str, int, int]] | None,
    *,
    id: int | None = None,  # noqa: A002  the column's name
    after: int | None = None,
    since: float | None = None,
    limit: int = MAX_ROWS,  # noqa: ARG001  it holds for all
    order: str = "time",  # noqa: ARG001  the same
    **wanted: Any,
) -> bool:
    """Tell whether a row that is not in the file fits a query."""
    return (
        id is None
        and after is None
        and (since is None or row["time"] >= since)
        and all(value is None or row[name] == value for name, value in wanted.items())
        and (processes is None or (row["boot"], row["pid"], row["start"]) in set(processes))
    )


def row_of(values: Sequence[Any]) -> dict[str, Any]:
    """Make a row of the values of COLUMNS."""
    row = dict(zip(COLUMNS, values, strict=True))
    return {**row, "detail": json.loads(row["detail"])}


def values_of(incident: Mapping[str, Any], run: str, rank: str) -> tuple[Any, ...]:
    """Give the columns from `seq` to `message`; the page may hold anything under these names."""
    seq, when, step, module = (incident.get(name) for name in ("seq", "time", "step", "module"))
    now = time.time()
    return (
        seq if _is_number(seq, int) else 0,
        # A time to come would be kept for ever, and stand above all others.
        min(float(when), now + AHEAD_S) if when is not None and _is_number(when, (int, float)) else now,
        _text(run),
        _text(rank),
        _text(incident.get("kind", "")),
        _text(module) if isinstance(module, str) else None,
        step if _is_number(step, int) else None,
        _text(incident.get("message", "")),
    )


def _text(value: object) -> str:
    """Give a text that SQLite takes: half a surrogate pair is none."""
    return str(value).encode("utf-8", "replace").decode()


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and -(2**63) <= value < 2**63  # type: ignore[operator]
