"""Find targets and their reports, through the daemon if one runs, else from the pages themselves."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypedDict

from hookd.errors import DaemonNotRunning, DaemonSilent, HookdError, NoSuchTarget, PermissionDenied, UsageError
from hookd.tool.cli import output
from hookd.tool.config.rules import fits
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.daemon.client import DaemonClient
    from hookd.wire.report import Report
    from hookd.wire.target import ServerStatus

POLL_S = 0.2
ANSWER_S = 10.0
"""Timeout of the request for a daemon's version."""
SUGGESTED = 8
"""Maximum number of runs or kinds that a message names."""


def daemon(host: str | None, timeout_s: float = 30.0) -> DaemonClient | None:
    """Return a client of the daemon that runs here, or None.

    Args:
        host: the value of `--host`; a daemon that is named there, or in the environment, must answer.
        timeout_s: timeout of one request.

    Raises:
        DaemonNotRunning: the named daemon is not running.
        DaemonSilent: a daemon is running, but does not answer.
    """
    from hookd.tool.daemon.client import DaemonClient

    client = DaemonClient.of(host, os.environ, timeout_s)
    named_by = _named_by(host)
    try:
        client.version(min(timeout_s, ANSWER_S))
    except PermissionDenied:
        if named_by:
            raise
        return None  # another user's daemon: go on as if there were none
    except DaemonNotRunning as error:
        if not named_by:
            return None
        hint = f"{named_by} names this socket: start `hookd serve` there, or omit {named_by} to work without a daemon."
        raise DaemonNotRunning(error.message, reason=error.reason, hint=hint) from error
    return client


def reader(host: str | None) -> DaemonClient | None:
    """Return the daemon as `daemon` does; warn and return None if it hangs and was not named.

    For commands that can also read without it: they are most needed when something is wrong.
    """
    try:
        return daemon(host)
    except DaemonSilent as error:
        if _named_by(host):
            raise
        output.say(f"hookd: warning: {error.message}; what only it knows is missing. {error.hint}")
        return None


def _named_by(host: str | None) -> str:
    """Return the option or variable that names the daemon, "" if none does."""
    if host and host != os.environ.get("HOOKD_HOST"):  # HOOKD_HOST is the default of --host
        return "--host"
    return next((name for name in ("HOOKD_HOST", "HOOKD_CONTROL") if os.environ.get(name)), "")


def foregrounds() -> list[ServerStatus]:
    """Return the status of every foreground attach of this user that answers: pid, URL and targets.

    Those in other PID namespaces, such as a container with the same files, are left out: their pids mean other processes here.
    """
    from hookd.tool.daemon.client import DaemonClient

    statuses = []
    for client in DaemonClient.embedded(os.environ):
        with contextlib.suppress(HookdError):  # a killed attach leaves its socket file
            status = client.status()
            if status["pid"] == client.peer:
                statuses.append(status)
    return statuses


def servers(client: DaemonClient | None) -> list[ServerStatus]:
    """Return the status of the daemon, if there is one, and of every foreground attach of this user."""
    others = foregrounds()
    if client is not None:
        with contextlib.suppress(HookdError):
            status = client.status()
            return [status, *(other for other in others if other["pid"] != status["pid"])]
    return others


def names(pids: Iterable[int], host: str | None) -> list[str]:
    """Return names of processes that hold or serve agents, with the URL if it is known."""
    urls = {server["pid"]: server["url"] for server in servers(daemon(host))}
    return [command_of(pid) + (f" ({urls[pid]})" if pid in urls else "") for pid in pids]


def command_of(pid: int) -> str:
    """Return `hookd COMMAND PID` for a process of hookd, `process PID` for any other."""
    from hookd.tool.linux import proc

    try:
        words = [PurePath(word).name for word in proc.words(pid, "cmdline")]
    except (HookdError, OSError):
        words = []
    command = next((after for word, after in pairwise(words) if word == "hookd"), "process")
    return f"hookd {command} {pid}" if command in ("attach", "run", "serve") else f"process {pid}"


def only_run(word: str, runs: Iterable[str], command: str) -> str:
    """Return the run that a word means: the one of this name, else the only one whose name it is without the tag.

    It is the word itself if there is none.

    Args:
        word: as a user gave it.
        runs: the names of the runs that there are; those named first are suggested.
        command: the command line without the word, for the hint.

    Raises:
        UsageError: it means several runs.
    """
    names = labels.called(runs, word)
    if len(names) > 1:
        more = f" and {len(names) - SUGGESTED} more" if len(names) > SUGGESTED else ""
        raise UsageError(
            f"there are {len(names)} runs of '{word}': {', '.join(map(output.plain, names[:SUGGESTED]))}{more}",
            reason="several-runs",
            hint=f"`{command} {shlex.quote(output.plain(names[0]))}` selects one of them.",
        )
    return next(iter(names), word)


def attached() -> list[int]:
    """Return the pids of all processes with an agent that we may inspect."""
    from hookd.tool.attach.discover import candidates

    return [process.pid for process in candidates() if process.state == "attached"]


def report(
    pid: int,
    client: DaemonClient | None,
    others: Sequence[ServerStatus] | None = None,
    *,
    has_curve: bool = False,
) -> Report:
    """Return the report of one target.

    It comes from the daemon or foreground attach that serves the target, which knows it even after its end; otherwise from
    the page itself.

    Args:
        pid: of the target.
        client: the daemon, if there is one.
        others: the `foregrounds`; None to look for them.
        has_curve: whether to add the times of the last steps, `curve`.

    Raises:
        NoSuchTarget: there is no such process, or no agent in it.
        PermissionDenied: its descriptors are not visible to us.
    """
    from hookd.tool.daemon.client import EMBEDDED_TIMEOUT_S, DaemonClient

    if client is not None:
        with contextlib.suppress(NoSuchTarget):  # perhaps just attached by another tool
            return client.report(pid, has_curve=has_curve)
    for status in foregrounds() if others is None else others:
        if pid in _pids(status):
            with contextlib.suppress(HookdError):
                server = DaemonClient(Path(status["control"]), EMBEDDED_TIMEOUT_S)
                return server.report(pid, has_curve=has_curve)
    return _report_of_page(pid, has_curve=has_curve)


def _pids(server: ServerStatus) -> set[int]:
    return {int(target["pid"]) for target in server["targets"]}


def _report_of_page(pid: int, *, has_curve: bool) -> Report:
    from hookd.tool.attach.discover import open_page
    from hookd.tool.daemon.fleet import curve
    from hookd.tool.daemon.fleet.identity import Identity
    from hookd.tool.linux.accounts import uid_of
    from hookd.tool.linux.owner import user_name
    from hookd.tool.reports.report import RECENT, build_report

    with contextlib.closing(open_page(pid)) as reader:
        report = build_report(reader.read(), pid, records=reader.recent(RECENT))
        report["identity"] = {**report["identity"], "run": Identity.of_page(report["identity"], pid=pid).run}
        report["user"] = user_name(uid_of(pid))
        if has_curve:
            report["curve"] = curve.of(reader.records())
        return report


def owner(report: Report) -> str:
    """Return the user who owns the process of a report, "" if unknown."""
    return str(report.get("target", report).get("user", ""))


def is_of(pid: int, report: Report | HookdError, user: int | None) -> bool:
    """Whether a target belongs to a user; always true for None.

    Without a report, the owner of the process is used.
    """
    from hookd.tool.linux.accounts import uid_of
    from hookd.tool.linux.owner import user_name

    if user is None:
        return True
    name = "" if isinstance(report, HookdError) else owner(report)
    return (name or user_name(uid_of(pid))) == user_name(user)


def reports(
    client: DaemonClient | None, others: Sequence[ServerStatus], *, has_curve: bool = False
) -> Iterator[tuple[int, Report | HookdError]]:
    """Yield the pid of every target with its report, or with the error if there is none.

    This includes targets that have ended and are still served.

    Args:
        client: the daemon, if there is one.
        others: the `foregrounds`.
        has_curve: whether to add the times of the last steps.
    """
    pids = {int(target["pid"]) for target in client.targets()} if client is not None else set(attached())
    for pid in sorted(pids.union(*map(_pids, others))):
        try:
            yield pid, report(pid, client, others, has_curve=has_curve)
        except HookdError as error:
            yield pid, error


def living(client: DaemonClient | None) -> list[int]:
    """Return the pids of all targets that have not ended."""
    if client is None:
        return sorted(attached())
    return sorted(int(target["pid"]) for target in client.targets() if target["ended"] is None)


class Skipped(TypedDict):
    """A process that matches a selection but is skipped, as `hookd attach --json` prints it."""

    pid: int
    why: str
    cmdline: list[str]
    """Words of its command line."""


@dataclass(frozen=True)
class Selection:
    """The processes selected for a command.

    Attributes:
        pids: of the processes to attach to.
        skipped: processes that match the selection but are skipped.
        is_named: whether each process was named by its pid; otherwise only training processes are selected.
    """

    pids: list[int]
    skipped: list[Skipped]
    is_named: bool


def select(
    pids: Sequence[int], *, tree: bool, match: str | None, user: str | None = None, timeout_s: float = 0.0
) -> Selection:
    """Return the selected processes in order, without duplicates.

    Args:
        pids: from the command line; without `tree` and `match` they are taken as they are.
        tree: select, for each pid, the attachable processes among it and its descendants.
        match: select processes whose command line contains this text or matches it as a glob; with pids, among these.
        user: select only processes of this user (name or uid), since anybody can choose a command line.
        timeout_s: how long to wait for processes of a tree to load torch.

    Raises:
        NoSuchTarget: the tree has no attachable process, or no process matches.
    """
    if not tree and match is None:
        return Selection(list(dict.fromkeys(pids)), [], is_named=True)
    if not pids and match is None:
        raise UsageError("--tree needs a PID")
    processes = _loaded(lambda: _matching(pids, tree=tree, match=match, user=user), timeout_s if tree else 0.0)
    left_out = [skipped(process) for process in processes if process.state == "skipped"]
    usable = [process.pid for process in processes if process.state != "skipped"]
    if not usable:
        what = " ".join(
            filter(
                None,
                (
                    "no process",
                    f"that matches '{match}'" if match else "",
                    f"of user {user}" if user else "",
                    "can be attached to",
                ),
            )
        )
        where = f" among {', '.join(map(str, pids))} and all descendants" if pids else ""
        why = "; ".join(skipped_lines(left_out))
        raise NoSuchTarget(what + where, reason="no-match", hint=why or "`hookd ps --all` lists the reasons.")
    return Selection(usable, left_out, is_named=False)


def _loaded(select_now: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
    """Repeat a selection until all ranks in it have loaded torch, or the timeout; print which ones it waits for."""
    processes, reported = select_now(), set[int]()
    deadline = time.monotonic() + timeout_s
    while (late := _late(processes)) and time.monotonic() < deadline:
        if late != reported:
            reported = late
            output.say(f"waiting for {', '.join(map(str, sorted(late)))} to load torch")
        time.sleep(POLL_S)
        processes = select_now()
    return processes


def _late(processes: Sequence[Candidate]) -> set[int]:
    """Return the pids of processes that may be about to load torch.

    These are all processes without torch if none has it yet, else those that run the same program as one that has it.
    """
    from hookd.tool.attach.discover import NO_TORCH
    from hookd.tool.linux.commandline import program

    running = {program(process.cmdline) for process in processes if process.state != "skipped"}
    without = [process for process in processes if process.why == NO_TORCH]
    return {process.pid for process in without if not running or program(process.cmdline) in running}


def _matching(pids: Sequence[int], *, tree: bool, match: str | None, user: str | None) -> list[Candidate]:
    from hookd.tool.attach.discover import candidates
    from hookd.tool.attach.process_tree import members
    from hookd.tool.linux.owner import user_name

    if tree and pids:
        processes = list({process.pid: process for pid in pids for process in members(pid)}.values())
    else:
        processes = [process for process in candidates() if not pids or process.pid in pids]
    processes = [process for process in processes if user in (None, str(process.uid), user_name(process.uid))]
    return [process for process in processes if match is None or fits(match, " ".join(process.cmdline))]


def skipped(process: Candidate) -> Skipped:
    """Describe a skipped process."""
    return {"pid": process.pid, "why": process.why, "cmdline": list(process.cmdline)}


def skipped_lines(rows: Iterable[Skipped]) -> list[str]:
    """Return the skipped processes, one line for each reason."""
    by_why: dict[str, list[str]] = {}
    for row in rows:
        by_why.setdefault(row["why"], []).append(str(row["pid"]))
    return [f"skipped {', '.join(pids)}: {why}" for why, pids in by_why.items()]
