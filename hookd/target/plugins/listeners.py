"""Who listens to what: pluggy registers, validates and orders; the order is then frozen. Runs in the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hookd._pluggy import PluginManager, PluginValidationError
from hookd.api import hookspecs
from hookd.errors import PluginError
from hookd.target.plugins import values
from hookd.wire.originals import clock
from hookd.wire.probation import Probation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.api.context import Context
    from hookd.api.plugin import Plugin
    from hookd.api.totals import Switched, Totals
    from hookd.wire.agreement import Agreement


BACK_OFF_S, LONGEST_BACK_OFF_S = 60.0, 3600.0
"""How long the first quarantine of a plugin lasts, and each later one at most; each is twice as long as the last."""
NONE, LAST, USUAL, ALL = range(4)
"""Which hooks of a plugin are called in a step, of those whose interval depends on the budget: those that are sampled last alone;
those that are not rare; all."""
FIXED = 4
"""What a step is more in which hooks of a fixed interval are called."""
PATIENCE = 3
"""So many samples of a plugin that looks apart from others are due, and it looks with them: two intervals after the first."""


@dataclass(unsafe_hash=True)  # what is compared never changes
class Listener:
    """One hook implementation of one plugin, and whether it is called now.

    Attributes:
        call: the plugin's function.
        totals: adds calls or backward passes up, or shows outputs, for a plugin that has no function for that; None: `call` is a function of
            the plugin's.
        unless_finite: it need not be called where all gradients are known to be finite.
        is_on: whether it is called; after it was turned, `Models.act_on_switches` is to be called.
        is_active: whether its plugin is; of what flows each call is told of to its end, also where it is not switched on any more.
        needs_quiet: whether it is to be called with gradients switched off and torch's modes taken away: an observer that may look at tensors.
        run: is called instead of `call`: the same, once the first calls have been watched (`hookd.target.plugins.global_state`).
        pick: returns the arguments, in their order, from all that a hook could be told: a dict, or for a module's call a list
            (`hookd.target.plugins.values`).
        only: where that has its only argument; None if it has none or several: what has one is called without `pick`, which is dear.
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
        """Set what follows from the rest."""
        places = [values.NAMES.index(name) for name in self.arguments] if self.hook in values.HOOKS else self.arguments
        self.run, self.pick = self.call, _picks(places)
        self.only = places[0] if len(places) == 1 else None
        looks = not hookspecs.TENSORS.isdisjoint(self.arguments) if self.hook in values.HOOKS else self.hook != "phase"
        self.needs_quiet = looks and not self.mutates

    @property
    def name(self) -> str:
        """What the plugin calls it (`Context.listen`)."""
        return self.hook if self.totals is None or self.hook == "output_summary" else f"{self.hook}_totals"


@dataclass
class Entry:
    """One loaded plugin and what became of it.

    Attributes:
        state: active, quarantined, disabled, or waiting: ready, and not yet switched on.
        errors: how often it raised, or returned something without the right to.
        longest: the longest interval of what is not rare; a person may want a longer one.
        stretch: what the governor decides on. Up to `rare_limit` the steps between two calls of its rarest hooks; beyond it, that
            times the steps between two calls of those that are sampled last.
        kind: of the step in progress, by what it costs: which of the hooks are called whose interval depends on the budget (`ALL`
            and what follows it), and `FIXED` more where such are called whose interval is fixed.
        looks: in the step in progress sampled hooks are called, others than those that are sampled last.
        has_fixed: the interval of some of its hooks does not depend on the budget now.
        drawn: what was said of the step in progress; None: it is to be said anew.
        listening: how many of its sampled hooks are called in the step in progress.
        cost_ns: what it took in the last accounted step of each kind, `{kind of the step: ns}`.
        spent_ns: estimated time spent in it.
        agreement: of all ranks, for a plugin that changes the training in a job of several.
        last_trouble: the last error for a person: `text`, `where` (the author's line) and `traceback`; empty if none.
        source: of what it was made, as far as the tool has said: `version`, `sha256`, `origin`.
        strikes: errors since it was last switched on.
        probation: when it comes back from a quarantine.
        readmits: whether it does.
        calls: in metered steps, and `call_ns` what they took.
        waiting: of a plugin that looks apart from others, samples that were due and have not been taken.
        is_asked: its `select` has answered for all modules that were known when it came. Until then the training's threads
            do not ask it: it may never answer.
    """

    number: int
    name: str
    plugin: Plugin
    context: Context
    by_name: bool
    listeners: tuple[Listener, ...] = ()
    state: str = "active"
    errors: int = 0
    last_error: str = ""
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
    last_trouble: dict[str, str] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    strikes: int = 0
    probation: Probation = field(default_factory=lambda: Probation(BACK_OFF_S, LONGEST_BACK_OFF_S))
    readmits: bool = True
    calls: int = 0
    call_ns: int = 0
    waiting: int = 0
    is_asked: bool = False
    _postponed: tuple[int, bool] = (-1, False)

    def turn(self, state: str) -> None:
        """Set another state."""
        self.state = state
        for one in self.listeners:
            one.is_active = state == "active"

    @property
    def max_strikes(self) -> int:
        """How many errors put it aside: one is enough of what may change the training, and on probation."""
        is_strict = self.plugin.mutates or self.probation.is_on(clock.monotonic())
        return 1 if is_strict else self.plugin.max_errors

    @property
    def changes_training(self) -> bool:
        """Whether it changes the training now; one that may can be made not to, as by gradclip's dry run."""
        return self.plugin.mutates and self.state == "active"

    def is_sampled(self, one: Listener) -> bool:
        """Whether this hook of the plugin is called on sampled steps only; a mutator's never is, and totals of calls are exact."""
        is_exact = one.totals is not None and one.hook == "forward"
        return one.hook in self.plugin.sampled and not is_exact and not _mutates(self.plugin, one.hook)

    def is_due(self, step: int) -> bool:
        """Whether the hooks whose interval depends on the budget are called in a step, but for the rare ones.

        They come once in so many steps, at no fixed distance: a training whose steps take turns (two tasks, generator and
        critic) would always show the same side. What the person or the plugin has fixed comes every so many steps.
        """
        return is_drawn(step, self.interval)

    def is_due_apart(self, step: int, *, is_alone: bool) -> bool:
        """Whether those of a plugin that looks apart from others are: what is due waits for a step in which it is alone.

        It waits until `PATIENCE` of them are due. Switches may be set several times in one step, so what was said of it stands
        unless others have begun to look.
        """
        asked, was_taken = self._postponed
        if step != asked:
            self.waiting = min(self.waiting - was_taken + self.is_due(step), PATIENCE)
        is_taken = self.waiting >= (1 if is_alone else PATIENCE)
        self._postponed = step, is_taken
        return is_taken

    def is_due_rarely(self, step: int) -> bool:
        """Whether the rare ones are, in a step in which the others are."""
        return is_drawn(step // self.interval, self.rare_interval // self.interval)

    def is_due_last(self, step: int) -> bool:
        """Whether those are that are sampled last."""
        return is_drawn(step, self.last_interval)

    def next_draw(self, step: int) -> int:
        """Return the next step in which not the same may be called as in this one, at the latest; what is fixed apart."""
        if self.looks or self.waiting:
            return step + 1
        seldom = (one for one in (self.interval, self.last_interval) if one > 1)
        return min((next_drawn(step, one) for one in seldom), default=step + 1)

    @property
    def interval(self) -> int:
        """Steps between two sampled steps; rare hooks may be called less often, in some of those."""
        return min(self.stretch, self.longest) if self.plugin.rare or self.plugin.sampled_last else self.stretch

    @property
    def rare_interval(self) -> int:
        """Steps between two calls of the rare hooks."""
        return min(self.stretch, self.rare_limit)

    @property
    def last_interval(self) -> int:
        """Steps between two calls of those that are sampled last, where no other one is called."""
        return max(1, self.stretch // self.rare_limit)

    @property
    def rare_limit(self) -> int:
        """The longest interval of the rare hooks, which is a multiple of the others'."""
        return max(self.longest, self.plugin.rarest // self.longest * self.longest)

    @property
    def limit(self) -> int:
        """How far the governor may stretch."""
        return self.rare_limit * (self.longest if self.plugin.sampled_last else 1)

    def cost(self, kind: int) -> int:
        """Return what it takes in a step in which the hooks of `kind` are called, ns.

        Where there was no such step yet it is what one with fewer hooks takes; and it is no more than one with more of them takes:
        that of a kind that does not come any more is old.
        """
        fixed = FIXED if self.has_fixed else 0  # what was fixed before has cost what it has
        known = [self.cost_ns.get(fixed + one) for one in range(ALL + 1)]
        own = next((ns for ns in known[kind::-1] if ns is not None), 0)
        return min([own, *(ns for ns in known[kind + 1 :] if ns is not None)])

    def share_ns(self, *, at_longest: bool) -> float:
        """Return what its sampled hooks take of a step on average, ns: those at their longest interval, or the others."""
        parts = (
            (LAST, self.last_interval, self.longest if self.plugin.sampled_last else 1),
            (USUAL, self.interval, self.longest),
            (ALL, self.rare_interval, self.rare_limit),
        )
        return sum(
            max(0, self.cost(kind) - self.cost(kind - 1)) / interval
            for kind, interval, longest in parts
            if (interval >= longest) is at_longest
        )

    @property
    def is_governed(self) -> bool:
        """Whether there is a hook whose interval depends on the budget."""
        return any(self.is_sampled(one) and self.context.fixed(one.hook) is None for one in self.listeners)


def is_drawn(number: int, interval: int) -> bool:
    """Whether a number is the one of its block of `interval` that is drawn; the first block's is its first.

    The blocks' numbers go round by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4, multiplicative
    hashing), so all places come up alike, and no random numbers are drawn in the training's process.
    """
    block, place = divmod(number, interval)
    return place == _place(block, interval)


def _place(block: int, interval: int) -> int:
    return ((block * 0x9E3779B1 & 0xFFFFFFFF) * interval) >> 32


def next_drawn(number: int, interval: int) -> int:
    """Return the next number after this one of which `is_drawn` says anything else than of this one, or that one is drawn."""
    if is_drawn(number, interval):
        return number + 1
    block = number // interval
    found = (one * interval + _place(one, interval) for one in (block, block + 1))
    return next(one for one in found if one > number)


class Registry:
    """The loaded plugins, in the order in which pluggy would call them.

    Attributes:
        entries: by number; replaced and never changed, so that any thread may go through it at any time.
        agreed: those that change the training as all ranks have agreed.
        alone: those that change it because there was one rank.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._manager = PluginManager("hookd")
        self._manager.add_hookspecs(hookspecs)
        self._next = 0
        self.agreed: list[Entry] = []
        self.alone: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        """Go through the loaded plugins, in the order in which they were loaded."""
        return iter(self.entries.values())

    def get(self, number: int) -> Entry | None:
        """Return a loaded plugin by its number."""
        return self.entries.get(number)

    def named(self, name: str) -> Entry:
        """Find a loaded plugin; while its options are changed, the one that is there.

        Raises:
            PluginError: none of this name is loaded.
        """
        for entry in self.entries.values():
            if entry.name == name:
                return entry
        raise PluginError(f"no plugin {name!r} is loaded", reason="no-such-plugin")

    def has(self, name: str) -> bool:
        """Whether a plugin of this name is loaded."""
        return any(entry.name == name for entry in self.entries.values())

    def is_active(self, name: str) -> bool:
        """Whether a plugin of this name is loaded and switched on."""
        return any(entry.name == name and entry.state == "active" for entry in self.entries.values())

    def add(self, plugin: Plugin, context: Context, *, by_name: bool) -> Entry:
        """Register a plugin that keeps the rules with pluggy, and freeze its listeners.

        Raises:
            PluginError: pluggy refuses it.
        """
        try:
            # Not by its name: while its options are changed there are two of it.
            self._manager.register(plugin, name=f"{plugin.name} {self._next}")
        except PluginValidationError as exc:
            raise PluginError(f"{plugin.name}: {exc}") from exc
        entry = Entry(self._next, plugin.name, plugin, context, by_name, state="waiting")
        self._next += 1
        entry.listeners = tuple(self._frozen(entry))
        entry.stretch = wanted_interval(plugin, context)
        entry.longest = max(plugin.longest, entry.stretch)
        entry.readmits = wanted_readmission(plugin, context)
        if "every" in context.options:
            context.fix(plugin.fixed_by_every, entry.interval)
        self.entries = {**self.entries, entry.number: entry}
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget a plugin."""
        self._manager.unregister(entry.plugin)
        self.entries = {number: one for number, one in self.entries.items() if one is not entry}

    def note_changing(self) -> None:
        """Find again those that change the training."""
        changing = [entry for entry in self.entries.values() if entry.changes_training]
        self.agreed = [entry for entry in changing if entry.agreement is not None]
        self.alone = [entry for entry in changing if entry.agreement is None]

    def ordered(self, hook: str) -> list[Listener]:
        """Give the listeners of one hook as pluggy would call them: last registered first, tryfirst, trylast."""
        caller = getattr(self._manager.hook, hook)
        by_plugin = {id(e.plugin): e for e in self.entries.values()}
        found = []
        for impl in reversed(caller.get_hookimpls()):
            entry = by_plugin.get(id(impl.plugin))
            if entry is not None:
                found += [one for one in entry.listeners if one.hook == hook and one.totals is None]
        return found + [
            one for entry in self.entries.values() for one in entry.listeners if one.totals and one.hook == hook
        ]

    def _frozen(self, entry: Entry) -> list[Listener]:
        listeners = []
        for hook in sorted(hookspecs.HOT | {"tick"}):
            for impl in getattr(self._manager.hook, hook).get_hookimpls():
                if impl.plugin is entry.plugin and hook == "output_summary":
                    shown = entry.context.shown or entry.context.show_outputs({}, zeros=0.0)
                    shown.tell = _picking(impl.function, impl.argnames)
                elif impl.plugin is entry.plugin:
                    names = tuple(impl.argnames)
                    rights = _mutates(entry.plugin, hook), entry.plugin.remembers
                    is_choosy = hook in entry.plugin.unless_finite
                    listeners.append(
                        Listener(entry.number, hook, names, *rights, impl.function, unless_finite=is_choosy)
                    )
        totals = entry.context.totals
        if totals is not None:
            names = ("module", "elapsed_ns", "self_ns", "recompute", "is_again")
            listeners.append(Listener(entry.number, "forward", names, False, False, totals.add, totals))  # noqa: FBT003
        back = entry.context.backward_totals
        if back is not None:
            names = ("module", "elapsed_ns", "self_ns")
            listeners.append(Listener(entry.number, "backward", names, False, False, back.add, back))  # noqa: FBT003
        outputs = entry.context.shown
        if outputs is not None:
            names = ("module", "output")
            listeners.append(Listener(entry.number, "output_summary", names, False, False, outputs.add, outputs))  # noqa: FBT003
        return listeners


def _picks(places: Sequence[int | str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what picks the values at these places, as a tuple; a third of the cost of a loop."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda told: tuple([told[place] for place in places])


def _picking(function: Callable[..., Any], names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    """Return what calls a plugin's `output_summary` with those of the three values that it wants."""
    places = [("module", "output", "summary").index(name) for name in names]

    def tell(*values: Any) -> Any:
        return function(*[values[at] for at in places])

    return tell


def _mutates(plugin: Plugin, hook: str) -> bool:
    return plugin.mutates and (not plugin.mutating or hook in plugin.mutating)


def wanted_interval(plugin: Plugin, context: Context) -> int:
    """Give the steps between two sampled steps that the person asked for, or else the plugin.

    Raises:
        PluginError: the option `every` is no positive whole number.
    """
    every = context.option("every", plugin.every) if "every" in context.options else plugin.every
    if every < 1:
        raise PluginError(f"{plugin.name}: every must be at least 1, not {every}")
    # Where nobody has fixed it the governor chooses, and one number would not be true.
    adapts = "every" not in context.options and plugin.sampled and plugin.longest > every
    context.settings["every"] = f"{every}..{plugin.longest}" if adapts else every
    return every


def wanted_readmission(plugin: Plugin, context: Context) -> bool:
    """Say whether a plugin comes back by itself after a quarantine; what may change the training never does.

    Raises:
        PluginError: the option `readmit` is neither true nor false.
    """
    wanted = context.option("readmit", plugin.readmit) if "readmit" in context.options else plugin.readmit
    return wanted and not (plugin.mutates or type(plugin).mutates)
