"""Hooks around a plugin's life and a model's: options, the choice of modules, train and eval, time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from collections.abc import Collection

    from hookd.api.context import Context
    from hookd.api.events import Module
    from hookd.api.plugin import Plugin


@hookspec
def configure(context: Context) -> None:
    """Read the options and declare the metrics; once, before anything else, in hookd's own thread.

    An exception here refuses the plugin; the user sees its message.

    Called: once, before anything else.
    Thread: hookd's own.
    May: declare metrics, read options, read files; raise PluginError to refuse.
    Cost: none in the training.

        @hookimpl
        def configure(self, context):
            self.width = context.option("width", 10)
            self.norm = context.gauge("norm", "L2 norm of the output.", ["module"])
    """


@hookspec
def succeed(predecessor: Plugin) -> None:
    """Take over state from `predecessor`, the plugin object that this one replaces after a change of options or a reload.

    Called once, after `configure`, when this object is about to be enabled: at the start of an optimizer step, or for observers in
    hookd's own thread, while the training goes on. Neither object gets a new event meanwhile, but the predecessor may still be
    handling one: share objects rather than copying their contents. With new options, counters continue. Other metrics, and all
    metrics after a reload, continue only in the series that this object has created too: `metric.adopt(predecessor.metric)`
    creates them all.

    Called: once, after `configure` of the new object.
    Thread: hookd's own, or the training's where an optimizer step begins.
    May: share the predecessor's objects.
    Cost: none, but once.

        @hookimpl
        def succeed(self, predecessor):
            self.norm.adopt(predecessor.norm)
            self.last = predecessor.last
    """


@hookspec
def unconfigure() -> None:
    """Release everything; once, at unload and at detach, in hookd's own thread, after the last event.

    Called: once, after the last event.
    Thread: hookd's own.
    May: close and write anything.
    Cost: none in the training.

        @hookimpl
        def unconfigure(self):
            self.calls = None
    """


@hookspec
def select(module: Module) -> bool | Collection[str] | None:
    """Return whether this plugin wants the events of `module`; once per module, before its first event.

    It runs in the training thread when a model is first called (after an attach in batches, over the next calls): be quick.
    A plugin without this hook gets every module. Return True to select the module, or the names of the hooks wanted there:
    `{"forward", "backward_pre"}`. `backward` is the most expensive, the more so the more the module contains.

    Called: once for each module, before its first event.
    Thread: the training's; hookd's own for modules already known when a tool loads the plugin, with 5 s for each.
    May: return its selection.
    Cost: nothing at the calls; once for each module.

        @hookimpl
        def select(self, module):
            return module.depth <= 2 and module.type != "Dropout"
    """


@hookspec
def mode(module: Module, training: bool) -> None:
    """Run when `train()` or `eval()` has switched a model; once per outermost call, not for its children.

    Called: at each outermost `train()` or `eval()`.
    Thread: the caller's.
    May: nothing but look.
    Cost: not measured; at `train()` and `eval()` alone.

        @hookimpl
        def mode(self, module, training):
            self.training.labels(module.name).set(training)
    """


@hookspec
def tick(now_s: float) -> None:
    """Run about once a second in hookd's own thread, while training goes on; never touch a tensor here.

    Called: about once a second.
    Thread: hookd's own, while the training goes on.
    May: work for some milliseconds; never touch a tensor.
    Cost: none in the training, but for the interpreter's lock.

        @hookimpl
        def tick(self, now_s):
            self.alive.set(now_s)
    """
