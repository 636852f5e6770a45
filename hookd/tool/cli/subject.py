"""What `hookd report` is about: a target by its pid, a run by its label, an incident by its number."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import HookdError, NoSuchTarget, PermissionDenied, UsageError
from hookd.tool.cli import stored, targets
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.collapse import same

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hookd.tool.daemon.client import DaemonClient

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

    @property
    def whose(self) -> str:
        """Whose incidents they are, in words: "" where that is not known."""
        user = self.rows[0].get("user") if self.rows else ""
        return f" of user {user}" if user else ""

    @property
    def owner(self) -> int | None:
        """The uid of the user whose target or incident it is, None where that is not known."""
        return _user_of(self.reports) if self.reports else next((_known(row["owner"]) for row in self.rows), None)

    def as_json(self) -> dict[str, Any]:
        """Give what `--json` prints."""
        if self.kind == "target":
            return self.reports[0]
        if self.kind == "run":
            return {"run": self.name, "targets": self.reports, "incidents": self.rows}
        return {"incident": self.rows[0], "target": self.reports[0] if self.reports else None}


def find(word: str, client: DaemonClient | None, user: int | None = None) -> Subject:
    """Find what a word means: `#` and a number is an incident, a number the pid of a target, all else a run.

    A number that is no target's pid may be the label of a run: Slurm's are numbers.

    Args:
        word: as a person has written it.
        client: the daemon, if there is one.
        user: the uid of the user to whom it has to belong; None: to anybody.

    Raises:
        NoSuchTarget: it is none of these, or another user's.
        UsageError: it can be none, or is a run that several users have had.
    """
    found = _find(word, client, user)
    if user is not None and found.kind != "run" and found.owner not in (None, user):
        raise NoSuchTarget(
            f"{found.kind} {word} is of user {user_name(found.owner)}", reason="other-user", hint="Leave --user out."
        )
    return found


def _find(word: str, client: DaemonClient | None, user: int | None) -> Subject:
    if word.startswith("#"):
        return _incident(word.removeprefix("#"), client)
    if not word.isdecimal():
        return _run(word, client, user)
    if int(word) == 0:
        raise click.UsageError(f"'{word}' is no process id; `hookd ps` lists the training processes.")
    try:
        return _target(int(word), client)
    except (NoSuchTarget, PermissionDenied) as error:
        try:
            return _run(word, client, user)
        except UsageError:  # several users have had it
            raise
        except HookdError:
            raise error from None


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
    rows = stored.rows(client, run=label, user=_user_of([report]), limit=ROWS, order="id")[::-1]
    for one in _ranks(label, client, of=report):
        told = _with(one, _of([one], rows))["incidents"] if one["pid"] != report["pid"] else []
        if told:
            yield {"rank": _rank_of(one), "pid": one["pid"], "incidents": len(told), "message": told[-1].get("message")}


def _ranks(
    label: str, client: DaemonClient | None, of: dict[str, Any] | None = None, user: int | None = None
) -> list[dict[str, Any]]:
    """Return the reports of a run: of this user, of that of the report `of`, else of the one whose process is the oldest."""
    every = [
        one
        for pid, one in targets.reports(client, targets.foregrounds(), has_curve=True)
        if targets.is_of(pid, one, user)
    ]
    found = [one for one in every if not isinstance(one, HookdError) and _is_of(one, label)]
    return sorted(_of_one_user(found, of), key=_rank)


def _of_one_user(reports: Sequence[dict[str, Any]], of: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the reports of one user: where no daemon names runs, anybody may use a name."""
    oldest = min(reports, key=lambda one: (_start(one) or 0, one["pid"]), default=None)
    return [one for one in reports if targets.owner(one) == targets.owner(of or oldest or one)]


def run_user(label: str, client: DaemonClient | None) -> int | None:
    """Return the uid of the user whose run of this name is watched, None where none is or the user is not known."""
    if client is None:
        return _user_of(_ranks(label, None))
    rows = [row for server in targets.servers(client) for row in server["targets"] if row["run"] == label]
    oldest = min(rows, key=lambda row: (row["start_ticks"], row["pid"]), default=None)
    return _known(oldest["uid"]) if oldest is not None else None


def _like(label: str, client: DaemonClient | None, user: int | None) -> str:
    """Say which runs are watched that asked for this name, which another has; "" without any."""
    every = targets.reports(client, targets.foregrounds())
    found = [one for pid, one in every if not isinstance(one, HookdError) and targets.is_of(pid, one, user)]
    names = dict.fromkeys(name for name in map(_label, found) if name.startswith(f"{label}~"))
    return f"There is {', '.join(names)}." if names else ""


def _run(label: str, client: DaemonClient | None, user: int | None) -> Subject:
    reports = _ranks(label, client, user=user)
    owner = _user_of(reports) if user is None else user
    rows = stored.rows(client, run=label, user=owner, limit=ROWS, order="id")[::-1]
    if not reports:
        rows = _rows_of_one_user(label, rows)
    if not reports and not rows:
        raise NoSuchTarget(
            f"there is no run '{label}'{'' if user is None else f' of user {user_name(user)}'}",
            reason="no-such-run",
            hint=_like(label, client, user) or "`hookd status` lists those that are watched.",
        )
    rows = _of(reports, rows) if reports else rows
    return Subject("run", label, [_with(report, _of([report], rows)) for report in reports], rows)


def _rows_of_one_user(label: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents of the one user who has had a run of this name; of no known user where there is none.

    Raises:
        UsageError: several users have.
    """
    owners = {row["owner"] for row in rows if row["owner"] >= 0}
    if len(owners) > 1:
        users = sorted({str(row["user"]) for row in rows if row["owner"] in owners})
        raise UsageError(
            f"several users have had a run '{label}', and none is watched: {', '.join(users)}",
            reason="several-users",
            hint=f"`hookd report {shlex.quote(label)} --user {users[0]}` reports on that of one.",
        )
    return [row for row in rows if row["owner"] in owners] if owners else rows


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


def _user_of(reports: Sequence[dict[str, Any]]) -> int | None:
    """Return the uid of the user to whom these targets belong; None where there are none, or it is not known."""
    from hookd.tool.linux.accounts import uid_of

    for report in reports:
        return _known(report["target"]["uid"] if "target" in report else uid_of(report["pid"]))
    return None


def _known(uid: int) -> int | None:
    return uid if uid >= 0 else None


def _start(report: dict[str, Any]) -> int | None:
    from hookd.tool.linux import proc

    if "target" in report:
        return int(report["target"]["start_ticks"])
    with contextlib.suppress(HookdError, OSError, ValueError, LookupError):
        return proc.start_ticks(report["pid"])
    return None


def _with(report: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add to the incidents of a page those that the daemon has seen itself, and the numbers of all."""
    told: list[dict[str, Any]] = [dict(one) for one in report.get("incidents", ())]
    by_name: dict[object, dict[str, Any]] = {(one.get("seq"), one.get("time")): one for one in told}
    by_name |= {same(one): one for one in told}
    for row in rows:
        known = by_name.get(row.get("same")) or by_name.get((row["seq"], row["detail"].get("time")))
        if known is None and row["seq"] < 0:
            known = dict(row["detail"])
            told.append(known)
        if known is not None:
            known["id"] = row["id"]
    told.sort(key=lambda one: one["time"] if isinstance(one.get("time"), (int, float)) else 0)
    return {**report, "incidents": told} if "incidents" in report else report
