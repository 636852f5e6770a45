"""hookd itself: its overhead, the state of its plugins, omitted series, and attaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import dashboard, filled, of_nodes
from panels import NODES, RUN_RANK, TOO_MUCH, Column, Query, lines, number, rate, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from panels import Panel

_PAUSES = f"sum by (le) (hookd_attach_pause_seconds_bucket{{{NODES}}})"
_RUN_PLUGIN = "{{run}} {{plugin}}"


def health() -> Dashboard:
    """Make the dashboard."""
    text = "hookd's own health: overhead, plugins, series, scrapes, attaches."
    made = dashboard("hookd-health", "hookd itself", text, of_nodes())
    sections = {
        "Now": _now(),
        "What it costs": _cost(),
        "Plugins": _plugins(),
        "Scrapes": _scrapes(),
        "Attaches": _attaches(),
    }
    return filled(made, sections)


def _now() -> list[Panel]:
    return [
        number("Daemons", "That are scraped.", "short", f"count(hookd_build_info{{{NODES}}})"),
        number("Targets", "That are attached.", "short", f"sum(hookd_target_up{{{NODES}}})"),
        number("Overhead", "Share of step time in hookd: of the rank where it is largest.", "percentunit",
               f"max(hookd_overhead_ratio{{{NODES}}})", red=TOO_MUCH, none="-"),
        number("Quarantined", "Plugins that were switched off because they failed or cost too much.", "short",
               f'sum(hookd_plugin_state{{{NODES}, state="quarantined"}})', red=1),
        number("Series left out", "Over the limit of a target, without room, or in conflict.", "short",
               f"sum(hookd_series_dropped_total{{{NODES}}})"),
        number("Scrape", "How long a daemon took to collect: the slowest.", "s",
               f"max(hookd_scrape_duration_seconds{{{NODES}}})", red=1, none="-"),
        number("Backing off", "Processes that a rule wants and in which attach has failed.", "short",
               f"sum(hookd_attach_backing_off{{{NODES}}})", red=1),
        number("Failed attaches", "Since the daemons began.", "short",
               f'sum(hookd_attach_total{{{NODES}, result!="ok"}})', red=1),
    ]  # fmt: skip


def _cost() -> list[Panel]:
    share = (
        f"sum by (plugin) ({rate('hookd_overhead_seconds_total', NODES)})"
        f" / on () group_left () (sum({rate('hookd_step_seconds_sum', NODES)}) > 0)"
    )
    return [
        lines("Overhead by rank", "Share of step time spent in hookd and its plugins, in the last window.", "percentunit",
              Query(f"max by (run, rank) (hookd_overhead_ratio{{{NODES}}})", RUN_RANK), red=TOO_MUCH),
        lines("Overhead by plugin", "Share of all ranks' step time, estimated; the series hookd is hookd itself.",
              "percentunit", Query(share, "{{plugin}}"), stacked=True),
        lines("Sampling interval", "Steps of which one is sampled: it grows where a plugin would cost too much. 0: none is sampled.",
              "short", Query(f"max by (run, plugin) (hookd_sampling_interval_steps{{{NODES}}})", _RUN_PLUGIN)),
        lines("Agents' ticks", "How often hookd's own thread ran in a target: about once a second. Less is a target that does not"
              " give it a turn.", "cps", Query(f"sum by (run, rank) ({rate('hookd_agent_ticks_total', NODES)})", RUN_RANK)),
    ]  # fmt: skip


def _plugins() -> list[Panel]:
    states = [Column("Ranks", "short", f"sum by (plugin, state) (hookd_plugin_state{{{NODES}}}) > 0")]
    return [
        rows("Plugins by state", "In how many ranks a plugin is in which state.", states, width=8),
        lines("Not active", "Plugins that are quarantined, disabled or waiting, by rank.", "short",
              Query(f'sum by (run, plugin, state) (hookd_plugin_state{{{NODES}, state!="active"}})',
                    "{{run}} {{plugin}} {{state}}"), width=8, red=1),
        lines("Errors", "Raised by a plugin, a second. After several it is quarantined.", "cps",
              Query(f"sum by (run, plugin) ({rate('hookd_plugin_errors_total', NODES)})", _RUN_PLUGIN), width=8),
    ]  # fmt: skip


def _scrapes() -> list[Panel]:
    return [
        lines("Duration of a scrape", "Collecting, as the daemon measures it, and all of it, as Prometheus does.", "s",
              Query(f"max by (instance) (hookd_scrape_duration_seconds{{{NODES}}})", "{{instance}}, collecting"),
              Query(f"max by (instance) (scrape_duration_seconds{{{NODES}}})", "{{instance}}, all")),
        lines("Lines of a scrape", "Samples that each daemon has served.", "short",
              Query(f"max by (instance) (scrape_samples_scraped{{{NODES}}})", "{{instance}}")),
        lines("Series left out", "So far: over the limit of a target, without room in its page, or in conflict. `hookd report` has"
              " those over the limit.", "short",
              Query(f"sum by (run, rank) (hookd_series_dropped_total{{{NODES}}})", RUN_RANK)),
        lines("Versions", "Of the daemons, and of the agents in the targets.", "short",
              Query(f"count by (version) (hookd_build_info{{{NODES}}})", "daemon {{version}}"),
              Query(f"count by (agent_version) (hookd_target_info{{{NODES}}})", "agent {{agent_version}}")),
    ]  # fmt: skip


def _attaches() -> list[Panel]:
    pauses = [Query(f"histogram_quantile({q}, {_PAUSES})", name) for q, name in ((0.5, "median"), (0.99, "p99"))]
    return [
        lines("Attaches", "By their result, since the daemons began: a step up is a new one.", "short",
              Query(f"sum by (result) (hookd_attach_total{{{NODES}}})", "{{result}}"), width=8),
        lines("Pause of an attach", "How long the main thread of a target stood: of all attaches since the daemons began, as exact"
              " as the buckets.", "s", *pauses, width=8),
        lines("Backing off", "Processes that a rule wants and in which attach has failed; it is tried again.", "short",
              Query(f"sum by (instance) (hookd_attach_backing_off{{{NODES}}})", "{{instance}}"), width=8, red=1),
    ]  # fmt: skip
