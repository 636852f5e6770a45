"""What keeps a bad plugin from harming the others, beyond its errors: its way back, its series. Runs in hookd's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire.originals import clock
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from hookd.target.session import Session

MOST_KINDS, OTHER_KIND, LONGEST_KIND = 32, "other", 64
"""So many kinds of incidents a plugin may have, and what all others count as; a kind's characters."""
_OF_HOOKD = frozenset({"quarantine", "plugin_memory", "training_changed"})
"""Kinds that the agent itself tells in a plugin's name: they are never among those others."""


class Kinds:
    """The kinds of incidents of each plugin. Each is a series, and a person looks for them by name: ever new ones are neither."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, set[str]] = {}
        self._over: set[str] = set()

    def bounded(self, plugin: str, kind: str, message: str) -> tuple[str, str]:
        """Give the kind as which an incident counts, and its message; one kind too many becomes part of the message."""
        kind = clean(str(kind), LONGEST_KIND)
        known = self._known.setdefault(plugin, {OTHER_KIND})
        if kind in known or kind in _OF_HOOKD:
            return kind, message
        if len(known) <= MOST_KINDS:
            known.add(kind)
            return kind, message
        if plugin not in self._over:
            self._over.add(plugin)
            self._session.write_log("error", f"plugin {plugin}: {MOST_KINDS} kinds of incidents, the next was {kind!r}:"
                                    f" all others count as {OTHER_KIND!r}")  # fmt: skip
        return OTHER_KIND, f"{kind}: {message}"


def readmit(session: Session) -> None:
    """Switch those on again whose quarantine is over; one error, until they have proved themselves, ends that."""
    now = clock.monotonic()
    for entry in session.registry.entries.values():
        is_stuck = session.cold.holds(entry.plugin)
        if entry.state == "quarantined" and entry.probation.is_over(now) and not is_stuck:
            entry.strikes = 0
            entry.probation.admit(now)
            session.switch(None, entry)
            session.write_log("info", f"plugin {entry.name} is let back in, on probation")


def tell_refused(session: Session) -> None:
    """Publish how many series of each plugin are over its limits, and how many values were none; log each once."""
    for entry in session.registry.entries.values():
        bound = entry.context.bound
        more = bound.refused - bound.told
        if more:
            if not bound.told:
                session.write_log("error", f"plugin {entry.name}: {bound.why}: others are not served")
            session.core.plugin_series_refused.labels(entry.name).inc(more)
            bound.told += more
        for metric, bad in list(bound.bad.items()):
            told = bound.bad_told.get(metric, 0)
            if not told:
                session.write_log(
                    "error", f"plugin {entry.name}: {metric} was given what is no amount: it is not stored"
                )
            session.core.plugin_bad_values.labels(entry.name, metric).inc(bad - told)
            bound.bad_told[metric] = bad
