"""Routing: the listeners of each module.

Each plugin is asked once per module which hooks it wants there. Most modules get the same answers and share one `Taste`,
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

_OF_ROOTS = ("root_forward", "root_forward_pre")


class Taste:
    """Modules that share one selection of hooks.

    Attributes:
        answers: each plugin's number and its selection.
        heard: listeners by hook, in calling order.
        by_call: listeners of the hooks that are part of a plan, in the plan's order.
    """

    __slots__ = ("answers", "by_call", "heard")

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.heard: dict[str, list[Listener]] = {}
        self.by_call: tuple[Listener, ...] | None = None

    def wants(self, one: Listener) -> bool:
        """Whether the listener's plugin wants this hook."""
        wanted = next((answer for number, answer in self.answers if number == one.plugin), False)
        return not wanted.isdisjoint((one.hook, one.name)) if isinstance(wanted, frozenset) else wanted


class Audience:
    """Finds the listeners of a hook.

    Args:
        registry: the loaded plugins.
        ask: calls the `select` of a plugin for a module.
        fault: called with plugin number, hook and error if `select` has raised.
    """

    def __init__(
        self,
        registry: Registry,
        ask: Callable[[Plugin, Module], Any],
        fault: Callable[[int, str, BaseException], None],
    ) -> None:
        self._registry = registry
        self._ask_plugin = ask
        self._fault = fault
        self._tastes: dict[int, Taste] = {}
        self._before: dict[int, Taste] = {}
        self._alike: dict[tuple[bool, Answers], Taste] = {}
        self._general: dict[str, list[Listener]] = {}
        self._early: dict[tuple[int, int], bool | frozenset[str]] = {}

    def prepare(self, loaded: Loaded, modules: Iterable[Module]) -> None:
        """Ask a new plugin about all known modules, before the plans are locked, so that the training does not wait for it.

        Raises:
            PluginError: reason "stuck": it does not answer. The plugin has then been removed from the registry.
        """
        self._early = {}
        try:
            for module in modules if hasattr(loaded.plugin, "select") else ():
                if any(_may_be_told(one, module) for one in loaded.listeners):
                    self._early[loaded.number, module.id] = self._select(loaded, module, is_new=True)
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
        taste = self._taste(module)
        listeners = taste.heard.get(hook)
        if listeners is None:
            ordered = self._registry.ordered(hook)
            listeners = taste.heard[hook] = [one for one in ordered if taste.wants(one) and _may_be_told(one, module)]
        return listeners

    def of_calls(self, module: Module) -> tuple[Listener, ...]:
        """Return all listeners in a module's plan."""
        taste = self._taste(module)
        if taste.by_call is None:
            taste.by_call = tuple(one for hook in sorted(MODULE) for one in self.listeners(hook, module))
        return taste.by_call

    def listening(self, module: Module) -> list[int]:
        """Return the numbers of the plugins that listen at a module, as far as they have been asked; none is asked now."""
        taste = self._tastes.get(module.id)
        return [number for number, wanted in taste.answers if wanted] if taste is not None else []

    def changed(self) -> None:
        """Discard the routes after a plugin came or went; the plugins' answers are kept."""
        self._before, self._tastes = {**self._before, **self._tastes}, {}
        self._alike.clear()
        self._general.clear()

    def forget(self, modules: Iterable[Module]) -> None:
        """Forget modules that are gone."""
        for module in modules:
            self._tastes.pop(module.id, None)
            self._before.pop(module.id, None)
        if not self._tastes:
            self._alike.clear()

    def _taste(self, module: Module) -> Taste:
        taste = self._tastes.get(module.id)
        if taste is None:
            known = self._before.pop(module.id, None)
            answers = self._ask(module, dict(known.answers) if known is not None else {})
            taste = self._alike.setdefault((not module.depth, answers), Taste(answers))
            self._tastes[module.id] = taste
        return taste

    def _ask(self, module: Module, known: dict[int, bool | frozenset[str]]) -> Answers:
        """Ask the plugins that have a hook for this module."""
        answers = []
        for loaded in self._registry:
            if loaded.is_asked and any(_may_be_told(one, module) for one in loaded.listeners):
                number = loaded.number
                answers.append((number, known[number] if number in known else self._select(loaded, module)))
        return tuple(answers)

    def _select(self, loaded: Loaded, module: Module, *, is_new: bool = False) -> bool | frozenset[str]:
        """Ask a plugin which hooks of a module it wants: all, none, or those named."""
        if (loaded.number, module.id) in self._early:
            return self._early.pop((loaded.number, module.id))
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


def _may_be_told(one: Listener, module: Module) -> bool:
    return not module.depth or one.hook not in _OF_ROOTS
