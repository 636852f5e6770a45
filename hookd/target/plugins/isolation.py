"""Isolation of faulty plugins: readmission after a quarantine, and limits on series. Runs in hookd's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire.originals import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.lifecycle_hooks import LifecycleHooks
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.wire.page import PageWriter


class Readmission:
    """Readmits quarantined plugins: `switch` switches them on."""

    def __init__(
        self,
        *,
        registry: Registry,
        lifecycle_hooks: LifecycleHooks,
        page: PageWriter,
        switch: Callable[[Loaded | None, Loaded | None], None],
    ) -> None:
        self._registry, self._lifecycle_hooks, self._page, self._switch = registry, lifecycle_hooks, page, switch

    def tick(self) -> None:
        """Switch on the plugins whose quarantine is over; on probation, one error quarantines them again."""
        now = clock.monotonic()
        for loaded in self._registry:
            is_stuck = self._lifecycle_hooks.holds(loaded.plugin)
            if loaded.state == "quarantined" and loaded.probation.is_over(now) and not is_stuck:
                loaded.strikes = 0
                loaded.probation.admit(now)
                self._switch(None, loaded)
                self._page.log("info", f"plugin {loaded.name} runs again, on probation")


class Refusals:
    """Publishes the series and values of plugins that were refused."""

    def __init__(self, *, registry: Registry, page: PageWriter, core: CoreMetrics) -> None:
        self._registry, self._page = registry, page
        self._series, self._values = core.plugin_series_refused, core.plugin_bad_values

    def tick(self) -> None:
        """Publish each plugin's number of series over its limits, and of invalid values; log the first of each."""
        for loaded in self._registry:
            bound = loaded.context.requests.bound
            more = bound.refused - bound.published
            if more:
                if not bound.published:
                    self._page.log("error", f"plugin {loaded.name}: {bound.why}; further series are not served")
                self._series.labels(loaded.name).inc(more)
                bound.published += more
            for metric, bad in list(bound.bad.items()):
                published = bound.bad_published.get(metric, 0)
                if not published:
                    text = f"plugin {loaded.name}: {metric} was given an invalid amount: it is not stored"
                    self._page.log("error", text)
                self._values.labels(loaded.name, metric).inc(bad - published)
                bound.bad_published[metric] = bad
