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
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.batching import Portions
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.listeners import Registry
    from hookd.wire.page import PageWriter

FORWARD, OTHER, DATA = (pages.PHASES.index(phase) for phase in ("forward", "other", "data"))
PHASE = pages.PHASE - pages.MODULE
"""The cell of a heartbeat, from its module cell on."""


class Calls:
    """Keeps a thread's state, its phase and the hooks on the graph right.

    Args:
        namespace: the globals of all plans, among them whether the step is metered, and whether gradients are listened to.
        turn: switches a thread to another phase.
        begins: is told of each call that is inside of no other.
        require_alone: stops plugins that may change the training of one rank only.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        namespace: dict[str, Any],
        clock: Callable[[], int],
        life: Life,
        local: Threads,
        dispatch: Dispatch,
        portions: Portions,
        models: Models,
        registry: Registry,
        turn: Callable[[ThreadState, int], None],
        begins: Callable[[ThreadState], None],
        require_alone: Callable[[], None],
    ) -> None:
        self._page, self._cells, self._namespace, self._clock = page, page.cells, namespace, clock
        self._life, self._local, self._dispatch, self._portions = life, local, dispatch, portions
        self._models, self._registry = models, registry
        self._turn, self._call_begins, self._require_alone = turn, begins, require_alone
        self._is_unobserved_told = False

    def names(self) -> dict[str, Any]:
        """Give what plans call by name."""
        return {
            "graph_task": getattr(torch._C, "_current_graph_task_id", _graph_task), "begin": self._hook_inputs,
            "end": self._hook_outputs, "unwind": self._unwind, "begins": self._begins, "ends": self._ends,
            "was_stopped": _was_stopped, "graph_begins": self._hook_inputs, "graph_enters": backward.Entered,
            "graph_ends": self._hook_outputs, "graph_adds": backward.added, "graph_told": self._dispatch.flowed, "graph_failed": self._graph_failed,
        }  # fmt: skip

    def _unwind(self, thread: ThreadState, top: Any, module: Module, error: BaseException) -> None:
        """A call was left by an exception: put the thread's state right, tell those who asked, let it go on."""
        thread.busy = False
        if thread.held and not is_from_signal_handler(error):
            self._portions.hand_over(thread)  # what had returned may be what it was left for
        if top is None and thread.kept:
            self._portions.let_go(thread)
        thread.top = top
        self._cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and self._cells[thread.beat + PHASE] == FORWARD:
            self._ends(thread)
        if not _was_stopped(error) and self._life.is_live:
            self._dispatch.emit("forward_error", {"module": module, "error": error}, module)

    def _hook_outputs(
        self, module: Module, args: tuple[Any, ...], output: Any, entered: backward.Entered, recompute: bool = False
    ) -> Any:
        """Hook the graph that a call has made; in a recompute only where that graph will be used (reentrant)."""
        if recompute and not backward.is_reentrant():
            return output
        mark = self._clock()
        before, after = (self._dispatch.switched_on(hook, module) for hook in ("backward_pre", "backward"))
        if not before and not after:
            return output
        top = entered.thread.top
        if top is not None and is_inside(top[1], module) and not any(one.mutates for one in before + after):
            return output  # its time is part of that of the outermost; and each would walk through all that are inside of it
        flow = backward.Flow(module, self._dispatch, self._local, before + after)
        try:
            return backward.end(flow, args, output, entered, heard_backward=bool(after))
        except Failure as failure:
            self._dispatch.own_failure(f"backward of {module.name}", failure)
            return output
        finally:
            entered.thread.lost += self._clock() - mark
            if self._namespace.get("accounting"):  # who listens pays for the hooks on the graph as well
                self._dispatch.charge((after or before)[0].plugin, mark)

    def _begins(self, thread: ThreadState) -> None:
        """A call begins inside of no other."""
        self._call_begins(thread)
        thread.returned, thread.passing, thread.kept, thread.held, thread.held_size = [], [], 0, [], 0
        models = self._models
        if models.is_alert:
            models.calm()
        thread.passed = models.passed() if models.looks else -1
        if self._registry.alone:
            self._require_alone()
        if models.learning:
            models.learn_on()
        phase = int(self._cells[thread.beat + PHASE])
        # It is that still where an exception came at a bad moment.
        thread.outside = phase if phase != FORWARD else OTHER
        thread.flows = self._namespace["backward_on"] and self._may_hook()
        if phase != DATA:
            self._turn(thread, FORWARD)

    def _ends(self, thread: ThreadState) -> None:
        if thread.held:
            self._portions.hand_over(thread)
        if thread.kept:
            self._portions.let_go(thread)
        if self._models.is_alert:
            self._models.calm()
        if thread.passing and not torch.is_grad_enabled():  # no backward will ask what has returned
            self._portions.end_passing(thread)
        if thread.outside != DATA:
            self._turn(thread, thread.outside)

    def output_shown(self, module: Module, output: Any) -> None:
        """Show what a counted call has returned where the entry in C cannot, or where a plugin is to be told of it."""
        dispatch = self._dispatch
        heard = dispatch.switched_on("output_summary", module)
        if heard and self._life.is_live:
            dispatch.tell(heard, {"module": module, "output": output})

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
        self._dispatch.own_failure("the backward of a module", error)

    def _hook_inputs(self, thread: ThreadState, args: tuple[Any, ...]) -> backward.Entered | None:
        if is_autograd_compiled():
            self._tell_unobserved()
            return None
        mark = self._clock()
        entered = None
        try:
            entered = backward.begin(thread, args)
        except Failure as failure:
            self._dispatch.own_failure("backward", failure)
        thread.lost += self._clock() - mark
        if entered is not None:
            entered.lost = thread.lost  # what was lost until now lies outside of the call
        return entered

    def _tell_unobserved(self) -> None:
        if not self._is_unobserved_told:
            self._is_unobserved_told = True
            self._page.log("info", "backward passes are compiled: gradients inside the model are not observed")


def _was_stopped(error: BaseException) -> bool:
    """Whether torch.utils.checkpoint ends a recompute early by this exception (2.1 to 2.14); it is no error."""
    return type(error).__name__ == "_StopRecomputationError"


def _graph_task() -> int:
    """Stand in for `torch._C._current_graph_task_id` where torch has none (before 2.0): never in a recompute."""
    return -1
