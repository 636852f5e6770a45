"""Which calls the entry in C counts, whom it tells of them, and what it looks at. Runs in the target.

Where calls are not entered in C all of them go through their plans, and what they return is looked at by nobody here.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs import FLOWS
from hookd.api.shown import Shown
from hookd.api.totals import BackwardTotals, Totals
from hookd.target.entry.c_entry import SHAPES, Counted, Entry
from hookd.target.entry.shape import Shape, is_timed, remembers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookd.api.events import Module
    from hookd.target.entry.patch import ClassPatch
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.plugins.listeners import Listener, Registry
    from hookd.target.tensors.statistics import Numeric

TOLD = ("forward_pre", "forward")
"""Hooks of which C has listeners told that change nothing."""


class Counting:
    """Says to the entry what to do at the calls of modules; switches and shapes change, the modules' plans do not.

    Args:
        patch: what sees the calls of modules.

    Attributes:
        hidden: calls a function of hookd's hidden from a profiler; None where calls are not entered in C.
        looks: whether what calls return is looked at, for who listens to `suspect`.
        is_alert: whether every call that returns is told of, because one has returned what is not finite.
    """

    def __init__(self, patch: Entry | ClassPatch, *, registry: Registry, dispatch: Dispatch, numeric: Numeric) -> None:
        self._entry = patch if isinstance(patch, Entry) else None
        self._registry, self._dispatch, self._numeric = registry, dispatch, numeric
        self.hidden = None if self._entry is None else self._entry.hidden
        self.looks = self.is_alert = False
        self._shapes: dict[tuple[Listener, ...], Shape] = {}
        # Also of calls under way whose modules have other plans by now. No WeakSet: threads that call modules add to it while others go through it.
        self._in_use: list[weakref.ref[Shape]] = []
        self._numbers = itertools.cycle(range(SHAPES))
        self._passed = 0  # calls whose outputs nobody could look at

    def prepare(self) -> None:
        """Do before `begin` what takes longest in it."""
        if self._entry is not None:
            self._entry.find_layout()

    def begin(self, host: Callable[[Entry], None]) -> None:
        """Count calls from now on.

        Args:
            host: gives the entry what it counts with.
        """
        if self._entry is not None:
            host(self._entry)
            self._entry.leave_room()
            self._check()

    def too_deep(self) -> int:
        """Return how many calls have passed unobserved for want of room since the last time."""
        return 0 if self._entry is None else self._entry.too_deep()

    # -- what plans are made of

    def heard(self, listeners: tuple[Listener, ...]) -> tuple[Listener, ...]:
        """Return whom a plan tells; without the entry nobody is told of a suspect: to look would be dear in every step."""
        return listeners if self._entry is not None else tuple(one for one in listeners if one.hook != "suspect")

    def shape(self, heard: tuple[Listener, ...]) -> Shape:
        """Return the shape of the modules of which the same is heard; its number is SHAPES where the entry cannot tell so many apart."""
        shape = self._shapes.get(heard)
        if shape is None:
            # Not a number of those before the last change, whose modules may still be called.
            is_one_more = len(self._shapes) < SHAPES // 2
            shape = self._shapes[heard] = Shape(heard, next(self._numbers) if is_one_more else SHAPES)
            self._in_use.append(weakref.ref(shape))
            self._arm(shape)
        return shape

    def counted(self, module: Module, shape: Shape) -> Counted | None:
        """Return what the entry counts of a module; None: nothing."""
        if self._entry is None:
            return None
        heard = shape.listeners
        totals = [one.totals for one in heard if isinstance(one.totals, Totals)]
        back = [one.totals for one in heard if isinstance(one.totals, BackwardTotals)]
        shown = [one.totals for one in heard if isinstance(one.totals, Shown)]
        checks = any(one.hook == "suspect" for one in heard)
        return Counted(module, shape.number, remembers(heard), checks, is_timed(heard), totals, back, shown)

    def begin_anew(self) -> list[Shape]:
        """Number all shapes anew; return those of before, which `end` is to be given once no module has them any more."""
        self._in_use = [one for one in self._in_use if one() is not None]
        old = list(self._shapes.values())
        if self._entry is not None:
            for shape in old:
                self._entry.hear(shape.number, None)
        self._shapes.clear()
        return old

    def end(self, old: list[Shape]) -> None:
        """Tell nobody of these any more: until here the training has called modules that had their plans of before."""
        if self._entry is not None:
            for shape in old:
                self._entry.tell(shape.number, [])

    # -- switches

    def act_on_switches(self) -> None:
        """Act on switches that were turned."""
        self._dispatch.turned()
        for one in list(self._in_use):
            shape = one()
            if shape is not None:
                shape.turned()
        self._arm_all()

    def meter(self, *, is_metered: bool) -> None:
        """Meter the calls of the step that begins, or do not."""
        self._dispatch.accounts.is_metered = is_metered
        if self._entry is not None:
            self._entry.meter(is_metered=is_metered)

    def metered_ns(self) -> list[int]:
        """Return what has taken how long in the metered step that is over.

        Returns:
            [4] ns: of calls without a plan, of hooks on graphs, of showing outputs, and of looking at large ones.
        """
        return [0] * 4 if self._entry is None else self._entry.metered_ns()

    def _arm_all(self) -> None:
        for shape in list(self._shapes.values()):
            self._arm(shape)
        self._check()

    def _arm(self, shape: Shape) -> None:
        """Have calls go through their plans where C can neither count them nor tell who listens: as long as totals are switched off, say."""
        if self._entry is None:
            return
        heard, number, is_seen = shape.listeners, shape.number, self._numeric.looks_in_c()
        switches = (is_seen, *[one.is_on for one in heard])
        if switches == shape.armed:  # those that were turned are others'
            return
        flowing = [one for one in heard if one.hook in FLOWS and one.is_on]
        is_plain = not any(one.mutates for one in flowing)  # what changes gradients is called by Python's own hooks
        self._entry.hear(number, flowing if flowing and is_plain else None)
        called = _not_in_c(heard, hears_in_c=is_plain, looks_in_c=is_seen)
        self._entry.hand(number, hands=is_seen and _looks_at_all(heard))
        is_told = all(one.hook in TOLD and not one.mutates for one in called)
        is_stopped = any(isinstance(one.totals, Totals) and not one.is_on for one in heard)
        self._entry.arm(number, is_armed=is_stopped or not is_told)
        self._entry.tell(number, called if is_told else [])
        shape.armed = switches

    # -- what calls return

    def _check(self) -> None:
        """Have the entry look at what calls return while anybody listens to `suspect`."""
        if self._entry is not None:
            heard = self._registry.ordered("suspect")
            self.looks = self._numeric.looks_in_c() and any(one.is_on for one in heard)
            self.passed()

    def alert(self) -> None:
        """Have every call that returns told of, and every plan hold its call, until `calm`: something was not finite."""
        if not self.is_alert:
            self.is_alert = True
            self._check()

    def calm(self) -> None:
        """Be told of what is not finite alone again: the outermost call is over."""
        self.is_alert = False
        self._check()

    def note_passed(self) -> None:
        """Note that nobody could look at what a call has returned."""
        self._passed += 1

    def passed(self) -> int:
        """Return how many calls have returned what nobody could look at, in all threads up to now."""
        if self._entry is not None:
            self._passed += self._entry.check(checks=self.looks, alert=self.is_alert)
        return self._passed

    def has_seen_all(self, thread: ThreadState, plugin: int) -> bool:
        """Do what `Context.has_seen_all` says; what C has handed over, the plugins have seen that listen to `forwards` there."""
        return (
            self.looks
            and thread.passed == self.passed()
            and all(
                any(one.plugin == plugin for one in self._dispatch.switched_on("forwards", module))
                for module in thread.handed
            )
        )

    def let_go(self, thread: ThreadState, last: int) -> int:
        """Have the entry keep alive no more what calls have returned; return how many it has left as they are."""
        return len(thread.returned) if self._entry is None else self._entry.let_go(thread, last)

    # -- what is hidden from a profiler

    def aloud_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return what runs a module as if hookd were not there, hidden from nobody; for plans that are called from C."""
        return self._entry.aloud_of(module)  # type: ignore[union-attr]

    def aloud(self, thread: ThreadState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the training's inside of that, which is hidden from nobody."""
        if thread.hidden and self._entry is not None:
            return self._entry.aloud(function, *args, **kwargs)
        return function(*args, **kwargs)


def _looks_at_all(heard: tuple[Listener, ...]) -> bool:
    """Whether a plugin that is told of suspects looks at all outputs in this step, large ones and those on a device too."""
    on = [one for one in heard if one.is_on]
    suspecting = {one.plugin for one in on if one.hook == "suspect"}
    return any(one.hook == "forwards" and one.plugin in suspecting for one in on)


def _not_in_c(heard: tuple[Listener, ...], *, hears_in_c: bool, looks_in_c: bool) -> list[Listener]:
    """Return those that are switched on and are not served by the entry alone.

    Args:
        heard: all listeners.
        hears_in_c: whether the entry hooks the graph for those to gradients.
        looks_in_c: whether it looks at what calls return.
    """
    on = [one for one in heard if one.is_on and not isinstance(one.totals, Totals)]
    suspecting = {one.plugin for one in on if one.hook == "suspect"} if looks_in_c else ()
    return [
        one
        for one in on
        if one.hook not in ("forward_error", "suspect")  # which no plan calls
        and not (one.hook in FLOWS and hears_in_c)
        and not (
            one.hook == "forwards" and one.plugin in suspecting
        )  # what it would look at is looked at in C, or handed over from there
        and one.hook != "output_summary"  # likewise, or `Calls.output_shown` is asked
    ]
