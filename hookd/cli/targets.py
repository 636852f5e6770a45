"""Where commands find targets: at the daemon when one runs, else in the pages themselves."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from typing import TYPE_CHECKING, Any

from hookd.errors import DaemonNotRunning, HookdError, NoSuchTarget, PermissionDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hookd.daemon.client import DaemonClient


def daemon(host: str | None) -> DaemonClient | None:
    """Give the daemon that runs here, or None.

    Args:
        host: of `--host`; a daemon that was named (there, or in the environment) must answer.

    Raises:
        DaemonNotRunning: the daemon that was named does not answer.
    """
    from hookd.daemon.client import DaemonClient

    client = DaemonClient.of(host, os.environ)
    is_named = bool(host or os.environ.get("HOOKD_HOST") or os.environ.get("HOOKD_CONTROL"))
    try:
        client.version()
    except DaemonNotRunning:
        if is_named:
            raise
        return None
    except PermissionDenied:
        if is_named:
            raise
        return None  # another user's daemon is no help, and no hindrance
    return client


def foregrounds() -> list[dict[str, Any]]:
    """Give the status of every foreground attach of this user that answers: who it is, where it serves, which targets."""
    from hookd.daemon.client import DaemonClient

    found = []
    for client in DaemonClient.embedded(os.environ):
        with contextlib.suppress(HookdError):  # a killed one leaves its socket file
            found.append(client.status())
    return found


def attached() -> list[int]:
    """Give the pids of all processes that hold an agent and that we may look into."""
    from hookd.attach.discover import candidates

    return [one.pid for one in candidates() if one.state == "attached"]


def report(pid: int, client: DaemonClient | None) -> dict[str, Any]:
    """Give the report of one target: the daemon's if it has one, else from the page itself.

    Raises:
        NoSuchTarget: there is no such process, or no agent in it.
        PermissionDenied: its descriptors cannot be seen.
    """
    if client is not None:
        with contextlib.suppress(NoSuchTarget):  # attached by another tool a moment ago, perhaps
            return {"pid": pid, **client.report(pid)}
    return _report_of_page(pid)


def _report_of_page(pid: int) -> dict[str, Any]:
    from hookd.attach import permission
    from hookd.attach.discover import find_page
    from hookd.daemon.report import build_report
    from hookd.page import PageReader

    try:
        fd = find_page(pid)
    except PermissionError as exc:
        raise permission.explain(pid, exc) from exc
    if fd is None:
        raise NoSuchTarget(f"no agent in process {pid}", reason="not-attached", hint=f"hookd attach {pid}")
    with contextlib.closing(PageReader(fd)) as reader:
        return {"pid": pid, **build_report(reader.read())}


def reports(client: DaemonClient | None) -> Iterator[tuple[int, dict[str, Any] | HookdError]]:
    """Give the report of every target, or why there is none."""
    pids = {int(one["pid"]) for one in client.targets()} if client is not None else set(attached())
    for pid in sorted(pids):
        try:
            yield pid, report(pid, client)
        except HookdError as error:
            yield pid, error


def select(pids: Sequence[int], *, tree: bool, match: str | None) -> list[int]:
    """Give the processes that were asked for, in order, each once.

    Args:
        pids: as given; without a rule, each of them is taken as it is.
        tree: take for each of them all attachable processes among itself and its descendants.
        match: take those whose command line contains this text or matches it as a glob; with pids, among these.

    Raises:
        NoSuchTarget: a tree without an attachable process, or nothing that matches.
    """
    from hookd.attach.discover import candidates

    if not tree and match is None:
        return list(dict.fromkeys(pids))
    if not pids and match is None:
        raise UsageError("--tree needs a PID")
    family = {member for pid in pids for member in (_tree(pid) if tree else [pid])}
    usable = [one for one in candidates() if one.state != "skipped" and (not pids or one.pid in family)]
    found = [one.pid for one in usable if match is None or matches(one.cmdline, match)]
    if not found:
        what = " ".join(filter(None, ("no process", f"that matches '{match}'" if match else "", "can be attached to")))
        where = f" among {', '.join(map(str, pids))} and what they started" if pids else ""
        raise NoSuchTarget(what + where, reason="no-match", hint="hookd ps --all says why.")
    return found


def matches(cmdline: Iterable[str], rule: str) -> bool:
    """Say whether a command line contains the text `rule`, or matches it as a glob."""
    text = " ".join(cmdline)
    return rule in text or fnmatch.fnmatchcase(text, rule)


def _tree(pid: int) -> list[int]:
    import psutil

    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc
