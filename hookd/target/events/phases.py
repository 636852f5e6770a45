"""Where a step's time goes: every moment of a training thread belongs to exactly one phase. Runs in the target.

Plugins ask for it by `Context.add_up_phases`. A phase is turned six times in a step, so nothing of a plugin's is called at a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire import page as pages

if TYPE_CHECKING:
    from hookd.api.metrics import CounterChild
    from hookd.target.plugins.listeners import Registry

_TRAINING = tuple(pages.PHASES.index(name) for name in ("backward", "optimizer"))
"""What a thread that only evaluates does not do."""
OFTEN_NS = 100_000_000
"""In a thread that steps, time is shown at each step, and so long after it was last: at each turn would cost more than to take it."""


class Spent:
    """What one thread has spent in each phase and nobody has been shown yet.

    Attributes:
        phase: the one that it is in, as the page numbers them.
        since_ns: when that began; 0 where nobody knows.
        shown_ns: when its time was last shown.
        unshown_ns: by phase.
        trains: it has gone backward, or has stepped: of one that never does the time is not counted.
        steps: it has ended a step.
        asked: who wanted it the last time; where others do, what was before is nobody's.
    """

    __slots__ = ("asked", "phase", "shown_ns", "since_ns", "steps", "trains", "unshown_ns")

    def __init__(self) -> None:
        self.phase = self.since_ns = self.shown_ns = 0
        self.unshown_ns = [0] * len(pages.PHASES)
        self.trains = self.steps = False
        self.asked: Wanted | None = None


Wanted = list[dict[int, "CounterChild"]]
"""The series of each counter that is wanted, by phase."""


class Phases:
    """Adds up the time of phases for the plugins that want it and are switched on."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._wanted: Wanted = []
        self._is_known = False

    def turned(self) -> None:
        """Find out again who wants it: a switch was turned, or a plugin came or went."""
        self._is_known = False

    def _found(self) -> Wanted:
        if not self._is_known:
            active = [entry.context for entry in self._registry if entry.state == "active"]
            found = [series for context in active for series in context.phases]
            if [id(one) for one in found] != [id(one) for one in self._wanted]:
                self._wanted = found
            self._is_known = True
        return self._wanted

    def turn(self, spent: Spent, phase: int, now_ns: int) -> None:
        """Have a thread go over to another phase.

        Args:
            spent: the calling thread's.
            phase: the new one, as the page numbers them.
            now_ns: the time.
        """
        wanted = self._wanted if self._is_known else self._found()
        if not wanted:
            return
        if spent.asked is not wanted:
            spent.asked, spent.since_ns = wanted, 0
        if spent.since_ns:
            spent.unshown_ns[spent.phase] += now_ns - spent.since_ns
        spent.phase, spent.since_ns = phase, now_ns
        if phase in _TRAINING:
            spent.trains = True
        if spent.trains and (not spent.steps or now_ns - spent.shown_ns > OFTEN_NS):
            self._show(spent, wanted)

    def step_done(self, spent: Spent) -> None:
        """Show what a thread has spent until its last turn."""
        wanted = self._found()
        if wanted and spent.asked is wanted:
            spent.steps = True
            self._show(spent, wanted)

    @staticmethod
    def _show(spent: Spent, wanted: Wanted) -> None:
        spent.shown_ns = spent.since_ns
        for phase, ns in enumerate(spent.unshown_ns):
            if ns:
                spent.unshown_ns[phase] = 0
                for series in wanted:
                    if phase in series:
                        series[phase].inc(ns * 1e-9)
