"""Incidents: events to report to a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.api.metrics import Counter
    from hookd.target.events.step_count import StepCount
    from hookd.wire.page import PageWriter

MOST_KINDS, OTHER_KIND, LONGEST_KIND = 32, "other", 64
"""The most kinds of incidents per plugin, the kind as which any further ones count, and the longest kind in characters."""
_OF_HOOKD = frozenset({"quarantine", "plugin_memory", "training_changed"})
"""Kinds that the agent itself reports in a plugin's name: they never count as `OTHER_KIND`."""


class Incidents:
    """Publishes incidents, and limits their kinds.

    Each kind is a series, and people search for kinds by name, so a plugin may have a limited number only.
    """

    def __init__(self, *, page: PageWriter, counter: Counter, count: StepCount) -> None:
        self._page, self._counter, self._count = page, counter, count
        self._known: dict[str, set[str]] = {}
        self._over: set[str] = set()

    def report(self, plugin: str, kind: str, message: str, fields: Mapping[str, object]) -> None:
        """Publish an incident."""
        kind, message = self._bounded(plugin, kind, message)
        self._counter.labels(kind).inc()
        where = {"step": self._count.absolute(), "is_step_absolute": self._count.offset is not None}
        # `fields` override the step: an incident found late, as from a device's numbers, belongs to an earlier step.
        self._page.incident({**where, **fields, "kind": kind, "plugin": plugin, "message": message})

    def _bounded(self, plugin: str, kind: str, message: str) -> tuple[str, str]:
        """Return the kind as which an incident counts, and its message, which contains the kind if that is one too many."""
        kind = clean(str(kind), LONGEST_KIND)
        known = self._known.setdefault(plugin, {OTHER_KIND})
        if kind in known or kind in _OF_HOOKD:
            return kind, message
        if len(known) <= MOST_KINDS:
            known.add(kind)
            return kind, message
        if plugin not in self._over:
            self._over.add(plugin)
            self._page.log("error", f"plugin {plugin}: {MOST_KINDS} kinds of incidents, the next was {kind!r}:"
                           f" all others count as {OTHER_KIND!r}")  # fmt: skip
        return OTHER_KIND, f"{kind}: {message}"
