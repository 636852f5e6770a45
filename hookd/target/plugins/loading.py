"""Loading plugins, switching between them, and unloading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.context import Context
from hookd.errors import PluginError, several_ranks, worded
from hookd.target.plugins import rules
from hookd.target.plugins.faults import Failure
from hookd.target.plugins.global_state import watch
from hookd.target.plugins.listeners import wanted_interval, wanted_readmission
from hookd.wire.plugin_frames import author_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.context import Host
    from hookd.api.plugin import Plugin
    from hookd.target.boot.identity import Process
    from hookd.target.events.step_count import StepCount
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.governor import Governor
    from hookd.target.plugins.lifecycle_hooks import LifecycleHooks
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.target.plugins.stopper import PluginStopper
    from hookd.wire.page import PageWriter


class Loading:
    """Loads plugins and unloads them; `rest` yields the interpreter to the training for a while."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        process: Process,
        page: PageWriter,
        registry: Registry,
        lifecycle_hooks: LifecycleHooks,
        models: Models,
        governor: Governor,
        count: StepCount,
        core: CoreMetrics,
        stopper: PluginStopper,
        host: Host,
        rest: Callable[[], None],
    ) -> None:
        self._process, self._page, self._host = process, page, host
        self._registry, self._lifecycle_hooks, self._models = registry, lifecycle_hooks, models
        self._governor, self._count, self._core, self._stopper = governor, count, core, stopper
        self._rest = rest

    def load(self, plugin: Plugin, options: dict[str, str], *, by_name: bool) -> Loaded:
        """Configure and register a plugin, and switch it on.

        Raises:
            PluginError: it breaks a rule, refuses its options, or would change only one rank of several.
        """
        loaded = self.ready(plugin, options, by_name=by_name)
        if loaded.plugin.mutates and self._process.world_size > 1:
            self.discard(loaded, None)
            raise several_ranks(loaded.name, self._process.world_size)
        self.switch(None, loaded)
        return loaded

    def ready(self, plugin: Plugin, options: dict[str, str], *, by_name: bool, old: Loaded | None = None) -> Loaded:
        """Configure and register a plugin, without switching it on.

        Args:
            plugin: the plugin; of the same class as `old` if it is to replace that one.
            options: the plugin's options.
            by_name: whether a person named it.
            old: the plugin to be replaced, which stays as it is; series of the same names continue.

        Raises:
            PluginError: it breaks a rule, or refuses its options.
        """
        rules.check(plugin, by_name=by_name)
        self._rest()
        if old is None and self._registry.has(plugin.name):
            raise PluginError(f"{plugin.name} is loaded already", reason="already-loaded")
        context = Context(plugin.name, options, self._host)
        try:
            self._lifecycle_hooks.configure(plugin, context)
            rules.check_attributes(plugin)  # it may have set some for its options
            self._rest()
            wanted_interval(plugin, context)
            wanted_readmission(plugin, context)
            rules.check_options(context)
            loaded = self._registry.add(plugin, context, by_name=by_name)
            self._rest()
            self._models.prepare_plugin(loaded)
        except BaseException as exc:
            _retire(context, old)
            if isinstance(exc, PluginError) or not isinstance(exc, Failure):
                raise
            raise PluginError(f"{plugin.name}: configure raised {worded(exc)}{author_place(exc, plugin)}") from exc
        for listener in loaded.listeners:
            # A tick does not run in the training's threads, and totals are hookd's own code.
            if not listener.mutates and listener.totals is None and listener.hook != "tick":
                watch(listener)
        if old is None:
            self._core.show(loaded)
        self._governor.switch(self._count.turns)
        self._models.replan()
        return loaded

    def switch(self, old: Loaded | None, new: Loaded | None) -> None:
        """Switch from one plugin to another, or one on or off. This only sets flags, so any thread may call it."""
        if old is not None:
            self._stopper.switch_off(old, "disabled")
        if new is not None:
            new.switch_to("active")
            if old is not None:
                self._lifecycle_hooks.succeed(old, new)
            self._core.show(new)
        self._registry.note_changing()
        self._governor.switch(self._count.turns)

    def discard(self, loaded: Loaded, heir: Loaded | None) -> None:
        """Remove a plugin that was switched off, and its series, except those that its heir continues."""
        self._registry.remove(loaded)
        self._models.replan()
        self._lifecycle_hooks.unconfigure(loaded)
        if heir is not None and heir.number > loaded.number:  # an older heir stays because this one was refused
            _count_on(loaded.context, heir.context)
        _retire(loaded.context, heir)
        if heir is None:
            self._core.hide(loaded)
        if loaded.agreement is not None and (heir is None or heir.agreement is not loaded.agreement):
            loaded.agreement.close()
        self._page.compact()

    def unload(self, name: str) -> None:
        """Remove a plugin, and its series.

        Raises:
            PluginError: it is not loaded.
        """
        loaded = self._registry.named(name)
        self.switch(loaded, None)
        self.discard(loaded, None)

    def forget_stopped(self, name: str) -> None:
        """Remove a plugin that was stopped, so that it can be loaded again."""
        if self._registry.has(name) and self._registry.named(name).state in ("quarantined", "disabled"):
            self.unload(name)


def _retire(context: Context, heir: Loaded | None) -> None:
    continued = {metric.name: metric for metric in heir.context.requests.metrics} if heir is not None else {}
    for metric in context.requests.metrics:
        metric.retire(continued.get(metric.name))


def _count_on(old: Context, new: Context) -> None:
    """Carry counts over to the plugin's new object, even before it uses them: a counter never falls."""
    continued = {metric.name: metric for metric in new.requests.metrics}
    for metric in old.requests.metrics:
        if metric.kind in ("counter", "histogram") and metric.name in continued:
            continued[metric.name].adopt(metric)
