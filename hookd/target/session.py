"""The agent: everything that is alive in the target between attach and detach. Runs in the target."""

from __future__ import annotations

import contextlib
import posix
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from hookd.api.context import Context
from hookd.api.totals import BackwardTotals
from hookd.errors import PluginError, several_ranks, worded
from hookd.target.entry import dynamo
from hookd.target.entry.calls import Calls
from hookd.target.entry.plan import is_inside, pair
from hookd.target.entry.threads import Threads
from hookd.target.events.batching import Portions
from hookd.target.events.data import Data
from hookd.target.events.dispatch import Dispatch
from hookd.target.events.liveness import Stall
from hookd.target.events.phases import Phases
from hookd.target.events.steps import Steps
from hookd.target.modeltree.models import Models
from hookd.target.plugins import isolation, rules
from hookd.target.plugins.background import Aside
from hookd.target.plugins.core_metrics import CoreMetrics
from hookd.target.plugins.faults import Failure
from hookd.target.plugins.global_state import watched
from hookd.target.plugins.governor import Governor
from hookd.target.plugins.lifecycle_hooks import Cold
from hookd.target.plugins.listeners import Registry, wanted_interval, wanted_readmission
from hookd.target.plugins.plugin_memory import Watch
from hookd.target.plugins.slow_hooks import Overdue
from hookd.target.remote.changes import Changes
from hookd.target.remote.tracing import Tracing
from hookd.target.tensors import torch_state
from hookd.target.tensors.statistics import Numeric
from hookd.wire import page as pages
from hookd.wire.originals import RLock, clock
from hookd.wire.plugin_frames import author_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hookd.api.events import Module, Returned
    from hookd.api.plugin import Plugin
    from hookd.target.boot.work import Work
    from hookd.target.entry.threads import ThreadState
    from hookd.target.plugins.listeners import Entry

PAUSED = float(pages.PHASES.index("paused"))
PAUSE_S = 0.05
"""How often a paused training looks whether it may go on."""
PHASE, STEP = pages.PHASE - pages.MODULE, pages.STEP - pages.MODULE
"""Cells of a heartbeat, from its module cell on."""


class Session:
    """One agent. Also the host of the plugins' contexts.

    Attributes:
        is_live: False from the beginning of a detach; whatever is still under way then calls through.
        namespace: the globals of all plans: plugins' callbacks, their switches, the page.
        clock: ns; steps and what plugins take of them are measured by it.
        tracing: torch's profiler, when somebody has asked for a trace.
        rest: lets the training have the interpreter for a while, in what takes hookd's own thread long.
        resume: starts the threads again that a fork has ended, if they are not there by now.
        phases: adds up where the time goes.
        dispatch: gives events to the plugins, and keeps what they spend.
    """

    def __init__(
        self, page: pages.PageWriter, identity: dict[str, Any], work: Work, *, budget: float, clock: Callable[[], int],
        rest: Callable[[], None],
    ) -> None:  # fmt: skip
        self.page = page
        self.rest = rest
        self.cells = page.cells
        self.run: str = identity["run"]
        self.rank: int = identity["rank"]
        self.world_size: int = identity["world_size"]
        self.is_live = False
        self.clock = clock
        self._installing = RLock()
        self._imported = 0  # modules in the process when it was last looked for what is to be replaced
        self._heartbeats: dict[int, int] = {}
        self.dispatch = Dispatch(self)
        self.calls = Calls(self)
        self.portions = Portions(self)
        self.numeric = Numeric(self.dispatch.deliver)
        self.aside = Aside(self.dispatch.failed_aside, work)
        self.cold = Cold(self, work)
        self._kinds = isolation.Kinds(self)
        states: dict[int, ThreadState] = {}
        self.local = Threads(page, self._heartbeats, states)
        self.overdue = Overdue(self, states)
        self.registry = Registry()
        self.rest()
        self.phases = Phases(self.registry)
        self.core = CoreMetrics(page, budget=budget)
        self._stall = Stall(page)
        self._holding = Watch(self)
        self.governor = Governor(self, budget)
        self.changes = Changes(self)
        self.steps = Steps(self, from_beginning=identity["method"] == "run")
        self.data = Data(self)
        self.namespace = self._namespace()
        self.rest()
        self.models = Models(self, gentle=identity["method"] == "attach")
        self.namespace["original"] = self.models.patch.original
        self.namespace["call_aloud"] = self.models.call_aloud
        self.residue: list[str] = []
        self.resume: Callable[[], None] = lambda: None
        self.tracing = Tracing(self)

    def _namespace(self) -> dict[str, Any]:
        return {
            "cells": self.cells, "record": self.page.record, "local": self.local, "clock": self.clock, "Failure": Failure,
            "no_frame": dynamo.no_frame(), "enter": torch_state.enter, "leave": torch_state.leave,
            "is_grad_enabled": torch_state.is_grad_enabled, "set_grad_enabled": torch_state.set_grad_enabled,
            "versions_of": torch_state.versions_of, "pair": pair, "is_inside": is_inside, "is_unreal": torch_state.is_unreal, "accounting": False, "backward_on": False,
            **self.portions.names(), **self.calls.names(), **self.dispatch.names(),
        }  # fmt: skip

    # -- life

    def arm(self) -> None:
        """Install everything; from the next outermost call on, modules are observed."""
        self.is_live = True
        self._imported = 0
        self.steps.install()
        with self._installing:
            self.data.install()
        self.models.install()

    def disarm(self) -> str:
        """Restore everything; what is under way finishes by itself.

        Returns:
            `identity`, or `pass-through` where somebody has patched `nn.Module.__call__` on top of us.
        """
        self.steps.finish()
        with self._installing:  # a step that ends just now installs nothing any more
            self.is_live = False
        self.residue += [*self.steps.restore(), *self.data.restore()]
        restored, residue = self.models.restore()
        self.residue += residue
        return "identity" if restored else "pass-through"

    # -- plugins

    def load(self, plugin: Plugin, options: dict[str, str], *, by_name: bool) -> Entry:
        """Configure and register a plugin, and switch it on.

        Raises:
            PluginError: it breaks a rule, or refuses its options, or would change one rank of several.
        """
        entry = self.ready(plugin, options, by_name=by_name)
        if entry.plugin.mutates and self.world_size > 1:
            self.discard(entry, None)
            raise several_ranks(entry.name, self.world_size)
        self.switch(None, entry)
        return entry

    def ready(self, plugin: Plugin, options: dict[str, str], *, by_name: bool, old: Entry | None = None) -> Entry:
        """Configure and register a plugin that does nothing until it is switched on.

        Args:
            plugin: of the class of `old`, where it is to take that one's place.
            options: of the plugin.
            by_name: whether a person named it.
            old: stays as it is; series of the same names go on.

        Raises:
            PluginError: it breaks a rule, or refuses its options.
        """
        rules.check(plugin, by_name=by_name)
        self.rest()
        if old is None and self.registry.has(plugin.name):
            raise PluginError(f"{plugin.name} is loaded already", reason="already-loaded")
        context = Context(plugin.name, options, self)
        try:
            self.cold.configure(plugin, context)
            self.rest()
            wanted_interval(plugin, context)
            wanted_readmission(plugin, context)
            context.check_options()
            entry = self.registry.add(plugin, context, by_name=by_name)
            self.rest()
            self.models.audience.prepare(entry, [one for _, _, one in list(self.models.names.known.values())])
        except BaseException as exc:
            self._retire(context, old)
            if isinstance(exc, PluginError) or not isinstance(exc, Failure):
                raise
            raise PluginError(f"{plugin.name}: configure raised {worded(exc)}{author_place(exc, plugin)}") from exc
        for one in entry.listeners:
            # A tick is called beside the training, and totals are hookd's own.
            is_watched = not one.mutates and one.totals is None and one.hook != "tick"
            self.namespace[one.function] = watched(one, self.namespace) if is_watched else one.call
        if old is None:
            self.core.show(entry)
        self.governor.switch(self.steps.turns)
        self.models.replan()
        return entry

    def switch(self, old: Entry | None, new: Entry | None) -> None:
        """Switch from one plugin to another, or on, or off; mere flags are turned, so any thread may do it."""
        if old is not None:
            self.switch_off(old, "disabled")
        if new is not None:
            new.state = "active"
            if old is not None:
                self.cold.succeed(old, new)
            self.core.show(new)
        self.registry.note_changing()
        self.governor.switch(self.steps.turns)

    def discard(self, entry: Entry, heir: Entry | None) -> None:
        """Take a plugin out that was switched off, and its series with it, but for those that its heir goes on with."""
        self.registry.remove(entry)
        self.models.replan()
        self.cold.unconfigure(entry)
        if heir is not None and heir.number > entry.number:  # not the one that stays because this one was refused
            _count_on(entry.context, heir.context)
        self._retire(entry.context, heir)
        if heir is None:
            self.core.hide(entry)
        if entry.agreement is not None and (heir is None or heir.agreement is not entry.agreement):
            entry.agreement.close()
        self.page.compact()

    @staticmethod
    def _retire(context: Context, heir: Entry | None) -> None:
        kept = {metric.name: metric for metric in heir.context.metrics} if heir is not None else {}
        for metric in context.metrics:
            metric.retire(kept.get(metric.name))

    def unload(self, name: str) -> None:
        """Take a plugin out, and its series with it.

        Raises:
            PluginError: it is not loaded.
        """
        entry = self.registry.named(name)
        self.switch(entry, None)
        self.discard(entry, None)

    def forget_stopped(self, name: str) -> None:
        """Take a plugin out that was put aside, so that it can be loaded again."""
        if self.registry.has(name) and self.registry.named(name).state in ("quarantined", "disabled"):
            self.unload(name)

    def quarantine(self, entry: Entry, why: str) -> None:
        """Stop calling a plugin, and tell a person."""
        self.switch_off(entry, "quarantined")
        self.core.show(entry)
        self.changes.failed(entry)
        again_s = entry.probation.put_aside(clock.monotonic()) if entry.readmits else 0.0
        message = f"plugin {entry.name} is quarantined: {why}"
        message += f"; it is tried again in {again_s:g} s" if again_s else ""
        self.report_incident(entry.name, "quarantine", message, {"error": why, "again_s": again_s})

    def switch_off(self, entry: Entry, state: str) -> None:
        """Stop calling a plugin at once."""
        entry.state = state
        for one in entry.listeners:
            self.namespace[one.switch] = False
            if isinstance(one.totals, BackwardTotals):
                one.totals.switch(is_on=False, is_active=False)
        self.dispatch.turned()
        self.models.arm()

    # -- steps

    def step_over(self, steps: int, *, in_call: bool) -> None:
        """A step of the training is over: publish it. What still comes belongs to it until `step_done`.

        Args:
            steps: how many: those that the training has made by itself may be told of together.
            in_call: whether a call of a model has begun since.
        """
        try:
            self._turn_later()
            elapsed_ns = self.governor.end()
            self.core.steps.inc(steps)
            if elapsed_ns and steps == 1:
                self.core.step_seconds.observe(elapsed_ns / 1e9)
            thread = self.local.thread
            if thread.kept:  # a training loop inside of a module's forward never leaves it
                self.portions.let_go(thread)
            self.portions.end_passing(thread)
            self.cells[thread.beat + STEP] = float(self.steps.done + 1 + (self.steps.offset or 0))
            self.page.record(pages.STEP_RECORD, 0, self.steps.done, elapsed_ns / 1e9)
            self.models.step_over(thread, in_call=in_call)
            self._install_late()
            self.resume()
            self.tracing.boundary()
        except Failure as failure:
            self.dispatch.own_failure("the end of a step", failure)

    def step_done(self) -> None:
        """Nothing more comes of the last step: tell the plugins."""
        self.phases.step_done(self.local.thread.spent)
        self.dispatch.emit("step_done", {"step": self.step_number()})

    def step_begins(self) -> None:
        """A step begins: account for the one before it, and switch to what is called in this one."""
        try:
            self.governor.begin(self.steps.turns)
        except Failure as failure:
            self.dispatch.own_failure("the beginning of a step", failure)

    def call_begins(self) -> None:
        """Begin a call of a model in a process that trains nothing: it is a turn, as a step is."""
        try:
            self._turn_later()
            self.core.step_calls.inc()
            self.governor.end()
            self.governor.begin(self.steps.turns)
            self._install_late()
        except Failure as failure:
            self.dispatch.own_failure("the beginning of a call", failure)

    def _turn_later(self) -> None:
        try:
            self.numeric.later.turn()
        except Failure as failure:  # what plugins have asked for must not cost the step its count
            self.dispatch.own_failure("later", failure)

    def _install_late(self) -> None:
        """Reach what has been imported since: dynamo, the DataLoader."""
        if len(sys.modules) == self._imported:
            return
        with self._installing:
            if self.is_live:
                self._imported = len(sys.modules)
                self.models.patch.register()
                self.data.install()

    def step_number(self) -> int:
        """Give the number of the step in progress, from 1."""
        return self.steps.number() + (self.steps.offset or 0)

    def tick(self, now_s: float) -> None:
        """Do what is to be done about once a second, in hookd's own thread."""
        readmit, tell = partial(isolation.readmit, self), partial(isolation.tell_refused, self)
        plugins = partial(self.cold.tick, now_s)
        for part in (partial(self.models.tick, now_s), self._stall.tick, readmit, self._holding.tick, plugins, tell):
            try:  # one that fails keeps no other from its turn, nor the thread from going on
                part()
            except Failure as failure:
                self.dispatch.own_failure("tick", failure)
        with contextlib.suppress(OSError):  # in a container without /proc, and while no descriptor is left, they stay
            alive = {int(task) for task in posix.listdir("/proc/self/task")}
            for ident in set(self._heartbeats) - alive:
                self.page.release_thread(self._heartbeats.pop(ident))
        dropped = float(self.page.dropped)
        self.core.series_dropped.inc(dropped - self.cells[self.core.series_dropped.at])

    # -- what a context asks (hookd.api.context.Host)

    def step_now(self) -> int:
        """Give the number of the step in progress, counted from the attach."""
        return self.steps.number()

    def step_offset(self) -> int | None:
        """Give what to add to it to count from the training's beginning, None while unknown."""
        return self.steps.offset

    def mark_now(self) -> int:
        """Give the mark of the last step boundary, see `hookd.wire.agreement`; 0 where there is none."""
        return self.changes.marks[-1][0] if self.changes.marks else 0

    def origin(self) -> str:
        """Give the step in progress in words, with what it counts from."""
        is_known = self.steps.offset is not None
        return f"step {self.step_number()}" + ("" if is_known else " (counted from the attach)")

    def module_stack(self) -> tuple[Module, ...]:
        """Give the modules that the calling thread is inside of."""
        return self.local.thread.stack()

    def returned_now(self) -> Sequence[Returned]:
        """Give what the module calls of the calling thread have returned."""
        return self.portions.returned(self.local.thread)

    def model_roots(self) -> list[Module]:
        """Give the roots of all models that are alive."""
        return [model.root for model, _ in self.models.names.live_roots()]

    def outermost_modules(self) -> list[tuple[Module, nn.Module]]:
        """Give the roots of all models that are alive, with their outermost wrappers."""
        return [(model.root, root) for model, root in self.models.names.live_roots()]

    def module_states(self) -> list[tuple[Module, str]]:
        """Give each module with what is seen of it."""
        return self.models.seen.states()

    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Give what `optimizer` holds in the models' order."""
        return self.models.names.ordered_parameters(optimizer)

    def interval_of(self, plugin: str) -> int:
        """Give how many steps lie between two sampled steps of a plugin."""
        return self.registry.named(plugin).interval if self.registry.has(plugin) else 1

    def is_alone(self, plugin: str) -> bool:
        """Say whether no other plugin's sampled hooks are called in this step."""
        return not any(entry.looks for entry in self.registry.entries.values() if entry.name != plugin)

    def resample(self) -> None:
        """Set the switches anew: a plugin wants to hear of something else; at the end of a step, of the next one on."""
        if self.steps.is_closing:
            self.governor.is_to_listen = True
        else:
            self.governor.listen(self.steps.turns)
        for entry in self.registry.entries.values():
            self.core.show_interval(entry)

    def has_seen_all(self) -> bool:
        """Say whether hookd has looked at all that observed modules have returned in the calling thread's outermost call."""
        return self.models.has_seen_all(self.local.thread)

    def pause(self, plugin: str) -> None:
        """Keep the calling thread until the plugin is changed or taken out, or the agent leaves."""
        cell = self.local.thread.beat + PHASE
        phase, self.cells[cell] = self.cells[cell], PAUSED
        try:
            while self.is_live and not self.changes.is_due(plugin) and self.registry.is_active(plugin):
                clock.sleep(PAUSE_S)  # in portions: signal handlers run between them
        finally:
            self.cells[cell] = phase

    def report_incident(self, plugin: str, kind: str, message: str, fields: dict[str, Any]) -> None:
        """Publish something worth telling a person."""
        kind, message = self._kinds.bounded(plugin, kind, message)
        self.core.incidents.labels(kind).inc()
        offset = self.steps.offset
        where = {"step": self.step_number(), "is_step_absolute": offset is not None}
        # What arrived later, as from a device, is of an earlier step.
        self.page.incident({**where, **fields, "kind": kind, "plugin": plugin, "message": message})

    def write_log(self, level: str, message: str) -> None:
        """Write a line into the page's log."""
        self.page.log(level, message)

    def work_aside(self, plugin: str, work: Callable[[], None]) -> None:
        """Do something for a plugin beside the training."""
        self.aside.add(plugin, work)

    # -- the end

    def is_inside(self) -> bool:
        """Whether this thread is inside a call that stores to the page when it ends."""
        return self.local.thread.top is not None


def _count_on(old: Context, new: Context) -> None:
    """Let what a plugin counts go on, also where its new object has not come to it yet: a counter never falls."""
    kept = {metric.name: metric for metric in new.metrics}
    for metric in old.metrics:
        if metric.kind in ("counter", "histogram") and metric.name in kept:
            kept[metric.name].adopt(metric)
