"""Calls listeners one after the other, each guarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs import FLOWS
from hookd.target.plugins.faults import Failure
from hookd.target.plugins.values import INPUTS, KWARGS, OUTPUT
from hookd.target.tensors import torch_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.entry.threads import ThreadState
    from hookd.target.plugins.accounts import Accounts
    from hookd.target.plugins.listeners import Listener
    from hookd.target.plugins.plugin_errors import Errors


REPLACED = {"backward_pre": "grad_output", "backward": "grad_input"}
"""For each gradient hook, the gradients that a mutator's result replaces."""


class Notifier:
    """Calls the listeners of an event; `no_frame` switches dynamo's frame evaluation."""

    def __init__(self, *, no_frame: Callable[[Any], Any], accounts: Accounts, errors: Errors) -> None:
        self._no_frame, self._accounts = no_frame, accounts
        self._clock, self._charge = accounts.clock, accounts.charge
        self._fault, self._stray, self._own_failure = errors.fault, errors.stray, errors.own_failure

    def notify(self, thread: ThreadState, listeners: list[Listener], values: Any, is_metered: bool) -> None:
        """Call listeners with dynamo's frame evaluation off, so that dynamo does not compile plugins.

        Args:
            thread: the calling thread, in which no plugin is running.
            listeners: the listeners to call.
            values: all values that they may take, as for `Listener.pick`; a mutator's result replaces some.
            is_metered: whether to charge each listener with its time, and hookd with the rest.

        Raises:
            TrainingError: a plugin raised it.
        """
        frame = self._no_frame(None)
        began = before = 0
        try:
            thread.busy = True  # inside: a signal handler may raise after any call
            if is_metered:
                began, before = self._clock(), self._accounts.charged
            self._call_each(listeners, values, began)
        finally:
            thread.busy = False
            self._no_frame(frame)  # the training may catch what a signal handler has raised, and go on
        if is_metered:
            self._accounts.settle(began, before)

    def _call_each(self, listeners: list[Listener], values: Any, since: int) -> None:
        """Call listeners one after the other; the first one is charged from the time `since` on, in ns; 0: none is charged."""
        undo: list[Any] = []
        was = is_refused = False
        try:
            for listener in listeners:
                # The plugin may have been switched off since the event began. A flow in progress is reported to its end.
                if not (listener.is_on or (listener.is_active and listener.hook in FLOWS)):
                    continue
                if listener.needs_quiet:
                    if not undo and not is_refused:
                        was = torch_state.is_grad_enabled()
                        is_refused = not (torch_state.quiet(undo) or self._enter(undo))
                    if is_refused:  # tensors must not be read now
                        continue
                    torch_state.set_grad_enabled(False)  # each time: the previous listener may have enabled it
                elif undo:
                    torch_state.set_grad_enabled(was)
                    torch_state.leave(undo)
                try:
                    only = listener.only
                    result = listener.run(*listener.pick(values)) if only is None else listener.run(values[only])
                    if result is not None:
                        self._take(listener, result, values)
                except BaseException as failure:  # noqa: BLE001  `fault` passes on what is not the plugin's
                    self._fault(listener.plugin, listener.hook, failure)
                finally:
                    if since:
                        since = self._charge(listener.plugin, since)
        finally:
            if undo:
                try:
                    torch_state.set_grad_enabled(was)
                finally:
                    torch_state.leave(undo)

    def notify_plainly(self, listeners: list[Listener], values: list[Any]) -> None:
        """Call listeners that read no tensors and change nothing, in an unmetered step; the entry in C has set up the thread."""
        for listener in listeners:
            if listener.is_on:
                try:
                    only = listener.only
                    result = listener.run(*listener.pick(values)) if only is None else listener.run(values[only])
                    if result is not None:
                        self._stray(listener.plugin, listener.hook)
                except BaseException as failure:  # noqa: BLE001  as above
                    self._fault(listener.plugin, listener.hook, failure)

    def for_entry(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that the entry in C calls, by name."""
        return {"notify": self.notify, "notify_plainly": self.notify_plainly, "no_frame": self._no_frame}

    def _enter(self, undo: list[Any]) -> bool:
        try:
            return torch_state.enter(undo)
        except Failure as failure:  # torch itself raised, for instance for a lost device
            self._own_failure("quiet", failure)
            return False

    def _take(self, listener: Listener, result: Any, values: Any) -> None:
        """Store a mutator's result as torch does with a hook's: torch/nn/modules/module.py `_call_impl`, 2.13.

        Raises:
            RuntimeError: the result cannot be used as arguments.
            ValueError: the number of gradients differs.
        """
        if not listener.mutates:
            self._stray(listener.plugin, listener.hook)
        elif listener.hook in ("forward", "root_forward"):
            values[OUTPUT] = result
        elif listener.hook in ("forward_pre", "root_forward_pre"):
            if "kwargs" in listener.arguments:
                values[INPUTS], values[KWARGS] = _pair(result)
            else:
                values[INPUTS] = _tuple(result)
        elif listener.hook in REPLACED:
            new, replaced = _tuple(result), REPLACED[listener.hook]
            if len(new) != len(values[replaced]):
                raise ValueError(f"{len(new)} gradients returned")
            values[replaced] = new


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _pair(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the result of a forward_pre with `kwargs` after checking it.

    Raises:
        RuntimeError: it is not a pair; the message is torch's.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    msg = f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    raise RuntimeError(msg)
