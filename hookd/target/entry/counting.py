"""Configuration of the C entry.

It says which calls the entry counts, which listeners it calls, and which outputs it looks at. If calls are not entered in
C, all of them go through their plans, and their outputs are not looked at here.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs import FLOWS
from hookd.api.shown import Shown
from hookd.api.totals import BackwardTotals, Totals
from hookd.target.entry.c_entry import GROUPS, Counted, Entry
from hookd.target.entry.module_group import ModuleGroup, is_timed, remembers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookd.api.events import Module
    from hookd.target.entry.patch import ClassPatch
    from hookd.target.entry.plan import Plan
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.tensors.statistics import Numeric

CALLED_FROM_C = ("forward_pre", "forward")
"""Hooks whose observers are called from C."""


class Counting:
    """Configures the entry: what it counts and checks, and which listeners it calls.

    Switches and groups change; the modules' plans do not.

    Attributes:
        hidden: calls a function of hookd's hidden from a profiler; None if calls are not entered in C.
        looks: whether outputs are checked for NaN and infinities, for listeners to `suspect`.
        is_alert: whether every call is reported when it returns, because the output of one was not finite.
    """

    def __init__(
        self, observer: Entry | ClassPatch, *, registry: Registry, dispatch: Dispatch, numeric: Numeric
    ) -> None:
        self._entry = observer if isinstance(observer, Entry) else None
        self._registry, self._dispatch, self._numeric = registry, dispatch, numeric
        self.hidden = None if self._entry is None else self._entry.hidden
        self.looks = self.is_alert = False
        self._groups: dict[tuple[Listener, ...], ModuleGroup] = {}
        # Includes the groups of current calls whose modules have new plans by now. Not a WeakSet, because threads that call
        # modules add to it while others iterate.
        self._in_use: list[weakref.ref[ModuleGroup]] = []
        self._numbers = itertools.cycle(range(GROUPS))
        self._passed = 0  # number of calls whose outputs could not be looked at

    def prepare(self) -> None:
        """Run the slowest part of `begin` in advance."""
        if self._entry is not None:
            self._entry.find_layout()

    def begin(self, host: Callable[[Entry], None]) -> None:
        """Count calls from now on; `host` passes the entry the objects that it needs."""
        if self._entry is not None:
            host(self._entry)
            self._entry.leave_room()
            self._check()

    def too_deep(self) -> int:
        """Return the number of calls that were too deep to be observed, since the last time."""
        return 0 if self._entry is None else self._entry.too_deep()

    # -- the parts of plans

    def planned(self, listeners: tuple[Listener, ...]) -> tuple[Listener, ...]:
        """Return the listeners that a plan calls.

        Without the C entry `suspect` is left out: looking at all outputs in every step would be too expensive.
        """
        if self._entry is not None:
            return listeners
        return tuple(listener for listener in listeners if listener.hook != "suspect")

    def group(self, listeners: tuple[Listener, ...]) -> ModuleGroup:
        """Return the group of the modules with these listeners; its number is GROUPS if the entry has none left."""
        group = self._groups.get(listeners)
        if group is None:
            # Numbers from before the last change are not reused yet, because modules with them may still be called.
            is_one_more = len(self._groups) < GROUPS // 2
            group = self._groups[listeners] = ModuleGroup(listeners, next(self._numbers) if is_one_more else GROUPS)
            self._in_use.append(weakref.ref(group))
            self._choose_path(group)
        return group

    def counted(self, module: Module, group: ModuleGroup) -> Counted | None:
        """Return what the C entry counts for a module; None without the entry."""
        if self._entry is None:
            return None
        listeners = group.listeners
        totals = [listener.totals for listener in listeners if isinstance(listener.totals, Totals)]
        back = [listener.totals for listener in listeners if isinstance(listener.totals, BackwardTotals)]
        shown = [listener.totals for listener in listeners if isinstance(listener.totals, Shown)]
        checks = any(listener.hook == "suspect" for listener in listeners)
        return Counted(module, group.number, remembers(listeners), checks, is_timed(listeners), totals, back, shown)

    def count_inference(self, key: int, plan: Plan) -> None:
        """Make the C entry handle calls of inference of a module, by its id, from now on."""
        if self._entry is None:
            plan.counts_inference = True
        else:
            self._entry.plans.count_inference(key, plan)

    def begin_anew(self) -> list[ModuleGroup]:
        """Begin with new groups, and return the old ones. Pass these to `end` once no module has them any more."""
        self._in_use = [ref for ref in self._in_use if ref() is not None]
        old = list(self._groups.values())
        if self._entry is not None:
            for group in old:
                self._entry.set_flow_listeners(group.number, None)
        self._groups.clear()
        return old

    def end(self, old: list[ModuleGroup]) -> None:
        """Stop calling the listeners of these groups, with which the training may have called modules until now."""
        if self._entry is not None:
            for group in old:
                self._entry.set_listeners(group.number, [])

    # -- switches

    def act_on_switches(self) -> None:
        """Act on switches that were turned."""
        self._dispatch.turned()
        for ref in list(self._in_use):
            group = ref()
            if group is not None:
                group.turned()
        self._arm_all()

    def meter(self, *, is_metered: bool) -> None:
        """Set whether the calls of the step that begins are metered."""
        self._dispatch.accounts.is_metered = is_metered
        if self._entry is not None:
            self._entry.meter(is_metered)

    def metered_ns(self) -> list[int]:
        """Return the [4] ns that `Entry.metered_ns` returns, for the metered step that is over; zeros without the entry."""
        return [0] * 4 if self._entry is None else self._entry.metered_ns()

    def _arm_all(self) -> None:
        for group in list(self._groups.values()):
            self._choose_path(group)
        self._check()

    def _choose_path(self, group: ModuleGroup) -> None:
        """Decide whether the calls of a group go through their plans.

        They do if C can neither count them nor call their listeners, for example while totals are switched off.
        """
        if self._entry is None:
            return
        listeners, number, is_seen = group.listeners, group.number, self._numeric.looks_in_c()
        switches = (is_seen, *[listener.is_on for listener in listeners])
        if switches == group.switches:  # only switches of other groups were turned
            return
        flowing = [listener for listener in listeners if listener.hook in FLOWS and listener.is_on]
        # Mutators of gradients are called by hooks in Python.
        is_plain = not any(listener.mutates for listener in flowing)
        self._entry.set_flow_listeners(number, flowing if flowing and is_plain else None)
        called = _not_in_c(listeners, hears_in_c=is_plain, looks_in_c=is_seen)
        self._entry.hand(number, is_seen and _looks_at_all(listeners))
        is_in_c = all(listener.hook in CALLED_FROM_C and not listener.mutates for listener in called)
        is_stopped = any(isinstance(listener.totals, Totals) and not listener.is_on for listener in listeners)
        self._entry.use_plans(number, is_stopped or not is_in_c)
        self._entry.set_listeners(number, called if is_in_c else [])
        group.switches = switches

    # -- outputs

    def _check(self) -> None:
        """Set whether the entry looks at outputs: while a plugin listens to `suspect`."""
        if self._entry is not None:
            listeners = self._registry.ordered("suspect")
            self.looks = self._numeric.looks_in_c() and any(listener.is_on for listener in listeners)
            self.passed()

    def alert(self) -> None:
        """Report every call that returns, because an output was not finite; plans hold their calls until `calm`."""
        if not self.is_alert:
            self.is_alert = True
            self._check()

    def calm(self) -> None:
        """End an alert after the outermost call: report only calls whose output is not finite."""
        self.is_alert = False
        self._check()

    def note_passed(self) -> None:
        """Count a call whose output could not be looked at."""
        self._passed += 1

    def passed(self) -> int:
        """Return the number of calls so far, in all threads, whose outputs could not be looked at."""
        if self._entry is not None:
            self._passed += self._entry.check(self.looks, self.is_alert)
        return self._passed

    def has_seen_all(self, thread: ThreadState, plugin: int) -> bool:
        """Implement `Context.has_seen_all`; calls handed over by C were seen by the listeners to `forwards` at their modules."""
        return (
            self.looks
            and thread.passed == self.passed()
            and all(
                any(listener.plugin == plugin for listener in self._dispatch.switched_on("forwards", module))
                for module in thread.handed
            )
        )

    def let_go(self, thread: ThreadState, last: int) -> int:
        """Make the entry release the outputs that it keeps alive; return the number of records left as they are."""
        return len(thread.returned) if self._entry is None else self._entry.let_go(thread, last)

    # -- hiding from a profiler

    def visible_call(self, module: nn.Module) -> Callable[..., Any]:
        """Return a function that runs a module without hookd, for plans that are called from C."""
        return self._entry.visible_call(module)  # type: ignore[union-attr]

    def call_visibly(self, thread: ThreadState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the training from hidden code, visible to profilers."""
        if thread.hidden and self._entry is not None:
            return self._entry.call_visibly(function, *args, **kwargs)
        return function(*args, **kwargs)


def _looks_at_all(listeners: tuple[Listener, ...]) -> bool:
    """Whether a plugin that listens to `suspect` takes all outputs, also large ones and those on a device."""
    on = [listener for listener in listeners if listener.is_on]
    suspecting = {listener.plugin for listener in on if listener.hook == "suspect"}
    return any(listener.hook == "forwards" and listener.plugin in suspecting for listener in on)


def _not_in_c(listeners: tuple[Listener, ...], *, hears_in_c: bool, looks_in_c: bool) -> list[Listener]:
    """Return the active listeners that the entry alone does not serve.

    It may hook the graph for listeners to gradients (`hears_in_c`), and look at outputs (`looks_in_c`).
    """
    on = [listener for listener in listeners if listener.is_on and not isinstance(listener.totals, Totals)]
    suspecting = {listener.plugin for listener in on if listener.hook == "suspect"} if looks_in_c else ()
    return [
        listener
        for listener in on
        if listener.hook not in ("forward_error", "suspect")  # plans do not call these
        and not (listener.hook in FLOWS and hears_in_c)
        # C looks at these outputs, or hands them over.
        and not (listener.hook == "forwards" and listener.plugin in suspecting)
        and listener.hook != "output_summary"  # likewise, or C calls `Calls.output_shown`
    ]
