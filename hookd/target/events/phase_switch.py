"""Switching a thread from one phase of a step to the next. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire import page as pages

if TYPE_CHECKING:
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.phases import Phases
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.telling import Telling
    from hookd.wire.page import PageWriter

OTHER = pages.PHASES.index("other")
PHASE = pages.PHASE - pages.MODULE
"""The cell of a heartbeat, from its module cell on."""


class PhaseSwitch:
    """Tells a thread's heartbeat and the plugins of a new phase.

    Args:
        phases: adds up the time of each phase.
        count: of steps.
        telling: tells the plugins.
    """

    def __init__(
        self,
        *,
        page: PageWriter,
        phases: Phases,
        dispatch: Dispatch,
        count: StepCount,
        telling: Telling,
    ) -> None:
        self._accounts, self._tell = dispatch.accounts, telling.tell
        self._cells, self._record = page.cells, page.record
        self._phases, self._dispatch, self._count = phases, dispatch, count

    def turn(self, thread: ThreadState, phase: int) -> None:
        """Switch the calling thread to another phase."""
        accounts = self._accounts
        self._cells[thread.beat + PHASE] = phase
        if accounts.is_metered and phase != OTHER:  # in some steps only, as the calls are recorded
            self._record(pages.PHASE_RECORD, 0, self._count.absolute(), phase)
        if thread.busy or thread.is_engine:
            return
        now_ns = accounts.clock()
        self._phases.turn(thread.spent, phase, now_ns)
        heard = self._dispatch.switched_on("phase", None)
        if heard:
            self._tell(thread, heard, {"name": pages.PHASES[phase], "now_ns": now_ns}, accounts.is_metered)
