"""Create the watchers of a daemon."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet import last_session
from hookd.tool.daemon.watch.drift import Drift
from hookd.tool.daemon.watch.hangs import Hangs
from hookd.tool.daemon.watch.memory_growth import MemoryGrowth
from hookd.tool.daemon.watch.silence import Patience
from hookd.tool.daemon.watch.slowdown import Slowdown
from hookd.tool.daemon.watch.stragglers import Stragglers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.fingerprints.keeper import Keeper
    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.history import History
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.watcher import Declared, Sample, Watcher

_log = logging.getLogger(__name__)


class Guarded:
    """A watcher whose exceptions are caught, so that other watchers and the scrape go on.

    Args:
        watcher: the watcher to guard; its exceptions are logged, once per type.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.families: Sequence[Declared] = watcher.families
        self._watcher = watcher
        self._known: set[type[Exception]] = set()

    def poll(self, targets: Sequence[Target]) -> None:
        """Call `poll` of the watcher; see `watch.Watcher`."""
        try:
            self._watcher.poll(targets)
        except Exception as exc:  # noqa: BLE001  a bug in one watcher must not stop the others
            self._failed(exc)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Return the watcher's samples, none if it fails; see `watch.Watcher`."""
        try:
            return list(self._watcher.samples(target))
        except Exception as exc:  # noqa: BLE001  as above
            self._failed(exc)
            return ()

    def _failed(self, error: Exception) -> None:
        if type(error) not in self._known:
            self._known.add(type(error))
            _log.error(
                "%s has failed, and is tried again; other watchers go on", type(self._watcher).__name__, exc_info=error
            )


def watchers(
    fleet: Fleet, config: ServeConfig, state_dir: Path | None, history: History, fingerprints: Keeper
) -> tuple[Watcher, ...]:
    """Create the watchers, in the order in which they are called.

    Args:
        fleet: to which they report incidents.
        config: with the settings of `[hang]`.
        state_dir: for the file that lists the targets; None: there is none.
        history: the watcher that records the pages.
        fingerprints: the watcher that keeps fingerprints.
    """
    patience = Patience(config.hang_after_s, config.hang_factor, config.hang_start_s)
    session_file = None if state_dir is None else state_dir / last_session.NAME
    hangs = Hangs(fleet, patience, poll_s=config.poll_s)
    every = (
        last_session.LastSession(session_file, fleet),
        hangs,
        Stragglers(fleet),
        Drift(fleet),
        MemoryGrowth(fleet),
        Slowdown(fleet),
        history,
        fingerprints,
    )
    return tuple(Guarded(watcher) for watcher in every)
