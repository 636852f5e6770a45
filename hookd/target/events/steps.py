"""Boundaries of the training's steps, and the extent of each backward.

Steps come from torch's global optimizer hooks (2.0+), which fire also for optimizers made before the attach, with schedulers,
and for subclasses. A step is over when its first optimizer has stepped. Other optimizers that step with it
(`hookd.target.events.optimizer_groups`) still belong to it, until something else begins: a forward, a backward, the wait for
data, or an optimizer that has already stepped in it.

Steps without an optimizer of torch are inferred from the parameters (`hookd.target.events.manual_updates`). In a process that
does not train, each outermost call of the largest model is a *turn*, as a step is: sampling and the budget count turns.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from hookd.api import nested
from hookd.api.passive import attributes_of, entries, peek
from hookd.target.entry.patch import Replaced
from hookd.target.events.manual_updates import ManualUpdates
from hookd.target.events.optimizer_groups import OptimizerRow
from hookd.target.events.phases import PHASE
from hookd.target.plugins.faults import Failure
from hookd.target.tensors.host_memory import is_readable
from hookd.target.tensors.torch_state import unseen
from hookd.wire.originals import thread as threads
from hookd.wire.page import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.boundaries import Boundaries
    from hookd.target.events.collectives import Collectives
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.inference import Inference
    from hookd.target.events.micro_batches import MicroBatches
    from hookd.target.events.step_count import StepCount
    from hookd.target.modeltree.names import Names
    from hookd.target.plugins.listeners import Listener
    from hookd.wire.page import PageWriter

try:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
except ImportError:  # torch < 2.0
    register_optimizer_step_pre_hook = register_optimizer_step_post_hook = None  # type: ignore[assignment]

TRIES = 32
"""How often an optimizer without state is asked for its own count of steps, at two attempts per step."""
OTHER, BACKWARD, OPTIMIZER = (PHASES.index(p) for p in ("other", "backward", "optimizer"))


class Steps:
    """Finds the steps of the training, counts them, and reports them.

    Args:
        count: the count of steps; only this class changes it.
        call_visibly: calls a function of the training, visible to profilers.
        set_phase: switches a thread to another phase.
        change: carries out the changes of plugins that are due at the beginning of a step.
        end_passing: ends the references to tensors that may be buffers of a model.
        inference: is notified of each backward.
        micro_batches: is notified of each backward, and of each optimizer.
        collectives: is notified of each backward, with the tensors that it starts from.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        clock: Callable[[], int],
        life: Life,
        local: Threads,
        count: StepCount,
        dispatch: Dispatch,
        names: Names,
        listeners: Callable[[str, Module | None], list[Listener]],
        call_visibly: Callable[..., Any],
        set_phase: Callable[[ThreadState, int], None],
        change: Callable[[], None],
        end_passing: Callable[[ThreadState], None],
        inference: Inference,
        micro_batches: MicroBatches,
        collectives: Collectives,
    ) -> None:
        self.has_hooks = register_optimizer_step_pre_hook is not None
        self._page, self._cells, self._clock = page, page.cells, clock
        self._life, self._local, self._count, self._dispatch = life, local, count, dispatch
        self._listeners, self._call_visibly, self._set_phase = listeners, call_visibly, set_phase
        self._change, self._end_passing, self._main_root = change, end_passing, names.main
        self._inference, self._micro_batches, self._collectives = inference, micro_batches, collectives
        self._boundaries: Boundaries
        self._started_ns = self._stepper = 0  # _stepper: ident of the thread that has made the last step, 0 if none
        self._outside = OTHER
        self._row = OptimizerRow()
        # By id, because an optimizer may not be hashable.
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._examined: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._attempts: dict[int, int] = {}  # of optimizers without state, such as SGD without momentum
        self._handles: list[Any] = []
        self._backward: Replaced | None = None
        # None once an optimizer of torch has stepped.
        self._manual_updates: ManualUpdates | None = ManualUpdates(
            names=names, own_failure=dispatch.own_failure, by_backward=not self.has_hooks
        )

    def report_to(self, boundaries: Boundaries) -> None:
        """Set the receiver of steps, before the first one."""
        self._boundaries = boundaries

    def install(self) -> None:
        """Register the optimizer hooks, and replace `torch.autograd.backward`."""
        if self.has_hooks:
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before()),
                (register_optimizer_step_post_hook, self._after()),
            ):
                self._handles.append(register(self._dispatch.callback(hook)))
        self._backward = Replaced(torch.autograd, "backward", self._wrap_backward)

    def restore(self) -> list[str]:
        """Undo `install`, and return what could not be undone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._backward is None or self._backward.restore():
            return []
        return ["torch.autograd.backward: another tool has patched it on top of hookd, so it was not restored"]

    def optimizers(self) -> list[Any]:
        """Return the optimizers that have made a step since the attach."""
        optimizers = [ref() for ref in self._known.valuerefs()]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def _before(self) -> Callable[..., None]:
        def step_pre(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._life.is_live or _is_nested(sys._getframe(2)):
                return None
            accounts = self._dispatch.accounts
            accounts.leave()
            # Before the closure runs, which may do what looks like a step without an optimizer.
            self._manual_updates = None
            if self._row.is_in_row(optimizer):
                self._row.end_row()
                self._close()
            thread = self._local.thread
            phase = int(self._cells[thread.beat + PHASE])
            self._outside = phase if phase != OPTIMIZER else OTHER  # still OPTIMIZER after a step that raised
            self._set_phase(thread, OPTIMIZER)
            self._micro_batches.optimizer_begins()
            self._find_offset(optimizer, completed=0)
            self._change()
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            values = {"optimizer": optimizer, "step": self._count.absolute(), "has_closure": callable(closure)}
            self._dispatch.emit("step_pre", values)
            self._started_ns = self._clock()
            accounts.come_back()
            if not callable(closure) or not self._listeners("closure_done", None):
                return None
            return _replaced(args, kwargs, self._observed_closure(optimizer, closure))

        return step_pre

    def _observed_closure(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self._life.is_live:
                return closure(*args, **kwargs)
            result = self._call_visibly(self._local.thread, closure, *args, **kwargs)
            if self._life.is_live:
                self._dispatch.emit("closure_done", {"optimizer": optimizer, "step": self._count.absolute()})
            return result

        ours = self._dispatch.callback(observed, closure)
        # An optimizer may read attributes that the training has set on its closure.
        if type(closure) is FunctionType:
            return functools.wraps(closure)(ours)
        vars(ours).update(attributes_of(closure))
        return ours

    def _after(self) -> Callable[..., None]:
        def step_post(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not self._life.is_live or _is_nested(sys._getframe(2)):
                return
            accounts = self._dispatch.accounts
            accounts.leave()
            elapsed_ns = self._clock() - self._started_ns if self._started_ns else 0
            self._set_phase(self._local.thread, self._outside)
            self._micro_batches.optimizer_done()
            self._step_done(optimizer, elapsed_ns)
            accounts.come_back()

        return step_post

    def _step_done(self, optimizer: Any, elapsed_ns: int) -> None:
        values = {"optimizer": optimizer, "step": self._count.absolute(), "elapsed_ns": elapsed_ns}
        try:
            self._dispatch.emit("step_post", values)
            self._find_offset(optimizer, completed=1)
        finally:  # a signal handler may raise while a plugin runs
            if self._known.get(id(optimizer)) is not optimizer:
                self._known[id(optimizer)] = optimizer
                self._main_root.note_new(optimizer)
            elif self._main_root.has_new:
                self._main_root.note_known()
            if self._row.add(optimizer):
                self._end()
            if self._row.is_complete():
                self._close()

    def _end(self, steps: int = 1, *, in_call: bool = False) -> None:
        """Count one or more completed steps.

        Events until `_close` belong to the last of them. Several steps are counted together if they were uncertain until
        now.
        """
        count = self._count
        count.done += steps
        count.is_open = True
        thread = self._local.thread
        self._stepper = 0 if thread.is_engine else threads.get_ident()
        self._boundaries.step_over(steps, self._micro_batches.take(), in_call=in_call)

    def _close(self) -> None:
        count = self._count
        if not count.is_open or count.is_closing:
            return
        count.is_closing = True
        try:
            self._boundaries.step_done()
        finally:
            count.is_open = count.is_closing = False
            self._boundaries.step_begins()

    def begins(self) -> None:
        """Close the completed step, because something other than an optimizer's step begins.

        Only the thread that has made the step closes it; if that was a thread of autograd's engine, any thread does.
        """
        if self._stepper in (0, threads.get_ident()):
            self._row.end_row()
            self._close()

    def finish(self) -> None:
        """Close the completed step at the end of the training; an optimizer's step only in the thread that made it."""
        if self._stepper == threads.get_ident():
            self._close()
        manual_updates = self._manual_updates
        if manual_updates is not None and threads.is_main() and (steps := manual_updates.finish()):
            self._end(steps)
            self._close()

    def _find_offset(self, optimizer: Any, completed: int) -> None:
        """Read the absolute step number from the state that an optimizer has from its first step on, once per optimizer.

        Nothing is read if that would need a device sync. `completed` is 1 if the state already counts the step in progress,
        else 0.
        """
        if self._examined.get(id(optimizer)) is optimizer:
            return
        try:
            states = peek(optimizer, "state")  # by parameter; a copy of this dict would hash the parameters
            first = next(iter(dict.values(states)), None) if issubclass(type(states), dict) else None
            if first is None:
                times = self._attempts[id(optimizer)] = self._attempts.get(id(optimizer), 0) + 1
                if times >= TRIES:
                    self._examined[id(optimizer)] = optimizer
                return
            self._examined[id(optimizer)] = optimizer
            step = _whole_number(entries(first).get("step"))
            before = (
                self._count.number() - 1 - self._row.is_counted
            )  # an earlier optimizer of the row has closed its step
            if step is not None and step + 1 - completed > before + (self._count.offset or 0):
                self._count.offset = offset = max(0, step - before - completed)
                self._page.update_identity(step_offset=offset)
        except Failure as failure:  # an optimizer may keep anything as its state
            self._dispatch.own_failure("the optimizer's own count of steps", failure)

    def _wrap_backward(self, original: Any) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._life.is_live:
                return original(*args, **kwargs)
            thread = self._local.thread
            if thread.busy or thread.backwards:
                return self._call_visibly(thread, original, *args, **kwargs)
            return self._observed_backward(thread, original, args, kwargs)

        return self._dispatch.callback(backward, original)

    def _observed_backward(self, thread: ThreadState, original: Any, args: Any, kwargs: Any) -> Any:
        accounts = self._dispatch.accounts
        accounts.leave()
        self._backward_begins()
        self._inference.backward_begins(thread)
        self._micro_batches.backward_begins()
        phase = int(self._cells[thread.beat + PHASE])
        started, handle = self._clock(), None
        try:
            thread.backwards += 1  # inside: a signal handler may raise after any call
            tensors = self._starts(args, kwargs)
            self._dispatch.emit("loss", {"tensors": tensors})
            handle = self._collectives.backward_begins(thread, tensors)
            self._set_phase(thread, BACKWARD)
            accounts.come_back()
            started = self._clock()
            return self._call_visibly(thread, original, *args, **kwargs)
        finally:
            accounts.leave()
            thread.backwards = 0
            if handle is not None:
                handle.remove()
            if self._life.is_live:
                elapsed_ns = self._clock() - started
                self._set_phase(thread, phase)
                self._dispatch.emit("loss_done", {"elapsed_ns": elapsed_ns})
            self._end_passing(thread)
            manual_updates = self._manual_updates
            if manual_updates is not None:
                manual_updates.backward_done()
            accounts.come_back()

    def _starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a backward starts from."""
        try:
            tensors = kwargs["tensors"] if "tensors" in kwargs else args[0] if args else ()
            # A generator must be left for the training to consume.
            values = [tensors] if nested.is_tensor(tensors) else nested.items(tensors) or ()
            return tuple(filter(nested.is_tensor, values))
        except Failure as failure:
            self._dispatch.own_failure("loss", failure)
            return ()

    def forward_begins(self, thread: ThreadState) -> None:
        """Handle the beginning of an outermost call, which closes the last step, and may end one without an optimizer."""
        self.begins()
        self._boundaries.collect_numbers()
        manual_updates = self._manual_updates
        if manual_updates is None:
            return
        if steps := manual_updates.forward_begins():
            self._end(steps, in_call=True)
            self._close()
            self._change()
        elif thread.top is not None and not self._count.done and manual_updates.is_turn(thread.top[0]):
            self._count.calls += 1
            self._boundaries.call_begins()

    def _backward_begins(self) -> None:
        self.begins()
        manual_updates = self._manual_updates
        if manual_updates is not None and (steps := manual_updates.backward_begins()):
            self._end(steps)
            self._close()


def _whole_number(step: Any) -> int | None:
    """Return an optimizer's `step`; None if it is not finite, or if reading it would sync or run a subclass's code."""
    if type(step) is torch.Tensor:
        with unseen(), torch._C._DisableTorchDispatch():
            step = step.item() if step.device.type == "cpu" and step.numel() == 1 and is_readable(step) else None
    return int(step) if type(step) in (int, float) and math.isfinite(step) else None


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a `step`, including the optimizer, with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _is_nested(wrapper: Any) -> bool:
    """Whether a `step` runs inside another one.

    A subclass calls super().step(), SAM calls the optimizer that it wraps. This looks at the stack, because no hook is
    called after a step that raised (a closure's error, an interrupt). All steps run in frames of one code object:
    torch/optim/optimizer.py `profile_hook_step`, 2.0 to 2.14.
    """
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code:
            return True
        frame = frame.f_back
    return False
