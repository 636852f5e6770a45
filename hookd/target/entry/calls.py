"""What happens beside the plugins when a module's call begins, ends or is left by an exception. Runs in the target.

The plans (`hookd.target.entry.plan`) call this: rarely for most modules, and at every call that is inside of no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.target.entry.dynamo import is_autograd_compiled
from hookd.target.entry.plan import is_inside
from hookd.target.events import backward
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.target.tensors.torch_state import is_unreal
from hookd.wire import page as pages

if TYPE_CHECKING:
    from hookd.api.events import Module
    from hookd.target.entry.threads import ThreadState
    from hookd.target.session import Session

FORWARD, OTHER, DATA = (pages.PHASES.index(phase) for phase in ("forward", "other", "data"))
PHASE = pages.PHASE - pages.MODULE
"""The cell of a heartbeat, from its module cell on."""


class Calls:
    """Keeps a thread's state, its phase and the hooks on the graph right."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_unobserved_told = False

    def names(self) -> dict[str, Any]:
        """Give what plans call by name."""
        return {
            "graph_task": getattr(torch._C, "_current_graph_task_id", _graph_task), "begin": self._hook_inputs,
            "end": self._hook_outputs, "unwind": self._unwind, "begins": self._begins, "ends": self._ends,
            "was_stopped": _was_stopped, "graph_begins": self._hook_inputs, "graph_enters": backward.Entered,
            "graph_ends": self._hook_outputs, "graph_adds": backward.added, "graph_told": self._session.dispatch.flowed, "graph_failed": self._graph_failed,
        }  # fmt: skip

    def _unwind(self, thread: ThreadState, top: Any, module: Module, error: BaseException) -> None:
        """A call was left by an exception: put the thread's state right, tell those who asked, let it go on."""
        thread.busy = False
        if thread.held and not is_from_signal_handler(error):
            self._session.portions.hand_over(thread)  # what had returned may be what it was left for
        if top is None and thread.kept:
            self._session.portions.let_go(thread)
        thread.top = top
        self._session.cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and self._session.cells[thread.beat + PHASE] == FORWARD:
            self._ends(thread)
        if not _was_stopped(error) and self._session.is_live:
            self._session.dispatch.emit("forward_error", {"module": module, "error": error}, module)

    def _hook_outputs(
        self, module: Module, args: tuple[Any, ...], output: Any, entered: backward.Entered, recompute: bool = False
    ) -> Any:
        """Hook the graph that a call has made; in a recompute only where that graph will be used (reentrant)."""
        if recompute and not backward.is_reentrant():
            return output
        mark = self._session.clock()
        before, after = (self._session.dispatch.switched_on(hook, module) for hook in ("backward_pre", "backward"))
        if not before and not after:
            return output
        top = entered.thread.top
        if top is not None and is_inside(top[1], module) and not any(one.mutates for one in before + after):
            return output  # its time is part of that of the outermost; and each would walk through all that are inside of it
        flow = backward.Flow(module, self._session.dispatch, self._session.local, before + after)
        try:
            return backward.end(flow, args, output, entered, heard_backward=bool(after))
        except Failure as failure:
            self._session.dispatch.own_failure(f"backward of {module.name}", failure)
            return output
        finally:
            entered.thread.lost += self._session.clock() - mark
            if self._session.namespace.get("accounting"):  # who listens pays for the hooks on the graph as well
                self._session.dispatch.charge((after or before)[0].plugin, mark)

    def _begins(self, thread: ThreadState) -> None:
        """A call begins inside of no other."""
        self._session.steps.forward_begins(thread)
        thread.returned, thread.passing, thread.kept, thread.held, thread.held_size = [], [], 0, [], 0
        if self._session.models.is_alert:
            self._session.models.calm()
        thread.passed = self._session.models.passed() if self._session.models.looks else -1
        if self._session.registry.alone:
            self._session.changes.require_alone()
        if self._session.models.learning:
            self._session.models.learn_on()
        phase = int(self._session.cells[thread.beat + PHASE])
        # It is that still where an exception came at a bad moment.
        thread.outside = phase if phase != FORWARD else OTHER
        thread.flows = self._session.namespace["backward_on"] and self._may_hook()
        if phase != DATA:
            self.turn(thread, FORWARD)

    def _ends(self, thread: ThreadState) -> None:
        if thread.held:
            self._session.portions.hand_over(thread)
        if thread.kept:
            self._session.portions.let_go(thread)
        if self._session.models.is_alert:
            self._session.models.calm()
        if thread.passing and not torch.is_grad_enabled():  # no backward will ask what has returned
            self._session.portions.end_passing(thread)
        if thread.outside != DATA:
            self.turn(thread, thread.outside)

    def turn(self, thread: ThreadState, phase: int) -> None:
        """A thread goes over to another phase: tell its heartbeat, and who listens."""
        session = self._session
        namespace = session.namespace
        session.cells[thread.beat + PHASE] = phase
        if namespace["accounting"] and phase != OTHER:  # in some steps only, as the calls are recorded
            session.page.record(pages.PHASE_RECORD, 0, session.step_number(), phase)
        if thread.busy or thread.is_engine:
            return
        now_ns = session.clock()
        session.phases.turn(thread.spent, phase, now_ns)
        heard = session.dispatch.switched_on("phase", None)
        if not heard:
            return
        values = {"name": pages.PHASES[phase], "now_ns": now_ns}
        frame = namespace["no_frame"](None)
        try:
            thread.busy = True
            for one in heard:
                session.dispatch.guarded(one, values)
        finally:
            thread.busy = False
            namespace["no_frame"](frame)

    def _may_hook(self) -> bool:
        """Return whether the graph may be hooked that is about to be made; `hookd/native/graph.c` asks only once an outermost call."""
        if is_autograd_compiled():
            self._tell_unobserved()
            return False
        return not is_unreal()

    def _graph_failed(self, error: BaseException) -> None:
        """Deal with what a hook in C has raised, as `hookd.target.events.backward` does."""
        if not isinstance(error, Failure):
            raise error
        self._session.dispatch.own_failure("the backward of a module", error)

    def _hook_inputs(self, thread: ThreadState, args: tuple[Any, ...]) -> backward.Entered | None:
        if is_autograd_compiled():
            self._tell_unobserved()
            return None
        mark = self._session.clock()
        entered = None
        try:
            entered = backward.begin(thread, args)
        except Failure as failure:
            self._session.dispatch.own_failure("backward", failure)
        thread.lost += self._session.clock() - mark
        if entered is not None:
            entered.lost = thread.lost  # what was lost until now lies outside of the call
        return entered

    def _tell_unobserved(self) -> None:
        if not self._is_unobserved_told:
            self._is_unobserved_told = True
            self._session.write_log("info", "backward passes are compiled: gradients inside the model are not observed")


def _was_stopped(error: BaseException) -> bool:
    """Whether torch.utils.checkpoint ends a recompute early by this exception (2.1 to 2.14); it is no error."""
    return type(error).__name__ == "_StopRecomputationError"


def _graph_task() -> int:
    """Stand in for `torch._C._current_graph_task_id` where torch has none (before 2.0): never in a recompute."""
    return -1
