"""What the plugins cost, and the budget that they are kept in. Runs in the target, at each step boundary.

One step in `ACCOUNTED_EVERY` is measured call by call, so that the clock is not read at every event; it stands for the
others of its kind, of each plugin's sampled steps and of those between them. Sampled hooks are on in one step of
`interval`; where those of all plugins together exceed the budget, the costliest gets a longer interval, and a shorter
one again when there is room. A plugin that cannot be sampled and
takes most of a step is quarantined, unless the person who enabled it fixed its interval.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hookd.agent.listeners import wanted_interval

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.agent.listeners import Entry
    from hookd.agent.session import Session

ACCOUNTED_EVERY = 4
WINDOW_STEPS = 16
RUNAWAY_RATIO = 0.5
"""The share of step time above which a plugin that cannot be sampled is quarantined."""
DEAR_RATIO = 0.9
"""The same for a plugin with `longest = 1`."""
RUNAWAY_STEPS = 3
"""How many accounted steps in a row it takes."""


class Governor:
    """Accounts and decides.

    Attributes:
        ratio: overhead of all plugins over step time, of the last window.
    """

    def __init__(self, session: Session, budget: float) -> None:
        self.budget = budget
        self.ratio = 0.0
        self._session = session
        self._boundary_ns = 0
        self._runaway: dict[int, int] = {}
        self._window_ns = 0
        self._window_steps = 0
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
            self._account(step - 1, elapsed, was_measured=namespace["accounting"])
        namespace["accounting"] = step % ACCOUNTED_EVERY == 0
        self.switch(step)
        return elapsed

    def switch(self, step: int) -> None:
        """Set which hooks are called during the step after `step` done ones."""
        namespace = self._session.namespace
        backward = False
        for entry in self._entries():
            for one in entry.listeners:
                on = entry.state == "active" and step % entry.interval_of(one.hook) == 0
                namespace[one.switch] = on
                backward = backward or (on and one.hook in ("backward_pre", "backward"))
        namespace["backward_on"] = backward

    def _entries(self) -> Iterable[Entry]:
        return list(self._session.registry.entries.values())

    def _account(self, step: int, elapsed: int, *, was_measured: bool) -> None:
        """Charge a step: with what was measured, or with what the last measured step of the same kind took."""
        spent = self._session.dispatch.spent
        self._window_ns += elapsed
        self._window_steps += 1
        for entry in self._entries():
            kind = entry.kind(step)
            if was_measured:
                entry.cost_ns[kind] = spent.get(entry.number, 0)
                self._watch(entry, entry.cost_ns[kind], elapsed)
            ns = entry.cost_ns.get(kind, 0)
            entry.spent_ns += ns
            self._window_spent[entry.number] = self._window_spent.get(entry.number, 0) + ns
            self._session.core.overhead.labels(entry.name).inc(ns / 1e9)
        if was_measured:
            spent.clear()
        if self._window_steps >= WINDOW_STEPS:
            self._decide()

    def _watch(self, entry: Entry, ns: int, elapsed: int) -> None:
        """Stop a plugin that takes most of the training's time, if it cannot be made to look less often."""
        # One that says it must not miss a step has said that it is dear; still, it must leave the training some time.
        limit = RUNAWAY_RATIO if entry.plugin.longest > 1 else DEAR_RATIO
        is_runaway = ns > limit * elapsed and not (entry.plugin.mutates or entry.context.is_fixed)
        self._runaway[entry.number] = self._runaway.get(entry.number, 0) + 1 if is_runaway else 0
        if self._runaway[entry.number] >= RUNAWAY_STEPS and not self._stretch(entry, 8):
            share = f"{100 * ns / elapsed:.0f} % of a step"
            self._session.quarantine(entry, f"it takes {share} and cannot be sampled")

    def _decide(self) -> None:
        """Look less often where the sampled hooks take more than the budget, more often where there is room.

        What cannot be stretched any more must not starve what can: the budget is for those that can.
        """
        self.ratio = sum(self._window_spent.values()) / self._window_ns
        self._session.core.overhead_ratio.set(self.ratio)
        shares = sorted(((self._share(e), e) for e in self._entries() if self._can_stretch(e)), key=lambda one: -one[0])
        bendable = sum(share for share, entry in shares if entry.stretch < entry.limit)
        if bendable > self.budget:
            any(self._stretch(entry, 2) for _, entry in shares)
        else:
            self._relax_all(shares, self.budget / 2 - bendable)
        self._window_ns = self._window_steps = 0
        self._window_spent.clear()

    def _share(self, entry: Entry) -> float:
        """Give what the hooks of a plugin that can still be stretched take of the training's time.

        Those are all sampled ones, or where these are at their longest interval the rare ones alone.
        """
        base = entry.cost_ns.get(0, 0)
        if entry.stretch > entry.longest:
            base = entry.cost_ns.get(1, base)
        extra_ns = entry.cost_ns.get(2, 0) - base
        return max(0.0, extra_ns / entry.stretch) * self._window_steps / self._window_ns

    def _relax_all(self, shares: list[tuple[float, Entry]], room: float) -> None:
        """Halve intervals, the cheapest plugins' first, as long as what that costs is less than `room`."""
        for share, entry in reversed(shares):
            wanted = wanted_interval(entry.plugin, entry.context)
            # One at its longest interval is not part of what was counted, and will be.
            more = share if entry.stretch < entry.limit else 2 * share
            if entry.stretch > wanted and more <= room:
                self._set(entry, max(wanted, entry.stretch // 2))
                room -= more

    @staticmethod
    def _can_stretch(entry: Entry) -> bool:
        return entry.is_governed and entry.limit > 1

    def _stretch(self, entry: Entry, factor: int) -> bool:
        """Lengthen a plugin's interval; whether that was possible."""
        if not self._can_stretch(entry) or entry.stretch >= entry.limit:
            return False
        self._set(entry, min(entry.stretch * factor, entry.limit))
        return True

    def _set(self, entry: Entry, stretch: int) -> None:
        # Rare hooks are called in sampled steps: their interval is a multiple of the others'.
        is_rare = entry.plugin.rare and stretch > entry.longest
        entry.stretch = stretch // entry.longest * entry.longest if is_rare else stretch
        self._session.core.sampling_interval.labels(entry.name).set(entry.interval)
