"""`hookd status`: list the attached targets, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hookd.errors import HookdError, PageError
from hookd.tool.cli import options, output, root_daemon, targets
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.reading import is_called_only, paused, state, step_seconds
from hookd.tool.reports.wording import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.root_daemon import RootDaemon
    from hookd.wire.report import Steps
    from hookd.wire.target import TargetReport


ASKED = "eval"
"""The kind of incident that records an evaluated expression; nothing is wrong with the target."""
BORN = ("nan", "inf")


@click.command()
@options.user
@options.host
@options.json
def status(*, user: int | None, host: str | None, as_json: bool) -> None:
    """Show where metrics are served, and list the attached targets."""
    client = targets.reader(host)
    daemon = client.status() if client is not None else None
    of_root = root_daemon.find() if daemon is None else None
    others = [server for server in targets.foregrounds() if daemon is None or server["pid"] != daemon["pid"]]
    rows = [_row(pid, report) for pid, report in targets.reports(client, others) if targets.is_of(pid, report, user)]
    for row in rows:
        row["served_by"] = [
            _server(server) for server in [*filter(None, [daemon]), *others] if _serves(server, row["pid"])
        ]
        row["held_by"] = [
            server["pid"] for server in [*filter(None, [daemon]), *others] if _serves(server, row["pid"], held=True)
        ]
    if as_json:
        output.emit(
            {
                "daemon": _server(daemon),
                "root_daemon": of_root.as_json() if of_root is not None else None,
                "foreground": [_server(server) for server in others],
                "targets": rows,
            }
        )
        return
    for line in (
        *_who_serves(daemon, others, of_root),
        *([] if rows else [_nothing(user)]),
    ):
        output.say(line)
    if rows:
        table = output.table(">PID", "RUN", ">RANK", "STATE", ">STEPS", ">A STEP", ">COST", ">MODULES", "USER")
        output.show(output.fill(table, [_cells(row) for row in rows]))
        for line in _notes(rows):
            click.echo(output.wrap(line))


def _nothing(user: int | None) -> str:
    if user is None:
        return "no process is attached; `hookd ps` lists those that can be"
    return (
        f"no process of user {user_name(user)} is attached; `hookd ps --user {user_name(user)}` lists those that can be"
    )


def _serves(server: dict[str, Any], pid: int, *, held: bool = False) -> bool:
    return any(target["pid"] == pid and (target["is_held"] or not held) for target in server["targets"])


def _server(status: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if status is None else {key: value for key, value in status.items() if key != "targets"}


def _who_serves(
    daemon: dict[str, Any] | None, others: list[dict[str, Any]], of_root: RootDaemon | None = None
) -> Iterator[str]:
    if daemon is not None:
        yield f"daemon: {daemon['url']}/metrics"
    elif of_root is not None:
        yield f"daemon: {of_root.told}. {of_root.hint}"
    elif not others:
        yield "daemon: none is running (pages are read directly)"
    for server in others:
        pids = ", ".join(str(target["pid"]) for target in server["targets"]) or "nothing yet"
        yield f"hookd attach (process {server['pid']}): {server['url']}/metrics serves {pids}"


def _notes(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines with details that do not fit into a table of 80 columns."""
    from hookd.tool.daemon.metrics.selection import told

    if any("step" in row and _is_from_attach(row["step"]) for row in rows):
        yield "* counted from the attach: the program's own step number is not known"
    for row in rows:
        if "error" in row:
            yield f"{row['pid']}: {row['error']}" + (f" ({row['hint']})" if row["hint"] else "")
            continue
        if is_called_only(row["step"]):
            yield f"{row['pid']}: {row['step']['text']}"
        if compiled := row["modules"].get("compiled", 0):
            yield f"{row['pid']}: {compiled:.0f} more modules are compiled and not seen inside"
        if row["changed_by"]:
            yield f"{row['pid']}: {', '.join(row['changed_by'])} changes the training"
        if row["series_dropped"]:
            yield f"{row['pid']}: {told(row['series_dropped'])}"
        if row["how"]:
            yield f"{row['pid']}: it {row['how']}"
        if row["paused"]:
            yield f"{row['pid']}: {row['paused']}"
        if row["hang"]:
            yield f"{row['pid']}: {hang(row['hang'])}"
        yield from (f"{row['pid']}: {line}" for line in ongoing(row["ongoing"]))
        if row["incident"]:
            when = f"{moment(row['incident_time'])}  " if isinstance(row["incident_time"], (int, float)) else ""
            more = f" (and {row['incidents'] - 1} more: hookd report {row['pid']})" if row["incidents"] > 1 else ""
            repeated = f" ({row['incident_count']:,} times)" if row["incident_count"] > 1 else ""
            yield f"{row['pid']}: {when}{row['incident']}{repeated}{more}"


def _is_from_attach(step: Steps) -> bool:
    return not step["is_absolute"] and not is_called_only(step)


def _row(pid: int, report: TargetReport | HookdError) -> dict[str, Any]:
    if not isinstance(report, HookdError) and "identity" not in report:
        reason = report.get("target", {}).get("reason") or "corrupt"
        report = PageError(
            "its page cannot be trusted, and is no longer read", reason=reason, hint="The process continues."
        )
    if isinstance(report, HookdError):
        return {"pid": pid, **report.as_json()}
    identity, target = report["identity"], report.get("target", {})
    incidents = report["incidents"]
    foremost = _foremost(incidents)
    return {
        "pid": pid,
        "user": targets.owner(report),
        "run": target.get("run", identity.get("run")),
        "rank": str(target.get("rank", identity.get("rank"))),
        "state": state(report),
        "step": report["step"],
        "step_seconds": step_seconds(report),
        "overhead_ratio": report["overhead"]["ratio"],
        "modules": report["observed"],
        "plugins": {plugin["name"]: plugin.get("settings", {}) for plugin in report["plugins"]},
        "changed_by": [plugin["name"] for plugin in report["plugins"] if plugin.get("changes_training")],
        "ongoing": target.get("ongoing", {}),
        "incidents": target.get("incidents", len(incidents)),
        "incident": foremost.get("message"),
        "incident_time": foremost.get("time"),
        "incident_count": foremost.get("count", 1),
        "last_incident": incidents[-1].get("message") if incidents else None,
        "paused": paused(report),
        "how": target.get("how"),
        "hang": target.get("hang"),
        "series_dropped": target.get("series_dropped", 0),
    }


def _foremost(incidents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the incident to show: the first NaN or infinity, else the newest one; {} if there is none.

    Later NaNs follow from the first one. Evaluated expressions are left out.
    """
    born = next((incident for incident in incidents if incident.get("kind") in BORN), None)
    others = [incident for incident in incidents if incident.get("kind") != ASKED]
    return born or (others[-1] if others else {})


def hang(row: dict[str, Any]) -> str:
    """Describe where a target hangs, for how long, and which ranks it waits for."""
    ranks = f", waits for rank {', '.join(row['waits_for'])}" if row["waits_for"] else ""
    least = "at least " if row["at_least"] else ""
    return f"hangs {row['where']} for {least}{row['for_s']:.0f} s{ranks}"


def ongoing(by_kind: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each ongoing incident that the daemon has reported, except a hang: see `hang`."""
    for kind, incident in by_kind.items():
        if kind != "hang":
            yield f"{kind} since {moment(incident['time'])}: {incident['message']}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (str(row["pid"]), "", "", row["reason"], "", "", "", "", "")
    return (
        str(row["pid"]),
        output.shorten(str(row["run"]), 16),
        output.shorten(row["rank"], 10),
        row["state"],
        str(row["step"]["current"]) + ("*" if _is_from_attach(row["step"]) else ""),
        output.seconds(row["step_seconds"]),
        output.percent(row["overhead_ratio"]),
        f"{row['modules'].get('observed', 0):.0f}",
        output.shorten(row["user"], 10),
    )
