"""The agent's work between two steps, in the training thread. `hookd.target.events.steps` finds the boundaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.target.events.phases import STEP
from hookd.target.plugins.faults import Failure
from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.entry.threads import Threads
    from hookd.target.events.batching import Portions
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.phases import Phases
    from hookd.target.events.step_count import StepCount
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.governor import Governor
    from hookd.target.remote.tracing import Tracing
    from hookd.target.tensors.deferred import Later
    from hookd.wire.page import PageWriter


class Boundaries:
    """Publishes steps, runs the governor, and does what must not be done within a step.

    Args:
        later: numbers that are still being copied from a device.
        install_late: patches Python modules that were imported since the last step.

    Attributes:
        resume: restarts hookd's threads after a fork, if they do not run.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        local: Threads,
        count: StepCount,
        core: CoreMetrics,
        governor: Governor,
        dispatch: Dispatch,
        portions: Portions,
        phases: Phases,
        models: Models,
        tracing: Tracing,
        later: Later,
        install_late: Callable[[], None],
    ) -> None:
        self._cells, self._record = page.cells, page.record
        self._local, self._count, self._governor, self._dispatch = local, count, governor, dispatch
        self._portions, self._phases, self._models, self._tracing = portions, phases, models, tracing
        self._steps, self._step_calls, self._step_seconds = core.steps, core.step_calls, core.step_seconds
        self._later, self._install_late = later, install_late
        self._micro_batches = core.micro_batches
        self._elapsed_ns = 0  # the time of the last step
        self.resume: Callable[[], None] = lambda: None

    def step_over(self, steps: int, micro_batches: int, *, in_call: bool) -> None:
        """Publish a completed step, or several that were made without an optimizer; events belong to it until `step_done`.

        `micro_batches` is the number of each of them; `in_call` says whether a call of a model has begun since.
        """
        try:
            self._deliver_numbers()
            thread = self._local.thread
            elapsed_ns = max(0, self._governor.end() - self._phases.take_inference(thread))
            self._elapsed_ns = elapsed_ns
            self._steps.inc(steps)
            self._micro_batches.inc(steps * micro_batches)
            if elapsed_ns and steps == 1:
                self._step_seconds.observe(elapsed_ns / 1e9)
            if thread.kept:  # a training loop inside of a module's forward never leaves the outermost call
                self._portions.let_go(thread)
            self._portions.end_passing(thread)
            done = self._count.done
            self._cells[thread.beat + STEP] = float(done + 1 + (self._count.offset or 0))
            self._record(pages.STEP_RECORD, 0, done, elapsed_ns / 1e9)
            self._models.step_over(thread, in_call=in_call)
            self._install_late()
            self.resume()
            self._tracing.boundary()
        except Failure as failure:
            self._dispatch.own_failure("the end of a step", failure)

    def step_done(self) -> None:
        """Call the plugins' hook `step_done`: no further event belongs to the last step."""
        thread = self._local.thread
        self._phases.step_done(thread.spent)
        self._dispatch.emit("step_done", {"step": self._count.absolute(), "elapsed_ns": self._elapsed_ns})

    def step_begins(self) -> None:
        """Settle the accounts of the last step, and switch hooks."""
        try:
            self._begin()
        except Failure as failure:
            self._dispatch.own_failure("the beginning of a step", failure)

    def _begin(self) -> None:
        """Charge hookd's own work so far to the last step, and what follows to the next one."""
        accounts = self._dispatch.accounts
        accounts.come_back()
        since = accounts.clock()
        self._governor.begin(self._count.turns)
        accounts.leave(since)

    def call_begins(self) -> None:
        """Begin a call of a model in a process that does not train. Such a call is a turn, as a step is."""
        try:
            self._deliver_numbers()
            self._step_calls.inc()
            self._governor.end()
            self._begin()
            self._install_late()
        except Failure as failure:
            self._dispatch.own_failure("the beginning of a call", failure)

    def collect_numbers(self) -> None:
        """Deliver the numbers that have arrived, if many wait; called at the beginning of each outermost call."""
        self._call_later(self._later.collect)

    def _deliver_numbers(self) -> None:
        self._call_later(self._later.end_step)

    def _call_later(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Failure as failure:  # an error in the plugins' numbers must not prevent the step from being counted
            self._dispatch.own_failure("later", failure)
