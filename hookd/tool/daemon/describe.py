"""JSON rows for targets and the daemon, shared by the control socket and the read-only API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hookd.errors import PageError
from hookd.tool.daemon.metrics.selection import Selection
from hookd.tool.reports.report import RECENT, build_report, describe_steps
from hookd.version import __version__

if TYPE_CHECKING:
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.metrics.selection import Limits
    from hookd.wire.answer import Version
    from hookd.wire.report import Report
    from hookd.wire.target import TargetRow


def target_row(target: Target) -> TargetRow:
    """Return the summary row of a target, from the last copy of its page (about a second old at most)."""
    identity, snapshot = target.identity, target.last()
    return {
        "pid": target.pid,
        "start_ticks": target.start_ticks,
        "run": target.claim.run,
        "rank": target.claim.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "state": target.state,
        "reason": target.ended.reason if target.ended is not None else None,
        "ended": target.ended.time if target.ended is not None else None,
        "how": target.ended.death.message if target.ended is not None and target.ended.death is not None else None,
        "step": describe_steps(snapshot) if snapshot is not None else None,
        "heartbeat_age_s": target.heartbeat_age_s(),
        "hang": target.hang,
        "ongoing": target.ongoing if target.ended is None else {},
        "incidents": target.distinct_incidents() + sum(target.reported.values()),
        "script": identity.script,
        "method": identity.method,
        "keep": identity.keep,
        "is_held": target.lease is not None,
        "started": identity.started,
        "attached": identity.attached,
        "python": identity.python,
        "torch": identity.torch,
        "agent_version": identity.agent_version,
        "uid": identity.uid,
        "user": identity.user,
    }


def target_report(target: Target, limits: Limits) -> Report:
    """Return the report of a target's page, see `report.build_report`, plus the daemon's row for it as `target`.

    The row also has `series_dropped`: the number of series that the limits exclude from /metrics.

    Raises:
        PageError: the page cannot be trusted, and never could.
    """
    snapshot, selection = target.read(), Selection(limits)
    if snapshot is None:
        raise PageError(
            f"the page of process {target.pid} cannot be trusted, and is no longer read",
            reason="corrupt",
            hint="The process continues.",
        )
    selection.served(snapshot, 0.0)
    report = build_report(snapshot, target.pid, records=target.recent(RECENT))
    report["target"] = {**target_row(target), "series_dropped": selection.dropped}
    return report


def daemon_version() -> Version:
    """Return version, pid and protocol of this daemon."""
    return {"version": __version__, "pid": os.getpid(), "protocol": 1}
