"""Record the calls of a plugin's hooks, by means of a subclass."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.api import hookspecs

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.plugin import Plugin


class Event(NamedTuple):
    """One call of a hook.

    Attributes:
        hook: name of the hook.
        module: name of the module for which it was called, "" if there is none.
        arguments: the arguments by name; tensors are copied.
    """

    hook: str
    module: str
    arguments: dict[str, Any]


def hooks_of(plugin: type[Plugin]) -> dict[str, Callable[..., Any]]:
    """Return the functions of a plugin class that are marked as hooks, by name."""
    attributes = {name: getattr(plugin, name, None) for name in dir(plugin)}
    return {name: value for name, value in attributes.items() if callable(value) and hasattr(value, "hookd_impl")}


def wrapped(plugin: type[Plugin], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> type[Plugin]:
    """Create a subclass in which `around(name, function)` replaces each hook; signatures stay the same."""
    pairs = {name: (hook, around(name, hook)) for name, hook in hooks_of(plugin).items()}
    hooks = {name: functools.wraps(hook)(call) for name, (hook, call) in pairs.items() if call is not hook}
    return type(plugin.__name__, (plugin,), {"__module__": plugin.__module__, "__doc__": plugin.__doc__, **hooks})


def recorded(plugin: type[Plugin], events: list[Event]) -> type[Plugin]:
    """Create a subclass that appends each call of a known hook to `events` before it calls the hook."""

    def around(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)[1:]
        if hook not in hookspecs.HOOKS:
            return function

        def call(self: Plugin, *values: Any) -> Any:
            arguments = dict(zip(names, map(_kept, values), strict=True))
            events.append(Event(hook, getattr(arguments.get("module"), "name", ""), arguments))
            return function(self, *values)

        return call

    return wrapped(plugin, around)


def _kept(value: Any) -> Any:
    """Copy the tensors in a value: arguments of hooks may change later, and must not be retained."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        copied = [_kept(item) for item in value]
        return type(value)(*copied) if hasattr(value, "_fields") else type(value)(copied)
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    return value
