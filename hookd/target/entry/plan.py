"""The plan of a module: runs those of its calls that C cannot handle alone.

These are the outermost calls, calls inside of a backward, and calls whose listeners need what C cannot do. All others stay in
`hookd/native/entry.c`, which counts them and calls their listeners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.target.entry.module_group import without_output
from hookd.target.entry.threads import graph_task, is_inside
from hookd.target.events.phases import STEP
from hookd.target.plugins.values import (
    ELAPSED,
    INFERENCE,
    INPUTS,
    IS_NESTED,
    KWARGS,
    OUTPUT,
    RECOMPUTE,
    SELF,
    VERSIONS,
    values_of,
)
from hookd.target.tensors.torch_state import is_unreal, versions_of
from hookd.wire.page import CALL_RECORD

if TYPE_CHECKING:
    from torch import nn

    from hookd.api.events import Module
    from hookd.target.entry.c_entry import Counted
    from hookd.target.entry.calls import Calls
    from hookd.target.entry.module_group import ActiveListeners, ModuleGroup
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.backward import Entered

    Start = tuple[int, int, int]
    """`ThreadState.inner` and `ThreadState.recomputed` when a call began, and the time in ns."""

FILE = "<hookd plan>"
"""File name of a plan's frame in a traceback, so that a traceback of the training does not show hookd's source."""


class Plan:
    """Runs the calls of one module, and calls its listeners.

    The table of plans contains the bound method `run`. An object with `__call__` would use one more level of Python's recursion
    limit.

    Args:
        is_wrapped: whether the module may be inside a wrapper of the same name.

    Attributes:
        counted: what the C entry needs to handle calls of the module; None: it cannot.
        counts_inference: whether the C entry handles its calls of inference too, which are counted apart.
    """

    __slots__ = ("__weakref__", "_calls", "_group", "_is_wrapped", "_module", "_number", "counted", "counts_inference")

    def __init__(self, calls: Calls, module: Module, group: ModuleGroup, *, is_wrapped: bool) -> None:
        self._calls, self._module, self._group, self._is_wrapped = calls, module, group, is_wrapped
        self._number = float(module.id)  # storing an int in a cell costs twice as much
        self.counted: Counted | None = None
        self.counts_inference = False

    def run(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0912, PLR0915
        """Run a call of the module.

        This is the only frame that hookd adds between the caller and the module, both in a traceback and for Python's recursion
        limit.
        """
        calls, module, group = self._calls, self._module, self._group
        accounts = calls.accounts
        is_metered = accounts.is_metered  # read once: a new step may begin in `calls.begins`
        if is_metered:
            accounts.leave()
        thread = calls.local.thread
        bare = calls.visible_call(called) if thread.hidden else calls.bare(called)
        # A mutator's changes must not become part of a trace; observers of tensors are not called in one.
        if thread.busy or (group.mutates and is_unreal()):
            return bare(*args, **kwargs)
        top: Any = thread.top
        own_top: Any = (module, top, self._number, id(called)) if self._is_wrapped else (module, top, self._number)
        if self._is_wrapped and self._is_nested(top) and top[3:] != own_top[3:]:
            # If a wrapper calls a module of the same name, only the wrapper's call is reported. A module that calls itself is
            # reported again.
            thread.top = (module, top[1], *own_top[2:])
            try:
                return bare(*args, **kwargs)
            finally:
                thread.top = top
        recompute = (top is None or thread.backwards != 0) and graph_task() != -1
        values = values_of(module, args, kwargs, recompute=recompute)
        flow: Entered | None = None
        start: Start | None = None
        try:
            thread.top = own_top
            calls.cells[thread.beat] = self._number
            if is_metered:
                calls.record(CALL_RECORD, self._number, calls.cells[thread.beat + STEP])
            if top is None and not recompute:
                calls.begins(thread)
            values[INFERENCE] = thread.infers and not recompute
            listeners = group.active[recompute] or group.find(recompute)
            if listeners.acts_before:
                args, kwargs, flow = self._notify_before(thread, top, listeners, values, is_metered)
            if listeners.is_timed:
                start = thread.inner, thread.recomputed, accounts.clock()
            if is_metered:
                accounts.come_back()
            output = bare(*args, **kwargs)
            if is_metered:
                accounts.leave()
            if start is not None:
                _take_time(thread, accounts.clock(), start, flow, values)
            listeners = group.active[recompute] or group.find(recompute)
            if listeners.acts_after:
                values[OUTPUT] = output
                output = self._notify_after(thread, top, listeners, flow, values, is_metered)
        except BaseException as error:
            calls.unwind(thread, top, module, error)
            if recompute and start is not None and was_stopped(error):
                _take_time(thread, accounts.clock(), start, flow, values)
                self._notify_stopped(thread, top, values, is_metered)
            raise
        thread.top = top
        if listeners.remembers:
            calls.portions.remember(thread, module, args, kwargs, output)
        calls.cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and not recompute:
            calls.ends(thread)
        if values[INFERENCE] and not self.counts_inference:
            calls.count_inference(called, self)
        if is_metered:
            accounts.come_back()
        return output

    run.__code__ = run.__code__.replace(co_filename=FILE)

    def _is_nested(self, top: Any) -> bool:
        return top is not None and top[0] is self._module

    def _notify_before(
        self, thread: ThreadState, top: Any, listeners: ActiveListeners, values: list[Any], is_metered: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Entered | None]:
        """Call the listeners before the module runs; return the call's args and kwargs, and the state of the graph."""
        calls = self._calls
        if listeners.before:
            calls.notify(thread, listeners.before, values, is_metered)
        if listeners.root_before and not self._is_nested(top):
            calls.notify(thread, listeners.root_before, values, is_metered)
        args, kwargs = values[INPUTS], values[KWARGS]
        hooks_graph = listeners.has_flows and calls.dispatch.hears_gradients
        flow = calls.hook_inputs(thread, args) if hooks_graph else None
        if listeners.wants_versions:
            values[VERSIONS] = versions_of(args, kwargs)
        return args, kwargs, flow

    def _notify_after(  # noqa: PLR0917  at every call
        self,
        thread: ThreadState,
        top: Any,
        listeners: ActiveListeners,
        flow: Entered | None,
        values: list[Any],
        is_metered: bool,
    ) -> Any:
        """Call the listeners after the module, and return its output."""
        calls, module = self._calls, self._module
        if listeners.wants_is_nested:
            values[IS_NESTED] = is_inside(top, module)
        if listeners.after:
            calls.notify(thread, listeners.after, values, is_metered)
        if listeners.holds or listeners.suspects:
            versions = () if listeners.is_replaced else values[VERSIONS]
            call = module, values[INPUTS], values[KWARGS], values[OUTPUT], versions
            if listeners.holds:
                calls.portions.queue(thread, *call)
            if listeners.suspects:
                calls.portions.check(thread, *call)
        if listeners.root_after and not self._is_nested(top):
            calls.notify(thread, listeners.root_after, values, is_metered)
        if flow is None:
            return values[OUTPUT]
        return calls.hook_outputs(module, values[INPUTS], values[OUTPUT], flow, values[RECOMPUTE])

    def _notify_stopped(self, thread: ThreadState, top: Any, values: list[Any], is_metered: bool) -> None:
        """Call the listeners for a recompute that torch has ended early. It has taken time as well."""
        active = self._group.find(recompute=True)
        values[IS_NESTED] = is_inside(top, self._module)
        listeners = active.after if self._is_nested(top) else active.after + active.root_after
        if listeners := without_output(listeners):
            self._calls.notify(thread, listeners, values, is_metered)


def _take_time(thread: ThreadState, ended: int, start: Start, flow: Entered | None, values: list[Any]) -> None:
    """Store `elapsed_ns` and `self_ns` of a call that returned at `ended` ns, and add them to the thread's times."""
    inner, recomputed, started = start
    elapsed = ended - started if flow is None else ended - started - (thread.lost - flow.lost)
    values[ELAPSED], values[SELF] = elapsed, elapsed - thread.inner + inner
    # One store each: an exception leaves them consistent, and an inner call is not counted twice.
    thread.inner = inner + elapsed
    if values[RECOMPUTE]:
        thread.recomputed = recomputed + elapsed


def was_stopped(error: BaseException) -> bool:
    """Whether this exception, which is not an error, ends a recompute of torch.utils.checkpoint early (2.1 to 2.14)."""
    return type(error).__name__ == "_StopRecomputationError"
