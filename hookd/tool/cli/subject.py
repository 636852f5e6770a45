"""Find the subject of `hookd report`: a target by its pid, a run by its label, an incident by its number."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import click

from hookd.errors import HookdError, NoSuchTarget, PermissionDenied, UsageError
from hookd.tool.cli import options, stored, targets
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.collapse import same
from hookd.tool.reports.reading import run_and_rank
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hookd.tool.daemon.client import DaemonClient
    from hookd.wire.incident import Incident, IncidentRow
    from hookd.wire.report import Elsewhere, IncidentReport, Report, RunReport

ROWS = 200
"""Incidents of a run that are shown: the last ones."""


@dataclass(frozen=True)
class Subject:
    """A target, a run or an incident, with its reports and incidents.

    Attributes:
        kind: "target", "run" or "incident".
        name: the pid, the label, or the number.
        reports: of its targets, by rank; targets that are no longer watched are missing.
        rows: its incidents as stored, the oldest first.
    """

    kind: str
    name: str
    reports: list[Report] = field(default_factory=list)
    rows: list[IncidentRow] = field(default_factory=list)

    @property
    def whose(self) -> str:
        """The owner of the incidents, as ` of user NAME`; "" if unknown."""
        user = self.rows[0].get("user") if self.rows else ""
        return f" of user {user}" if user else ""

    @property
    def owner(self) -> int | None:
        """The uid of the owner of the target or incident, None if unknown."""
        return _user_of(self.reports) if self.reports else next((_known(row["owner"]) for row in self.rows), None)

    def as_json(self) -> Report | RunReport | IncidentReport:
        """Return the object that `--json` prints."""
        if self.kind == "target":
            return self.reports[0]
        if self.kind == "run":
            return {"run": self.name, "targets": self.reports, "incidents": self.rows}
        return {"incident": self.rows[0], "target": self.reports[0] if self.reports else None}


def find(word: str, client: DaemonClient | None, user: int | None = None) -> Subject:
    """Return the subject that a word names.

    `#` and a number is an incident, a number the pid of a target, anything else the label of a run. If a number is not
    the pid of a target, it may still be a run: those of Slurm are numbers.

    Args:
        word: the argument of the command.
        client: the daemon, if there is one.
        user: the uid of the required owner; None accepts any.

    Raises:
        NoSuchTarget: there is no such subject, or it belongs to another user.
        UsageError: the word is not valid, or names a run that several users have had.
    """
    subject = _find(word, client, user)
    if user is not None and subject.kind != "run" and subject.owner not in (None, user):
        raise NoSuchTarget(
            f"{subject.kind} {word} belongs to user {user_name(subject.owner)}",
            reason="other-user",
            hint="Omit --user.",
        )
    return subject


def _find(word: str, client: DaemonClient | None, user: int | None) -> Subject:
    if word.startswith("#"):
        return _incident(word.removeprefix("#"), client)
    if (pid := options.number(word)) is None:
        return _run(word, client, user)
    if pid == 0:
        raise click.UsageError(f"'{word}' is not a process id; `hookd ps` lists the training processes.")
    try:
        return _target(pid, client)
    except (NoSuchTarget, PermissionDenied) as error:
        try:
            return _run(word, client, user)
        except UsageError:  # several users have had a run of this name
            raise
        except HookdError:
            raise error from None


def _target(pid: int, client: DaemonClient | None) -> Subject:
    report = targets.report(pid, client, has_curve=True)
    rows: list[IncidentRow] = []
    with contextlib.suppress(HookdError):  # the report of a live target is useful without them
        rows = _of([report], stored.rows(client, pid=pid, order="id")[::-1])
        report["elsewhere"] = list(_elsewhere(report, client))
    return Subject("target", str(pid), [_with(report, rows)], rows)


def _elsewhere(report: Report, client: DaemonClient | None) -> Iterator[Elsewhere]:
    """Yield the incidents of the other ranks of a target's run, one row for each rank.

    A hang, for example, is an incident of the rank that stopped, not of those that wait for it.
    """
    size = report.get("identity", {}).get("world_size")
    if not isinstance(size, int) or size < 2:
        return
    label, _ = run_and_rank(report)
    rows = stored.rows(client, run=label, user=_user_of([report]), limit=ROWS, order="id")[::-1]
    for other in _ranks(label, client, of=report):
        incidents = _with(other, _of([other], rows))["incidents"] if other["pid"] != report["pid"] else []
        if incidents:
            message = incidents[-1].get("message")
            yield {"rank": run_and_rank(other)[1], "pid": other["pid"], "incidents": len(incidents), "message": message}


def _ranks(label: str, client: DaemonClient | None, of: Report | None = None, user: int | None = None) -> list[Report]:
    """Return the reports of the ranks of one user's run, by rank.

    The user is `user`, else the one of the report `of`, else the one with the oldest process.

    Raises:
        UsageError: the label is the script's name of several runs.
    """
    every = _watched(client, user, has_curve=True)
    name = targets.only_run(label, [run_and_rank(report)[0] for report in every], "hookd report")
    ranks = [report for report in every if run_and_rank(report)[0] == name]
    return sorted(_of_one_user(ranks, of), key=rank_order)


def _watched(client: DaemonClient | None, user: int | None = None, *, has_curve: bool = False) -> list[Report]:
    """Return the reports of all targets of a user; None is every user."""
    every = targets.reports(client, targets.foregrounds(), has_curve=has_curve)
    return [report for pid, report in every if not isinstance(report, HookdError) and targets.is_of(pid, report, user)]


def _of_one_user(reports: Sequence[Report], of: Report | None) -> list[Report]:
    """Return the reports of one user.

    Without a daemon that keeps run names unique, several users can have runs of the same name.
    """
    oldest = min(reports, key=lambda report: (_start(report) or 0, report["pid"]), default=None)
    return [report for report in reports if targets.owner(report) == targets.owner(of or oldest or report)]


def run_user(label: str, client: DaemonClient | None) -> int | None:
    """Return the uid of the owner of the watched run of this name; None without one, or if unknown."""
    if client is None:
        every = [report for report in _watched(None) if labels.is_called(run_and_rank(report)[0], label)]
        return _user_of(_of_one_user(every, None))
    rows = [
        row for server in targets.servers(client) for row in server["targets"] if labels.is_called(row["run"], label)
    ]
    oldest = min(rows, key=lambda row: (row["start_ticks"], row["pid"]), default=None)
    return _known(oldest["uid"]) if oldest is not None else None


def _like(label: str, client: DaemonClient | None, user: int | None) -> str:
    """Return a hint that names watched runs which were renamed because another run has this name.

    "" without any.
    """
    every = map(run_and_rank, _watched(client, user))
    names = dict.fromkeys(name for name, _ in every if name.startswith(f"{label}~"))
    return f"Similar runs: {', '.join(names)}." if names else ""


def _run(label: str, client: DaemonClient | None, user: int | None) -> Subject:
    reports = _ranks(label, client, user=user)
    label = run_and_rank(reports[0])[0] if reports else label
    owner = _user_of(reports) if user is None else user
    rows = stored.rows(client, run=label, user=owner, limit=ROWS, order="id")[::-1]
    if not reports:
        rows = _rows_of_one_user(label, rows)
        label = targets.only_run(label, [row["run"] for row in reversed(rows)], "hookd report")
    if not reports and not rows:
        raise NoSuchTarget(
            f"there is no run '{label}'{'' if user is None else f' of user {user_name(user)}'}",
            reason="no-such-run",
            hint=_like(label, client, user) or "`hookd status` lists the runs that are watched.",
        )
    rows = _of(reports, rows) if reports else rows
    return Subject("run", label, [_with(report, _of([report], rows)) for report in reports], rows)


def _rows_of_one_user(label: str, rows: list[IncidentRow]) -> list[IncidentRow]:
    """Return the incidents of the only user who has had a run of this name; all rows if no owner is known.

    Raises:
        UsageError: several users have had one.
    """
    owners = {row["owner"] for row in rows if row["owner"] >= 0}
    if len(owners) > 1:
        users = sorted({str(row["user"]) for row in rows if row["owner"] in owners})
        raise UsageError(
            f"several users have had a run '{label}', and none is watched: {', '.join(users)}",
            reason="several-users",
            hint=f"`hookd report {shlex.quote(label)} --user {users[0]}` selects one of them.",
        )
    return [row for row in rows if row["owner"] in owners] if owners else rows


def _incident(number: str, client: DaemonClient | None) -> Subject:
    if (incident := options.number(number)) is None:
        raise click.UsageError(f"'#{number}' is not an incident number; `hookd incidents` lists the numbers.")
    rows = stored.rows(client, id=incident)
    if not rows:
        raise NoSuchTarget(
            f"there is no incident #{number}", reason="no-such-incident", hint="`hookd incidents` lists them."
        )
    reports: list[Report] = []
    with contextlib.suppress(HookdError):  # the target is gone, or we may not read it
        report = targets.report(int(rows[0]["pid"]), client, has_curve=True)
        reports = [_with(report, rows)] if _of([report], rows) else []
    return Subject("incident", number, reports, rows)


def rank_order(report: Report) -> tuple[int, str]:
    """Return the sort key of a rank: as a number."""
    _, rank = run_and_rank(report)
    number = options.number(rank)
    return (1 << 30 if number is None else number, rank)


def _of(reports: Iterable[Report], rows: Iterable[IncidentRow]) -> list[IncidentRow]:
    """Return the rows of exactly these processes, by pid and start time, since pids are reused."""
    processes = {(report["pid"], _start(report)) for report in reports}
    return [row for row in rows if (row["pid"], row["start"]) in processes]


def _user_of(reports: Sequence[Report]) -> int | None:
    """Return the uid of the owner of these targets; None without targets, or if unknown."""
    from hookd.tool.linux.accounts import uid_of

    for report in reports:
        return _known(report["target"]["uid"] if "target" in report else uid_of(report["pid"]))
    return None


def _known(uid: int) -> int | None:
    return uid if uid >= 0 else None


def _start(report: Report) -> int | None:
    from hookd.tool.linux import proc

    if "target" in report:
        return int(report["target"]["start_ticks"])
    with contextlib.suppress(HookdError, OSError, ValueError, LookupError):
        return proc.start_ticks(report["pid"])
    return None


def _with(report: Report, rows: Iterable[IncidentRow]) -> Report:
    """Return a report with the incidents that the daemon has detected added, and with the numbers of all."""
    incidents: list[Incident] = [{**incident} for incident in report["incidents"]]
    by_name: dict[object, Incident] = {(incident.get("seq"), incident.get("time")): incident for incident in incidents}
    by_name |= {same(incident): incident for incident in incidents}
    for row in rows:
        known = by_name.get(row.get("same")) or by_name.get((row["seq"], row["detail"].get("time")))
        if known is None and row["seq"] < 0:
            known = cast("Incident", {**row["detail"]})
            incidents.append(known)
        if known is not None and row["id"] is not None:
            known["id"] = row["id"]
    incidents.sort(key=lambda incident: incident["time"])
    return {**report, "incidents": incidents}
