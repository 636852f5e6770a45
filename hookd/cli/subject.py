"""What `hookd report` is about: a target by its pid, a run by its label, an incident by its number."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from hookd.cli import stored, targets
from hookd.errors import HookdError, NoSuchTarget, PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hookd.daemon.client import DaemonClient

ROWS = 200
"""Incidents of a run that are shown, the last ones."""


@dataclass(frozen=True)
class Subject:
    """One of three.

    Attributes:
        kind: "target", "run" or "incident".
        name: the pid, the label, or the number.
        reports: of the targets it is about, by rank; those of an incident and of a run that are gone are not there.
        rows: incidents as the store has them, the oldest first.
    """

    kind: str
    name: str
    reports: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Give what `--json` prints."""
        if self.kind == "target":
            return self.reports[0]
        if self.kind == "run":
            return {"run": self.name, "targets": self.reports, "incidents": self.rows}
        return {"incident": self.rows[0], "target": self.reports[0] if self.reports else None}


def find(word: str, client: DaemonClient | None) -> Subject:
    """Find what a word means: `#` and a number is an incident, a number the pid of a target, all else a run.

    A number that is no target's pid may be the label of a run: Slurm's are numbers.

    Raises:
        NoSuchTarget: it is none of these.
        UsageError: it can be none.
    """
    if word.startswith("#"):
        return _incident(word.removeprefix("#"), client)
    if not word.isdecimal():
        return _run(word, client)
    if int(word) == 0:
        raise click.UsageError(f"'{word}' is no process id; `hookd ps` lists the training processes.")
    try:
        return _target(int(word), client)
    except (NoSuchTarget, PermissionDenied):
        with contextlib.suppress(HookdError):
            return _run(word, client)
        raise


def _target(pid: int, client: DaemonClient | None) -> Subject:
    report = targets.report(pid, client, has_curve=True)
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(HookdError):  # it is about a target that is there: its page says enough
        rows = _of([report], stored.rows(client, pid=pid, order="id")[::-1])
        report["elsewhere"] = list(_elsewhere(report, client))
    return Subject("target", str(pid), [_with(report, rows)], rows)


def _elsewhere(report: dict[str, Any], client: DaemonClient | None) -> Iterator[dict[str, Any]]:
    """Give what was told of the other ranks of its run: a hang is an incident of the rank that stands."""
    size = report.get("identity", {}).get("world_size")
    if not isinstance(size, int) or size < 2:
        return
    label = _label(report)
    rows = stored.rows(client, run=label, limit=ROWS, order="id")[::-1]
    for one in _ranks(label, client):
        told = _with(one, _of([one], rows))["incidents"] if one["pid"] != report["pid"] else []
        if told:
            yield {"rank": _rank_of(one), "pid": one["pid"], "incidents": len(told), "message": told[-1].get("message")}


def _ranks(label: str, client: DaemonClient | None) -> list[dict[str, Any]]:
    every = [one for _, one in targets.reports(client, targets.foregrounds(), has_curve=True)]
    return sorted((one for one in every if not isinstance(one, HookdError) and _is_of(one, label)), key=_rank)


def _run(label: str, client: DaemonClient | None) -> Subject:
    reports = _ranks(label, client)
    rows = stored.rows(client, run=label, limit=ROWS, order="id")[::-1]
    if not reports and not rows:
        raise NoSuchTarget(
            f"there is no run '{label}'", reason="no-such-run", hint="`hookd status` lists those that are watched."
        )
    rows = _of(reports, rows) if reports else rows
    return Subject("run", label, [_with(report, _of([report], rows)) for report in reports], rows)


def _incident(number: str, client: DaemonClient | None) -> Subject:
    if not number.isdecimal():
        raise click.UsageError(f"'#{number}' is no incident; `hookd incidents` lists their numbers.")
    rows = stored.rows(client, id=int(number))
    if not rows:
        raise NoSuchTarget(
            f"there is no incident #{number}", reason="no-such-incident", hint="`hookd incidents` lists them."
        )
    reports: list[dict[str, Any]] = []
    with contextlib.suppress(HookdError):  # its target is gone, or may not be seen
        report = targets.report(int(rows[0]["pid"]), client, has_curve=True)
        reports = [_with(report, rows)] if _of([report], rows) else []
    return Subject("incident", number, reports, rows)


def _is_of(report: dict[str, Any], label: str) -> bool:
    return "identity" in report and _label(report) == label


def _label(report: dict[str, Any]) -> str:
    return str(report.get("target", {}).get("run", report["identity"].get("run")))


def _rank_of(report: dict[str, Any]) -> str:
    return str(report.get("target", {}).get("rank", report["identity"].get("rank")))


def _rank(report: dict[str, Any]) -> tuple[int, str]:
    rank = _rank_of(report)
    return (int(rank) if rank.isdecimal() else 1 << 30, rank)


def _of(reports: Iterable[dict[str, Any]], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give those rows that are of these very processes: a pid names many, one after the other."""
    processes = {(one["pid"], _start(one)) for one in reports}
    return [row for row in rows if (row["pid"], row["start"]) in processes]


def _start(report: dict[str, Any]) -> int | None:
    from hookd.attach import proc

    if "target" in report:
        return int(report["target"]["start_ticks"])
    with contextlib.suppress(HookdError, OSError, ValueError, LookupError):
        return proc.start_ticks(report["pid"])
    return None


def _with(report: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add to the incidents of a page those that the daemon has seen itself, and the numbers of all."""
    told: list[dict[str, Any]] = [dict(one) for one in report.get("incidents", ())]
    by_name = {(one.get("seq"), one.get("time")): one for one in told}
    for row in rows:
        known = by_name.get((row["seq"], row["detail"].get("time")))
        if known is None and row["seq"] < 0:
            known = dict(row["detail"])
            told.append(known)
        if known is not None:
            known["id"] = row["id"]
    told.sort(key=lambda one: one["time"] if isinstance(one.get("time"), (int, float)) else 0)
    return {**report, "incidents": told} if "incidents" in report else report
