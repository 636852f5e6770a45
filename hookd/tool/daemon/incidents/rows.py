"""Rows of the incident store: conversion from incidents, and queries."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from hookd.tool.linux.owner import user_name
from hookd.tool.reports.collapse import same
from hookd.wire import labels

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from typing_extensions import Unpack

    from hookd.wire.incident import IncidentRow, StoredIncident

R = TypeVar("R", bound="StoredIncident")
MAX_ROWS = 1000
"""Maximum number of rows that one query returns."""
AHEAD_S = 60.0
"""Seconds that a target's clock may be ahead of ours."""
KEY = ("boot", "pid", "start", "page", "same")
"""The columns that identify an incident."""
FIELDS = (*KEY, "seq", "time", "run", "rank", "kind", "module", "step", "message", "owner", "count", "last", "last_seq")
COLUMNS = ("id", *FIELDS, "detail")
UNKNOWN = -1
"""The owner of a process whose user is not known."""
_PLACEHOLDERS = ", ".join("?" * len(FIELDS))
_TARGET = " AND ".join(f"{name} = ?" for name in KEY[:-1])
# Several daemons may read one page, concurrently or in turn. Sequence numbers only grow, so nothing is counted twice.
_COUNT = f"""
UPDATE incidents SET count = count + MIN(?, ? - last_seq), last = MAX(last, ?), last_seq = ?
WHERE {_TARGET} AND same = ? AND last_seq < ?
"""  # noqa: S608  ours, as below
# INSERT OR IGNORE and ON CONFLICT would use up an id each time.
_INSERT = f"""
INSERT INTO incidents ({", ".join(FIELDS)}, detail, bytes) SELECT {_PLACEHOLDERS}, ?, ?
WHERE NOT EXISTS (SELECT 1 FROM incidents WHERE {_TARGET} AND (same = ? OR seq = ?))
"""  # noqa: S608
_OVERHEAD = 200
"""Approximate bytes of a row, without its message and detail."""
_PROCESS = ", ".join(f"json_extract(value, '$[{n}]')" for n in range(3))


class Query(TypedDict, total=False):
    """The conditions of `query`; None allows any value."""

    id: int | None
    """The one of this number."""
    after: int | None
    """Those of a higher number, the lowest first, each of them."""
    run: str | None
    """As it is served."""
    pid: int | None
    user: int | None
    """The uid of the owner."""
    kind: str | None
    """As it was reported."""
    since: float | None
    """Unix seconds; the last occurrence counts."""
    limit: int
    """Maximum number of rows."""
    order: str
    """`time`, or `id` for the order in which they were stored."""


def key(row: StoredIncident) -> tuple[Any, ...]:
    """Return the values of KEY, which identify an incident."""
    return row["boot"], row["pid"], row["start"], row["page"], row["same"]


def merged(old: StoredIncident, new: StoredIncident) -> StoredIncident:
    """Merge two rows of the same key: the first message, and the sum of both counts.

    Incidents that the daemon itself has seen are not counted: the newer row replaces the older.
    """
    if new["seq"] < 0:
        return {**new}
    last, last_seq = max(old["last"], new["last"]), max(old["last_seq"], new["last_seq"])
    return {**old, "last": last, "last_seq": last_seq, "count": old["count"] + new["count"]}


def insertion(row: StoredIncident, detail: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the statements that store a row, or count it where there is one of its key; each with its values."""
    last = (row["last_seq"], row["last"], row["last_seq"])
    columns: Mapping[str, object] = row
    values = tuple(columns[name] for name in FIELDS)
    return [
        (_COUNT, (row["count"], *last, *key(row), row["last_seq"])),
        (_INSERT, (*values, detail, size(row["message"], detail), *key(row), row["seq"])),
    ]


def size(message: str, detail: str) -> int:
    """Return the approximate size of a row in bytes."""
    return _OVERHEAD + len(message) + len(detail)


def named(rows: Iterable[StoredIncident]) -> list[IncidentRow]:
    """Return rows with their owner's name as `user`. Each name is looked up once, because that may use the network."""
    every = list(rows)
    names = {owner: user_name(owner) for owner in {row["owner"] for row in every}}
    return [{**row, "user": names[row["owner"]]} for row in every]


def fair(rows: Iterable[R], limit: int) -> list[R]:
    """Choose `limit` rows so that nobody's are crowded out: owners take turns, and targets have shares within an owner.

    Args:
        rows: the newest first.
        limit: how many.

    Returns:
        They keep their order. Where all are of one target, it has the newest `limit`.
    """
    of_target: Counter[Any] = Counter()
    of_owner: Counter[Any] = Counter()
    portions = []
    for at, row in enumerate(rows):
        target = (row["owner"], row["pid"], row["start"])
        portions.append((of_target[target] // _share(limit), at, row))
        of_target[target] += 1
    turns = []
    for _, at, row in sorted(portions, key=lambda turn: turn[:2]):
        turns.append((of_owner[row["owner"]], at, row))
        of_owner[row["owner"]] += 1
    chosen = sorted(turns, key=lambda turn: turn[:2])[:limit]
    return [row for _, _, row in sorted(chosen, key=lambda turn: turn[1])]


def _share(limit: int) -> int:
    return max(1, limit // 5)


def query(
    connection: sqlite3.Connection, processes: Collection[tuple[str, int, int]] | None = None, **filters: Unpack[Query]
) -> list[IncidentRow]:
    """Return incidents that match all given conditions, the newest first, `MAX_ROWS` at most.

    If more than `limit` match, they are chosen as `fair` does. With `run` or `pid`, each owner's newest are chosen:
    several users may have used the name in turn.

    Args:
        connection: to the file.
        processes: only incidents of these, by boot, pid and start ticks.
        filters: the conditions.
    """
    sql_of = {
        "pid": "pid = ?", "user": "owner = ?", "kind": "kind = ?", "since": "last >= ?", "id": "id = ?",
        "after": "id > ?",
    }  # fmt: skip
    asked = cast("Mapping[str, str | float | None]", filters)
    given = {sql_of[name]: value for name, value in asked.items() if name in sql_of and value is not None}
    conditions, values = list(given), [*given.values()]
    if (run := filters.get("run")) is not None:
        conditions.append(_CALLED)
        values += _called(run)
    if not all(isinstance(value, str) or -(2**63) <= value < 2**63 for value in values):
        return []  # SQLite has no such numbers
    if processes is not None:
        conditions.append(f"(boot, pid, start) IN (SELECT {_PROCESS} FROM json_each(?))")  # noqa: S608  ours
        values.append(json.dumps([list(process) for process in processes]))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    limit = max(0, min(filters.get("limit", MAX_ROWS), MAX_ROWS))
    is_after = filters.get("after") is not None
    columns = ", ".join(COLUMNS)
    by = "id" if is_after else "id DESC" if filters.get("order") == "id" else "last DESC, id DESC"
    if is_after:
        sql = f"SELECT {columns} FROM incidents {where} ORDER BY {by} LIMIT ?"  # noqa: S608  ours
        rows = connection.execute(sql, (*values, limit))
    elif conditions:
        sql = _FAIR.format(columns=columns, where=where, by=by)
        is_of_many = filters.get("run") is None and filters.get("pid") is None
        share = _share(limit) if is_of_many else max(1, limit)
        rows = connection.execute(sql, (*values, share, limit))
    else:
        sql = _NEWEST + _FAIR.format(columns=columns, where="WHERE id IN newest", by=by)
        rows = connection.execute(sql.replace("\nWITH portions", ", portions", 1), (limit, limit, _share(limit), limit))
    return named(map(row_of, rows))


def _called(word: str) -> list[str]:
    """Return the values of _CALLED."""
    plain = "".join(f"[{char}]" if char in "*?[" else char for char in word)
    tagged = f"{plain}@{'[0-9a-f]' * labels.TAG}"
    return [word, f"{word}@", f"{word}@g", tagged, f"{tagged}~*"]


_CALLED = "(run = ? OR (run > ? AND run < ? AND (run GLOB ? OR run GLOB ?)))"
"""Selects the same runs as `labels.is_called`; the range is for the index."""
_FAIR = """
WITH portions AS (
    SELECT id, owner, last, (ROW_NUMBER() OVER (PARTITION BY owner, pid, start ORDER BY {by}) - 1) AS n
    FROM incidents {where}
), turns AS (
    SELECT id, last, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY n / ?, {by}) AS turn FROM portions
)
SELECT {columns} FROM incidents WHERE id IN (SELECT id FROM turns ORDER BY turn, {by} LIMIT ?) ORDER BY {by}
"""
"""Makes the same choice as `fair`."""
_NEWEST = """
WITH RECURSIVE targets (owner, pid, start) AS (
    SELECT * FROM (SELECT owner, pid, start FROM incidents ORDER BY owner, pid, start LIMIT 1)
    UNION ALL
    SELECT next.owner, next.pid, next.start FROM targets AS this, incidents AS next WHERE next.id = COALESCE(
        (SELECT id FROM incidents WHERE owner = this.owner AND pid = this.pid AND start > this.start ORDER BY start LIMIT 1),
        (SELECT id FROM incidents WHERE owner = this.owner AND pid > this.pid ORDER BY pid, start LIMIT 1),
        (SELECT id FROM incidents WHERE owner > this.owner ORDER BY owner, pid, start LIMIT 1)
    )
), newest (id) AS (
    SELECT one.id FROM targets, incidents AS one WHERE one.id IN (
        SELECT id FROM incidents WHERE owner = targets.owner AND pid = targets.pid AND start = targets.start
        ORDER BY id DESC LIMIT ?
    )
    UNION SELECT id FROM (SELECT id FROM incidents ORDER BY last DESC LIMIT ?)
)
"""
"""Selects the newest rows of each target through the index alone, so a full store is not scanned."""


def fits(row: StoredIncident, processes: Collection[tuple[str, int, int]] | None, **filters: Unpack[Query]) -> bool:
    """Whether a row that is not in the file matches a query."""
    if filters.get("id") is not None or filters.get("after") is not None:
        return False
    since, run = filters.get("since"), filters.get("run")
    return (
        (run is None or labels.is_called(row["run"], run))
        and filters.get("pid") in (None, row["pid"])
        and filters.get("user") in (None, row["owner"])
        and filters.get("kind") in (None, row["kind"])
        and (since is None or row["last"] >= since)
        and (processes is None or (row["boot"], row["pid"], row["start"]) in set(processes))
    )


def row_of(values: Sequence[Any]) -> StoredIncident:
    """Return a row from the values of COLUMNS."""
    row = dict(zip(COLUMNS, values, strict=True))
    return cast("StoredIncident", {**row, "detail": json.loads(row["detail"])})


def values_of(incident: Mapping[str, Any], run: str, rank: str, owner: int) -> dict[str, str | int | float | None]:
    """Return the columns from `same` on; the page may hold anything under these names."""
    seq, when, step, module = (incident.get(name) for name in ("seq", "time", "step", "module"))
    number = seq if _is_number(seq, int) else 0
    now = time.time()
    # A row with a future time would never be pruned, and would sort above all others.
    moment = min(float(when), now + AHEAD_S) if when is not None and _is_number(when, (int, float)) else now
    return {
        "same": same({**incident, "seq": number}),
        "seq": number,
        "time": moment,
        "run": _text(run),
        "rank": _text(rank),
        "kind": _text(incident.get("kind", "")),
        "module": _text(module) if isinstance(module, str) else None,
        "step": step if _is_number(step, int) else None,
        "message": _text(incident.get("message", "")),
        "owner": owner,
        "count": 1,
        "last": moment,
        "last_seq": number,
    }


def _text(value: object) -> str:
    """Return text that SQLite accepts: replace lone surrogates."""
    return str(value).encode("utf-8", "replace").decode()


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and -(2**63) <= value < 2**63  # type: ignore[operator]
