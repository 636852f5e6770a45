"""The loaded plugins and their listeners: pluggy registers, validates and orders them; the order is then frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hookd._pluggy import PluginManager, PluginValidationError
from hookd.api import hookspecs
from hookd.api.rates import Rate, rates_of
from hookd.errors import PluginError
from hookd.target.plugins import values
from hookd.wire.agent import Source
from hookd.wire.hook_error import HookError
from hookd.wire.originals import clock
from hookd.wire.probation import Probation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.api.context import Context
    from hookd.api.plugin import Plugin
    from hookd.api.totals import Switched, Totals
    from hookd.wire.agreement import Agreement


BACK_OFF_S, LONGEST_BACK_OFF_S = 60.0, 3600.0
"""Duration of a plugin's first quarantine, and the longest one, in seconds; each is twice as long as the last."""
NONE, LAST, USUAL, ALL = range(4)
"""Which of a plugin's hooks with a governed interval are called in a step: none; only those stretched last; all but the rare ones
(`Rate.longest`); all."""
FIXED = 4
"""Added to these for a step in which hooks with a fixed interval are called."""
PATIENCE = 3
"""Number of due samples after which an `apart` plugin is called together with others: two intervals after the first."""


@dataclass(unsafe_hash=True)  # what is compared never changes
class Listener:
    """One hook implementation of one plugin, and whether it is called now.

    Attributes:
        call: the plugin's function.
        totals: accumulates calls or backward passes, or shows outputs, for a plugin without a function of its own for that;
            None: `call` is the plugin's function.
        unless_finite: the hook need not be called if all gradients are known to be finite.
        is_on: whether the hook is called; after a change, call `Models.act_on_switches`.
        is_active: whether its plugin is active. A call in progress is reported to the hooks of `FLOWS` to its end, even if they
            were switched off meanwhile.
        needs_quiet: whether to disable gradients and torch's modes around the call: it is an observer that may look at tensors.
        run: the function to call in place of `call`; equal to it once the first calls have been watched
            (`hookd.target.plugins.global_state`).
        pick: returns the hook's arguments, in order, from all available values: a dict, or for a module's call a list
            (`hookd.target.plugins.values`).
        only: key or index of the hook's only argument in these values; None if it takes none or several. A hook with one
            argument is called without `pick`, which is expensive.
    """

    plugin: int
    hook: str
    arguments: tuple[str, ...]
    mutates: bool
    remembers: bool
    call: Callable[..., Any] = field(compare=False)
    totals: Totals | Switched | None = None
    unless_finite: bool = False
    is_on: bool = field(default=False, init=False, compare=False)
    is_active: bool = field(default=False, init=False, compare=False)
    needs_quiet: bool = field(init=False, compare=False)
    run: Callable[..., Any] = field(init=False, repr=False, compare=False)
    pick: Callable[[Any], tuple[Any, ...]] = field(init=False, repr=False, compare=False)
    only: Any = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Set the derived attributes."""
        places = (
            [values.NAMES.index(name) for name in self.arguments] if self.hook in values.CALL_HOOKS else self.arguments
        )
        self.run, self.pick = self.call, _picks(places)
        self.only = places[0] if len(places) == 1 else None
        looks = (
            not hookspecs.TENSORS.isdisjoint(self.arguments) if self.hook in values.CALL_HOOKS else self.hook != "phase"
        )
        self.needs_quiet = looks and not self.mutates

    @property
    def name(self) -> str:
        """The name by which the plugin refers to it (`Context.listen`)."""
        return self.hook if self.totals is None or self.hook == "output_summary" else f"{self.hook}_totals"


@dataclass
class Loaded:
    """One loaded plugin and its state.

    Attributes:
        state: active, quarantined, disabled, or waiting: ready, and not yet switched on.
        errors: number of times that it raised, or returned a value without being a mutator.
        rates: the rate of each sampled hook.
        rarest: the longest interval of the rare hooks, in steps; 0 if there are none.
        has_last: whether it has hooks that are stretched last.
        longest: the longest interval of hooks that are not rare, in steps; a longer `every` raises it.
        stretch: the one number that the governor sets. Up to `rare_limit` it is the interval of the plugin's rarest hooks, in
            steps; beyond, it is `rare_limit` times the interval of the hooks that are stretched last.
        kind: the kind of the step in progress, by its cost: which hooks with a governed interval are called (`NONE` to `ALL`),
            plus `FIXED` if hooks with a fixed interval are called.
        looks: whether sampled hooks, other than those stretched last, are called in the step in progress.
        has_fixed: whether some of its hooks have a fixed interval now.
        drawn: the draw for the step in progress; None: it is to be drawn anew.
        listening: number of its sampled hooks that are called in the step in progress.
        cost_ns: its cost in the last accounted step of each kind, `{kind of the step: ns}`.
        spent_ns: estimated time spent in it, in ns.
        agreement: the agreement of all ranks, for a plugin that changes the training in a job of several.
        last_error: the last error; empty if there was none.
        source: its origin, as far as the tool has reported it: `version`, `sha256`, `origin`.
        strikes: errors since it was last switched on.
        probation: when it returns from a quarantine.
        readmits: whether it returns.
        calls: number of calls in metered steps; `call_ns` is their time in ns.
        waiting: for an `apart` plugin, number of samples that were due and have not been taken.
        is_asked: whether its `select` has answered for all modules known when it was loaded. Until then the training's
            threads do not ask it, because it may never answer.
    """

    number: int
    name: str
    plugin: Plugin
    context: Context
    by_name: bool
    listeners: tuple[Listener, ...] = ()
    state: str = "active"
    errors: int = 0
    longest: int = 1
    stretch: int = 1
    kind: int = 3
    looks: bool = False
    has_fixed: bool = False
    drawn: tuple[object, ...] | None = None
    listening: int = 0
    cost_ns: dict[int, int] = field(default_factory=dict)
    spent_ns: int = 0
    agreement: Agreement | None = None
    logged: set[str] = field(default_factory=set)
    last_error: HookError = field(default_factory=HookError)
    source: Source = field(default_factory=Source)
    strikes: int = 0
    probation: Probation = field(default_factory=lambda: Probation(BACK_OFF_S, LONGEST_BACK_OFF_S))
    readmits: bool = True
    calls: int = 0
    call_ns: int = 0
    waiting: int = 0
    is_asked: bool = False
    rates: dict[str, Rate] = field(init=False)
    rarest: int = field(init=False)
    has_last: bool = field(init=False)
    _postponed: tuple[int, bool] = (-1, False)

    def __post_init__(self) -> None:
        """Set the derived attributes; `configure` may have changed those of the plugin."""
        self.rates = rates_of(self.plugin.sampled)
        self.rarest = max((rate.longest for rate in self.rates.values()), default=0)
        self.has_last = any(rate.stretched_last for rate in self.rates.values())

    def switch_to(self, state: str) -> None:
        """Change the state."""
        self.state = state
        for listener in self.listeners:
            listener.is_active = state == "active"

    @property
    def max_strikes(self) -> int:
        """Number of errors that cause a quarantine: one for a mutator and on probation."""
        is_strict = self.plugin.mutates or self.probation.is_on(clock.monotonic())
        return 1 if is_strict else self.plugin.max_errors

    @property
    def changes_training(self) -> bool:
        """Whether it changes the training now; a mutator may be configured not to, as by gradclip's dry run."""
        return self.plugin.mutates and self.state == "active"

    def is_sampled(self, listener: Listener) -> bool:
        """Whether this hook is called in sampled steps only; mutators' hooks never are, and totals of calls are exact."""
        is_exact = listener.totals is not None and listener.hook == "forward"
        return listener.hook in self.rates and not is_exact and not _mutates(self.plugin, listener.hook)

    def is_due(self, step: int) -> bool:
        """Whether the hooks with a governed interval, except the rare ones, are called in a step.

        The distance between two samples varies: at a constant one, a training that alternates between kinds of step (two
        tasks, generator and critic) would always show the same kind. A fixed interval is a constant distance.
        """
        return is_drawn(step, self.interval)

    def is_due_apart(self, step: int, *, is_alone: bool) -> bool:
        """Whether the same hooks of an `apart` plugin are called: a due sample waits for a step without other plugins' samples.

        It waits until `PATIENCE` samples are due. The switches may be set several times in one step; a sample counts as taken
        only once.
        """
        asked, was_taken = self._postponed
        if step != asked:
            self.waiting = min(self.waiting - was_taken + self.is_due(step), PATIENCE)
        is_taken = self.waiting >= (1 if is_alone else PATIENCE)
        self._postponed = step, is_taken
        return is_taken

    def is_due_rarely(self, step: int) -> bool:
        """Whether the rare hooks are called, in a step in which the others are."""
        return is_drawn(step // self.interval, self.rare_interval // self.interval)

    def is_due_last(self, step: int) -> bool:
        """Whether the hooks that are stretched last are called."""
        return is_drawn(step, self.last_interval)

    def next_draw(self, step: int) -> int:
        """Return the next step at which the set of called hooks may change; fixed intervals are not considered."""
        if self.looks or self.waiting:
            return step + 1
        seldom = (interval for interval in (self.interval, self.last_interval) if interval > 1)
        return min((next_drawn(step, interval) for interval in seldom), default=step + 1)

    @property
    def interval(self) -> int:
        """Steps between two sampled steps; rare hooks may be called less often, in some of those."""
        return min(self.stretch, self.longest)

    @property
    def rare_interval(self) -> int:
        """Steps between two calls of the rare hooks."""
        return min(self.stretch, self.rare_limit)

    @property
    def last_interval(self) -> int:
        """Steps between two calls of the hooks that are stretched last, in steps without other samples."""
        return max(1, self.stretch // self.rare_limit)

    @property
    def rare_limit(self) -> int:
        """The longest interval of the rare hooks, a multiple of the others' longest interval."""
        return max(self.longest, self.rarest // self.longest * self.longest)

    @property
    def _last_limit(self) -> int:
        return self.longest if self.has_last else 1

    @property
    def limit(self) -> int:
        """The largest `stretch` that the governor may set."""
        return self.rare_limit * self._last_limit

    def cost(self, kind: int) -> int:
        """Return the cost of a step in which the hooks of `kind` are called, in ns.

        Before the first step of this kind, the cost of a step with fewer hooks is returned. The result never exceeds the cost
        of a step with more hooks: the value of a kind that no longer occurs is out of date.
        """
        fixed = FIXED if self.has_fixed else 0  # costs with fixed hooks are kept separately
        known = [self.cost_ns.get(fixed + tier) for tier in range(ALL + 1)]
        own = next((ns for ns in known[kind::-1] if ns is not None), 0)
        return min([own, *(ns for ns in known[kind + 1 :] if ns is not None)])

    def share_ns(self, *, at_longest: bool) -> float:
        """Return the average cost per step of its sampled hooks, in ns: of those at their longest interval, or of the others."""
        parts = (
            (LAST, self.last_interval, self._last_limit),
            (USUAL, self.interval, self.longest),
            (ALL, self.rare_interval, self.rare_limit),
        )
        costs = [self.cost(kind) for kind in range(ALL + 1)]
        return sum(
            max(0, costs[kind] - costs[kind - 1]) / interval
            for kind, interval, longest in parts
            if (interval >= longest) is at_longest
        )

    @property
    def is_governed(self) -> bool:
        """Whether it has a hook whose interval depends on the budget."""
        return any(self.is_sampled(one) and self.context.requests.interval(one.hook) is None for one in self.listeners)


def is_drawn(number: int, interval: int) -> bool:
    """Whether `number` is the one drawn from its block of `interval` numbers; from the first block the first is drawn.

    The place within the block follows the golden ratio (Knuth, The Art of Computer Programming 3, 6.4, multiplicative
    hashing), so all places occur equally often, and no random numbers are drawn in the training's process.
    """
    block, place = divmod(number, interval)
    return place == _place(block, interval)


def _place(block: int, interval: int) -> int:
    return ((block * 0x9E3779B1 & 0xFFFFFFFF) * interval) >> 32


def next_drawn(number: int, interval: int) -> int:
    """Return the next drawn number after this one; after a drawn number, simply the next number."""
    if is_drawn(number, interval):
        return number + 1
    block = number // interval
    drawn = (b * interval + _place(b, interval) for b in (block, block + 1))
    return next(n for n in drawn if n > number)


class Registry:
    """The loaded plugins, in the order in which pluggy would call them.

    Attributes:
        loaded: the plugins by number; replaced and never modified, so that any thread may iterate over it at any time.
        agreed: the plugins that change the training by an agreement of all ranks.
        alone: the plugins that change the training without an agreement, in a job of one rank.
    """

    def __init__(self) -> None:
        self.loaded: dict[int, Loaded] = {}
        self._manager = PluginManager("hookd")
        self._manager.add_hookspecs(hookspecs)
        self._next = 0
        self.agreed: list[Loaded] = []
        self.alone: list[Loaded] = []

    def __iter__(self) -> Iterator[Loaded]:
        """Iterate over the loaded plugins, in the order in which they were loaded."""
        return iter(self.loaded.values())

    def get(self, number: int) -> Loaded | None:
        """Return a loaded plugin by its number."""
        return self.loaded.get(number)

    def named(self, name: str) -> Loaded:
        """Return a loaded plugin by its name; while its options are changed, the first of the two.

        Raises:
            PluginError: none of this name is loaded.
        """
        for loaded in self.loaded.values():
            if loaded.name == name:
                return loaded
        raise PluginError(f"no plugin {name!r} is loaded", reason="no-such-plugin")

    def has(self, name: str) -> bool:
        """Whether a plugin of this name is loaded."""
        return any(loaded.name == name for loaded in self.loaded.values())

    def is_active(self, name: str) -> bool:
        """Whether a plugin of this name is loaded and switched on."""
        return any(loaded.name == name and loaded.state == "active" for loaded in self.loaded.values())

    def add(self, plugin: Plugin, context: Context, *, by_name: bool) -> Loaded:
        """Register a plugin that has passed the rules with pluggy, and freeze its listeners.

        Raises:
            PluginError: pluggy refuses it.
        """
        try:
            # The number makes the name unique: while its options are changed, two plugins have this name.
            self._manager.register(plugin, name=f"{plugin.name} {self._next}")
        except PluginValidationError as exc:
            raise PluginError(f"{plugin.name}: {exc}") from exc
        loaded = Loaded(self._next, plugin.name, plugin, context, by_name, state="waiting")
        self._next += 1
        loaded.listeners = tuple(self._frozen(loaded))
        loaded.stretch = wanted_interval(plugin, context)
        loaded.longest = max(plugin.longest, loaded.stretch)
        loaded.readmits = wanted_readmission(plugin, context)
        if "every" in context.options:
            governed = (hook for hook, rate in loaded.rates.items() if not rate.is_usual)
            context.requests.fixed = {"": loaded.interval, **dict.fromkeys(governed)}
        self.loaded = {**self.loaded, loaded.number: loaded}
        return loaded

    def remove(self, loaded: Loaded) -> None:
        """Forget a plugin."""
        self._manager.unregister(loaded.plugin)
        self.loaded = {number: other for number, other in self.loaded.items() if other is not loaded}

    def note_changing(self) -> None:
        """Update `agreed` and `alone`, after a plugin came, went or changed its state."""
        changing = [loaded for loaded in self.loaded.values() if loaded.changes_training]
        self.agreed = [loaded for loaded in changing if loaded.agreement is not None]
        self.alone = [loaded for loaded in changing if loaded.agreement is None]

    def ordered(self, hook: str) -> list[Listener]:
        """Return the listeners of one hook in pluggy's order: last registered first, with tryfirst and trylast."""
        caller = getattr(self._manager.hook, hook)
        by_plugin = {id(e.plugin): e for e in self.loaded.values()}
        called = [by_plugin[id(i.plugin)] for i in reversed(caller.get_hookimpls()) if id(i.plugin) in by_plugin]
        listeners = [one for loaded in called for one in loaded.listeners if one.hook == hook and one.totals is None]
        totals = [one for loaded in self.loaded.values() for one in loaded.listeners if one.hook == hook and one.totals]
        return listeners + totals

    def _frozen(self, loaded: Loaded) -> list[Listener]:
        listeners = []
        for hook in sorted(hookspecs.HOT | {"tick"}):
            for impl in getattr(self._manager.hook, hook).get_hookimpls():
                if impl.plugin is loaded.plugin and hook == "output_summary":
                    shown = loaded.context.requests.shown or loaded.context.show_outputs({}, zeros=0.0)
                    shown.callback = _picking(impl.function, impl.argnames)
                elif impl.plugin is loaded.plugin:
                    names = tuple(impl.argnames)
                    rights = _mutates(loaded.plugin, hook), loaded.plugin.remembers
                    rate = loaded.rates.get(hook, Rate())
                    listeners.append(
                        Listener(loaded.number, hook, names, *rights, impl.function, unless_finite=rate.unless_finite)
                    )
        totals = loaded.context.requests.totals
        if totals is not None:
            names = ("module", "elapsed_ns", "self_ns", "recompute", "is_nested", "inference")
            listeners.append(Listener(loaded.number, "forward", names, False, False, totals.add, totals))  # noqa: FBT003
        back = loaded.context.requests.backward_totals
        if back is not None:
            names = ("module", "elapsed_ns", "self_ns")
            listeners.append(Listener(loaded.number, "backward", names, False, False, back.add, back))  # noqa: FBT003
        outputs = loaded.context.requests.shown
        if outputs is not None:
            names = ("module", "output")
            listeners.append(Listener(loaded.number, "output_summary", names, False, False, outputs.add, outputs))  # noqa: FBT003
        return listeners


def _picks(places: Sequence[int | str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks the values at these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)  # a third of the cost of a loop
    return lambda available: tuple([available[place] for place in places])


def _picking(function: Callable[..., Any], names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    """Return a function that calls a plugin's `output_summary` with those of the three values that it takes."""
    places = [("module", "output", "summary").index(name) for name in names]

    def call(*values: Any) -> Any:
        return function(*[values[at] for at in places])

    return call


def _mutates(plugin: Plugin, hook: str) -> bool:
    return plugin.mutates and (not plugin.mutating or hook in plugin.mutating)


def wanted_interval(plugin: Plugin, context: Context) -> int:
    """Return the interval of sampled steps that the person asked for, or else the plugin's own.

    Raises:
        PluginError: the option `every` is not a positive integer.
    """
    every = context.option("every", plugin.every) if "every" in context.options else plugin.every
    if every < 1:
        raise PluginError(f"{plugin.name}: every must be at least 1, not {every}")
    # Without the option the governor chooses within this range, and a single number would be wrong.
    adapts = "every" not in context.options and plugin.sampled and plugin.longest > every
    context.settings["every"] = f"{every}..{plugin.longest}" if adapts else every
    return every


def wanted_readmission(plugin: Plugin, context: Context) -> bool:
    """Whether a plugin returns by itself after a quarantine; a mutator never does.

    Raises:
        PluginError: the option `readmit` is neither true nor false.
    """
    wanted = context.option("readmit", plugin.readmit) if "readmit" in context.options else plugin.readmit
    return wanted and not (plugin.mutates or type(plugin).mutates)
