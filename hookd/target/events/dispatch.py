"""Dispatch of events to the plugins that listen.

The events of each module call are in the plans (`hookd.target.entry.plan`), which use only `accounts` from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.target.plugins.notifier import REPLACED

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
    from hookd.target.plugins.notifier import Notifier
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.target.plugins.routing import Routing


class Dispatch:
    """Calls listeners one after the other, each guarded.

    Attributes:
        hears_gradients: whether any plugin listens to gradients in the step in progress.
        callback: makes the functions that the training calls (`hookd.target.entry.hidden`).
        own_failure: handles an error of hookd itself (`hookd.target.plugins.plugin_errors`).
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        accounts: Accounts,
        notifier: Notifier,
        life: Life,
        local: Threads,
        registry: Registry,
        routing: Routing,
        phases: Phases,
        errors: Errors,
        callback: Callable[..., Callable[..., Any]],
    ) -> None:
        self.accounts, self.callback, self.own_failure = accounts, callback, errors.own_failure
        self._life, self._local, self._notify = life, local, notifier.notify
        self._registry, self._listeners, self._phases = registry, routing.listeners, phases
        self._fault = errors.fault
        self.hears_gradients = False
        self._on: dict[str, list[Listener]] = {}  # active listeners by hook; only of hooks without a module

    def switched_on(self, hook: str, module: Module | None) -> list[Listener]:
        """Return the active listeners of a hook. For a module's hook, these are the listeners at `module`."""
        on = self._on  # `turned` replaces it
        listeners = on.get(hook) if module is None else None
        if listeners is None:
            listeners = [listener for listener in self._listeners(hook, module) if listener.is_on]
            if module is None:
                on[hook] = listeners
        return listeners

    def turned(self) -> None:
        """Drop the cached listeners. Called when a switch was turned, or a plugin was loaded or unloaded."""
        self._on = {}
        self._phases.turned()

    def emit(self, hook: str, values: dict[str, Any], module: Module | None = None) -> None:
        """Call the listeners of a hook, and ignore their results. For hooks that are not part of a plan."""
        listeners = self._on.get(hook) if module is None else None
        if listeners is None:
            listeners = self.switched_on(hook, module)
        thread = self._local.thread
        if listeners and not thread.busy:
            self._notify(thread, listeners, values, self.accounts.is_metered)

    def notify(self, listeners: list[Listener], values: Any) -> None:
        """Call listeners, unless a plugin is running in this thread; see `Notifier.notify`."""
        thread = self._local.thread
        if not thread.busy:
            self._notify(thread, listeners, values, self.accounts.is_metered)

    def flow(self, hook: str, flow: Flow, grads: tuple[Any, ...], *, mutators: bool) -> Any:
        """Call the listeners of a module's gradients: either the mutators or the observers.

        Mutators are called as soon as some gradients must be passed on, which need not be all of them. A gradient that has
        not arrived yet, or was passed on already, is None. Observers are called once, when all gradients have arrived.

        Returns:
            The replacement of `grads`, or None.
        """
        if not self._life.is_live:
            return None
        if mutators:
            listeners = [listener for listener in self.switched_on(hook, flow.module) if listener.mutates]
        else:  # the backward of a sampled call is reported even if it ends in a step that is not sampled
            listeners = [one for one in flow.listeners if one.hook == hook and not one.mutates and one.is_active]
        if not listeners:
            return None
        values = {
            "module": flow.module, "grad_input": tuple(flow.grads_in), "grad_output": tuple(flow.grads_out),
            "elapsed_ns": flow.elapsed_ns or self.accounts.clock() - flow.started, "self_ns": flow.self_ns,
        }  # fmt: skip
        replaces = REPLACED[hook]
        values[replaces] = grads
        self.notify(listeners, values)
        return None if values[replaces] is grads else values[replaces]

    def flowed(  # noqa: PLR0913, PLR0917  `hookd/native/graph.c` calls it
        self,
        module: Module,
        at_call: list[Listener],
        has_left: bool,
        is_bad: bool,
        grad_input: tuple[Any, ...],
        grad_output: tuple[Any, ...],
        elapsed_ns: int,
        self_ns: int,
    ) -> None:
        """Call the observers of a module that was hooked in C, of its listeners `at_call`, the time of the call.

        The gradients have left the module (`backward`) or entered it (`backward_pre`). Listeners with `unless_finite` are
        called only if some gradient is not known to be finite (`is_bad`).
        """
        hook = "backward" if has_left else "backward_pre"
        listeners = [one for one in at_call if one.hook == hook and (is_bad or not one.unless_finite) and one.is_active]
        if listeners and self._life.is_live:
            values = {
                "module": module, "grad_input": grad_input, "grad_output": grad_output, "elapsed_ns": elapsed_ns,
                "self_ns": self_ns,
            }  # fmt: skip
            self.notify(listeners, values)

    def deliver(self, context: Context, then: Callable[[list[float]], None], numbers: list[float]) -> None:
        """Pass numbers that have arrived to the plugin that asked for them, if it is still active."""
        loaded = next((e for e in self._registry if e.context is context), None)
        if loaded is None or loaded.state != "active":
            return
        accounts, thread = self.accounts, self._local.thread
        begun = accounts.clock() if accounts.is_metered else 0
        was_busy = thread.busy  # a hook that asks for many numbers gets some of them while it still runs
        try:
            thread.busy = True
            then(numbers)
        except BaseException as failure:  # noqa: BLE001  counts against the plugin
            self._fault(loaded.number, "later", failure)
        finally:
            thread.busy = was_busy
        if begun and not was_busy:  # inside of a hook, the time is charged with that hook
            accounts.charge(loaded.number, begun)
