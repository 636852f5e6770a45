"""Hookd's own work at the beginning and at the end of a call, also of one that ends by an exception.

The plans (`hookd.target.entry.plan`) and the C entry call these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.target.entry.dynamo import is_autograd_compiled
from hookd.target.entry.patch import bare_of
from hookd.target.entry.plan import was_stopped
from hookd.target.entry.threads import is_inside
from hookd.target.events import backward
from hookd.target.events.phases import EVENTS, PHASE
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.target.plugins.values import values_of
from hookd.target.tensors.torch_state import is_unreal, versions_of
from hookd.wire import page as pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.counting import Counting
    from hookd.target.entry.plan import Plan
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.batching import Portions
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.inference import Inference
    from hookd.target.events.micro_batches import MicroBatches
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.listeners import Registry
    from hookd.target.plugins.notifier import Notifier
    from hookd.wire.page import PageWriter

FORWARD, OTHER, DATA, INFERENCE = (pages.PHASES.index(phase) for phase in ("forward", "other", "data", "inference"))


class Calls:
    """Maintains a thread's state, its phase and the hooks on the graph.

    Args:
        set_phase: switches a thread to another phase.
        begins: called at each outermost call.
        inference: decides whether an outermost call is inference.
        micro_batches: is notified of the other ones.
        require_alone: stops plugins that may change the training of one rank only.

    Attributes:
        record: puts a record into the page's recorder.
        bare: returns the function that runs a module as if hookd were not there.
        visible_call: returns the same for a plan that is hidden from a profiler: the module itself stays visible.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        life: Life,
        local: Threads,
        dispatch: Dispatch,
        portions: Portions,
        notifier: Notifier,
        models: Models,
        counting: Counting,
        registry: Registry,
        set_phase: Callable[[ThreadState, int], None],
        begins: Callable[[ThreadState], None],
        inference: Inference,
        micro_batches: MicroBatches,
        require_alone: Callable[[], None],
    ) -> None:
        self.cells: Any = page.cells
        self.record: Callable[..., None] = page.record
        self.local, self.dispatch, self.portions, self.notify = local, dispatch, portions, notifier.notify
        self.accounts = dispatch.accounts
        self._notifier = notifier
        self._page, self._life, self._clock = page, life, dispatch.accounts.clock
        self.bare, self.visible_call = bare_of(models.observer.original), counting.visible_call
        self._models, self._counting, self._registry = models, counting, registry
        self._set_phase, self._call_begins, self._require_alone = set_phase, begins, require_alone
        self._inference, self._micro_batches = inference, micro_batches
        self._is_unobserved_logged = False

    def for_entry(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that the C entry calls, by name."""
        return {
            "unwind": self.unwind, **self._notifier.for_entry(), "versions": versions_of, "graph_begins": self.hook_inputs, "graph_enters": backward.Entered,
            "graph_ends": self.hook_outputs, "graph_adds": backward.added, "graph_notifies": self.dispatch.flowed, "graph_failed": self._graph_failed,
        }  # fmt: skip

    def unwind(self, thread: ThreadState, top: Any, module: Module, error: BaseException) -> None:
        """Restore the thread's state after an exception has left a call, and call the listeners of `forward_error`."""
        thread.busy = False
        if thread.pending and not is_from_signal_handler(error):
            self.portions.hand_over(thread)  # an output among them may be the reason for the exception
        if top is None and thread.kept:
            self.portions.let_go(thread)
        thread.top = top
        self.cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and self.cells[thread.beat + PHASE] in (FORWARD, INFERENCE):
            self.ends(thread)
        if not was_stopped(error) and self._life.is_live:
            self.dispatch.emit("forward_error", {"module": module, "error": error}, module)

    def hook_outputs(
        self, module: Module, args: tuple[Any, ...], output: Any, entered: backward.Entered, recompute: bool = False
    ) -> Any:
        """Hook the graph that a call has made; in a recompute, only if the graph will be used (reentrant)."""
        if recompute and not backward.is_reentrant():
            return output
        begun = self._clock()
        before, after = (self.dispatch.switched_on(hook, module) for hook in ("backward_pre", "backward"))
        if not before and not after:
            return output
        top = entered.thread.top
        if top is not None and is_inside(top[1], module) and not any(listener.mutates for listener in before + after):
            # Recursion: its time is part of the outer call's, and each level would walk through all levels inside of it.
            return output
        flow = backward.Flow(module, self.dispatch, self.local, before + after)
        try:
            return backward.end(flow, args, output, entered, heard_backward=bool(after))
        except Failure as failure:
            self.dispatch.own_failure(f"backward of {module.name}", failure)
            return output
        finally:
            entered.thread.lost += self._clock() - begun
            if self.accounts.is_metered:  # the hooks on the graph are charged to a plugin that listens
                self.accounts.charge((after or before)[0].plugin, begun)

    def begins(self, thread: ThreadState) -> None:
        """Handle the beginning of an outermost call."""
        # Only these are counted as events: a read-modify-write costs three times a store.
        self.cells[thread.beat + EVENTS] += 1.0
        self._call_begins(thread)
        thread.returned, thread.passing, thread.kept, thread.pending, thread.pending_size = [], [], 0, [], 0
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
        if thread.top is not None:
            root = thread.top[0]
            thread.infers = self._inference.begins(thread, root)
            if not thread.infers:
                self._micro_batches.call_begins(root)
        phase = int(self.cells[thread.beat + PHASE])
        # An exception at a bad moment may have left FORWARD there.
        thread.outside = phase if phase not in (FORWARD, INFERENCE) else OTHER
        thread.flows = self.dispatch.hears_gradients and self._may_hook()
        if phase != DATA:
            self._set_phase(thread, INFERENCE if thread.infers else FORWARD)

    def ends(self, thread: ThreadState) -> None:
        """Handle the end of an outermost call."""
        if thread.pending:
            self.portions.hand_over(thread)
        if thread.kept:
            self.portions.let_go(thread)
        if self._counting.is_alert:
            self._counting.calm()
        if thread.passing and not torch.is_grad_enabled():  # no backward will need the outputs
            self.portions.end_passing(thread)
        if thread.outside != DATA:
            self._set_phase(thread, thread.outside)

    def count_inference(self, called: nn.Module, plan: Plan) -> None:
        """Make the C entry handle calls of inference of a module from now on."""
        try:
            self._counting.count_inference(id(called), plan)
        except Failure as failure:
            self.dispatch.own_failure("counting of inference", failure)

    def output_shown(self, module: Module, output: Any) -> None:
        """Call the listeners of `output_summary` for a counted call where the C entry cannot do the work itself."""
        dispatch = self.dispatch
        listeners = dispatch.switched_on("output_summary", module)
        if listeners and self._life.is_live:
            dispatch.notify(listeners, values_of(module, output=output))

    def _may_hook(self) -> bool:
        """Whether to hook the graph of an outermost call; asked once for each, also in C (`hookd/native/graph.c`)."""
        if is_autograd_compiled():
            self._log_unobserved()
            return False
        return not is_unreal()

    def _graph_failed(self, error: BaseException) -> None:
        """Handle an error that a hook in C has raised, as `hookd.target.events.backward` does."""
        if not isinstance(error, Failure):
            raise error
        self.dispatch.own_failure("the backward of a module", error)

    def hook_inputs(self, thread: ThreadState, args: tuple[Any, ...]) -> backward.Entered | None:
        """Return the state of the graph before a call, or None if the graph is not to be hooked."""
        if is_autograd_compiled():
            self._log_unobserved()
            return None
        begun = self._clock()
        entered = None
        try:
            entered = backward.begin(thread, args)
        except Failure as failure:
            self.dispatch.own_failure("backward", failure)
        thread.lost += self._clock() - begun
        if entered is not None:
            entered.lost = thread.lost  # the time lost until now is outside of the call
        return entered

    def _log_unobserved(self) -> None:
        if not self._is_unobserved_logged:
            self._is_unobserved_logged = True
            self._page.log("info", "backward passes are compiled: gradients inside the model are not observed")
