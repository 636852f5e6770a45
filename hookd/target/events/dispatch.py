"""Giving events to the plugins that listen. Runs in the target.

What happens at every call of a module is in the plans (`hookd.target.entry.plan`), which come here for accounts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.target.plugins.telling import REPLACED

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.context import Context
    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads
    from hookd.target.events.backward import Flow
    from hookd.target.events.phases import Phases
    from hookd.target.plugins.accounts import Accounts
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.target.plugins.routing import Audience
    from hookd.target.plugins.telling import Telling


class Dispatch:
    """Calls listeners, one after the other, each guarded.

    Args:
        audience: knows who listens.
        telling: tells them.
        errors: is told of what leaves a plugin.

    Attributes:
        accounts: of metered steps.
        hears_gradients: whether anybody listens to gradients in it.
        entrance: makes the functions that the training calls (`hookd.target.entry.hidden`).
        own_failure: deals with an error of hookd itself (`hookd.target.plugins.plugin_errors`).
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        accounts: Accounts,
        telling: Telling,
        life: Life,
        local: Threads,
        registry: Registry,
        audience: Audience,
        phases: Phases,
        errors: Errors,
        entrance: Callable[..., Callable[..., Any]],
    ) -> None:
        self.accounts, self.entrance, self.own_failure = accounts, entrance, errors.own_failure
        self._life, self._local, self._tell = life, local, telling.tell
        self._registry, self._listeners, self._phases = registry, audience.listeners, phases
        self._fault = errors.fault
        self.hears_gradients = False
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
        """Tell the listeners of a hook that is not part of a plan, and whose result nobody uses."""
        heard = self._on.get(hook) if module is None else None
        if heard is None:
            heard = self.switched_on(hook, module)
        thread = self._local.thread
        if heard and not thread.busy:
            self._tell(thread, heard, values, self.accounts.is_metered)

    def tell(self, heard: list[Listener], values: Any) -> None:
        """Tell listeners, unless a plugin is what has called: see `Telling.tell`."""
        thread = self._local.thread
        if not thread.busy:
            self._tell(thread, heard, values, self.accounts.is_metered)

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
            heard = [one for one in flow.heard if one.hook == hook and not one.mutates and one.is_active]
        if not heard:
            return None
        values = {
            "module": flow.module, "grad_input": tuple(flow.grads_in), "grad_output": tuple(flow.grads_out),
            "elapsed_ns": flow.elapsed_ns or self.accounts.clock() - flow.started, "self_ns": flow.self_ns,
        }  # fmt: skip
        replaces = REPLACED[hook]
        values[replaces] = grads
        self.tell(heard, values)
        return None if values[replaces] is grads else values[replaces]

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
        told = [one for one in heard if one.hook == hook and (is_bad or not one.unless_finite) and one.is_active]
        if told and self._life.is_live:
            values = {
                "module": module,
                "grad_input": grad_input,
                "grad_output": grad_output,
                "elapsed_ns": elapsed_ns,
                "self_ns": self_ns,
            }
            self.tell(told, values)

    def deliver(self, context: Context, then: Callable[[list[float]], None], numbers: list[float]) -> None:
        """Give a plugin numbers that have arrived, if it is still there."""
        entry = next((e for e in self._registry if e.context is context), None)
        if entry is None or entry.state != "active":
            return
        accounts, thread = self.accounts, self._local.thread
        mark = accounts.clock() if accounts.is_metered else 0
        was_busy = thread.busy  # it may be asked for so much inside of a hook that some is delivered there
        try:
            thread.busy = True
            then(numbers)
        except BaseException as failure:  # noqa: BLE001  as above
            self._fault(entry.number, "later", failure)
        finally:
            thread.busy = was_busy
        if mark and not was_busy:  # who has asked inside of a hook is charged with that hook
            accounts.charge(entry.number, mark)
