"""What happens beside the plugins when a module's call begins, ends or is left by an exception. Runs in the target.

The plans (`hookd.target.entry.plan`) and the entry in C call this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.target.entry.dynamo import is_autograd_compiled
from hookd.target.entry.patch import bare_of
from hookd.target.entry.plan import was_stopped
from hookd.target.entry.threads import is_inside
from hookd.target.events import backward
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.target.plugins.values import values_of
from hookd.target.tensors.torch_state import is_unreal, versions_of
from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.counting import Counting
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.batching import Portions
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.listeners import Registry
    from hookd.target.plugins.telling import Telling
    from hookd.wire.page import PageWriter

FORWARD, OTHER, DATA = (pages.PHASES.index(phase) for phase in ("forward", "other", "data"))
EVENTS, PHASE = pages.EVENTS - pages.MODULE, pages.PHASE - pages.MODULE
"""Cells of a heartbeat, from its module cell on."""


class Calls:
    """Keeps a thread's state, its phase and the hooks on the graph right.

    Args:
        telling: tells listeners of a call.
        turn: switches a thread to another phase.
        begins: is told of each call that is inside of no other.
        require_alone: stops plugins that may change the training of one rank only.

    Attributes:
        cells: of the page, and `record`: puts a record into its recorder.
        local: has the state of the calling thread, and `accounts` what is spent in metered steps.
        bare: returns what runs a module as if hookd were not there, and `aloud_of`: what does so hidden from nobody, where the plan itself is
            hidden from a profiler.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        life: Life,
        local: Threads,
        dispatch: Dispatch,
        portions: Portions,
        telling: Telling,
        models: Models,
        counting: Counting,
        registry: Registry,
        turn: Callable[[ThreadState, int], None],
        begins: Callable[[ThreadState], None],
        require_alone: Callable[[], None],
    ) -> None:
        self.cells: Any = page.cells
        self.record: Callable[..., None] = page.record
        self.local, self.dispatch, self.portions, self.tell = local, dispatch, portions, telling.tell
        self.accounts = dispatch.accounts
        self._telling = telling
        self._page, self._life, self._clock = page, life, dispatch.accounts.clock
        self.bare, self.aloud_of = bare_of(models.patch.original), counting.aloud_of
        self._models, self._counting, self._registry = models, counting, registry
        self._turn, self._call_begins, self._require_alone = turn, begins, require_alone
        self._is_unobserved_told = False

    def for_entry(self) -> dict[str, Callable[..., Any]]:
        """Return what the entry in C calls, by name."""
        return {
            "unwind": self.unwind, **self._telling.for_entry(), "versions": versions_of, "graph_begins": self.hook_inputs, "graph_enters": backward.Entered,
            "graph_ends": self.hook_outputs, "graph_adds": backward.added, "graph_told": self.dispatch.flowed, "graph_failed": self._graph_failed,
        }  # fmt: skip

    def unwind(self, thread: ThreadState, top: Any, module: Module, error: BaseException) -> None:
        """A call was left by an exception: put the thread's state right, tell those who asked, let it go on."""
        thread.busy = False
        if thread.held and not is_from_signal_handler(error):
            self.portions.hand_over(thread)  # what had returned may be what it was left for
        if top is None and thread.kept:
            self.portions.let_go(thread)
        thread.top = top
        self.cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and self.cells[thread.beat + PHASE] == FORWARD:
            self.ends(thread)
        if not was_stopped(error) and self._life.is_live:
            self.dispatch.emit("forward_error", {"module": module, "error": error}, module)

    def hook_outputs(
        self, module: Module, args: tuple[Any, ...], output: Any, entered: backward.Entered, recompute: bool = False
    ) -> Any:
        """Hook the graph that a call has made; in a recompute only where that graph will be used (reentrant)."""
        if recompute and not backward.is_reentrant():
            return output
        mark = self._clock()
        before, after = (self.dispatch.switched_on(hook, module) for hook in ("backward_pre", "backward"))
        if not before and not after:
            return output
        top = entered.thread.top
        if top is not None and is_inside(top[1], module) and not any(one.mutates for one in before + after):
            return output  # its time is part of that of the outermost; and each would walk through all that are inside of it
        flow = backward.Flow(module, self.dispatch, self.local, before + after)
        try:
            return backward.end(flow, args, output, entered, heard_backward=bool(after))
        except Failure as failure:
            self.dispatch.own_failure(f"backward of {module.name}", failure)
            return output
        finally:
            entered.thread.lost += self._clock() - mark
            if self.accounts.is_metered:  # who listens pays for the hooks on the graph as well
                self.accounts.charge((after or before)[0].plugin, mark)

    def begins(self, thread: ThreadState) -> None:
        """A call begins inside of no other."""
        # Only these are counted as events: a read-modify-write costs three times a store.
        self.cells[thread.beat + EVENTS] += 1.0
        self._call_begins(thread)
        thread.returned, thread.passing, thread.kept, thread.held, thread.held_size = [], [], 0, [], 0
        if thread.handed:
            thread.handed = set()
        models, counting = self._models, self._counting
        if counting.is_alert:
            counting.calm()
        thread.passed = counting.passed() if counting.looks else -1
        if self._registry.alone:
            self._require_alone()
        if models.learning:
            models.learn_on()
        phase = int(self.cells[thread.beat + PHASE])
        # It is that still where an exception came at a bad moment.
        thread.outside = phase if phase != FORWARD else OTHER
        thread.flows = self.dispatch.hears_gradients and self._may_hook()
        if phase != DATA:
            self._turn(thread, FORWARD)

    def ends(self, thread: ThreadState) -> None:
        """A call ends that was inside of no other."""
        if thread.held:
            self.portions.hand_over(thread)
        if thread.kept:
            self.portions.let_go(thread)
        if self._counting.is_alert:
            self._counting.calm()
        if thread.passing and not torch.is_grad_enabled():  # no backward will ask what has returned
            self.portions.end_passing(thread)
        if thread.outside != DATA:
            self._turn(thread, thread.outside)

    def output_shown(self, module: Module, output: Any) -> None:
        """Show what a counted call has returned where the entry in C cannot, or where a plugin is to be told of it."""
        dispatch = self.dispatch
        heard = dispatch.switched_on("output_summary", module)
        if heard and self._life.is_live:
            dispatch.tell(heard, values_of(module, output=output))

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
        self.dispatch.own_failure("the backward of a module", error)

    def hook_inputs(self, thread: ThreadState, args: tuple[Any, ...]) -> backward.Entered | None:
        """Note where the graph stands before a call; None where it is not to be hooked."""
        if is_autograd_compiled():
            self._tell_unobserved()
            return None
        mark = self._clock()
        entered = None
        try:
            entered = backward.begin(thread, args)
        except Failure as failure:
            self.dispatch.own_failure("backward", failure)
        thread.lost += self._clock() - mark
        if entered is not None:
            entered.lost = thread.lost  # what was lost until now lies outside of the call
        return entered

    def _tell_unobserved(self) -> None:
        if not self._is_unobserved_told:
            self._is_unobserved_told = True
            self._page.log("info", "backward passes are compiled: gradients inside the model are not observed")
