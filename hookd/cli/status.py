"""`hookd status`: one line for each attached target."""

from __future__ import annotations

from typing import Any

import click

from hookd.cli import options, output, targets
from hookd.errors import HookdError


@click.command()
@options.host
@options.json
def status(*, host: str | None, as_json: bool) -> None:
    """Show the daemon, and one line for each attached target."""
    client = targets.daemon(host)
    daemon = None if client is None else {key: value for key, value in client.status().items() if key != "targets"}
    rows = [_row(pid, found) for pid, found in targets.reports(client)]
    if as_json:
        output.emit({"daemon": daemon, "targets": rows})
        return
    output.say(f"daemon: {daemon['url']}/metrics" if daemon else "daemon: none runs (pages are read directly)")
    if not rows:
        output.say("nothing is attached; `hookd ps` lists what can be")
        return
    table = output.table(">PID", "RUN", ">RANK", "STATE", ">STEP", ">STEP TIME", ">OVERHEAD", ">MODULES", "INCIDENT")
    output.show(output.fill(table, [_cells(row) for row in rows]))


def _row(pid: int, found: dict[str, Any] | HookdError) -> dict[str, Any]:
    if isinstance(found, HookdError):
        return {"pid": pid, **output.describe(found)}
    identity, target = found["identity"], found.get("target", {})
    incidents = found["incidents"]
    return {
        "pid": pid,
        "run": target.get("run", identity.get("run")),
        "rank": str(target.get("rank", identity.get("rank"))),
        "state": target.get("state") if target.get("state") not in (None, "attached") else found["state"],
        "step": found["step"],
        "step_seconds": step_seconds(found),
        "overhead_ratio": found["overhead"]["ratio"],
        "modules": found["observed"],
        "incidents": len(incidents),
        "last_incident": incidents[-1].get("message") if incidents else None,
    }


def step_seconds(report: dict[str, Any]) -> float | None:
    """Give the mean time of a step, in seconds; None before the second one."""
    histogram = report["metrics"].get("step", {}).get("seconds")
    return histogram["mean"] if isinstance(histogram, dict) else None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (str(row["pid"]), "", "", row["reason"], "", "", "", "", row["error"])
    seen, blind = row["modules"].get("observed", 0), row["modules"].get("compiled", 0)
    return (
        str(row["pid"]),
        str(row["run"]),
        row["rank"],
        row["state"],
        str(row["step"]["current"]) + ("" if row["step"]["is_absolute"] else "*"),
        output.seconds(row["step_seconds"]),
        output.percent(row["overhead_ratio"]),
        f"{seen:.0f}" + (f" (+{blind:.0f} compiled)" if blind else ""),
        row["last_incident"] or "",
    )
