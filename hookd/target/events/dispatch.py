"""Giving events to the plugins that listen. Runs in the target.

What happens at every call of a module is in the plans (`hookd.target.entry.plan`), which come here for accounts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.target.plugins.faults import Failure
from hookd.target.tensors import torch_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.context import Context
    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads
    from hookd.target.events.backward import Flow
    from hookd.target.events.phases import Phases
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.target.plugins.routing import Audience

OWN = -1
"""Stands for hookd itself where plugins have their numbers."""


class Dispatch:
    """Calls listeners, one after the other, each guarded.

    Args:
        no_frame: switches dynamo's frame evaluation.
        audience: knows who listens.
        errors: is told of what leaves a plugin.

    Attributes:
        is_metered: whether the step in progress is one of those in which the time is taken of each plugin, and of all that is not the
            training's own code.
        hears_gradients: whether anybody listens to gradients in it.
        spent: ns spent in each plugin during a metered step, by the plugin's number, and in hookd itself as `OWN`.
        charged: ns of all that so far.
        calls: of each plugin's hooks during a metered step, by the plugin's number.
        clock: ns; what plugins spend is measured by it.
        entrance: makes the functions that the training calls (`hookd.target.entry.hidden`).
        own_failure: deals with an error of hookd itself (`hookd.target.plugins.plugin_errors`).
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        clock: Callable[[], int],
        no_frame: Callable[[Any], Any],
        life: Life,
        local: Threads,
        registry: Registry,
        audience: Audience,
        phases: Phases,
        errors: Errors,
        entrance: Callable[..., Callable[..., Any]],
    ) -> None:
        self.clock, self.entrance, self.own_failure = clock, entrance, errors.own_failure
        self._no_frame, self._life, self._local = no_frame, life, local
        self._registry, self._listeners, self._phases = registry, audience.listeners, phases
        self._fault, self._stray = errors.fault, errors.stray
        self.is_metered = self.hears_gradients = False
        self.spent: dict[int, int] = {}
        self.charged = 0
        self.calls: dict[int, int] = {}
        self._on: dict[str, list[Listener]] = {}  # by hook, of those that are no module's

    def switched_on(self, hook: str, module: Module | None) -> list[Listener]:
        """Give who listens to a hook, at a module where it is a module's hook, and is to be called now."""
        on = self._on  # another one once a switch is turned
        found = on.get(hook) if module is None else None
        if found is None:
            found = [one for one in self._listeners(hook, module) if one.is_on]
            if module is None:
                on[hook] = found
        return found

    def turned(self) -> None:
        """Find out again who is to be called: a switch was turned, or a plugin came or went."""
        self._on = {}
        self._phases.turned()

    def emit(self, hook: str, values: dict[str, Any], module: Module | None = None) -> None:
        """Give the listeners of a hook that is not part of a plan, and whose result nobody uses."""
        heard = self.switched_on(hook, module)
        if not heard:
            return
        begun, before = self.mark(), self.charged
        self.tell(heard, values)
        if begun:
            self.settle(begun, before)

    def flow(self, hook: str, flow: Flow, grads: tuple[Any, ...], *, mutators: bool) -> Any:
        """Give the listeners of a module's gradients, either the mutators or all others.

        Mutators are asked as soon as some gradients must be handed on, which need not be all of them: what is not there
        yet, or was handed on already, is None. Observers are told once, when everything is there.

        Returns:
            What replaces `grads`, or None.
        """
        if not self._life.is_live:
            return None
        if mutators:
            heard = [one for one in self.switched_on(hook, flow.module) if one.mutates]
        else:  # a sampled call is told of to its end, also where that comes in a step that is not sampled
            heard = [one for one in flow.heard if one.hook == hook and not one.mutates and self._is_active(one)]
        if not heard:
            return None
        values = {
            "module": flow.module, "grad_input": tuple(flow.grads_in), "grad_output": tuple(flow.grads_out),
            "elapsed_ns": flow.elapsed_ns or self.clock() - flow.started, "self_ns": flow.self_ns,
        }  # fmt: skip
        replaces = "grad_output" if hook == "backward_pre" else "grad_input"
        values[replaces] = grads
        return self.tell(heard, values, replaces)

    def flowed(  # noqa: PLR0913, PLR0917  `hookd/native/graph.c` calls it
        self,
        module: Module,
        heard: list[Listener],
        has_left: bool,
        is_bad: bool,
        grad_input: tuple[Any, ...],
        grad_output: tuple[Any, ...],
        elapsed_ns: int,
        self_ns: int,
    ) -> None:
        """Tell observers of the gradients of a module that was hooked in C.

        Args:
            module: which one.
            heard: who listened when the call was made.
            has_left: whether they have left the module; or have entered it.
            is_bad: whether any is not known to be finite, of which some are not told otherwise.
            grad_input: those that have left, None where there is none.
            grad_output: those that have entered.
            elapsed_ns: the time until now.
            self_ns: what of it was not inside of a module inside.
        """
        hook = "backward" if has_left else "backward_pre"
        told = [one for one in heard if one.hook == hook and (is_bad or not one.unless_finite) and self._is_active(one)]
        if told and self._life.is_live:
            values = {
                "module": module,
                "grad_input": grad_input,
                "grad_output": grad_output,
                "elapsed_ns": elapsed_ns,
                "self_ns": self_ns,
            }
            self.tell(told, values)

    def _is_active(self, one: Listener) -> bool:
        entry = self._registry.entries.get(one.plugin)
        return entry is not None and entry.state == "active"

    def tell(self, heard: list[Listener], values: Any, replaces: str = "") -> Any:
        """Call listeners one after the other; what a mutator returns replaces a value for those after it.

        Args:
            heard: listeners.
            values: what they could be told, as `Listener.pick` takes it.
            replaces: the name of the one that mutators replace.

        Returns:
            The value `replaces` if it was replaced, else None.
        """
        thread = self._local.thread
        if thread.busy:
            return None
        no_frame = self._no_frame
        frame = no_frame(None)
        try:
            thread.busy = True
            for one in heard:
                if one.mutates:
                    return self._in_turn(heard, values, replaces)
            self.observe(heard, values)
            return None
        finally:
            thread.busy = False
            no_frame(frame)

    def _in_turn(self, heard: list[Listener], values: dict[str, Any], replaces: str) -> Any:
        replaced = None
        for one in heard:
            result = self.call(one, values)
            if result is not None and replaces:
                new = result if isinstance(result, tuple) else (result,)
                if len(new) == len(values[replaces]):
                    values[replaces] = replaced = new
                else:
                    self._fault(one.plugin, one.hook, ValueError(f"{len(new)} gradients returned"))
        return replaced

    def call(self, one: Listener, values: dict[str, Any]) -> Any:
        """Call a listener, an observer with torch's modes taken away; what a mutator returns."""
        if one.mutates:
            return self.guarded(one, values)
        self.observe([one], values)
        return None

    def observe(self, heard: list[Listener], values: Any) -> None:
        """Call observers, torch's modes taken away for all of them at once."""
        was, undo = torch_state.is_grad_enabled(), None
        try:
            undo = self._enter()
            for one in heard if undo is not None else ():
                torch_state.set_grad_enabled(False)  # each time, for the one before may have switched it on
                self.guarded(one, values)
        finally:
            if undo:
                torch_state.set_grad_enabled(was)
                torch_state.leave(undo)

    def _enter(self) -> list[Any] | None:
        try:
            return torch_state.enter()
        except Failure as failure:  # torch's own, as of a device that is lost
            self.own_failure("quiet", failure)
            return None

    def guarded(self, one: Listener, values: Any) -> Any:
        """Call a listener with those of the values that it wants; what leaves it is its own error, unless it may tell the training."""
        mark = self.mark()
        try:
            result = one.run(*one.pick(values))
            if result is not None and not one.mutates:
                self._stray(one.plugin, one.hook)
            return result
        except BaseException as failure:  # noqa: BLE001  `_fault` passes on what is not the plugin's
            self._fault(one.plugin, one.hook, failure)
            return None
        finally:
            if mark:
                self.charge(one.plugin, mark)

    def deliver(self, context: Context, then: Callable[[list[float]], None], numbers: list[float]) -> None:
        """Give a plugin numbers that have arrived, if it is still there."""
        entry = next((e for e in self._registry if e.context is context), None)
        if entry is None or entry.state != "active":
            return
        mark, thread = self.mark(), self._local.thread
        was_busy = thread.busy  # it may be asked for so much inside of a hook that some is delivered there
        try:
            thread.busy = True
            then(numbers)
        except BaseException as failure:  # noqa: BLE001  as above
            self._fault(entry.number, "later", failure)
        finally:
            thread.busy = was_busy
        if mark:
            self.charge(entry.number, mark)

    # -- accounts

    def mark(self) -> int:
        """Return the time, ns, in a metered step, and 0 in all others."""
        return self.clock() if self.is_metered else 0

    def charge(self, number: int, mark: int) -> int:
        """Add the time since `mark` to what a plugin has spent.

        Returns:
            The time now, ns.
        """
        now = self.clock()
        self.spent[number] = self.spent.get(number, 0) + now - mark
        self.charged += now - mark
        self.calls[number] = self.calls.get(number, 0) + 1
        return now

    def settle(self, begun: int, before: int) -> None:
        """Add to what hookd itself has spent the time since `begun`, without what was charged or settled since.

        Args:
            begun: when the training's own code was left, ns.
            before: what `charged` was then.
        """
        spent = max(0, self.clock() - begun - (self.charged - before))  # another thread may charge meanwhile
        self.spent[OWN] = self.spent.get(OWN, 0) + spent
        self.charged += spent
