"""`hookd status`: list the attached targets, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, cast, final

import click

from hookd.errors import ErrorAnswer, HookdError
from hookd.tool.cli import options, output, root_daemon, targets
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.reading import is_called_only, paused, run_and_rank, state, step_seconds
from hookd.tool.reports.wording import hang_words, moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.outputs import Status
    from hookd.tool.cli.root_daemon import RootDaemon
    from hookd.wire.incident import Incident
    from hookd.wire.report import Report, Steps
    from hookd.wire.target import ErrorRow, Hang, Ongoing, Server, ServerStatus

ASKED = "eval"
"""The kind of incident that records an evaluated expression; nothing is wrong with the target."""
BORN = ("nan", "inf")


class _Row(TypedDict):
    pid: int
    user: str
    run: str
    rank: str
    state: str
    """`running`, `paused`, `hangs` (others wait for it), `waits` (for a rank that hangs), or how it ended."""
    step: Steps
    step_seconds: float | None
    """Mean time of a step."""
    overhead_ratio: float | None
    """Share of step time that hookd and its plugins took last; null before the first step that was measured."""
    modules: dict[str, float]
    """Number of modules by coverage."""
    plugins: dict[str, dict[str, str]]
    """The effective options of each plugin."""
    changed_by: list[str]
    """Plugins that are changing the training."""
    ongoing: dict[str, Ongoing]
    incidents: int
    """Number of incidents; equal ones are one."""
    incident: str | None
    """The message of the most important one: the first NaN or infinity, else the newest."""
    incident_time: float | None
    incident_count: int
    """How often it has occurred."""
    last_incident: str | None
    paused: str | None
    """Why it is paused."""
    how: str | None
    """How its process ended."""
    hang: Hang | None
    series_dropped: int
    """Number of its series that the limits exclude from /metrics."""
    refused_series: dict[str, float]
    """By plugin: number of series that were refused, because a label had too many values."""


@final
class StatusRow(_Row):
    """A target."""


class Served(TypedDict):
    """The daemons that serve and hold a target."""

    served_by: list[Server]
    held_by: list[int]
    """Pids of the daemons that hold its agent."""


class ServedStatus(_Row, Served):
    """A target, and the daemons that serve it."""


class ServedError(ErrorAnswer, Served):
    """A target whose page cannot be read."""

    pid: int


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
    if as_json:
        servers = [*([daemon] if daemon is not None else []), *others]
        data: Status = {
            "daemon": _server(daemon) if daemon is not None else None,
            "root_daemon": of_root.as_json() if of_root is not None else None,
            "foreground": [_server(server) for server in others],
            "targets": [cast("ServedStatus", {**row, **_served(row["pid"], servers)}) for row in rows],
        }
        output.emit(data)
        return
    for line in (
        *_who_serves(daemon, others, of_root),
        *([] if rows else [_nothing(user)]),
    ):
        output.say(line)
    if rows:
        table = output.table(">PID", "RUN", ">RANK", "STATE", ">STEPS", ">A STEP", ">COST", ">MODULES", "USER")
        table.collapse_padding = True
        output.show(output.fill(table, [_cells(row) for row in rows]))
        for line in _notes(rows):
            click.echo(output.wrap(line))


def _nothing(user: int | None) -> str:
    if user is None:
        return "no process is attached; `hookd ps` lists those that can be"
    return (
        f"no process of user {user_name(user)} is attached; `hookd ps --user {user_name(user)}` lists those that can be"
    )


def _serves(server: ServerStatus, pid: int, *, with_lease: bool = False) -> bool:
    return any(target["pid"] == pid and (target["is_held"] or not with_lease) for target in server["targets"])


def _served(pid: int, servers: list[ServerStatus]) -> Served:
    """Return who serves a target, and the pids of those that hold its agent."""
    return {
        "served_by": [_server(server) for server in servers if _serves(server, pid)],
        "held_by": [server["pid"] for server in servers if _serves(server, pid, with_lease=True)],
    }


def _server(status: ServerStatus) -> Server:
    return cast("Server", {key: value for key, value in status.items() if key != "targets"})


def _who_serves(
    daemon: ServerStatus | None, others: list[ServerStatus], of_root: RootDaemon | None = None
) -> Iterator[str]:
    if daemon is not None:
        yield f"daemon: {daemon['url']}/metrics"
    elif of_root is not None:
        yield f"daemon: {of_root.description}. {of_root.hint}"
    elif not others:
        yield "daemon: none is running"
    for server in others:
        pids = ", ".join(str(target["pid"]) for target in server["targets"]) or "nothing yet"
        yield f"hookd attach (process {server['pid']}): {server['url']}/metrics serves {pids}"


def _notes(rows: list[StatusRow | ErrorRow]) -> Iterator[str]:
    """Yield lines with details that do not fit into a table of 80 columns."""
    from hookd.tool.daemon.metrics.selection import left_out

    if any("error" not in row and _is_from_attach(row["step"]) for row in rows):
        yield "* counted from the attach: the program's own step number is not known"
    if dropped := sum(row["series_dropped"] for row in rows if "error" not in row):
        yield left_out(dropped)
    for row in rows:
        if "error" in row:
            yield f"{row['pid']}: {row['error']}" + (f" ({row['hint']})" if row["hint"] else "")
            continue
        if is_called_only(row["step"]):
            yield f"{row['pid']}: {row['step']['text']}"
        if compiled := row["modules"].get("compiled", 0):
            yield f"{row['pid']}: {compiled:.0f} more modules are hidden in compiled code"
        if row["changed_by"]:
            yield f"{row['pid']}: the training is changed by {', '.join(row['changed_by'])}"
        for name, count in row["refused_series"].items():
            yield f"{row['pid']}: {name}: {count:,.0f} series were refused: a label of it has too many values, such as steps or texts"
        if row["how"]:
            yield f"{row['pid']}: it {row['how']}"
        if row["paused"]:
            yield f"{row['pid']}: {row['paused']}"
        if row["hang"]:
            yield f"{row['pid']}: {hang_words(row['hang'])}"
        yield from (f"{row['pid']}: {line}" for line in ongoing(row["ongoing"]))
        if row["incident"]:
            when = f"{moment(row['incident_time'])}  " if isinstance(row["incident_time"], (int, float)) else ""
            more = f" (and {row['incidents'] - 1} more: hookd report {row['pid']})" if row["incidents"] > 1 else ""
            repeated = f" ({row['incident_count']:,} times)" if row["incident_count"] > 1 else ""
            yield f"{row['pid']}: {when}{row['incident']}{repeated}{more}"


def _is_from_attach(step: Steps) -> bool:
    return not step["is_absolute"] and not is_called_only(step)


def _row(pid: int, report: Report | HookdError) -> StatusRow | ErrorRow:
    if isinstance(report, HookdError):
        return {"pid": pid, **report.as_json()}
    target, incidents = report.get("target", {}), report["incidents"]
    run, rank = run_and_rank(report)
    foremost = _foremost(incidents)
    return {
        "pid": pid,
        "user": targets.owner(report),
        "run": run,
        "rank": rank,
        "state": state(report),
        "step": report["step"],
        "step_seconds": step_seconds(report),
        "overhead_ratio": report["overhead"]["ratio"],
        "modules": report["observed"],
        "plugins": {plugin["name"]: plugin.get("settings", {}) for plugin in report["plugins"]},
        "changed_by": [plugin["name"] for plugin in report["plugins"] if plugin.get("changes_training")],
        "ongoing": target.get("ongoing", {}),
        "incidents": target.get("incidents", len(incidents)),
        "incident": foremost.get("message") if foremost is not None else None,
        "incident_time": foremost["time"] if foremost is not None else None,
        "incident_count": foremost.get("count", 1) if foremost is not None else 1,
        "last_incident": incidents[-1].get("message") if incidents else None,
        "paused": paused(report),
        "how": target.get("how"),
        "hang": target.get("hang"),
        "series_dropped": target.get("series_dropped", 0),
        "refused_series": {
            plugin["name"]: count for plugin in report["plugins"] if (count := plugin.get("refused_series"))
        },
    }


def _foremost(incidents: list[Incident]) -> Incident | None:
    """Return the incident to show: the first NaN or infinity, else the newest one.

    Later NaNs follow from the first one. Evaluated expressions are left out.
    """
    born = next((incident for incident in incidents if incident.get("kind") in BORN), None)
    others = [incident for incident in incidents if incident.get("kind") != ASKED]
    return born or (others[-1] if others else None)


def ongoing(by_kind: dict[str, Ongoing]) -> Iterator[str]:
    """Yield a line for each ongoing incident that the daemon has reported, except a hang: see `hang_words`."""
    for kind, incident in by_kind.items():
        if kind != "hang":
            yield f"{kind} since {moment(incident['time'])}: {incident['message']}"


def _cells(row: StatusRow | ErrorRow) -> tuple[str, ...]:
    if "error" in row:
        return (str(row["pid"]), "", "", row["reason"], "", "", "", "", "")
    return (
        str(row["pid"]),
        output.shorten(str(row["run"]), 24),
        output.shorten(row["rank"], 10),
        row["state"],
        str(row["step"]["current"]) + ("*" if _is_from_attach(row["step"]) else ""),
        output.seconds(row["step_seconds"]),
        output.percent(row["overhead_ratio"]),
        f"{row['modules'].get('observed', 0):.0f}",
        output.shorten(row["user"], 10),
    )
