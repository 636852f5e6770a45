"""The agent's own metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.metrics import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from hookd.target.plugins.listeners import Loaded
    from hookd.wire.page import PageWriter

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PLUGIN_STATES = ("active", "quarantined", "disabled", "waiting")


class CoreMetrics:
    """The metric families of every target; their names and labels are a contract (docs/metrics)."""

    def __init__(self, page: PageWriter, *, budget: float) -> None:
        self._has_budget = budget > 0
        self.steps = Counter(page, "hookd_steps", "Steps of the training since the attach.").labels()
        self.micro_batches = Counter(
            page, "hookd_micro_batches", "Micro-batches of these steps: more than steps with gradient accumulation."
        ).labels()
        self.step_calls = Counter(
            page, "hookd_step_calls", "Calls of the model counted as steps, as long as nothing has been trained."
        ).labels()
        self.step_seconds = Histogram(
            page, "hookd_step_seconds", "Wall time of a training step.", (), STEP_BUCKETS
        ).labels()
        self.modules = Gauge(page, "hookd_modules", "Modules of the models seen, by state of observation.", ("state",))
        self.incidents = Counter(page, "hookd_incidents", "Incidents, by kind.", ("kind",))
        self.overhead = Counter(
            page, "hookd_overhead_seconds", "Estimated time spent in each plugin, and in hookd itself.", ("plugin",)
        )
        self.overhead_ratio = Gauge(
            page, "hookd_overhead_ratio", "Share of step time spent in hookd and its plugins, last window."
        )
        Gauge(
            page,
            "hookd_overhead_budget_ratio",
            "Share of step time that sampled hooks may take; 0: nothing is sampled.",
        ).labels().set(budget)
        self.sampling_interval = Gauge(
            page, "hookd_sampling_interval_steps", "Steps of which one is sampled; 0: none is.", ("plugin",)
        )
        self.plugin_errors = Counter(page, "hookd_plugin_errors", "Errors raised by each plugin.", ("plugin",))
        self.call_seconds = Gauge(
            page, "hookd_plugin_call_seconds", "Mean time of one call of a plugin's hooks, measured.", ("plugin",)
        )
        self.plugin_held = Gauge(
            page, "hookd_plugin_held_bytes", "Memory of the tensors that a plugin's attributes lead to.", ("plugin",)
        )
        self.plugin_series_refused = Counter(
            page, "hookd_plugin_series_refused", "Series of a plugin that are over its limits.", ("plugin",)
        )
        self.plugin_bad_values = Counter(
            page,
            "hookd_plugin_bad_values",
            "Invalid values, such as NaN, given to a plugin's counter or histogram.",
            ("plugin", "metric"),
        )
        self.plugin_state = Gauge(
            page, "hookd_plugin_state", "1 for the state that a plugin is in.", ("plugin", "state")
        )
        self.changes_training = Gauge(
            page, "hookd_plugin_changes_training", "1 while a plugin that may change the training does.", ("plugin",)
        )
        self.series_dropped = Counter(
            page, "hookd_series_dropped", "Series dropped because the page was full."
        ).labels()

    def show(self, loaded: Loaded) -> None:
        """Publish the state of a plugin."""
        for state in PLUGIN_STATES:
            self.plugin_state.labels(loaded.name, state).set(1.0 if loaded.state == state else 0.0)
        self.plugin_errors.labels(loaded.name).inc(0.0)
        self.overhead.labels(loaded.name).inc(0.0)
        self.show_interval(loaded)
        if type(loaded.plugin).mutates or loaded.plugin.mutates:
            self.changes_training.labels(loaded.name).set(float(loaded.changes_training))
        else:  # with earlier options it may have been a mutator
            self.changes_training.remove(loaded.name)

    def show_interval(self, loaded: Loaded) -> None:
        """Publish a plugin's sampling interval: the fixed one, or else the one that the budget allows; 0 for never."""
        fixed = [loaded.context.requests.interval(hook) for hook, rate in loaded.rates.items() if rate.is_usual]
        asked = min((interval for interval in fixed if interval is not None), default=0)
        never = not self._has_budget and loaded.is_governed
        self.sampling_interval.labels(loaded.name).set(asked or (0 if never else loaded.interval))

    def show_cost(self, loaded: Loaded) -> None:
        """Publish the mean cost of a plugin's call, once some were measured."""
        if loaded.calls:
            self.call_seconds.labels(loaded.name).set(loaded.call_ns / loaded.calls / 1e9)

    def hide(self, loaded: Loaded) -> None:
        """End the series of a plugin that was unloaded."""
        for state in PLUGIN_STATES:
            self.plugin_state.remove(loaded.name, state)
        for metric in (
            self.plugin_errors, self.overhead, self.sampling_interval, self.changes_training, self.call_seconds,
            self.plugin_series_refused, self.plugin_held,
        ):  # fmt: skip
            metric.remove(loaded.name)
        for name in loaded.context.requests.bound.bad:
            self.plugin_bad_values.remove(loaded.name, name)
