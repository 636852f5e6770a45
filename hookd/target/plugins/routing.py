"""Routing: the listeners of each module.

Each plugin is asked once per module which hooks it wants there. Most modules get the same answers and share one `Selection`,
because a model may have tens of thousands of modules and dozens of hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs import MODULE
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.api.events import Module
    from hookd.api.plugin import Plugin
    from hookd.target.plugins.listeners import Listener, Loaded, Registry

    Answers = tuple[tuple[int, "bool | frozenset[str]"], ...]

_ROOT_HOOKS = ("root_forward", "root_forward_pre")


class Selection:
    """Modules that share one selection of hooks.

    Attributes:
        answers: each plugin's number and its selection.
        by_hook: listeners by hook, in calling order.
        in_plan: listeners of the hooks that are part of a plan, in the plan's order.
    """

    __slots__ = ("answers", "by_hook", "in_plan")

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.by_hook: dict[str, list[Listener]] = {}
        self.in_plan: tuple[Listener, ...] | None = None

    def wants(self, listener: Listener) -> bool:
        """Whether the listener's plugin wants this hook."""
        wanted = next((answer for number, answer in self.answers if number == listener.plugin), False)
        return not wanted.isdisjoint((listener.hook, listener.name)) if isinstance(wanted, frozenset) else wanted


class Routing:
    """Finds the listeners of a hook.

    Args:
        ask: calls the `select` of a plugin for a module.
        fault: called with plugin number, hook and error if `select` has raised.
    """

    def __init__(
        self, registry: Registry, ask: Callable[[Plugin, Module], Any], fault: Callable[[int, str, BaseException], None]
    ) -> None:
        self._registry = registry
        self._ask_plugin = ask
        self._fault = fault
        self._selections: dict[int, Selection] = {}
        self._previous: dict[int, Selection] = {}
        self._shared: dict[tuple[bool, Answers], Selection] = {}
        self._general: dict[str, list[Listener]] = {}
        self._prepared: dict[tuple[int, int], bool | frozenset[str]] = {}

    def prepare(self, loaded: Loaded, modules: Iterable[Module]) -> None:
        """Ask a new plugin about all known modules, before the plans are locked, so that the training does not wait for it.

        Raises:
            PluginError: reason "stuck": it does not answer. The plugin has then been removed from the registry.
        """
        self._prepared = {}
        try:
            for module in modules if hasattr(loaded.plugin, "select") else ():
                if any(_applies(listener, module) for listener in loaded.listeners):
                    self._prepared[loaded.number, module.id] = self._select(loaded, module, is_new=True)
        except BaseException:
            self._registry.remove(loaded)
            raise
        loaded.is_asked = True

    def listeners(self, hook: str, module: Module | None) -> list[Listener]:
        """Return the listeners of a hook in calling order; for a module's hook, those at `module`."""
        if module is None:
            listeners = self._general.get(hook)
            if listeners is None:
                listeners = self._general[hook] = self._registry.ordered(hook)
            return listeners
        selection = self._selection(module)
        listeners = selection.by_hook.get(hook)
        if listeners is None:
            ordered = self._registry.ordered(hook)
            listeners = selection.by_hook[hook] = [
                listener for listener in ordered if selection.wants(listener) and _applies(listener, module)
            ]
        return listeners

    def of_calls(self, module: Module) -> tuple[Listener, ...]:
        """Return all listeners in a module's plan."""
        selection = self._selection(module)
        if selection.in_plan is None:
            selection.in_plan = tuple(listener for hook in sorted(MODULE) for listener in self.listeners(hook, module))
        return selection.in_plan

    def listening(self, module: Module) -> list[int]:
        """Return the numbers of the plugins that listen at a module, as far as they have been asked; none is asked now."""
        selection = self._selections.get(module.id)
        return [number for number, wanted in selection.answers if wanted] if selection is not None else []

    def changed(self) -> None:
        """Discard the routes after a plugin came or went; the plugins' answers are kept."""
        self._previous, self._selections = {**self._previous, **self._selections}, {}
        self._shared.clear()
        self._general.clear()

    def forget(self, modules: Iterable[Module]) -> None:
        """Forget modules that are gone."""
        for module in modules:
            self._selections.pop(module.id, None)
            self._previous.pop(module.id, None)
        if not self._selections:
            self._shared.clear()

    def _selection(self, module: Module) -> Selection:
        selection = self._selections.get(module.id)
        if selection is None:
            known = self._previous.pop(module.id, None)
            answers = self._ask(module, dict(known.answers) if known is not None else {})
            selection = self._shared.setdefault((not module.depth, answers), Selection(answers))
            self._selections[module.id] = selection
        return selection

    def _ask(self, module: Module, known: dict[int, bool | frozenset[str]]) -> Answers:
        """Ask the plugins that have a hook for this module."""
        answers = []
        for loaded in self._registry:
            if loaded.is_asked and any(_applies(listener, module) for listener in loaded.listeners):
                number = loaded.number
                answers.append((number, known[number] if number in known else self._select(loaded, module)))
        return tuple(answers)

    def _select(self, loaded: Loaded, module: Module, *, is_new: bool = False) -> bool | frozenset[str]:
        """Ask a plugin which hooks of a module it wants: all, none, or those named."""
        if (loaded.number, module.id) in self._prepared:
            return self._prepared.pop((loaded.number, module.id))
        plugin: Any = loaded.plugin
        if not hasattr(plugin, "select"):
            return True
        if loaded.state not in ("active", "waiting"):
            return False
        try:
            wanted = self._ask_plugin(plugin, module)
            return frozenset(wanted) if isinstance(wanted, (set, frozenset, tuple, list)) else bool(wanted)
        except BaseException as failure:
            if is_new and isinstance(failure, PluginError) and failure.reason == "stuck":
                raise
            self._fault(loaded.number, "select", failure)
            return False


def _applies(listener: Listener, module: Module) -> bool:
    return not module.depth or listener.hook not in _ROOT_HOOKS
