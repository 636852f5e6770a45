"""The rules that a plugin must obey; a refusal names the file and line in the plugin's source."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hookd.api import compatibility, hookspecs, rates
from hookd.api.compatibility import is_name, nearest
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.api.context import Context
    from hookd.api.plugin import Plugin


def check(plugin: Plugin, *, by_name: bool) -> None:
    """Refuse a plugin that breaks a rule, with the line in its source.

    Raises:
        PluginError: the name is invalid; the plugin mutates and was not enabled by name; it requires another API; a hook is
            unknown or a wrapper; an argument is unknown to the hook or has a default; or an attribute breaks a rule
            of `check_attributes`.
    """
    name = plugin.name
    if not is_name(name):
        said = f"{name!r} cannot be a plugin's name" if name else "it has no name"
        raise PluginError(f"{type(plugin).__name__}: {said}: a lower-case word is needed that no core metric begins with"
                          f"{_class_line(type(plugin))}", hint=f"name = {type(plugin).__name__.lower()!r} in the class")  # fmt: skip
    compatibility.check(name, plugin.requires_api)
    if plugin.mutates and not by_name:
        raise PluginError(f"{name} changes training, so it must be enabled by name: -p {name}")
    for hook, function in marked(type(plugin)):
        check_hook(name, hook, function)
    check_attributes(plugin)


def check_attributes(plugin: Plugin) -> None:
    """Refuse attributes that would have the plugin's hooks called otherwise than its author meant.

    Raises:
        PluginError: an attribute does not exist any more, does not name hooks as it should, or has rates that exclude each
            other.
    """
    for attribute, instead in compatibility.FORMER.items():
        if hasattr(plugin, attribute):
            at = _class_line(type(plugin))
            raise PluginError(
                f"{plugin.name}: plugins do not have the attribute {attribute} any more{at}", reason="api", hint=instead
            )
    for attribute in compatibility.NAMING:
        _check_named(plugin, attribute)
    if isinstance(plugin.sampled, dict):
        problem = rates.problem(plugin.sampled, plugin.longest)
        if problem is not None:
            message, hint = problem
            raise PluginError(f"{plugin.name}: {message}{_class_line(type(plugin))}", hint=hint)


def _check_named(plugin: Plugin, attribute: str) -> None:
    """Refuse an attribute that does not name existing hooks: such a plugin would be called at every step."""
    named = getattr(plugin, attribute)
    if not isinstance(named, (tuple, list, dict) if attribute == "sampled" else (tuple, list)):
        message = f"{plugin.name}: {attribute} is {named!r}, but must be a tuple of hook names"
        raise PluginError(
            message + _class_line(type(plugin)), hint=f'Write {attribute} = ("forward",), with the comma.'
        )
    for hook in named:
        if hook not in hookspecs.HOOKS:
            message = f"{plugin.name}: {attribute} names {hook!r}, but there is no such hook"
            raise PluginError(message + _class_line(type(plugin)), hint=nearest(str(hook), hookspecs.HOOKS))


def marked(kind: type[Plugin]) -> Iterable[tuple[str, Callable[..., Any]]]:
    """Yield the functions of a plugin class that are marked as hooks, with their names."""
    for attribute in dir(kind):
        function = getattr(kind, attribute, None)
        if callable(function) and hasattr(function, "hookd_impl"):
            yield attribute, function


def check_hook(name: str, hook: str, function: Callable[..., Any]) -> None:
    """Refuse a hook that does not exist, or that takes an argument that does not exist.

    Raises:
        PluginError: with the line in the plugin's source, and the nearest known name.
    """
    at = where(function)
    if hook not in hookspecs.HOOKS:
        raise PluginError(f"{name}: there is no hook {hook!r} ({at})", hint=nearest(hook, hookspecs.HOOKS))
    options = function.hookd_impl  # type: ignore[attr-defined]
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginError(f"{name}: {hook} is a hook wrapper, which hot hooks do not allow ({at})",
                          hint="Write @hookimpl without wrapper=True.")  # fmt: skip
    allowed = inspect.signature(getattr(hookspecs, hook)).parameters
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(
                f"{name}: {hook} takes {str(parameter)!r}, but arguments are asked for by plain names ({at})"
            )
        if parameter.default is not inspect.Parameter.empty:
            raise PluginError(f"{name}: {hook} gives {parameter.name!r} a default, which hides the value ({at})",
                              hint=f"Write {parameter.name} without `= …`.")  # fmt: skip
        if parameter.name not in allowed:
            raise PluginError(f"{name}: {hook} has no argument {parameter.name!r} ({at})",
                              hint=nearest(parameter.name, allowed))  # fmt: skip


def where(function: Any) -> str:
    """Return `file:line` of a function, with decorators unwrapped."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "no source"


def _class_line(kind: type[Plugin]) -> str:
    """Return ` (file:line)` of a plugin's class, for an error message; an empty string without source."""
    # Only for refusals: `inspect` tokenizes the whole class, which takes 10 ms.
    try:
        return f" ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):
        return ""


def check_options(context: Context) -> None:
    """Refuse options that `configure` never read.

    Raises:
        PluginError: with the nearest known name.
    """
    known = {"every", "readmit", *context.settings}
    for name in context.options:
        if name not in known:
            raise PluginError(f"{context.plugin}: no such option: {name!r}", hint=nearest(name, known))
