"""Overhead accounting: keeps hookd and the plugins within their budget. Runs at each step boundary.

Reading the clock at every event would cost too much, so only some steps are metered call by call: one step in `METERED_EVERY`,
or one in `CALM_EVERY` after a while without surprises. A metered step stands for all steps of its kind, those in which the
same hooks are sampled. The rate applies to each kind separately, so a kind that occurs seldom is metered as well.

Sampled hooks are called in one step of `interval`. If together they exceed the budget that the unsampled work leaves, with
hookd's own overhead for calling them included, the costliest plugin gets a longer interval, and a shorter one again when the
budget allows it. A plugin that cannot be sampled and takes too much of a step is quarantined, unless the person who enabled
it fixed its interval.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hookd.api.hookspecs import FLOWS
from hookd.api.totals import Switched
from hookd.target.plugins.accounts import OWN
from hookd.target.plugins.listeners import ALL, FIXED, LAST, NONE, USUAL, wanted_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.target.entry.counting import Counting
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.listeners import Listener, Loaded, Registry

    _Kind = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """The kind of a step: the plugins' numbers, and for each plugin its `Loaded.kind` and the number of its sampled hooks called."""

METERED_EVERY, CALM_EVERY = 5, 17
"""Odd, so that a training that alternates between two kinds of step (generator, discriminator) is metered in both."""
METERED_RATIO = 1 / 3
"""The largest share of steps that is metered, however many kinds there are."""
CALM_WINDOWS = 4
"""Number of consecutive windows without a surprise after which metering slows down to `CALM_EVERY`."""
WINDOW_STEPS = 16
SHOWN_WINDOWS = 8
"""Number of last windows of which the published overhead is the mean: single windows differ, as plugins are sampled."""
SURPRISE, ALARM_RATIO = 2, 4
"""A metered step triggers an early decision if its cost differs from the estimate by more than the factor `SURPRISE`
and exceeds the budget by more than the factor `ALARM_RATIO`."""
SMOOTHED = 4
"""Number of windows, about, over which the step time is averaged: one heavy sample makes a window much longer. A shorter step
time counts at once, because the same overhead is a larger share of it."""
LEFT_RATIO = 1 / 2
"""The share of the budget that is reserved for sampled hooks, so that the work done at every step cannot starve them."""
RUNAWAY_RATIO = 1 / 3
"""The share of step time above which a plugin that cannot be sampled is quarantined: half of the training's own time."""
COSTLY_RATIO = 0.9
"""The same for a plugin with `longest = 1`."""
RUNAWAY_STEPS = 3
"""Number of consecutive metered steps above that share before a plugin is quarantined."""

UNKNOWN_NS = 100_000
"""Assumed cost of a sampled plugin per module and step, until it is metered. Measured in a model of 1,000 modules:
80 to 150 us, garbage collection included."""

FAR = 1 << 12
"""The most steps between two draws of the sampled hooks."""
KINDS = 108
"""Number of kinds of steps that are remembered, the most recent ones: enough for every kind of four plugins."""
LAST_COSTS = 4
"""Number of metered costs whose mean counts: see `_typical`."""


class _Draw(NamedTuple):
    """One sampled hook of a plugin, and when it is called.

    Attributes:
        kind: the kind of a step in which it is called, see `Loaded.kind`; `NONE` if its interval is fixed.
        fixed: its fixed interval in steps; None: the governor chooses.
        tier: the group that it is drawn with if its interval is not fixed: `LAST`, `USUAL`, or `ALL` for a rare hook.
        totals: the totals that are kept instead of calling the hook; None: it is called.
    """

    listener: Listener
    kind: int
    fixed: int | None
    tier: int
    is_backward: bool
    totals: Switched | None = None

    @classmethod
    def of(cls, loaded: Loaded, listener: Listener) -> _Draw:
        """Return the draw of a listener."""
        rate, fixed = loaded.rates[listener.hook], loaded.context.requests.interval(listener.hook)
        tier = ALL if rate.longest else LAST if rate.stretched_last else USUAL
        costliest = ALL if tier == USUAL and not loaded.rarest else tier
        totals = listener.totals if isinstance(listener.totals, Switched) else None
        return cls(listener, NONE if fixed is not None else costliest, fixed, tier, listener.hook in FLOWS, totals)


class Governor:
    """Accounts for overhead, and decides on sampling intervals.

    Args:
        clock: returns the time in ns; steps are measured by it.
        quarantine: stops a plugin, for a given reason.

    Attributes:
        budget: the share of step time that hookd and all plugins may take; with 0 nothing is sampled.
        ratio: overhead of hookd and all plugins over step time, in the last windows.
        is_to_listen: a plugin has changed which hooks it wants; the change applies from the next step on.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        budget: float,
        clock: Callable[[], int],
        registry: Registry,
        dispatch: Dispatch,
        models: Models,
        counting: Counting,
        core: CoreMetrics,
        quarantine: Callable[[Loaded, str], None],
    ) -> None:
        self.budget = budget
        self.ratio = 0.0
        self._clock, self._registry, self._dispatch = clock, registry, dispatch
        self._models, self._counting, self._core, self._quarantine = models, counting, core, quarantine
        self._overhead, self._overhead_ratio = core.overhead, core.overhead_ratio
        self._ended_ns = self._elapsed_ns = 0  # end and duration of the last step
        self._runaway: dict[int, int] = {}  # by plugin: consecutive metered steps above its limit
        self._own: dict[tuple[int, ...], int] = {}  # ns of hookd itself, by the plugins' kinds in the step
        self._costs: dict[_Kind, dict[int, int]] = {}  # ns of each plugin, by kind of step
        self._last: dict[tuple[int, int | _Kind], list[int]] = {}  # metered costs, see `_typical`
        self._window_ns = self._window_steps = self._calm_windows = 0
        self._step_ns = 0.0
        self._with_own = 1.0  # factor that adds dispatch overhead to a plugin's own time
        self._is_alarmed = self._is_changed = self.is_to_listen = False
        self._allowance = 0.0  # number of steps that may be metered now
        self._window_spent: dict[int, int] = {}
        self._kind: _Kind = ((), (), ())  # of the step in progress
        self._metered: dict[_Kind, int] = {}  # the last metered step of each kind
        self._drawn: list[tuple[Loaded, list[_Draw], tuple[int, ...]]] = []  # sampled hooks, fixed intervals
        self._numbers: tuple[int, ...] = ()
        self._next_draw = 0  # until this step the draw stays the same
        self._always_flows = False  # whether a hook of `FLOWS` is called in every step
        self._unpaid: dict[_Kind, int] = {}  # number of steps not charged yet, by kind
        self._shown: deque[tuple[int, int]] = deque(maxlen=SHOWN_WINDOWS)  # ns of hookd and of the steps, by window

    def end(self) -> int:
        """End a step; return its wall time in ns, 0 for the first one, whose beginning was not observed."""
        now = self._clock()
        self._elapsed_ns, self._ended_ns = now - self._ended_ns if self._ended_ns else 0, now
        return self._elapsed_ns

    def begin(self, turn: int) -> None:
        """Close the accounts of the last step, and set the switches for the next one, after `turn` turns (`StepCount.turns`)."""
        elapsed = self._elapsed_ns
        if self._is_changed:
            self._is_changed = False
            self._renew()
        if elapsed:
            self._account(elapsed, was_metered=self._dispatch.accounts.is_metered)
            if self.budget > 0 and self._models.is_learning:
                self._hold_back(elapsed)
        if self.is_to_listen:
            self.is_to_listen = False
            self.listen(turn)
        elif self._draw(turn):
            self._counting.act_on_switches()
        self._counting.meter(is_metered=self._is_to_be_metered(turn))

    def forget_time(self) -> None:
        """Treat the next step as the first: the time since the last one does not count."""
        self._ended_ns = 0

    def _is_to_be_metered(self, step: int) -> bool:
        every = CALM_EVERY if self._calm_windows >= CALM_WINDOWS else METERED_EVERY
        self._allowance = min(self._allowance + METERED_RATIO, 2)
        if self._models.is_learning:
            return False
        if step - self._metered.get(self._kind, -every) < every:
            return False
        if self._allowance < 1 and all(loaded.kind in loaded.cost_ns for loaded, _, _ in self._drawn):
            return False
        self._allowance -= 1
        self._metered[self._kind] = step
        return True

    def _hold_back(self, step_ns: int) -> None:
        """Stretch intervals on an assumed cost after an attach, while the model is being learnt and nothing is metered."""
        wanted = self._models.size() * UNKNOWN_NS / (self.budget * step_ns)
        for loaded in self._all():
            if min(wanted, loaded.rare_limit) > loaded.stretch and self._can_stretch(loaded):
                self.stretch_to(loaded, min(1 << math.ceil(math.log2(wanted)), loaded.rare_limit))

    def switch(self, step: int) -> None:
        """Set which hooks are called after `step` completed steps, because a plugin was loaded, unloaded or changed."""
        self._calm_windows = 0
        self.listen(step)

    def listen(self, step: int) -> None:
        """Set which hooks are called after `step` completed steps, because a plugin changed which ones it wants."""
        drawn, flows = [], False
        for loaded in self._all():
            draws = []
            for listener in loaded.listeners:
                on = loaded.state == "active" and listener.name not in loaded.context.requests.unwanted
                is_sampled = loaded.is_sampled(listener)
                if (
                    on
                    and is_sampled
                    and (self.budget > 0 or loaded.context.requests.interval(listener.hook) is not None)
                ):
                    draws.append(_Draw.of(loaded, listener))
                else:
                    listener.is_on = on and not is_sampled
                    if isinstance(listener.totals, Switched):
                        listener.totals.switch(is_on=on and not is_sampled, is_active=loaded.state == "active")
                    flows = flows or (on and not is_sampled and listener.hook in FLOWS)
            drawn.append((loaded, draws, tuple({draw.fixed for draw in draws if draw.fixed})))
            loaded.drawn, loaded.has_fixed = None, any(draw.fixed is not None for draw in draws)
        drawn.sort(key=lambda row: row[0].plugin.apart)  # `apart` plugins last: they are drawn depending on the others
        numbers = tuple(loaded.number for loaded, _, _ in drawn)
        if numbers != self._numbers:
            self._is_changed = True  # the accounts belong to the training thread: `begin` renews them
        active = [loaded.number for loaded, _, _ in drawn if loaded.state == "active"]
        self._runaway = {number: self._runaway.get(number, 0) for number in active}
        self._drawn, self._numbers, self._always_flows, self._next_draw = drawn, numbers, flows, 0
        self._draw(step)
        self._counting.act_on_switches()

    def _draw(self, step: int) -> bool:
        """Set which sampled hooks are called in the next step, after `step` completed ones; return whether a switch was changed."""
        if step < self._next_draw:
            return False
        is_changed, somebody_looks, following = False, False, step + FAR
        for loaded, draws, fixed in self._drawn:
            is_on = bool(draws) and loaded.state == "active"  # it may have been quarantined since `listen`
            if is_on and loaded.plugin.apart:
                usual = loaded.is_due_apart(step, is_alone=not somebody_looks)
            else:
                usual = is_on and loaded.is_due(step)
            rare = usual and loaded.is_due_rarely(step)
            last = usual or (is_on and loaded.is_due_last(step))
            drawn = (is_on, last, usual, rare, loaded.stretch, *(step % interval == 0 for interval in fixed))
            if drawn != loaded.drawn:
                loaded.drawn, is_changed = drawn, True
                self._set_switches(loaded, draws, (False, last, usual, rare), step)
            somebody_looks = somebody_looks or loaded.looks
            if draws and loaded.state == "active":
                changes = (_next_fixed(step, interval) for interval in fixed if interval > 1)
                following = min(following, loaded.next_draw(step), *changes)
        self._next_draw = following
        if is_changed:
            flows = (draw.listener.is_on for _, draws, _ in self._drawn for draw in draws if draw.is_backward)
            self._dispatch.hears_gradients = self._always_flows or any(flows)
            plugins = [loaded for loaded, _, _ in self._drawn]
            kinds, listening = tuple(plugin.kind for plugin in plugins), tuple(plugin.listening for plugin in plugins)
            self._kind = self._numbers, kinds, listening
        return is_changed

    def _set_switches(self, loaded: Loaded, draws: list[_Draw], due: tuple[bool, ...], step: int) -> None:
        """Set the switches of one plugin; `due` holds by tier whether it is called."""
        is_on, looks, is_fixed, costliest, listening = loaded.state == "active", False, False, NONE, 0
        for draw in draws:
            is_called = is_on and (step % draw.fixed == 0 if draw.fixed else due[draw.tier])
            draw.listener.is_on = is_called
            if draw.totals is not None:
                if is_on:
                    steps = draw.fixed or (loaded.rare_interval if draw.tier == ALL else loaded.interval)
                    draw.totals.sample(is_on=is_called, done=step, interval=steps)
                else:
                    draw.totals.switch(is_on=False, is_active=False)
            if is_called:
                listening += 1
                looks = looks or draw.tier != LAST
                is_fixed = is_fixed or bool(draw.fixed)
                costliest = max(costliest, draw.kind)
        loaded.kind, loaded.listening, loaded.looks = FIXED * is_fixed + costliest, listening, looks

    def _all(self) -> Iterable[Loaded]:
        return list(self._registry)

    # -- accounts

    def _account(self, elapsed: int, *, was_metered: bool) -> None:
        """Charge a step with the cost of metered steps of the same kind."""
        self._window_ns += elapsed
        self._window_steps += 1
        if was_metered:
            self._pay()
            self._learn(elapsed)
        self._unpaid[self._kind] = self._unpaid.get(self._kind, 0) + 1
        if self._window_steps >= WINDOW_STEPS or (self._is_alarmed and self._window_steps >= METERED_EVERY):
            self._pay()
            self._decide()

    def _learn(self, elapsed: int) -> None:
        """Record the costs of a metered step."""
        accounts, kinds = self._dispatch.accounts, self._kind[1]
        payers = OWN, self._listening(FLOWS), self._listening(("output_summary",)), self._listening(("forwards",))
        for number, ns in zip(payers, self._counting.metered_ns()):
            accounts.spent[number] = accounts.spent.get(number, 0) + ns
        known = self._costs.pop(self._kind, {})  # reinserted below as the most recent one
        if len(self._costs) >= KINDS:
            self._forget(next(iter(self._costs)))
        costs = self._costs[self._kind] = {}
        for loaded in self._all():
            ns = accounts.spent.get(loaded.number, 0)
            loaded.calls += accounts.calls.get(loaded.number, 0)
            loaded.call_ns += ns
            loaded.cost_ns[loaded.kind] = self._typical((loaded.number, loaded.kind), ns)
            costs[loaded.number] = self._typical((loaded.number, self._kind), ns)
            self._watch(loaded, ns, elapsed)
        # `_pay` charges the least of these for a kind that was never metered.
        self._own[kinds] = self._typical((OWN, self._kind), accounts.spent.get(OWN, 0))
        spent, taken_for = sum(accounts.spent.values()), sum(known.values()) + self._own[kinds]
        is_surprising = not taken_for / SURPRISE <= spent <= taken_for * SURPRISE
        if is_surprising:
            self._metered.pop(self._kind, None)  # so that the next step of this kind is metered
        if (known and is_surprising) or any(self._runaway.values()):
            self._calm_windows = 0
        if is_surprising and spent > ALARM_RATIO * self.budget * elapsed:
            self._is_alarmed = True
        accounts.spent.clear()
        accounts.calls.clear()

    def _listening(self, hooks: tuple[str, ...]) -> int:
        """Return the number of the first plugin that listens to one of `hooks` in this step: it pays for the work done in C."""
        for loaded in self._all():
            if any(listener.hook in hooks and listener.is_on for listener in loaded.listeners):
                return loaded.number
        return OWN

    def _forget(self, kind: _Kind) -> None:
        """Forget a kind of steps."""
        self._costs.pop(kind, None)
        self._own.pop(kind[1], None)
        self._metered.pop(kind, None)

    def _renew(self) -> None:
        """Forget all kinds of steps, because the set of plugins has changed."""
        self._pay()
        for known in (self._costs, self._own, self._metered):
            known.clear()

    def _typical(self, key: tuple[int, int | _Kind], ns: int) -> int:
        """Return the mean of the last metered costs, in ns; the largest counts with at most twice the second largest.

        So an interruption of one step is not charged to all steps of its kind, but a cost that differs from step to step is
        charged as a whole. Of two costs the lower one counts, because a plugin's first sampled step includes its one-time setup.
        """
        if len(self._last) >= 4 * KINDS:
            self._last.clear()
        last: list[int] = [*self._last.get(key, ()), ns][-LAST_COSTS:]
        self._last[key] = last
        if len(last) < 3:  # noqa: PLR2004
            return min(last)
        *_, second, largest = sorted(last)
        return (sum(last) - largest + min(largest, 2 * second)) // len(last)

    def _pay(self) -> None:
        """Charge all unpaid steps at once: charging each step by itself would cost more than many of the hooks."""
        for (numbers, kinds, listening), steps in self._unpaid.items():
            costs = self._costs.get((numbers, kinds, listening), {})
            for loaded, kind in zip(map(self._registry.get, numbers), kinds):
                if loaded is not None:
                    ns = steps * costs.get(loaded.number, loaded.cost_ns.get(kind, 0))
                    loaded.spent_ns += ns
                    self._charge(loaded.number, loaded.name, ns)
            self._charge(OWN, "hookd", steps * self._own.get(kinds, min(self._own.values(), default=0)))
        self._unpaid.clear()

    def _charge(self, number: int, name: str, ns: int) -> None:
        self._window_spent[number] = self._window_spent.get(number, 0) + ns
        self._overhead.labels(name).inc(ns / 1e9)

    def _watch(self, loaded: Loaded, ns: int, elapsed: int) -> None:
        """Quarantine a plugin that takes much of the training's time, if its interval cannot be stretched."""
        is_runaway = ns > limit_of(loaded) * elapsed and not (loaded.plugin.mutates or loaded.context.requests.is_fixed)
        self._runaway[loaded.number] = self._runaway.get(loaded.number, 0) + 1 if is_runaway else 0
        if self._runaway[loaded.number] >= RUNAWAY_STEPS and not self.stretch(loaded):
            share = f"{100 * ns / elapsed:.0f} % of a step"
            self._quarantine(loaded, f"it takes {share} and cannot be sampled")

    # -- decisions

    def _decide(self) -> None:
        """Close a window: publish the overhead, then stretch or relax intervals to meet the budget."""
        if self._own:  # else nothing has been metered yet, and the ratio is unknown
            self._shown.append((sum(self._window_spent.values()), self._window_ns))
            self.ratio = sum(spent for spent, _ in self._shown) / sum(ns for _, ns in self._shown)
            self._overhead_ratio.labels().set(self.ratio)
        for loaded in self._all():
            self._core.show_cost(loaded)
        self._calm_windows += 1
        step_ns = self._window_ns / self._window_steps
        weight = 1.0 if self._is_alarmed or not self._step_ns or step_ns < self._step_ns else 1 / SMOOTHED
        self._step_ns += weight * (step_ns - self._step_ns)
        if self.budget > 0:
            self._adapt()
        self._window_ns = self._window_steps = 0
        self._is_alarmed = False
        self._window_spent.clear()

    def _adapt(self) -> None:
        self._with_own = self._find_own()
        governed = [loaded for loaded in self._all() if self._can_stretch(loaded)]
        shares, allowed = {id(loaded): self._share(loaded) for loaded in governed}, self._allowed(governed)
        taken = sum(shares.values())
        if taken <= allowed:
            self._relax_all(governed, allowed / 2 - taken)
        while taken > allowed:
            costliest = max((e for e in governed if e.stretch < e.limit), key=lambda e: shares[id(e)])
            self.stretch(costliest)
            shares[id(costliest)] = self._share(
                costliest
            )  # those of the others stay: this is in a step of the training
            taken = sum(shares.values())

    def _allowed(self, governed: list[Loaded]) -> float:
        """Return the share of step time that hooks with stretchable intervals may take.

        That is the budget without the costs that a longer interval cannot reduce: those of every step, and those of hooks at
        their longest interval. Hooks with a fixed interval are not counted: the person who fixed it accepts their cost.
        """
        ns = min(self._own.values(), default=0) + sum(loaded.cost_ns.get(NONE, 0) for loaded in self._all())
        longest = sum(loaded.share_ns(at_longest=True) for loaded in governed) * self._with_own
        return max(self.budget - (ns + longest) / self._step_ns, self.budget * LEFT_RATIO)

    def _share(self, loaded: Loaded) -> float:
        """Return the share of step time of a plugin's hooks that can still be stretched, dispatch overhead included."""
        return loaded.share_ns(at_longest=False) * self._with_own / self._step_ns

    def _find_own(self) -> float:
        """Return the factor that adds hookd's dispatch overhead to a plugin's own time."""
        costliest = max(self._own, key=sum, default=())
        extra = sum(max(0, loaded.cost(ALL) - loaded.cost(NONE)) for loaded in self._all())
        own = self._own.get(costliest, 0) - min(self._own.values(), default=0)
        return 1 + own / extra if extra > 0 and own > 0 else 1.0

    def _relax_all(self, governed: list[Loaded], room: float) -> None:
        """Halve intervals, those of the cheapest plugins first, while the added share of step time fits into `room`."""
        for loaded in sorted(governed, key=self._share):
            wanted, stretch = wanted_interval(loaded.plugin, loaded.context), loaded.stretch
            before = self._share(loaded)
            if stretch > wanted:
                self.stretch_to(loaded, max(wanted, stretch // 2))
                more = self._share(loaded) - before  # includes hooks that were at their longest interval before
                if more <= room:
                    room -= more
                else:
                    self.stretch_to(loaded, stretch)

    @staticmethod
    def _can_stretch(loaded: Loaded) -> bool:
        return loaded.is_governed and loaded.limit > 1

    def stretch(self, loaded: Loaded, times: int = 2) -> bool:
        """Multiply a plugin's interval by `times`, up to its limit; return whether that was possible."""
        if not self._can_stretch(loaded) or loaded.stretch >= loaded.limit:
            return False
        self.stretch_to(loaded, min(loaded.stretch * times, loaded.limit))
        return True

    def stretch_to(self, loaded: Loaded, stretch: int) -> None:
        """Set a plugin's `Loaded.stretch`, from the next step on."""
        # Rare hooks are called in sampled steps only, so their interval is a multiple of the others'. Beyond `rare_limit`
        # the one number encodes two intervals, see `Loaded.stretch`.
        whole = loaded.rare_limit if stretch > loaded.rare_limit else loaded.longest if stretch > loaded.longest else 1
        loaded.stretch, self._next_draw = stretch // whole * whole, 0
        self._core.show_interval(loaded)


def limit_of(loaded: Loaded) -> float:
    """Return the share of step time above which a plugin that cannot be sampled is quarantined."""
    # With `longest = 1` a plugin declares that it must see every step, at whatever cost.
    return RUNAWAY_RATIO if loaded.plugin.longest > 1 else COSTLY_RATIO


def _next_fixed(step: int, interval: int) -> int:
    """Return the next step at which a hook with this fixed interval is switched on or off."""
    return step + interval - step % interval if step % interval else step + 1
