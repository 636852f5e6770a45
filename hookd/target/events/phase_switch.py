"""Switching a thread from one phase of a step to the next. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.phases import Phases
    from hookd.target.events.step_count import StepCount
    from hookd.wire.page import PageWriter

OTHER = pages.PHASES.index("other")
PHASE = pages.PHASE - pages.MODULE
"""The cell of a heartbeat, from its module cell on."""


class PhaseSwitch:
    """Tells a thread's heartbeat and the plugins of a new phase.

    Args:
        no_frame: switches dynamo's frame evaluation.
        phases: adds up the time of each phase.
        count: of steps.
        clock: ns.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        no_frame: Callable[[Any], Any],
        page: PageWriter,
        phases: Phases,
        dispatch: Dispatch,
        count: StepCount,
        clock: Callable[[], int],
    ) -> None:
        self._no_frame, self._clock = no_frame, clock
        self._cells, self._record = page.cells, page.record
        self._phases, self._dispatch, self._count = phases, dispatch, count

    def turn(self, thread: ThreadState, phase: int) -> None:
        """Switch the calling thread to another phase."""
        self._cells[thread.beat + PHASE] = phase
        if self._dispatch.is_metered and phase != OTHER:  # in some steps only, as the calls are recorded
            self._record(pages.PHASE_RECORD, 0, self._count.absolute(), phase)
        if thread.busy or thread.is_engine:
            return
        now_ns = self._clock()
        self._phases.turn(thread.spent, phase, now_ns)
        heard = self._dispatch.switched_on("phase", None)
        if not heard:
            return
        values = {"name": pages.PHASES[phase], "now_ns": now_ns}
        frame = self._no_frame(None)
        try:
            thread.busy = True
            for one in heard:
                self._dispatch.guarded(one, values)
        finally:
            thread.busy = False
            self._no_frame(frame)
