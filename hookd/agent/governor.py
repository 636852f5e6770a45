"""What hookd and the plugins cost, and the budget that they are kept in. Runs in the target, at each step boundary.

One step in `METERED_EVERY`, and each in which something seldom is sampled, is measured call by call, so that the clock is
not read at every event; it stands for the others of its kind, of each plugin's sampled steps and of those between them.
Sampled hooks are on in one step of `interval`; where those of all plugins together exceed the budget, with what hookd
itself needs to call them, the costliest gets a longer interval, and a shorter one again when there is room. A plugin that
cannot be sampled and takes too much of a step is quarantined, unless the person who enabled it fixed its interval.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hookd.agent.dispatch import OWN
from hookd.agent.listeners import wanted_interval

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.agent.listeners import Entry
    from hookd.agent.session import Session

METERED_EVERY = 4
WINDOW_STEPS = 16
ALARM_RATIO = 4
"""A metered step that costs so many times the budget is decided upon at once, not at the end of the window."""
RUNAWAY_RATIO = 1 / 3
"""The share of step time above which a plugin that cannot be sampled is quarantined: half of what is left."""
DEAR_RATIO = 0.9
"""The same for a plugin with `longest = 1`."""
RUNAWAY_STEPS = 3
"""How many metered steps in a row it takes."""

FIXED = 3
"""What a kind of step is more by where hooks of a fixed interval are called (`Entry.kind`)."""
KINDS = 81
"""So many kinds of steps are told apart by what is sampled in them: all of four plugins."""


class Governor:
    """Accounts and decides.

    Attributes:
        budget: the share of the step time that what is sampled may take; with 0 nothing is sampled at all.
        ratio: overhead of hookd and all plugins over step time, of the last window.
    """

    def __init__(self, session: Session, budget: float) -> None:
        self.budget = budget
        self.ratio = 0.0
        self._session = session
        self._boundary_ns = 0
        self._runaway: dict[int, int] = {}
        self._own: dict[tuple[int, ...], int] = {}  # ns of hookd itself, by what was sampled in the step
        self._window_ns = self._window_steps = 0
        self._window_spent: dict[int, int] = {}

    def boundary(self, step: int) -> int:
        """Close the accounts of a step and set the switches of the next.

        Args:
            step: how many steps are done since the attach.

        Returns:
            The wall time of the step in ns, 0 for the first, whose beginning nobody saw.
        """
        now = time.perf_counter_ns()
        elapsed, self._boundary_ns = now - self._boundary_ns if self._boundary_ns else 0, now
        namespace = self._session.namespace
        if elapsed:
            self._account(elapsed, was_metered=namespace["accounting"])
        self.switch(step)
        namespace["accounting"] = step % METERED_EVERY == 0 or self._is_seldom()
        return elapsed

    def _is_seldom(self) -> bool:
        """Whether what is sampled in this step comes so seldom that its cost would be known of long ago."""
        return any(entry.stretch >= METERED_EVERY and entry.kind % FIXED for entry in self._entries())

    def switch(self, step: int) -> None:
        """Set which hooks are called during the step after `step` done ones."""
        namespace = self._session.namespace
        backward = False
        for entry in self._entries():
            kinds = {0}
            for one in entry.listeners:
                on = entry.state == "active" and entry.is_due(one.hook, step) and self._may(entry, one.hook)
                namespace[one.switch] = on
                backward = backward or (on and one.hook in ("backward_pre", "backward"))
                if on and entry.is_sampled(one.hook):
                    kinds.add(self._kind(entry, one.hook))
            entry.kind = FIXED * (FIXED in kinds) + max(kinds - {FIXED})
        namespace["backward_on"] = backward

    @staticmethod
    def _kind(entry: Entry, hook: str) -> int:
        if entry.context.fixed(hook) is not None:
            return FIXED
        return 2 if hook in entry.plugin.rare or not entry.plugin.rare else 1

    def _may(self, entry: Entry, hook: str) -> bool:
        return self.budget > 0 or not entry.is_sampled(hook) or entry.context.fixed(hook) is not None

    def _entries(self) -> Iterable[Entry]:
        return list(self._session.registry.entries.values())

    # -- accounts

    def _account(self, elapsed: int, *, was_metered: bool) -> None:
        """Charge a step: with what was measured, or with what the last metered step of the same kind took."""
        spent = self._session.dispatch.spent
        self._window_ns += elapsed
        self._window_steps += 1
        for entry in self._entries():
            if was_metered:
                entry.cost_ns[entry.kind] = spent.get(entry.number, 0)
                self._watch(entry, entry.cost_ns[entry.kind], elapsed)
            ns = entry.cost_ns.get(entry.kind, 0)
            entry.spent_ns += ns
            self._charge(entry.number, entry.name, ns)
        self._charge(OWN, "hookd", self._own_ns(spent.get(OWN, 0) if was_metered else None))
        is_alarming = was_metered and sum(list(spent.values())) > ALARM_RATIO * self.budget * elapsed
        if was_metered:
            spent.clear()
        if self._window_steps >= WINDOW_STEPS or (is_alarming and self._window_steps >= METERED_EVERY):
            self._decide()

    def _charge(self, number: int, name: str, ns: int) -> None:
        self._window_spent[number] = self._window_spent.get(number, 0) + ns
        self._session.core.overhead.labels(name).inc(ns / 1e9)

    def _own_ns(self, measured: int | None) -> int:
        """Give what hookd itself took in a step; where none like it was metered, what it takes at least."""
        kinds = tuple(entry.kind for entry in self._entries())
        if measured is not None:
            if len(self._own) >= KINDS:
                self._own.clear()
            self._own[kinds] = measured
        return self._own.get(kinds, min(self._own.values(), default=0))

    def _watch(self, entry: Entry, ns: int, elapsed: int) -> None:
        """Stop a plugin that takes much of the training's time, if it cannot be made to look less often."""
        # One that says it must not miss a step has said that it is dear; still, it must leave the training some time.
        limit = RUNAWAY_RATIO if entry.plugin.longest > 1 else DEAR_RATIO
        is_runaway = ns > limit * elapsed and not (entry.plugin.mutates or entry.context.is_fixed)
        self._runaway[entry.number] = self._runaway.get(entry.number, 0) + 1 if is_runaway else 0
        if self._runaway[entry.number] >= RUNAWAY_STEPS and not self._stretch(entry):
            share = f"{100 * ns / elapsed:.0f} % of a step"
            self._session.quarantine(entry, f"it takes {share} and cannot be sampled")

    # -- decisions

    def _decide(self) -> None:
        """Look less often where the sampled hooks take more than the budget, more often where there is room.

        What cannot be stretched any more must not starve what can: the budget is for those that can.
        """
        self.ratio = sum(self._window_spent.values()) / self._window_ns
        self._session.core.overhead_ratio.labels().set(self.ratio)
        if self.budget > 0:
            self._adapt()
        self._window_ns = self._window_steps = 0
        self._window_spent.clear()

    def _adapt(self) -> None:
        governed = [entry for entry in self._entries() if self._can_stretch(entry)]
        taken = self._taken(governed)
        if taken <= self.budget:
            self._relax_all(governed, self.budget / 2 - taken)
        while taken > self.budget:
            costliest = max((e for e in governed if e.stretch < e.limit), key=self._share)
            self._stretch(costliest)
            taken = self._taken(governed)

    def _taken(self, governed: list[Entry]) -> float:
        """Give what can still be stretched takes of the training's time, hookd's own part of it included."""
        return sum(self._share(entry) for entry in governed if entry.stretch < entry.limit)

    def _share(self, entry: Entry) -> float:
        """Give what the hooks of a plugin that can still be stretched take of the training's time.

        Those are all sampled ones, or where these are at their longest interval the rare ones alone.
        """
        extra_ns = self._extra_ns(entry) * self._with_own()
        return extra_ns / entry.stretch * self._window_steps / self._window_ns

    @staticmethod
    def _extra_ns(entry: Entry) -> int:
        """Give what a step costs in which all hooks are called, beyond one in which those that can be stretched are not."""
        cost = entry.cost_ns
        fixed = FIXED if FIXED + 2 in cost else 0
        base = cost.get(fixed, 0)
        if entry.stretch > entry.longest:
            base = cost.get(fixed + 1, base)
        return max(0, cost.get(fixed + 2, 0) - base)

    def _with_own(self) -> float:
        """Give by what a plugin's own time is to be multiplied, so that what hookd needs for calling it is in it."""
        dearest = max(self._own, key=sum, default=())
        extra = sum(self._extra_ns(entry) for entry in self._entries())
        own = self._own.get(dearest, 0) - min(self._own.values(), default=0)
        return 1 + own / extra if extra > 0 and own > 0 else 1.0

    def _relax_all(self, governed: list[Entry], room: float) -> None:
        """Halve intervals, the cheapest plugins' first, as long as what that costs is less than `room`."""
        for entry in sorted(governed, key=self._share):
            wanted = wanted_interval(entry.plugin, entry.context)
            # One at its longest interval is not part of what was counted, and will be.
            more = self._share(entry) if entry.stretch < entry.limit else 2 * self._share(entry)
            if entry.stretch > wanted and more <= room:
                self._set(entry, max(wanted, entry.stretch // 2))
                room -= more

    @staticmethod
    def _can_stretch(entry: Entry) -> bool:
        return entry.is_governed and entry.limit > 1

    def _stretch(self, entry: Entry) -> bool:
        """Double a plugin's interval; whether that was possible."""
        if not self._can_stretch(entry) or entry.stretch >= entry.limit:
            return False
        self._set(entry, min(entry.stretch * 2, entry.limit))
        return True

    def _set(self, entry: Entry, stretch: int) -> None:
        # Rare hooks are called in sampled steps: their interval is a multiple of the others'.
        is_rare = entry.plugin.rare and stretch > entry.longest
        entry.stretch = stretch // entry.longest * entry.longest if is_rare else stretch
        self._session.core.show_interval(entry)
