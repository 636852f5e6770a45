"""All runs of the nodes that are scraped: which there are, and which of them needs somebody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import TO_RUN, dashboard, filled, of_nodes
from panels import NODES, RUN_RANK, TOO_MUCH, Column, Query, lines, number, rate, rows, step_time

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from panels import Panel

_STEPS = f"avg by (run) ({rate('hookd_steps_total', NODES)})"


def fleet() -> Dashboard:
    """Make the dashboard."""
    text = "All runs on the nodes that are scraped: are they up, do they step, does one of them need somebody?"
    made = dashboard("hookd-fleet", "Fleet", text, of_nodes())
    return filled(made, {"Now": _now(), "Runs": [_runs()], "Over time": _over_time()})


def _now() -> list[Panel]:
    return [
        number("Runs", "Runs with a rank that is attached.", "short",
               f"count(count by (run) (hookd_target_up{{{NODES}}} == 1))"),
        number("Ranks", "Processes that are attached and whose page can be read.", "short",
               f"sum(hookd_target_up{{{NODES}}})"),
        number("Lost", "Processes that ended, or whose page cannot be trusted; shown for two minutes.", "short",
               f'sum(hookd_target_state{{{NODES}, state=~"lost|corrupt"}})', red=1),
        number("Hangs", "Ranks that stand, while others may wait for them.", "short",
               f'sum(hookd_hang{{{NODES}, role="stands"}})', red=1),
        number("Stragglers", "Ranks that the others of their run on the node wait for, step by step.", "short",
               f"sum(hookd_straggler{{{NODES}}})", red=1),
        number("Drifted", "Ranks whose replica is no longer like that of the others (plugin drift).", "short",
               f"sum(hookd_drift_diverged{{{NODES}}})", red=1),
        number("Incidents", "Reported about the targets that are served now, since they were attached.", "short",
               f"sum(hookd_incidents_total{{{NODES}}})"),
        number("Overhead", "Share of step time in hookd and its plugins: of the rank where it is largest.",
               "percentunit", f"max(hookd_overhead_ratio{{{NODES}}})", red=TOO_MUCH, none="-"),
    ]  # fmt: skip


def _runs() -> Panel:
    columns = [
        Column("Ranks up", "short", f"sum by (run) (hookd_target_up{{{NODES}}})"),
        Column("Steps/s", "short", _STEPS),
        Column("Step time", "s", step_time(NODES, "run")),
        Column("Silent for", "s", f"max by (run) (time() - hookd_heartbeat_timestamp_seconds{{{NODES}}})", 60),
        Column("Hanging", "short", f"sum by (run) (hookd_hang{{{NODES}}})", 1),
        Column("Stragglers", "short", f"sum by (run) (hookd_straggler{{{NODES}}})", 1),
        Column("Incidents", "short", f"sum by (run) (hookd_incidents_total{{{NODES}}})", 1),
        Column("Overhead", "percentunit", f"max by (run) (hookd_overhead_ratio{{{NODES}}})", TOO_MUCH),
    ]
    text = "One line for each run. Silent for: since the rank that was quiet longest called a module. Click on a run."
    return rows("Runs", text, columns, links=[("run", "The run", TO_RUN)], sort="Incidents")


def _over_time() -> list[Panel]:
    return [
        lines("Step rate", "Optimizer steps a second, the mean of a run's ranks.", "cps", Query(_STEPS, "{{run}}")),
        lines("Step time", "Mean wall time of a step, over the ranks of a run.", "s", Query(step_time(NODES, "run"), "{{run}}")),
        lines("Ranks up", "Ranks of each run that are attached and readable.", "short",
              Query(f"sum by (run) (hookd_target_up{{{NODES}}})", "{{run}}")),
        lines("Targets by state", "All targets of the nodes, by the state that they are in.", "short",
              Query(f"sum by (state) (hookd_target_state{{{NODES}}})", "{{state}}"), stacked=True),
        lines("Hanging ranks", "Ranks that stand, and ranks that wait for them.", "short",
              Query(f"sum by (run, role) (hookd_hang{{{NODES}}})", "{{run}} {{role}}"), red=1),
        lines("Stragglers", "Ranks that the others of their run on the node wait for.", "short",
              Query(f"sum by (run) (hookd_straggler{{{NODES}}})", "{{run}}"), red=1),
        lines("Incidents", "Reported so far, by kind: a step up is a new one.", "short",
              Query(f"sum by (run, kind) (hookd_incidents_total{{{NODES}}}) > 0", "{{run}} {{kind}}")),
        lines("Overhead", "Share of step time spent in hookd and its plugins, by rank.", "percentunit",
              Query(f"max by (run, rank) (hookd_overhead_ratio{{{NODES}}})", RUN_RANK), red=TOO_MUCH),
    ]  # fmt: skip
