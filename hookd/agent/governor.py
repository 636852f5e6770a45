"""What the plugins cost, and the budget that they are kept in. Runs in the target, at each step boundary.

One step in `ACCOUNTED_EVERY` is measured call by call and stands for all of them, so that the clock is not read at
every event. Sampled hooks are on in one step of `interval`; where all plugins together exceed the budget, the costliest
sampled one gets a longer interval, and a shorter one again when there is room. A plugin that cannot be sampled and
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
            self._account(elapsed, was_measured=namespace["accounting"])
        namespace["accounting"] = step % ACCOUNTED_EVERY == 0
        self.switch(step)
        return elapsed

    def switch(self, step: int) -> None:
        """Set which hooks are called during the step after `step` done ones."""
        namespace = self._session.namespace
        backward = False
        for entry in self._entries():
            is_sampled_step = step % entry.interval == 0
            for one in entry.listeners:
                on = entry.state == "active" and (is_sampled_step or not entry.is_sampled(one.hook))
                namespace[one.switch] = on
                backward = backward or (on and one.hook in ("backward_pre", "backward"))
        namespace["backward_on"] = backward

    def _entries(self) -> Iterable[Entry]:
        return list(self._session.registry.entries.values())

    def _account(self, elapsed: int, *, was_measured: bool) -> None:
        spent = self._session.spent
        if was_measured:
            for entry in self._entries():
                ns = spent.get(entry.number, 0)
                self._charge(entry, ns, elapsed)
            spent.clear()
        self._window_ns += elapsed
        self._window_steps += 1
        if self._window_steps >= WINDOW_STEPS:
            self._decide()

    def _charge(self, entry: Entry, ns: int, elapsed: int) -> None:
        scaled = ns * ACCOUNTED_EVERY
        entry.spent_ns += scaled
        self._window_spent[entry.number] = self._window_spent.get(entry.number, 0) + scaled
        self._session.core.overhead.labels(entry.name).inc(scaled / 1e9)
        # One that says it must not miss a step has said that it is dear; still, it must leave the training some time.
        limit = RUNAWAY_RATIO if entry.plugin.longest > 1 else DEAR_RATIO
        is_runaway = ns > limit * elapsed and not (entry.plugin.mutates or entry.is_exempt)
        self._runaway[entry.number] = self._runaway.get(entry.number, 0) + 1 if is_runaway else 0
        if self._runaway[entry.number] >= RUNAWAY_STEPS and not self._stretch(entry, 8):
            share = f"{100 * ns / elapsed:.0f} % of a step"
            self._session.quarantine(entry, f"it takes {share} and cannot be sampled")

    def _decide(self) -> None:
        self.ratio = sum(self._window_spent.values()) / self._window_ns
        self._session.core.overhead_ratio.set(self.ratio)
        costly = sorted(self._entries(), key=lambda e: -self._window_spent.get(e.number, 0))
        # What cannot be stretched must not starve what can: the budget is for those that look as often as it allows.
        bendable = sum(self._window_spent.get(e.number, 0) for e in costly if self._can_stretch(e)) / self._window_ns
        if bendable > self.budget:
            any(self._stretch(entry, 2) for entry in costly)
        elif bendable < self.budget / 4:
            for entry in costly:
                self._relax(entry)
        self._window_ns = self._window_steps = 0
        self._window_spent.clear()

    @staticmethod
    def _can_stretch(entry: Entry) -> bool:
        is_sampled = any(entry.is_sampled(one.hook) for one in entry.listeners)
        return is_sampled and not entry.is_exempt and entry.plugin.longest > 1

    def _stretch(self, entry: Entry, factor: int) -> bool:
        """Lengthen a plugin's interval; whether that was possible."""
        if not self._can_stretch(entry) or entry.interval >= entry.plugin.longest:
            return False
        self._set(entry, min(entry.interval * factor, entry.plugin.longest))
        return True

    def _relax(self, entry: Entry) -> None:
        wanted = wanted_interval(entry.plugin, entry.context)
        if entry.interval > wanted:
            self._set(entry, max(wanted, entry.interval // 2))

    def _set(self, entry: Entry, interval: int) -> None:
        entry.interval = interval
        self._session.core.sampling_interval.labels(entry.name).set(interval)
