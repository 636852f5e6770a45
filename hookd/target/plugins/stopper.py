"""Stops plugins at once, from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.totals import Switched
from hookd.wire.originals import clock

if TYPE_CHECKING:
    from hookd.target.entry.counting import Counting
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.incidents import Incidents
    from hookd.target.plugins.listeners import Loaded
    from hookd.target.remote.marks import Marks


class PluginStopper:
    """Stops plugins. This only sets switches, so any thread may call it."""

    def __init__(self, *, counting: Counting, core: CoreMetrics, incidents: Incidents, marks: Marks) -> None:
        self._counting, self._core = counting, core
        self._incidents, self._marks = incidents, marks

    def switch_off(self, loaded: Loaded, state: str) -> None:
        """Stop calling a plugin at once."""
        loaded.switch_to(state)
        for listener in loaded.listeners:
            listener.is_on = False
            if isinstance(listener.totals, Switched):
                listener.totals.switch(is_on=False, is_active=False)
        self._counting.act_on_switches()

    def quarantine(self, loaded: Loaded, why: str) -> None:
        """Stop calling a plugin, and report an incident."""
        self.switch_off(loaded, "quarantined")
        self._core.show(loaded)
        self._marks.failed(loaded)
        again_s = loaded.probation.quarantine(clock.monotonic()) if loaded.readmits else 0.0
        message = f"plugin {loaded.name} is quarantined: {why}"
        message += f"; it is tried again in {again_s:g} s" if again_s else ""
        self._incidents.report(loaded.name, "quarantine", message, {"error": why, "again_s": again_s})
