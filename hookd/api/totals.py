"""What a plugin has added up at each call of a module, or each backward, without a function of its own. Runs in the target.

Where calls of modules are entered in C (`hookd/native/entry.c`), so are its totals: three additions, and no Python function is
called. Elsewhere `add` is called as any `forward` or `backward` hook.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hookd.api.events import Module
    from hookd.api.metrics import Counter

    Places = list[tuple[int, int, int]]
    """The indices of a module's cells in the page, for each of the families: NOWHERE where a number is not wanted."""

NOWHERE = -1
STEPS, IS_ON, IS_ACTIVE = range(3)


class Families(NamedTuple):
    """Counters with the one label `module`, each or None: of seconds, of those without the modules called inside, of calls."""

    seconds: Counter | None
    self_seconds: Counter | None
    calls: Counter | None


class Totals:
    """Adds calls up in the cells of the page.

    Args:
        cells: of the page.
        known: where to keep the places of the modules, by `Module.id`; whoever owns the two takes out those that are gone.
            The first is of the calls of a training, the second of those that activation checkpointing makes again.

    Attributes:
        families: that have been asked for, likewise.
    """

    def __init__(self, cells: memoryview[float], known: tuple[dict[int, Places], dict[int, Places]]) -> None:
        self.families: tuple[list[Families], list[Families]] = ([], [])
        self._cells, self._known = cells, known

    def places_of(self, module: Module, *, recompute: bool = False) -> Places:
        """Return the places of a module; a series that is not there yet is made."""
        known = self._known[recompute]
        if module.id not in known:
            known[module.id] = [_places(families, module.name) for families in self.families[recompute]]
        return known[module.id]

    def add(self, module: Module, elapsed_ns: int, self_ns: int, recompute: bool, is_again: bool) -> None:  # noqa: PLR0913, PLR0917 - one call
        """Add one call; `is_again` says whether it is inside of another one of the module, whose time it is part of."""
        if is_again:
            elapsed_ns = 0
        try:
            # One plugin's, with no loop: where calls are not entered in C, these are the hottest lines of all.
            ((seconds, own, calls),) = self._known[recompute][module.id]
        except (KeyError, ValueError):
            _add(self._cells, self.places_of(module, recompute=recompute), (elapsed_ns * 1e-9, self_ns * 1e-9, 1.0))
            return
        cells = self._cells
        if seconds >= 0:
            cells[seconds] += elapsed_ns * 1e-9
        if own >= 0:
            cells[own] += self_ns * 1e-9
        if calls >= 0:
            cells[calls] += 1.0


class Switched:
    """What is done in sampled steps without a function of a plugin's.

    Attributes:
        standing: at STEPS for how many steps a sampled one stands; at IS_ON 1 in a step in which something is done; at IS_ACTIVE 1
            while the plugin is switched on. The entry reads the first two at a call, and the last at its backward.
    """

    def __init__(self) -> None:
        self.standing = array("d", [1.0, 0.0, 0.0])

    def switch(self, *, is_on: bool, is_active: bool, steps: float = 1.0) -> None:
        """Say whether calls from here on are added up, or shown, each for so many steps, and whether those before them still are."""
        if is_on:
            self.standing[STEPS] = steps
        self.standing[IS_ON], self.standing[IS_ACTIVE] = is_on, is_active


class BackwardTotals(Switched):
    """Adds up the backward of modules in sampled steps, each for all the steps that it stands for.

    Args:
        cells: of the page.
        known: where to keep the places of the modules, as `Totals` does.

    Attributes:
        families: that have been asked for.
    """

    def __init__(self, cells: memoryview[float], known: dict[int, Places]) -> None:
        super().__init__()
        self.families: list[Families] = []
        self._cells, self._known = cells, known

    def places_of(self, module: Module) -> Places:
        """Return the places of a module; a series that is not there yet is made."""
        if module.id not in self._known:
            self._known[module.id] = [_places(families, module.name) for families in self.families]
        return self._known[module.id]

    def add(self, module: Module, elapsed_ns: int, self_ns: int) -> None:
        """Add one backward."""
        times = self.standing[STEPS]
        _add(self._cells, self.places_of(module), (elapsed_ns * 1e-9 * times, self_ns * 1e-9 * times, times))


def _add(cells: memoryview[float], places: Places, numbers: tuple[float, float, float]) -> None:
    for each in places:
        for index, number in zip(each, numbers, strict=True):
            if index >= 0:
                cells[index] += number


def _places(families: Families, module: str) -> tuple[int, int, int]:
    seconds, own, calls = (NOWHERE if family is None else family.labels(module).at for family in families)
    return seconds, own, calls
