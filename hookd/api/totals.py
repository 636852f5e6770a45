"""Totals of module calls and backward passes for a plugin, without a function of the plugin.

Where module calls are entered in C (`hookd/native/entry.c`), C updates the totals too: three additions, and no Python function is
called. Elsewhere `add` is called like a `forward` or `backward` hook.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hookd.api.events import Module
    from hookd.api.metrics import Counter

    Places = list[tuple[int, int, int]]
    """The indices of a module's cells in the page, for each of the families; NOWHERE for a number that is not requested."""

NOWHERE = -1
TRAINING, RECOMPUTE, INFERENCE = range(3)
"""Kinds of calls. RECOMPUTE: those that activation checkpointing repeats inside a backward; INFERENCE: those that no backward follows."""
STEPS, IS_ON, IS_ACTIVE = range(3)


class Families(NamedTuple):
    """Counters with the single label `module`: seconds, seconds without nested modules, and calls. Any may be None."""

    seconds: Counter | None
    self_seconds: Counter | None
    calls: Counter | None


class Totals:
    """Adds calls to cells of the page.

    Args:
        known: dicts for the places of the modules by `Module.id`, one for each kind of calls; their owner removes modules that
            are gone.

    Attributes:
        families: requested so far, by the kind of calls.
    """

    def __init__(self, cells: memoryview[float], known: tuple[dict[int, Places], ...]) -> None:
        self.families: tuple[list[Families], ...] = ([], [], [])
        self._cells, self._known = cells, known

    def places_of(self, module: Module, kind: int = TRAINING) -> Places:
        """Return the places of a module for one kind of calls; missing series are created."""
        known = self._known[kind]
        if module.id not in known:
            known[module.id] = [_places(families, module.name) for families in self.families[kind]]
        return known[module.id]

    def add(  # noqa: PLR0913, PLR0917 - one call
        self, module: Module, elapsed_ns: int, self_ns: int, recompute: bool, is_nested: bool, inference: bool
    ) -> None:
        """Add one call; `is_nested`: it is nested in another call of the same module, which includes its time."""
        if is_nested:
            elapsed_ns = 0
        kind = INFERENCE if inference else recompute
        try:
            # For a single plugin, without a loop: where calls are not entered in C, these are the hottest lines of all.
            ((seconds, own, calls),) = self._known[kind][module.id]
        except (KeyError, ValueError):
            _add(self._cells, self.places_of(module, kind), (elapsed_ns * 1e-9, self_ns * 1e-9, 1.0))
            return
        cells = self._cells
        if seconds >= 0:
            cells[seconds] += elapsed_ns * 1e-9
        if own >= 0:
            cells[own] += self_ns * 1e-9
        if calls >= 0:
            cells[calls] += 1.0


class Switched:
    """Work in sampled steps that needs no function of a plugin.

    A sampled step represents the steps until the next one is due, and those that the sampled steps before it did not represent
    because the interval was stretched. So in the end each step is represented once, whatever the intervals were.

    Attributes:
        standing: at STEPS the number of steps that a sampled step represents; at IS_ON 1 in a step in which the work is done;
            at IS_ACTIVE 1 while the plugin is active. The entry reads the first two at a call, and the last at its backward.
    """

    def __init__(self) -> None:
        self.standing = array("d", [1.0, 0.0, 0.0])
        self._sampled = self._represented = NOWHERE  # steps done before the last sampled one; steps represented so far

    def switch(self, *, is_on: bool, is_active: bool) -> None:
        """Set how calls are handled from now on, each step representing itself.

        Args:
            is_on: whether calls that begin from now on are added up or shown.
            is_active: whether earlier calls still are, at their backward.
        """
        self.standing[IS_ON], self.standing[IS_ACTIVE] = is_on, is_active
        self.standing[STEPS], self._represented = 1.0, NOWHERE

    def sample(self, *, is_on: bool, done: int, interval: int) -> None:
        """Set whether the next step is a sampled one, while the plugin is active.

        Args:
            is_on: as of `switch`.
            done: the number of steps done.
            interval: the number of steps until the next sampled one is due.
        """
        if self._represented == NOWHERE:  # what was done before is not represented
            self._represented, self._sampled = done, NOWHERE
        if is_on and done != self._sampled:
            self._sampled = done
            self.standing[STEPS] = float(max(0, done + interval - self._represented))
            self._represented = max(self._represented, done + interval)
        self.standing[IS_ON], self.standing[IS_ACTIVE] = is_on, 1.0


class BackwardTotals(Switched):
    """Adds up the backward passes of modules in sampled steps, weighted by the number of steps that each represents.

    Args:
        known: a dict for the places of the modules, as in `Totals`.

    Attributes:
        families: requested so far.
    """

    def __init__(self, cells: memoryview[float], known: dict[int, Places]) -> None:
        super().__init__()
        self.families: list[Families] = []
        self._cells, self._known = cells, known

    def places_of(self, module: Module) -> Places:
        """Return the places of a module; missing series are created."""
        if module.id not in self._known:
            self._known[module.id] = [_places(families, module.name) for families in self.families]
        return self._known[module.id]

    def add(self, module: Module, elapsed_ns: int, self_ns: int) -> None:
        """Add one backward."""
        times = self.standing[STEPS]
        _add(self._cells, self.places_of(module), (elapsed_ns * 1e-9 * times, self_ns * 1e-9 * times, times))


def _add(cells: memoryview[float], places: Places, numbers: tuple[float, float, float]) -> None:
    for indices in places:
        for index, number in zip(indices, numbers, strict=True):
            if index >= 0:
                cells[index] += number


def _places(families: Families, module: str) -> tuple[int, int, int]:
    seconds, own, calls = (NOWHERE if family is None else family.labels(module).at for family in families)
    return seconds, own, calls
