"""Where a step's time goes: every moment of a training thread belongs to exactly one phase. Runs in the target.

Plugins ask for it by `Context.add_up_phases`. A phase is turned six times in a step, so nothing of such a plugin's is called at a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.api.metrics import CounterChild
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.accounts import Accounts
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.plugins.telling import Telling
    from hookd.wire.page import PageWriter

OTHER = pages.PHASES.index("other")
PHASE = pages.PHASE - pages.MODULE
"""The cell of a heartbeat, from its module cell on."""

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
    """Tells of a thread's phases: its heartbeat, the plugins that listen, and the series of those that have them added up.

    Args:
        count: of steps.
        telling: tells the plugins.
        listeners: returns who listens to a hook.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        registry: Registry,
        count: StepCount,
        accounts: Accounts,
        telling: Telling,
        listeners: Callable[[str, Module | None], list[Listener]],
    ) -> None:
        self._cells, self._record = page.cells, page.record
        self._registry, self._count, self._accounts, self._tell = registry, count, accounts, telling.tell
        self._listeners = listeners
        self._wanted: Wanted = []
        self._heard: list[Listener] = []
        self._is_known = False

    def turned(self) -> None:
        """Find out again who wants it: a switch was turned, or a plugin came or went."""
        self._is_known = False

    def _find(self) -> None:
        active = [entry.context for entry in self._registry if entry.state == "active"]
        found = [series for context in active for series in context.phases]
        if [id(one) for one in found] != [id(one) for one in self._wanted]:
            self._wanted = found
        self._heard = [one for one in self._listeners("phase", None) if one.is_on]
        self._is_known = True

    def turn(self, thread: ThreadState, phase: int) -> None:
        """Have the calling thread go over to another phase, as the page numbers them."""
        accounts = self._accounts
        self._cells[thread.beat + PHASE] = phase
        if accounts.is_metered and phase != OTHER:  # in some steps only, as the calls are recorded
            self._record(pages.PHASE_RECORD, 0, self._count.absolute(), phase)
        if thread.busy or thread.is_engine:
            return
        if not self._is_known:
            self._find()
        wanted, heard = self._wanted, self._heard
        if not wanted and not heard:
            return
        now_ns = accounts.clock()
        if wanted:
            spent = thread.spent
            if spent.asked is not wanted:
                spent.asked, spent.since_ns = wanted, 0
            if spent.since_ns:
                spent.unshown_ns[spent.phase] += now_ns - spent.since_ns
            spent.phase, spent.since_ns = phase, now_ns
            if phase in _TRAINING:
                spent.trains = True
            if spent.trains and (not spent.steps or now_ns - spent.shown_ns > OFTEN_NS):
                _show(spent, wanted)
        if heard:
            self._tell(thread, heard, {"name": pages.PHASES[phase], "now_ns": now_ns}, accounts.is_metered)

    def step_done(self, spent: Spent) -> None:
        """Show what a thread has spent until its last turn."""
        if not self._is_known:
            self._find()
        wanted = self._wanted
        if wanted and spent.asked is wanted:
            spent.steps = True
            _show(spent, wanted)


def _show(spent: Spent, wanted: Wanted) -> None:
    spent.shown_ns = spent.since_ns
    for phase, ns in enumerate(spent.unshown_ns):
        if ns:
            spent.unshown_ns[phase] = 0
            for series in wanted:
                if phase in series:
                    series[phase].inc(ns * 1e-9)
