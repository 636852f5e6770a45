"""What runs at every call of an observed module: its plan. Runs in the target.

Calls of modules to which no Python function listens are counted in C (`hookd/native/entry.c`) and do not come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.target.entry.shape import without_output
from hookd.target.entry.threads import is_inside
from hookd.target.plugins.values import ELAPSED, INPUTS, IS_AGAIN, KWARGS, OUTPUT, RECOMPUTE, SELF, VERSIONS, values_of
from hookd.target.tensors.torch_state import is_unreal, versions_of
from hookd.wire.page import CALL_RECORD, MODULE, STEP

if TYPE_CHECKING:
    from torch import nn

    from hookd.api.events import Module
    from hookd.target.entry.c_entry import Counted
    from hookd.target.entry.calls import Calls
    from hookd.target.entry.shape import Heard, Shape
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.backward import Entered

    Stood = tuple[int, int, int]
    """`ThreadState.inner` and `ThreadState.again` when a call began, and the time, ns."""

FILE = "<hookd plan>"
"""The file of a plan's frame in a traceback of the training, which is to show no source of hookd's."""
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_STEP = STEP - MODULE
"""The cell of a heartbeat, from its module cell on."""


class Plan:
    """Runs the calls of one module, and tells its listeners: by `run`.

    That bound method is what is looked up and called: an object with `__call__` would take one more level of Python's recursion limit.

    Args:
        calls: does what is to be done beside that.
        module: as plugins see it.
        shape: has the listeners.
        is_wrapped: whether the module may stand inside a wrapper of the same name.

    Attributes:
        counted: what the entry in C counts while nobody listens.
    """

    __slots__ = ("__weakref__", "_calls", "_is_wrapped", "_module", "_number", "_shape", "counted")

    def __init__(self, calls: Calls, module: Module, shape: Shape, *, is_wrapped: bool) -> None:
        self._calls, self._module, self._shape, self._is_wrapped = calls, module, shape, is_wrapped
        self._number = float(module.id)  # to store an int in a cell costs twice as much
        self.counted: Counted | None = None

    def run(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0912, PLR0915
        """Run a call of the module.

        This frame is all that hookd puts between the caller and the module: in a traceback, and before Python's recursion limit.
        """
        calls, module, shape = self._calls, self._module, self._shape
        accounts = calls.accounts
        is_metered = accounts.is_metered  # asked once: where the outermost call begins a new step may begin
        away = (accounts.clock(), accounts.charged) if is_metered else (0, 0)
        thread = calls.local.thread
        bare = calls.aloud_of(called) if thread.hidden else calls.bare(called)
        # What a mutator does must not be baked into a trace; observers of tensors are not called in one.
        if thread.busy or (shape.mutates and is_unreal()):
            return bare(*args, **kwargs)
        top: Any = thread.top
        mine: Any = (module, top, self._number, id(called)) if self._is_wrapped else (module, top, self._number)
        if self._is_wrapped and self._is_nested(top) and top[3:] != mine[3:]:
            # Of a module and a wrapper of the same name the wrapper's call is reported; one of the very same object is one more.
            thread.top = (module, top[1], *mine[2:])
            try:
                return bare(*args, **kwargs)
            finally:
                thread.top = top
        recompute = (top is None or thread.backwards != 0) and _graph_task() != -1
        values = values_of(module, args, kwargs, recompute=recompute)
        flow: Entered | None = None
        stood: Stood | None = None
        try:
            thread.top = mine
            calls.cells[thread.beat] = self._number
            if is_metered:
                calls.record(CALL_RECORD, self._number, calls.cells[thread.beat + _STEP])
            if top is None and not recompute:
                calls.begins(thread)
            heard = shape.heard[recompute] or shape.find(recompute)
            if heard.is_told_before:
                args, kwargs, flow = self._tell_before(thread, top, heard, values, is_metered)
            if heard.is_timed:
                stood = thread.inner, thread.again, accounts.clock()
            if is_metered:
                accounts.settle(*away)
            output = bare(*args, **kwargs)
            if is_metered:
                away = accounts.clock(), accounts.charged
            if stood is not None:
                _take_time(thread, accounts.clock(), stood, flow, values)
            heard = shape.heard[recompute] or shape.find(recompute)
            if heard.is_told_after:
                values[OUTPUT] = output
                output = self._tell_after(thread, top, heard, flow, values, is_metered)
        except BaseException as error:
            calls.unwind(thread, top, module, error)
            if recompute and stood is not None and was_stopped(error):
                _take_time(thread, accounts.clock(), stood, flow, values)
                self._tell_stopped(thread, top, values, is_metered)
            raise
        thread.top = top
        if heard.remembers:
            calls.portions.remember(thread, module, args, kwargs, output)
        calls.cells[thread.beat] = 0.0 if top is None else top[2]
        if top is None and not recompute:
            calls.ends(thread)
        if is_metered:
            accounts.settle(*away)
        return output

    run.__code__ = run.__code__.replace(co_filename=FILE)

    def _is_nested(self, top: Any) -> bool:
        return top is not None and top[0] is self._module

    def _tell_before(
        self, thread: ThreadState, top: Any, heard: Heard, values: list[Any], is_metered: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Entered | None]:
        """Tell that the module is about to run; return what it is called with, and what is known of the graph."""
        calls = self._calls
        if heard.before:
            calls.tell(thread, heard.before, values, is_metered)
        if heard.root_before and not self._is_nested(top):
            calls.tell(thread, heard.root_before, values, is_metered)
        args, kwargs = values[INPUTS], values[KWARGS]
        hooks_graph = heard.has_flows and calls.dispatch.hears_gradients
        flow = calls.hook_inputs(thread, args) if hooks_graph else None
        if heard.wants_versions:
            values[VERSIONS] = versions_of(args, kwargs)
        return args, kwargs, flow

    def _tell_after(  # noqa: PLR0917  at every call
        self,
        thread: ThreadState,
        top: Any,
        heard: Heard,
        flow: Entered | None,
        values: list[Any],
        is_metered: bool,
    ) -> Any:
        """Tell that the module has returned; return what its caller gets."""
        calls, module = self._calls, self._module
        if heard.wants_is_again:
            values[IS_AGAIN] = is_inside(top, module)
        if heard.after:
            calls.tell(thread, heard.after, values, is_metered)
        if heard.holds or heard.suspects:
            versions = () if heard.is_replaced else values[VERSIONS]
            call = module, values[INPUTS], values[KWARGS], values[OUTPUT], versions
            if heard.holds:
                calls.portions.hold(thread, *call)
            if heard.suspects:
                calls.portions.look(thread, *call)
        if heard.root_after and not self._is_nested(top):
            calls.tell(thread, heard.root_after, values, is_metered)
        if flow is None:
            return values[OUTPUT]
        return calls.hook_outputs(module, values[INPUTS], values[OUTPUT], flow, values[RECOMPUTE])

    def _tell_stopped(self, thread: ThreadState, top: Any, values: list[Any], is_metered: bool) -> None:
        """Tell of a recompute that torch has ended as soon as it had what it needs: it has taken time as well."""
        heard = self._shape.find(recompute=True)
        values[IS_AGAIN] = is_inside(top, self._module)
        told = heard.after if self._is_nested(top) else heard.after + heard.root_after
        if told := without_output(told):
            self._calls.tell(thread, told, values, is_metered)


def _take_time(thread: ThreadState, ended: int, stood: Stood, flow: Entered | None, values: list[Any]) -> None:
    """Take the time of a call.

    Args:
        thread: has what it has spent so far: `inner` in observed calls, `lost` in hookd's own hooks on the graph, `again` in recomputes.
            Its caller is told of a call's time by one store each; so an exception leaves them right, and an inner call cannot be counted twice.
        ended: when it has returned, ns.
        stood: as it began.
        flow: of the graph, if that is hooked.
        values: get `elapsed_ns` and `self_ns`.
    """
    inner, again, started = stood
    elapsed = ended - started if flow is None else ended - started - (thread.lost - flow.lost)
    values[ELAPSED], values[SELF] = elapsed, elapsed - thread.inner + inner
    thread.inner = inner + elapsed
    if values[RECOMPUTE]:
        thread.again = again + elapsed


def was_stopped(error: BaseException) -> bool:
    """Whether torch.utils.checkpoint ends a recompute early by this exception (2.1 to 2.14); it is no error."""
    return type(error).__name__ == "_StopRecomputationError"
