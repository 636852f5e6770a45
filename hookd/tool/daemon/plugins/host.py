"""Run all daemon plugins: call their hooks at the right times, and serve their metrics and panels."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hookd.errors import PluginError
from hookd.serving import MAX_SERIES, Metrics, Panel, Reading
from hookd.tool.daemon.incidents.receivers import FunctionReceiver
from hookd.tool.daemon.metrics.families import empty
from hookd.tool.daemon.plugins import discovery
from hookd.tool.daemon.plugins.worker import STATES, PluginWorker
from hookd.tool.reports.report import steps
from hookd.wire.text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from hookd.serving import ReportedFamily
    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.tool.daemon.plugins.rows import DaemonPluginRow, PanelRow
    from hookd.wire.incident import IncidentRow

    Collected = list[tuple[str, ReportedFamily]]

FRESH_S = 30.0
"""How long a panel is shown, and how long metrics are served after the next `collect` was due, in seconds."""
PANEL_EVERY_S = 5.0
MAX_ROWS, MAX_COLUMNS, MAX_CELL = 100, 12, 200
_log = logging.getLogger(__name__)


def load(config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> Host:
    """Find the daemon plugins that the configuration allows, and start each in its own thread."""
    plugins, problems = discovery.find(config.plugin_dirs, config.allows)
    for problem in problems:
        _log.error("%s", one_line(problem.message))
    options = config.daemon_plugin_options
    for unknown in sorted(set(options) - {plugin.name for plugin in plugins}):
        _log.warning("[daemon_plugins.%s]: there is no such plugin, or it is not allowed", one_line(unknown))
    return Host([PluginWorker(plugin, options.get(plugin.name, {}), clock) for plugin in plugins], clock)


class Host:
    """Calls the daemon plugins after each poll of the targets, and keeps their results."""

    def __init__(self, workers: Sequence[PluginWorker] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = tuple(workers)
        self._clock = clock
        self._known: dict[Target, Reading] = {}
        self._ever: dict[str, set[tuple[str, ...]]] = {worker.name: set() for worker in workers}
        self._dropped = dict.fromkeys(self._ever, 0)
        self._collected: dict[str, tuple[float, Collected]] = {}
        self._panels: dict[str, tuple[float, PanelRow]] = {}
        self._lock = threading.Lock()

    def poll(self, targets: Iterable[Target]) -> None:
        """Report new and lost targets to the plugins, and request metrics and panels.

        Never waits for a plugin. Call it in one thread at a time.
        """
        if not self.workers:
            return
        ended = {target: target.ended.reason for target in targets if target.ended is not None}
        known, self._known = self._known, {target: _reading(target) for target in targets if target not in ended}
        came = [reading for target, reading in self._known.items() if target not in known]
        gone = [(known[target], ended.get(target, "gone")) for target in known if target not in self._known]
        runs: dict[str, list[Reading]] = {}
        for reading in self._known.values():
            runs.setdefault(reading.run, []).append(reading)
        for worker in self.workers:
            worker.poll()
            for reading in came:
                worker.ask("target_attached", [{"target": reading}])
            for reading, reason in gone:
                worker.ask("target_lost", [{"target": reading, "reason": reason}])
            self._ask_metrics(worker, runs)
            keep_panel = functools.partial(self._keep_panel, worker.name)
            worker.ask_every(PANEL_EVERY_S, "web_panel", [{"runs": runs}], keep_panel)

    def _ask_metrics(self, worker: PluginWorker, runs: Mapping[str, list[Reading]]) -> None:
        """Request `collect` for all runs; the metrics are served once the last run is done."""
        room = [MAX_SERIES]  # shared by all runs
        by_run = {run: Metrics(worker.name, self._ever[worker.name], room) for run in runs}
        rounds = [{"run": run, "ranks": ranks, "metrics": by_run[run]} for run, ranks in runs.items()]
        worker.ask_every(worker.every_s, "collect", rounds, functools.partial(self._keep_metrics, worker, by_run))

    def _keep_metrics(self, worker: PluginWorker, by_run: Mapping[str, Metrics], _results: list[object]) -> None:
        collected = [(run, family) for run, metrics in by_run.items() for family in metrics.families.values()]
        with self._lock:
            self._dropped[worker.name] += sum(metrics.dropped for metrics in by_run.values())
            self._collected[worker.name] = (self._clock() + worker.every_s + FRESH_S, collected)

    def _keep_panel(self, name: str, results: list[object]) -> None:
        (panel,) = results
        if panel is not None and not isinstance(panel, Panel):
            raise PluginError(f"web_panel returned {type(panel).__name__}, expected a hookd.serving.Panel or None")
        row = None if panel is None else _panel_row(name, panel)
        with self._lock:
            self._panels.pop(name, None)
            if row is not None:
                self._panels[name] = (self._clock(), row)

    def receivers(self, store: IncidentStore) -> list[FunctionReceiver]:
        """Return a receiver of incidents for each plugin with the hook `incident`.

        An incident counts as delivered even if the call was skipped or has failed.
        """
        return [
            FunctionReceiver(f"plugin {worker.name}", functools.partial(_hand_over, worker), store)
            for worker in self.workers
            if worker.available.has("incident")
        ]

    def panels(self) -> list[PanelRow]:
        """Return the panels, without waiting for a plugin; the caller must escape their text for HTML."""
        with self._lock:
            return [panel for _, (at, panel) in sorted(self._panels.items()) if self._clock() - at < FRESH_S]

    def rows(self) -> list[DaemonPluginRow]:
        """Return a description of each plugin."""
        with self._lock:
            return [{**worker.row(), "series_dropped": self._dropped[worker.name]} for worker in self.workers]

    def families(self, is_free: Callable[[str, str], bool]) -> Iterator[Metric]:
        """Yield the last metrics of the plugins, and the metrics about them, without waiting for a plugin.

        Args:
            is_free: whether no other source serves a family of this name and kind.
        """
        if not self.workers:
            return
        with self._lock:
            current = [pair for until, pairs in self._collected.values() if self._clock() < until for pair in pairs]
        merged: dict[str, Metric] = {}
        for run, family in current:
            known = merged.get(family.name)
            if known is None and is_free(family.name, family.kind):
                known = merged[family.name] = empty(family.name, family.help, family.kind)
            if known is None or known.type != family.kind:
                continue
            sample = family.name + ("_total" if family.kind == "counter" else "")
            for values, value in family.samples.items():
                known.add_sample(sample, {"run": run, **dict(zip(family.labels, values, strict=True))}, value)
        yield from merged.values()
        yield from self._own_families()

    def _own_families(self) -> Iterator[Metric]:
        errors = CounterMetricFamily(
            "hookd_daemon_plugin_errors", "Errors of each daemon plugin, by hook.", labels=["plugin", "hook"]
        )
        states = GaugeMetricFamily(
            "hookd_daemon_plugin_state", "1 for the state that a daemon plugin is in.", labels=["plugin", "state"]
        )
        seconds = CounterMetricFamily(
            "hookd_daemon_plugin_seconds", "Time spent in each daemon plugin.", labels=["plugin"]
        )
        drops = CounterMetricFamily(
            "hookd_daemon_plugin_series_dropped",
            "Series of each daemon plugin that were dropped over a limit.",
            labels=["plugin"],
        )
        for worker in self.workers:
            for hook in sorted({*worker.hooks, *worker.errors}):
                errors.add_metric([worker.name, hook], worker.errors[hook])
            for state in STATES:
                states.add_metric([worker.name, state], float(worker.state == state))
            seconds.add_metric([worker.name], worker.seconds)
            drops.add_metric([worker.name], self._dropped[worker.name])
        yield from (errors, states, seconds, drops)

    def close(self) -> None:
        """Close all plugins; blocks for at most two seconds each."""
        for worker in self.workers:
            worker.close()


def _reading(target: Target) -> Reading:
    snapshot = target.last()
    claim, counted = target.claim, steps(snapshot) if snapshot is not None else None
    families = snapshot.families if snapshot is not None else ()
    return Reading(claim.run, claim.rank, target.pid, target.state, counted, families)


def _hand_over(worker: PluginWorker, incident: IncidentRow) -> None:
    worker.call("incident", incident=incident)


def _panel_row(name: str, panel: Panel) -> PanelRow:
    """Reduce a panel to what may be shown: limited in size, and printable.

    Raises:
        PluginError: there are no columns, or the number of cells in a row is not the number of columns.
    """
    columns = [_text(column) for column in panel.columns][:MAX_COLUMNS]
    if not columns:
        raise PluginError(f"{name}: its panel has no columns")
    rows = [[_cell(cell) for cell in row] for row in list(panel.rows)[:MAX_ROWS]]
    if any(len(row) != len(columns) for row in rows):
        raise PluginError(f"{name}: a row of its panel does not have {len(columns)} cells, one for each column")
    return {"plugin": name, "title": _text(panel.title), "columns": columns, "rows": rows}


def _cell(value: object) -> str | float | None:
    if value is None or (isinstance(value, (int, float)) and value == value and abs(value) < 2.0**63):  # noqa: PLR0124  NaN
        return value
    return _text(value)


def _text(value: object) -> str:
    return printable(str(value)[:MAX_CELL])
