"""Time spent in each phase.

Every moment of a training thread belongs to exactly one phase. Plugins ask for it with `Context.add_up_phases`. A thread
changes its phase six times in a step, so hookd adds up the times itself, and does not call these plugins at each change.

The time between two calls of inference (the wait for the next batch of a validation, the environment of a rollout) belongs to
inference as well, unless the training has done something in between. It is not part of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.api.metrics import CounterChild
    from hookd.target.boot.identity import Process
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.collectives import PhaseCollectives
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.accounts import Accounts
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.plugins.notifier import Notifier
    from hookd.wire.page import PageWriter

OTHER, INFERENCE = (pages.PHASES.index(name) for name in ("other", "inference"))
EVENTS, PHASE, STEP = (cell - pages.MODULE for cell in (pages.EVENTS, pages.PHASE, pages.STEP))
"""Cells of a heartbeat, relative to its module cell."""
_TRAINING = tuple(pages.PHASES.index(name) for name in ("backward", "optimizer"))
"""Phases that a thread which only evaluates is never in."""
_OF_STEPS = (*_TRAINING, pages.PHASES.index("forward"))
"""Phases that end a stretch of inference."""
OFTEN_NS = 100_000_000
"""Interval at which a thread that steps adds its times to the counters between two steps, in ns.

It adds them at each step anyway. To do so at each change of phase would cost more than to measure the times.
"""


class Spent:
    """Time that one thread has spent in each phase.

    This is the time that is not yet added to the counters ("shown").

    Attributes:
        phase: the current phase, as numbered in the page.
        since_ns: time at which the phase began; 0 if unknown.
        shown_ns: time up to which the counters are complete.
        unshown_ns: time not shown yet, by phase.
        after_ns: time since the last call of inference, by phase; it is inference if another such call follows.
        infers: whether the thread is in a stretch of inference.
        inference_ns: time of inference since the last step.
        trains: whether the thread has run a backward or an optimizer; the time of a thread that never does is not counted.
        steps: whether the thread has ended a step.
        counters: counters at the last change of phase; when they change, the time before belongs to none of the new ones.
    """

    __slots__ = (
        "after_ns", "counters", "inference_ns", "infers", "phase", "shown_ns", "since_ns", "steps", "trains", "unshown_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.phase = self.since_ns = self.shown_ns = self.inference_ns = 0
        self.unshown_ns, self.after_ns = [0] * len(pages.PHASES), [0] * len(pages.PHASES)
        self.trains = self.steps = self.infers = False
        self.counters: PhaseCounters | None = None

    def switch(self, phase: int, now_ns: int) -> None:
        """End the current phase, and begin another one."""
        if self.since_ns:
            elapsed_ns = now_ns - self.since_ns
            if self.phase == INFERENCE:
                self._infer(elapsed_ns)
            else:
                (self.after_ns if self.infers else self.unshown_ns)[self.phase] += elapsed_ns
        if phase == INFERENCE:
            if self.infers:
                self._infer(sum(self.after_ns))
                self.after_ns = [0] * len(pages.PHASES)
            self.infers = True
        elif self.infers and phase in _OF_STEPS:
            self.settle()
        self.phase, self.since_ns = phase, now_ns

    def settle(self) -> None:
        """End a stretch of inference: the time since its last call belongs to the phases that it was spent in."""
        self.infers = False
        for phase, ns in enumerate(self.after_ns):
            self.unshown_ns[phase] += ns
            self.after_ns[phase] = 0

    def _infer(self, ns: int) -> None:
        self.unshown_ns[INFERENCE] += ns
        self.inference_ns += ns


PhaseCounters = list[dict[int, "CounterChild"]]
"""Each requested counter's series, by phase."""


class Phases:
    """Publishes the phase of each thread: to its heartbeat, to plugins that listen, and to counters that add phases up."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        registry: Registry,
        count: StepCount,
        accounts: Accounts,
        notifier: Notifier,
        listeners: Callable[[str, Module | None], list[Listener]],
        process: Process,
        collectives: PhaseCollectives,
    ) -> None:
        self._process, self._collectives = process, collectives
        self._cells, self._record = page.cells, page.record
        self._registry, self._count, self._accounts, self._notify = registry, count, accounts, notifier.notify
        self._listeners = listeners
        self._counters: PhaseCounters = []
        self._active: list[Listener] = []
        self._is_known = False

    def turned(self) -> None:
        """Drop the cached listeners and counters, because a switch was turned, or a plugin was loaded or unloaded."""
        self._is_known = False

    def _find(self) -> None:
        active = [entry.context for entry in self._registry if entry.state == "active"]
        counters = [series for context in active for series in context.requests.phases]
        if [id(series) for series in counters] != [id(series) for series in self._counters]:
            self._counters = counters
        self._active = [listener for listener in self._listeners("phase", None) if listener.is_on]
        self._is_known = True

    def set_phase(self, thread: ThreadState, phase: int) -> None:
        """Switch the calling thread to another phase, as numbered in the page."""
        accounts, at = self._accounts, thread.beat + PHASE
        if self._process.world_size > 1 and not thread.busy and not thread.is_engine:
            self._collectives.phase_over(int(self._cells[at]), is_metered=accounts.is_metered)
        self._cells[at] = phase
        if accounts.is_metered and phase != OTHER:  # only in the steps in which calls are recorded, too
            self._record(pages.PHASE_RECORD, 0, self._count.absolute(), phase)
        if thread.busy or thread.is_engine:
            return
        if not self._is_known:
            self._find()
        counters, listeners, spent = self._counters, self._active, thread.spent
        is_timed = bool(counters) or phase == INFERENCE or spent.infers  # the time of a step is without inference
        if not is_timed and not listeners:
            spent.since_ns = 0
            return
        now_ns = accounts.clock()
        if is_timed:
            if spent.counters is not counters:
                spent.counters, spent.since_ns, spent.unshown_ns = counters, 0, [0] * len(pages.PHASES)
            spent.switch(phase, now_ns)
            if phase in _TRAINING:
                spent.trains = True
            if spent.trains and (not spent.steps or now_ns - spent.shown_ns > OFTEN_NS):
                _show(spent, counters)
        if listeners:
            self._notify(thread, listeners, {"name": pages.PHASES[phase], "now_ns": now_ns}, accounts.is_metered)

    def take_inference(self, thread: ThreadState) -> int:
        """Return the time of inference in the thread's step that is over, in ns."""
        spent = thread.spent
        ns, spent.inference_ns = spent.inference_ns, 0
        return ns

    def step_done(self, spent: Spent) -> None:
        """Add a thread's time until its last change of phase to the counters."""
        if not self._is_known:
            self._find()
        counters = self._counters
        if counters and spent.counters is counters:
            spent.steps = True
            _show(spent, counters)


def _show(spent: Spent, counters: PhaseCounters) -> None:
    spent.shown_ns = spent.since_ns
    for phase, ns in enumerate(spent.unshown_ns):
        if ns:
            spent.unshown_ns[phase] = 0
            for series in counters:
                if phase in series:
                    series[phase].inc(ns * 1e-9)
