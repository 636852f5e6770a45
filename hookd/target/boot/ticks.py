"""The agent's periodic work, about once a second in hookd's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.target.plugins.faults import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.api.metrics import CounterChild
    from hookd.target.entry.threads import Heartbeats
    from hookd.wire.page import PageWriter


class Ticks:
    """Calls the parts of the agent that have periodic work.

    Args:
        acts: functions that are called in this order, each with the time in unix seconds.
        heartbeats: the threads' heartbeats; those of ended threads are released.
        page: counts the series that it has dropped.
        dropped: the metric for that count.
    """

    def __init__(
        self,
        acts: Sequence[Callable[[float], None]],
        *,
        own_failure: Callable[[str, BaseException], None],
        heartbeats: Heartbeats,
        page: PageWriter,
        dropped: CounterChild,
    ) -> None:
        self._acts, self._own_failure = acts, own_failure
        self._heartbeats = heartbeats
        self._page, self._cells, self._dropped = page, page.cells, dropped

    def tick(self, now_s: float) -> None:
        """Call each function once; an error of one does not prevent the others."""
        for act in self._acts:
            try:
                act(now_s)
            except Failure as failure:
                self._own_failure("tick", failure)
        self._heartbeats.release_ended()
        dropped = float(self._page.dropped)
        self._dropped.inc(dropped - self._cells[self._dropped.at])
