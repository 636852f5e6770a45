"""Telling listeners of a module's call: one after the other, each guarded. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.target.entry.threads import is_inside
from hookd.target.tensors import torch_state
from hookd.target.tensors.torch_state import versions_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.entry.shape import Told
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.plugins.listeners import Listener
    from hookd.target.plugins.plugin_errors import Errors


class Telling:
    """Tells listeners what they want to know.

    Args:
        no_frame: switches dynamo's frame evaluation.
        dispatch: has the accounts of metered steps.
        errors: is told of what leaves a plugin.
    """

    def __init__(self, *, no_frame: Callable[[Any], Any], dispatch: Dispatch, errors: Errors) -> None:
        self._no_frame, self._dispatch = no_frame, dispatch
        self._clock, self._charge = dispatch.clock, dispatch.charge
        self._fault, self._stray = errors.fault, errors.stray

    def tell(self, thread: ThreadState, listeners: list[Listener], values: dict[str, Any], is_metered: bool) -> None:
        """Tell listeners, all in one bracket: dynamo must not compile plugins that run under its callback.

        Args:
            thread: the calling one.
            listeners: who is told.
            values: all that they may want, by the names of their arguments; what a mutator returns replaces some.
            is_metered: whether each is charged with the time that it takes.
        """
        frame = self._no_frame(None)
        thread.busy = True
        mark = self._clock() if is_metered else 0
        was, undo = False, None
        try:
            for one in listeners:
                if not one.is_on:  # any more: one before has failed, say
                    continue
                if one.needs_quiet and undo is None:
                    was, undo = torch_state.is_grad_enabled(), torch_state.enter()
                    if undo is None:  # tensors must not be looked at now
                        continue
                    torch_state.set_grad_enabled(False)
                elif undo and not one.needs_quiet:
                    torch_state.set_grad_enabled(was)
                    torch_state.leave(undo)
                    undo = None
                try:
                    result = one.run(values[one.only]) if one.only else one.run(*one.pick(values))
                    if result is not None:
                        self._take(one, result, values)
                except BaseException as failure:  # noqa: BLE001  `fault` passes on what is not the plugin's
                    self._fault(one.plugin, one.hook, failure)
                if is_metered:
                    mark = self._charge(one.plugin, mark)
        finally:
            if undo:
                torch_state.set_grad_enabled(was)
                torch_state.leave(undo)
        thread.busy = False
        self._no_frame(frame)

    def before(
        self, told: Told, thread: ThreadState, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Tell that a module is about to run whose calls are counted in C; return what `after` is to be given.

        Raises:
            TrainingError: a plugin may raise it.
        """
        dispatch = self._dispatch
        is_metered = dispatch.is_metered
        away = (dispatch.clock(), dispatch.charged) if is_metered else (0, 0)
        values = _values(module, args, kwargs)
        if told.before:
            self.tell(thread, told.before, values, is_metered)
        if told.wants_versions:
            values["versions"] = versions_of(args, kwargs)
        if is_metered:
            dispatch.settle(*away)
        return values

    def after(  # noqa: PLR0917  the entry in C calls it
        self,
        told: Told,
        thread: ThreadState,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: dict[str, Any] | None,
        output: Any,
        elapsed_ns: int,
        self_ns: int,
    ) -> None:
        """Tell that it has returned.

        Args:
            told: has the listeners.
            thread: the calling one.
            module: that was called.
            args: by position.
            kwargs: by name.
            values: what `before` has returned; None where that was not called.
            output: that was returned.
            elapsed_ns: how long it took,
            self_ns: and how long without the observed modules inside of it.

        Raises:
            TrainingError: a plugin may raise it.
        """
        dispatch = self._dispatch
        is_metered = dispatch.is_metered
        away = (dispatch.clock(), dispatch.charged) if is_metered else (0, 0)
        if values is None:
            values = _values(module, args, kwargs)
        values["output"], values["elapsed_ns"], values["self_ns"] = output, elapsed_ns, self_ns
        if told.wants_is_again:
            values["is_again"] = thread.top is not None and is_inside(thread.top[1], module)
        self.tell(thread, told.after, values, is_metered)
        if is_metered:
            dispatch.settle(*away)

    def _take(self, one: Listener, result: Any, values: dict[str, Any]) -> None:
        """Do with a mutator's result what torch does with a hook's: torch/nn/modules/module.py `_call_impl`, 2.13."""
        if not one.mutates:
            self._stray(one.plugin, one.hook)
        elif one.hook in ("forward", "root_forward"):
            values["output"] = result
        elif "kwargs" in one.arguments:
            values["inputs"], values["kwargs"] = _pair(result)
        else:
            values["inputs"] = result if isinstance(result, tuple) else (result,)


def _values(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"module": module, "inputs": args, "kwargs": kwargs, "recompute": False, "versions": ()}


def _pair(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check what a forward_pre with `kwargs` returned, in torch's words.

    Raises:
        RuntimeError: it is not a pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    msg = f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    raise RuntimeError(msg)
