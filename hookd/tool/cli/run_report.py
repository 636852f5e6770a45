"""`hookd report RUN` and `hookd report '#ID'`: compare the ranks of a run, and show one incident."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from hookd.tool.cli import output, targets
from hookd.tool.cli.incidents import line
from hookd.tool.reports.reading import SHOWN, phases, run_and_rank, short, state, step_seconds
from hookd.tool.reports.wording import moment, process_of, repeated
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from hookd.wire.incident import IncidentRow
    from hookd.wire.report import Report

SLOW = 1.1
"""A rank is slow if its step takes this many times the median."""


def ranks(reports: Sequence[Report]) -> Table:
    """Return a table of a run's ranks: the progress of each, and its step time compared with the median."""
    head = (">RANK", ">PID", "STATE", ">STEPS", ">A STEP", ">MEDIANS", ">FWD", ">DATA", ">COST", ">INC")
    table = output.table(*head)
    table.collapse_padding = True  # ten columns fit into 80
    median = median_step(reports)
    return output.fill(table, [_cells(report, median) for report in reports])


def owners(reports: Sequence[Report]) -> str:
    """Return the name of the user to whom the ranks of a run belong; normally there is one."""
    return ", ".join(sorted({targets.owner(report) for report in reports} - {""}))


def _cells(report: Report, median: float | None) -> tuple[str, ...]:
    seconds = step_seconds(report)
    return (
        run_and_rank(report)[1],
        str(report["pid"]),
        state(report),
        str(report["step"]["current"]),
        output.seconds(seconds),
        ratio(seconds, median),
        output.seconds(of_step(report, "forward")),
        output.seconds(of_step(report, "data")),
        output.percent(report["overhead"]["ratio"]),
        str(len(report["incidents"])),
    )


def median_step(reports: Sequence[Report]) -> float | None:
    """Return the median of the ranks' mean step times, in seconds."""
    times = [seconds for report in reports if (seconds := step_seconds(report))]
    return statistics.median(times) if times else None


def of_step(report: Report, phase: str) -> float | None:
    """Return the seconds per step that a phase takes.

    Ranks that wait for each other have equal step times, but differ in these.
    """
    seconds, share = step_seconds(report), dict(phases(report)).get(phase)
    return seconds * share if seconds and share is not None else None


def ratio(seconds: float | None, median: float | None) -> str:
    """Format a step time as a multiple of the median, with `slow` if it exceeds `SLOW`."""
    if not seconds or not median or seconds < 0:
        return "-"
    return f"{seconds / median:.2f}x" + (" slow" if seconds > SLOW * median else "")


def incidents(rows: Sequence[IncidentRow]) -> Iterator[str]:
    """Yield a line for each incident."""
    if not rows:
        yield "incidents: none"
        return
    yield "incidents:"
    yield from map(line, rows)


def incident(row: IncidentRow) -> Iterator[str]:
    """Yield lines with everything stored about one incident."""
    number = "not stored yet" if row["id"] is None else f"incident #{row['id']}"
    yield f"{number}: {one_line(row['kind'])}, {moment(row['time'])}"
    process = process_of(row["pid"], row.get("user", ""))
    yield f"run {one_line(row['run'])}, rank {one_line(row['rank'])}, {one_line(process)}"
    yield one_line(row["message"]) + repeated(row)
    for name, value in row["detail"].items():
        if name not in SHOWN and value is not None:
            yield from _field(one_line(name), value)


def _field(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, list) and value and not short(value):
        yield f"{name}:"
        for item in value:
            yield "  " + one_line(item if isinstance(item, str) else _words(item))
    else:
        yield f"{name}: {one_line(short(value) or _words(value))}"


def _words(value: Any) -> str:
    """Format an object of plain values as `key value, …`, without empty ones; anything else as JSON."""
    if not isinstance(value, dict) or not all(_is_plain(item) for item in value.values()):
        return json.dumps(output.finite(value))
    return ", ".join(f"{key} {_part(key, item)}" for key, item in value.items() if item not in (None, ""))


def _is_plain(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else ()
    return not isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in inner)


def _part(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"({_words(value)})"
    if isinstance(value, float):
        return clock(value) if key == "time" else f"{value:.6g}"
    return short(value)


def clock(unix_s: float) -> str:
    """Format the time of day to the millisecond, since events are close together."""
    day, dot, rest = moment(unix_s).partition(" ")
    return f"{rest}.{int(unix_s % 1 * 1000):03}" if dot else day
