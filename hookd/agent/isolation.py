"""What keeps a bad plugin from harming the others, beyond its errors: its way back, its series. Runs in hookd's own thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookd.agent.session import Session


def readmit(session: Session) -> None:
    """Switch those on again whose quarantine is over; one error, until they have proved themselves, ends that."""
    now = time.monotonic()
    for entry in list(session.registry.entries.values()):
        if entry.state == "quarantined" and entry.probation.is_over(now):
            entry.strikes = 0
            entry.probation.admit(now)
            session.switch(None, entry)
            session.write_log("info", f"plugin {entry.name} is let back in, on probation")


def tell_refused(session: Session) -> None:
    """Publish how many series of each plugin are over its limits, and log it once, with the metric's name."""
    for entry in list(session.registry.entries.values()):
        bound = entry.context.bound
        if bound.refused:
            told = session.core.plugin_series_refused.labels(entry.name)
            if not session.cells[told.at]:
                session.write_log("error", f"plugin {entry.name}: {bound.why}: others are not served")
            told.inc(bound.refused - session.cells[told.at])
