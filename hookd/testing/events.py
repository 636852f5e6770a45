"""What the hooks of a plugin were called with, written down by a subclass of it."""

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
        hook: its name.
        module: the name of the module that it was called for, "" where there is none.
        arguments: what it asked for, by name; of tensors a copy.
    """

    hook: str
    module: str
    arguments: dict[str, Any]


def hooks_of(plugin: type[Plugin]) -> dict[str, Callable[..., Any]]:
    """Give the functions of a plugin class that are marked as hooks, by their names."""
    found = {name: getattr(plugin, name, None) for name in dir(plugin)}
    return {name: one for name, one in found.items() if callable(one) and hasattr(one, "hookd_impl")}


def wrapped(plugin: type[Plugin], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> type[Plugin]:
    """Make a subclass of which each hook is what `around` makes of its name and function; it keeps its signature."""
    made = {name: (one, around(name, one)) for name, one in hooks_of(plugin).items()}
    hooks = {name: functools.wraps(one)(call) for name, (one, call) in made.items() if call is not one}
    return type(plugin.__name__, (plugin,), {"__module__": plugin.__module__, "__doc__": plugin.__doc__, **hooks})


def recorded(plugin: type[Plugin], events: list[Event]) -> type[Plugin]:
    """Make a subclass that appends each call of a known hook to `events` before it is done."""

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
    """Copy the tensors of a value: what hooks are given may be changed later, and must not be kept."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        kept = [_kept(one) for one in value]
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
    if isinstance(value, dict):
        return {key: _kept(one) for key, one in value.items()}
    return value
