"""Where commands find targets: at the daemon when one runs, else in the pages themselves."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hookd.errors import DaemonNotRunning, DaemonSilent, HookdError, NoSuchTarget, PermissionDenied, UsageError
from hookd.tool.cli import output
from hookd.tool.config.rules import fits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.daemon.client import DaemonClient

POLL_S = 0.2
ANSWER_S = 10.0
"""For so long a daemon may take to say which version it is."""


def daemon(host: str | None, timeout_s: float = 30.0) -> DaemonClient | None:
    """Give the daemon that runs here, or None.

    Args:
        host: of `--host`; a daemon that was named (there, or in the environment) must answer.
        timeout_s: how long one request to it may take.

    Raises:
        DaemonNotRunning: the daemon that was named is not there.
        DaemonSilent: one is there and does not answer.
    """
    from hookd.tool.daemon.client import DaemonClient

    client = DaemonClient.of(host, os.environ, timeout_s)
    named_by = _named_by(host)
    try:
        client.version(min(timeout_s, ANSWER_S))
    except PermissionDenied:
        if named_by:
            raise
        return None  # another user's daemon is no help, and no hindrance
    except DaemonNotRunning as error:
        if not named_by:
            return None
        hint = (
            f"{named_by} names this socket: start `hookd serve` there, or leave {named_by} out to do without a daemon."
        )
        raise DaemonNotRunning(error.message, reason=error.reason, hint=hint) from error
    return client


def reader(host: str | None) -> DaemonClient | None:
    """Give the daemon, as `daemon` does; None, after a warning, where one hangs that nobody named.

    For what can be read without it as well: somebody looks because something is wrong.
    """
    try:
        return daemon(host)
    except DaemonSilent as error:
        if _named_by(host):
            raise
        output.say(f"hookd: warning: {error.message}; what it alone knows is missing. {error.hint}")
        return None


def _named_by(host: str | None) -> str:
    """Say by what a daemon was named, "" if by nothing; `--host` has the value of HOOKD_HOST where it was not given."""
    if host and host != os.environ.get("HOOKD_HOST"):
        return "--host"
    return next((name for name in ("HOOKD_HOST", "HOOKD_CONTROL") if os.environ.get(name)), "")


def foregrounds() -> list[dict[str, Any]]:
    """Give the status of every foreground attach of this user that answers: who it is, where it serves, which targets.

    Not of one in another PID namespace, as of a container with the same files: its pids are those of other processes here.
    """
    from hookd.tool.daemon.client import DaemonClient

    found = []
    for client in DaemonClient.embedded(os.environ):
        with contextlib.suppress(HookdError):  # a killed one leaves its socket file
            status = client.status()
            if status["pid"] == client.peer:
                found.append(status)
    return found


def servers(client: DaemonClient | None) -> list[dict[str, Any]]:
    """Give the status of the daemon, if there is one, and of every foreground attach of this user."""
    found = foregrounds()
    if client is not None:
        with contextlib.suppress(HookdError):
            status = client.status()
            return [status, *(one for one in found if one["pid"] != status["pid"])]
    return found


def names(pids: Iterable[int], host: str | None) -> list[str]:
    """Name processes that hold or serve agents, with where they serve as far as they tell."""
    urls = {one["pid"]: one["url"] for one in servers(daemon(host))}
    return [command_of(pid) + (f" ({urls[pid]})" if pid in urls else "") for pid in pids]


def command_of(pid: int) -> str:
    """Name a process of hookd by its command, any other by its pid alone."""
    from hookd.tool.linux import proc

    try:
        words = [PurePath(word).name for word in proc.words(pid, "cmdline")]
    except (HookdError, OSError):
        words = []
    command = next((after for word, after in pairwise(words) if word == "hookd"), "process")
    return f"hookd {command} {pid}" if command in ("attach", "run", "serve") else f"process {pid}"


def attached() -> list[int]:
    """Give the pids of all processes that hold an agent and that we may look into."""
    from hookd.tool.attach.discover import candidates

    return [one.pid for one in candidates() if one.state == "attached"]


def report(
    pid: int,
    client: DaemonClient | None,
    others: Sequence[dict[str, Any]] | None = None,
    *,
    has_curve: bool = False,
) -> dict[str, Any]:
    """Give the report of one target: from who serves it, which knows it also when it has ended, else from the page itself.

    Args:
        pid: of the target.
        client: the daemon, if there is one.
        others: the `foregrounds`; looked for if None.
        has_curve: with the times of its last steps, `curve`.

    Raises:
        NoSuchTarget: there is no such process, or no agent in it.
        PermissionDenied: its descriptors cannot be seen.
    """
    from hookd.tool.daemon.client import EMBEDDED_TIMEOUT_S, DaemonClient

    if client is not None:
        with contextlib.suppress(NoSuchTarget):  # attached by another tool a moment ago, perhaps
            return {"pid": pid, **client.report(pid, has_curve=has_curve)}
    for one in foregrounds() if others is None else others:
        if pid in _pids(one):
            with contextlib.suppress(HookdError):
                server = DaemonClient(Path(one["control"]), EMBEDDED_TIMEOUT_S)
                return {"pid": pid, **server.report(pid, has_curve=has_curve)}
    return _report_of_page(pid, has_curve=has_curve)


def _pids(server: dict[str, Any]) -> set[int]:
    return {int(target["pid"]) for target in server["targets"]}


def _report_of_page(pid: int, *, has_curve: bool) -> dict[str, Any]:
    from hookd.tool.attach.discover import open_page
    from hookd.tool.daemon.fleet import curve
    from hookd.tool.linux.accounts import uid_of
    from hookd.tool.linux.owner import user_name
    from hookd.tool.reports.report import build_report

    with contextlib.closing(open_page(pid)) as reader:
        drawn = {"curve": curve.of(reader.records())} if has_curve else {}
        return {"pid": pid, **build_report(reader.read()), "user": user_name(uid_of(pid)), **drawn}


def owner(report: dict[str, Any]) -> str:
    """Return the user to whom the process of a report belongs, "" if that is not known."""
    return str(report.get("target", report).get("user", ""))


def is_of(pid: int, found: dict[str, Any] | HookdError, user: int | None) -> bool:
    """Whether a target belongs to a user, None: to anybody; of one without a report its process says so."""
    from hookd.tool.linux.accounts import uid_of
    from hookd.tool.linux.owner import user_name

    if user is None:
        return True
    name = "" if isinstance(found, HookdError) else owner(found)
    return (name or user_name(uid_of(pid))) == user_name(user)


def reports(
    client: DaemonClient | None, others: Sequence[dict[str, Any]], *, has_curve: bool = False
) -> Iterator[tuple[int, dict[str, Any] | HookdError]]:
    """Give the report of every target, also of those that have ended and are still served, or why there is none.

    Args:
        client: the daemon, if there is one.
        others: the `foregrounds`.
        has_curve: with the times of their last steps.
    """
    pids = {int(one["pid"]) for one in client.targets()} if client is not None else set(attached())
    for pid in sorted(pids.union(*map(_pids, others))):
        try:
            yield pid, report(pid, client, others, has_curve=has_curve)
        except HookdError as error:
            yield pid, error


def living(client: DaemonClient | None) -> list[int]:
    """Give the pids of all targets that have not ended."""
    if client is None:
        return sorted(attached())
    return sorted(int(one["pid"]) for one in client.targets() if one["ended"] is None)


@dataclass(frozen=True)
class Selection:
    """The processes that a command is about.

    Attributes:
        pids: to attach to.
        skipped: what was asked for in general and is not attached to: `{"pid", "why", "cmdline"}` each.
        is_named: whether each process was named by its pid; else only those that train are meant.
    """

    pids: list[int]
    skipped: list[dict[str, Any]]
    is_named: bool


def select(
    pids: Sequence[int], *, tree: bool, match: str | None, user: str | None = None, timeout_s: float = 0.0
) -> Selection:
    """Find the processes that were asked for, in order, each once.

    Args:
        pids: as given; without a rule, each of them is taken as it is.
        tree: take for each of them all attachable processes among itself and what it has started.
        match: take those whose command line contains this text or matches it as a glob; with pids, among these.
        user: name or number of the user whose processes alone are taken: anybody may choose a command line.
        timeout_s: how long to wait until those of a tree have loaded torch.

    Raises:
        NoSuchTarget: a tree without an attachable process, or nothing that matches.
    """
    if not tree and match is None:
        return Selection(list(dict.fromkeys(pids)), [], is_named=True)
    if not pids and match is None:
        raise UsageError("--tree needs a PID")
    found = _loaded(lambda: _asked(pids, tree=tree, match=match, user=user), timeout_s if tree else 0.0)
    skipped = [
        {"pid": one.pid, "why": one.why, "cmdline": list(one.cmdline)} for one in found if one.state == "skipped"
    ]
    usable = [one.pid for one in found if one.state != "skipped"]
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
        where = f" among {', '.join(map(str, pids))} and what they started" if pids else ""
        why = "; ".join(told_skipped(skipped))
        raise NoSuchTarget(what + where, reason="no-match", hint=why or "hookd ps --all says why.")
    return Selection(usable, skipped, is_named=False)


def _loaded(ask: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
    """Look again and again until those that are to train have loaded torch, or the time is over; say for whom we wait."""
    found, told = ask(), set[int]()
    deadline = time.monotonic() + timeout_s
    while (late := _late(found)) and time.monotonic() < deadline:
        if late != told:
            told = late
            output.say(f"waiting for {', '.join(map(str, sorted(late)))} to load torch")
        time.sleep(POLL_S)
        found = ask()
    return found


def _late(found: Sequence[Candidate]) -> set[int]:
    """Give those without torch that may be about to load it: all if none has it yet, else who runs what the others run."""
    from hookd.tool.attach.discover import NO_TORCH
    from hookd.tool.linux.commandline import program

    running = {program(one.cmdline) for one in found if one.state != "skipped"}
    without = [one for one in found if one.why == NO_TORCH]
    return {one.pid for one in without if not running or program(one.cmdline) in running}


def _asked(pids: Sequence[int], *, tree: bool, match: str | None, user: str | None) -> list[Candidate]:
    from hookd.tool.attach.discover import candidates
    from hookd.tool.attach.process_tree import members
    from hookd.tool.linux.owner import user_name

    if tree and pids:
        found = list({one.pid: one for pid in pids for one in members(pid)}.values())
    else:
        found = [one for one in candidates() if not pids or one.pid in pids]
    found = [one for one in found if user in (None, str(one.uid), user_name(one.uid))]
    return [one for one in found if match is None or fits(match, " ".join(one.cmdline))]


def told_skipped(skipped: Iterable[dict[str, Any]]) -> list[str]:
    """Say what was skipped and why, one line for each reason."""
    by_why: dict[str, list[str]] = {}
    for one in skipped:
        by_why.setdefault(one["why"], []).append(str(one["pid"]))
    return [f"skipped {', '.join(pids)}: {why}" for why, pids in by_why.items()]
