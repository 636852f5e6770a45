"""`hookd attach` and `hookd detach`."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, TypeVar

import click

from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.cli import options, output, plugin_check, targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.errors import ErrorAnswer
    from hookd.tool.cli.options import Watch
    from hookd.tool.cli.targets import Selection
    from hookd.tool.config import PluginSpec
    from hookd.tool.daemon.client import DaemonClient
    from hookd.wire.agent import PluginConfig
    from hookd.wire.answer import Attached, ChangedTarget, DetachedTarget
    from hookd.wire.target import ErrorRow

AT_ONCE = 16
"""Maximum number of concurrent attaches and detaches; the daemon has as many threads."""
SILENT_S = 2.0
"""Seconds after which a slow attach is reported."""
WORKER = "a data loader's worker"
T = TypeVar("T")
Outcome = TypeVar("Outcome", "Attached", "DetachedTarget")
PIDS = click.argument("pids", metavar="PID…", nargs=-1, type=options.Pid())


@click.command()
@PIDS
@options.watch
@options.host
@options.json
def attach(*, pids: tuple[int, ...], watch: Watch, host: str | None, as_json: bool) -> int:
    """Attach to running processes and serve their metrics.

    If a daemon (`hookd serve`) runs, ask it to attach, and return. Without a daemon, or with --listen, serve the
    metrics in the foreground, and detach on Ctrl-C.
    """
    if not pids and watch.match is None:
        raise click.UsageError("Which process? Give a PID (`hookd ps` lists them) or --match RULE.")
    if watch.user is not None and watch.match is None and not watch.tree:
        raise click.UsageError(
            "--user goes with --match or --tree; a process that is named is attached to, whoever owns it."
        )
    if not watch.force:
        plugin_check.require_sound([spec.name for spec in watch.plugins], watch.plugin_dirs)
    chosen = targets.select(pids, tree=watch.tree, match=watch.match, user=watch.user, timeout_s=watch.timeout_s)
    client = None if watch.listen else targets.daemon(host)
    if client is None:
        from hookd.tool.cli import foreground

        return foreground.attach(chosen, watch, as_json=as_json)
    reminder = waiting(chosen.pids, watch.timeout_s)
    entries = _all_by_daemon(client, watch, chosen)
    reminder.cancel()
    url = client.status()["url"]
    return finish_attached(entries, chosen, as_json=as_json, metrics=f"{url}/metrics")


@click.command(short_help="Detach from processes and leave them as they were.")
@PIDS
@click.option("--all", "everything", is_flag=True, help="Detach from every process that holds an agent.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
              metavar="S", help="Seconds that one detach may take.")  # fmt: skip
@options.host
@options.json
def detach(*, pids: tuple[int, ...], everything: bool, timeout_s: float, host: str | None, as_json: bool) -> int:
    """Detach from processes and leave them as they were, whoever attached to them."""
    if bool(pids) == everything:
        raise click.UsageError("Give a PID, or --all.")
    client = targets.daemon(host)
    if everything:
        pids = tuple(targets.living(client))
    with ThreadPoolExecutor(AT_ONCE) as pool:  # one that hangs does not delay the others
        leave = functools.partial(_tried, lambda pid: _leave(client, pid, timeout_s))
        entries = list(pool.map(leave, dict.fromkeys(pids)))
    return finish(entries, as_json=as_json, say=detached_message)


def waiting(pids: Sequence[int], timeout_s: float) -> Timer:
    """Start a timer that prints what an attach waits for; the caller cancels it when the attach is over."""
    who = ", ".join(map(str, pids))
    timer = Timer(
        SILENT_S, output.say, [f"waiting for {who} to reach the interpreter, at most {timeout_s:g} s (--timeout)"]
    )
    timer.daemon = True
    timer.start()
    return timer


def _all_by_daemon(client: DaemonClient, watch: Watch, chosen: Selection) -> list[Attached | ErrorRow]:
    """Attach to all processes at once.

    All ranks must agree on a plugin that changes the training, so such plugins are enabled when all are attached.
    """
    from hookd.tool.attach.change import enable_together
    from hookd.tool.attach.payload import apart

    first, later = apart(watch.plugins, watch.plugin_dirs) if len(chosen.pids) > 1 else (watch.plugins, ())
    plugins = [spec.as_json() for spec in first] if watch.plugins else None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tries = pool.map(
            lambda pid: _tried(lambda pid: _by_daemon(client, pid, watch, chosen, plugins), pid), chosen.pids
        )
        entries = list(tries)
    for spec in later:
        enable_together(entries, spec.name, functools.partial(_enable, client, watch, spec))
    return entries


def _enable(client: DaemonClient, watch: Watch, spec: PluginSpec, op: str, pid: int) -> ChangedTarget | ErrorRow:
    directories = [str(directory.absolute()) for directory in watch.plugin_dirs]
    return _tried(
        lambda pid: client.change_plugins(pid, op, spec.as_json(), timeout_s=watch.timeout_s, plugin_dirs=directories),
        pid,
    )


def _by_daemon(
    client: DaemonClient, pid: int, watch: Watch, chosen: Selection, plugins: list[PluginConfig] | None
) -> Attached:
    return client.attach(
        pid,
        timeout_s=watch.timeout_s,
        plugins=plugins,
        plugin_dirs=[str(Path(directory).absolute()) for directory in watch.plugin_dirs],
        keep=watch.keep,
        force=watch.force,
        only_trainers=not chosen.is_named,
    )


def _leave(client: DaemonClient | None, pid: int, timeout_s: float) -> DetachedTarget:
    try:
        return _detached(client, pid, timeout_s)
    except NoSuchTarget as error:
        if error.reason != "not-attached":
            raise
        hint = "Nothing to do: hookd is not in this process."
        raise NoSuchTarget(f"no agent in process {pid}", reason=error.reason, hint=hint) from error


def _detached(client: DaemonClient | None, pid: int, timeout_s: float) -> DetachedTarget:
    if client is not None:
        return client.detach(pid, timeout_s)
    from hookd.tool import attach as attaching

    answer = attaching.detach(pid, timeout_s)
    return {"pid": pid, "restored": answer.get("restored"), "residue": answer.get("residue", [])}


def _tried(act: Callable[[int], T], pid: int) -> T | ErrorRow:
    try:
        return act(pid)
    except HookdError as error:
        return {"pid": pid, **error.as_json()}


def finish(
    entries: Sequence[Outcome | ErrorRow], *, as_json: bool, say: Callable[[Outcome], str], **more: object
) -> int:
    """Print the outcome for each process and return the worst exit code.

    Args:
        entries: one per process: its pid, and an error as `HookdError.as_json` returns it, or the result.
        as_json: print `{"targets": entries}` on stdout, with the worst error beside it.
        say: returns the message for a result.
        more: further keys of the object.
    """
    worst: ErrorAnswer | None = None
    for entry in entries:
        if "error" not in entry:
            output.say(say(entry))
            continue
        output.complain(HookdError(entry["error"], hint=entry["hint"]))
        if worst is None or entry["exit_code"] > worst["exit_code"]:
            worst = {
                "error": entry["error"],
                "reason": entry["reason"],
                "hint": entry["hint"],
                "exit_code": entry["exit_code"],
            }
    if as_json:
        output.emit({"targets": list(entries), **more, **(worst or {})})
    return worst["exit_code"] if worst is not None else 0


def finish_attached(entries: Sequence[Attached | ErrorRow], chosen: Selection, *, as_json: bool, metrics: str) -> int:
    """Print the outcome of the attaches and what was skipped, and return the worst exit code."""
    refused = [entry for entry in entries if entry.get("reason") == "data-worker" and not chosen.is_named]
    skipped = chosen.skipped + [{"pid": entry["pid"], "why": WORKER, "cmdline": []} for entry in refused]
    for line in targets.skipped_lines(skipped):
        output.say(line)
    rest = [entry for entry in entries if entry not in refused]
    status = finish(rest, as_json=as_json, say=attached_message, skipped=skipped, metrics=metrics)
    for entry in rest:
        if newer := entry.get("unproven"):  # a daemon of an older version does not send this
            output.say(f"{entry['pid']}: {newer}")
    return status


def attached_message(entry: Attached) -> str:
    """Return the message for an attach."""
    who = f"{entry['pid']} (run {entry['run']}, rank {entry['rank']})"
    plugins = ", ".join(entry["plugins"]) or "no plugin"
    if entry["method"] == "existing":
        added = f"added {', '.join(entry['added'])}" if entry["added"] else "nothing to add"
        holders = [targets.command_of(pid) for pid in entry.get("holders", ()) if pid]  # an older daemon sends none
        held = f", held by {' and '.join(holders)}" if holders else ""
        return f"joined the agent in {who}{held}: {added}; loaded: {plugins}"
    pause = f"stopped for {output.seconds(entry['pause_s'])}" if entry["pause_s"] else "never stopped"
    replaced = f" in place of the agent of hookd {entry['replaced']}" if entry["replaced"] else ""
    return f"attached to {who} with {plugins}{replaced}: {pause}, ready after {output.seconds(entry['wall_s'])}"


def detached_message(entry: DetachedTarget) -> str:
    """Return the message for a detach: what was restored, and what stays."""
    words = {
        "identity": "nn.Module.__call__ is the original again",
        "pass-through": "other code has patched nn.Module.__call__ after hookd, so an empty wrapper stays below it",
        "pending": "the patch is removed when the calls in flight have returned",
        None: str(entry.get("left", "already gone")),
    }
    restored = entry.get("restored")
    left = f"; what stays: {', '.join(entry['residue'])}" if entry.get("residue") else ""
    return f"detached from {entry['pid']}: {words.get(restored, str(restored))}{left}"
