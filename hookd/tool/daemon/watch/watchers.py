"""Who looks at the targets after each poll."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet import last_session
from hookd.tool.daemon.watch.drift import Drift
from hookd.tool.daemon.watch.hangs import Hangs
from hookd.tool.daemon.watch.silence import Patience
from hookd.tool.daemon.watch.stragglers import Stragglers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.history import History
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.watcher import Declared, Sample, Watcher

_log = logging.getLogger(__name__)


class Guarded:
    """A watcher whose mistakes are its own: the others look, and a scrape has what they know.

    Args:
        watcher: who looks; what it raises is logged, each type of exception once.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.families: Sequence[Declared] = watcher.families
        self._watcher = watcher
        self._known: set[type[Exception]] = set()

    def look(self, targets: Sequence[Target]) -> None:
        """Have it look; see `watch.Watcher`."""
        try:
            self._watcher.look(targets)
        except Exception as exc:  # noqa: BLE001  whatever it is
            self._failed(exc)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Give what it knows, nothing where it fails; see `watch.Watcher`."""
        try:
            return list(self._watcher.samples(target))
        except Exception as exc:  # noqa: BLE001  the same
            self._failed(exc)
            return ()

    def _failed(self, error: Exception) -> None:
        if type(error) not in self._known:
            self._known.add(type(error))
            _log.error(
                "%s has failed, and looks again; others are not touched", type(self._watcher).__name__, exc_info=error
            )


def watchers(fleet: Fleet, config: ServeConfig, state_dir: Path | None, history: History) -> tuple[Watcher, ...]:
    """Make them, in the order in which they look.

    Args:
        fleet: whom they tell of what they find.
        config: says what a hang is.
        state_dir: where it is noted who is there; None: nowhere.
        history: keeps what the pages show, and is asked for it.
    """
    patience = Patience(config.hang_after_s, config.hang_factor, config.hang_start_s)
    noted = None if state_dir is None else state_dir / last_session.NAME
    hangs = Hangs(fleet, patience, poll_s=config.poll_s)
    every = (last_session.Roster(noted, fleet), hangs, Stragglers(fleet), Drift(fleet), history)
    return tuple(Guarded(one) for one in every)
