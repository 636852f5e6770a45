"""Who looks at the targets after each poll."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.daemon import roster
from hookd.daemon.drift import Drift
from hookd.daemon.hangs import Hangs
from hookd.daemon.silence import Patience
from hookd.daemon.stragglers import Stragglers

if TYPE_CHECKING:
    from pathlib import Path

    from hookd.config import ServeConfig
    from hookd.daemon.fleet import Fleet
    from hookd.daemon.watch import Watcher


def watchers(fleet: Fleet, config: ServeConfig, state_dir: Path | None) -> tuple[Watcher, ...]:
    """Make them, in the order in which they look. `state_dir`: where it is noted who is there; None: nowhere."""
    patience = Patience(config.hang_after_s, config.hang_factor, config.hang_start_s)
    noted = None if state_dir is None else state_dir / roster.NAME
    return (roster.Roster(noted, fleet), Hangs(fleet, patience, poll_s=config.poll_s), Stragglers(fleet), Drift(fleet))
