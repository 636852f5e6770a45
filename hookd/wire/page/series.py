"""What the agent's end of a page has of families, series and modules: which cells are whose. Runs in the target."""

from __future__ import annotations

import contextlib
import itertools
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, TypeVar

from hookd.wire.originals import RLock
from hookd.wire.page.layout import (
    DROPPED_WORD,
    MAX_FAMILIES,
    MAX_MODULES,
    MAX_SERIES,
    SCRATCH_CELLS,
    Declaration,
    Region,
    clean,
)
from hookd.wire.page.log import Log, array_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
Values = tuple[str, ...]

LOCK_WAIT_S = 10.0


class Bound:
    """How many series the families of one plugin may have: together, and each of them beside the label `module`.

    Labels that have a new value for ever (text, a step, a fraction) end here, and not where nobody else has room.

    Attributes:
        refused: how often a series was not made, and `why`, in words; `told` of them are published.
        bad: by the name of a metric, how many values were none, see `hookd.api.metrics`; `bad_told` of them are published.
    """

    def __init__(self, most: int = MAX_SERIES // 2, most_values: int = 500) -> None:
        self.most, self.most_values = most, most_values
        self.live = self.refused = self.told = 0
        self.why = ""
        self.bad: dict[str, int] = {}
        self.bad_told: dict[str, int] = {}

    def refuse(self, name: str) -> None:
        """Count a value of a metric that is none."""
        self.bad[name] = self.bad.get(name, 0) + 1

    def has_room(self, name: str, beside: int) -> bool:
        """Whether a series may be made of a family that has so many with the same module; if not, it is counted."""
        if self.live < self.most and beside < self.most_values:
            return True
        self.refused += 1
        limit = f"{self.most_values} series" if beside >= self.most_values else f"{self.most} series in all"
        self.why = f"{name} has {limit}" + (" beside the label module" if beside >= self.most_values else "")
        return False


class SeriesWriter:
    """The families, series and modules of a page, and the lock under which they change.

    Args:
        cells: float64 view of the whole page.
        words: uint64 view of the whole page.
        schema: the log that says which cells are which series.
        values: where the cells of series lie.

    Attributes:
        dropped: how many series found no room.
        sharers: by family, the objects of `hookd.api.metrics` that have declared it.
    """

    def __init__(self, cells: memoryview[float], words: memoryview[int], schema: Log, values: Region) -> None:
        self.cells, self._words, self._schema = cells, words, schema
        self.dropped = 0
        self._drops = itertools.count(1)
        self._lock = RLock()
        self._is_busy = self._is_closed = self._is_lock_lost = False
        self._families: dict[int, _Family] = {}
        self.sharers: dict[int, list[Any]] = {}
        self._texts: dict[Values, Values] = {}
        self._by_name: dict[str, _Family] = {}
        self._modules: dict[int, tuple[str, str, int]] = {}
        self._family_ids = itertools.count(1)
        self._module_ids = itertools.count(1)
        self._series_count = self._stale = 0  # live series; records in the schema that no longer hold
        self._retired: list[tuple[int, int]] = []  # index and width: free after the next compact()
        self._free: dict[int, list[int]] = {}  # by width
        self._scratch = values.offset // 8
        self._next = self._scratch + SCRATCH_CELLS
        self._end = self._scratch + values.length // 8

    def _exclusive(self, work: Callable[..., T], *args: Any) -> T | None:
        """Run `work` alone and return its result; None, and not run, when closed, re-entered, or the lock is not had.

        Training must never hang on us. So the lock is re-entrant: a signal handler may run in the middle of `work` and
        come here again. And the wait for it is bounded: a handler that raises at the wrong instant can leave it taken.
        """
        if not self._lock.acquire(timeout=0 if self._is_lock_lost else LOCK_WAIT_S):
            self._is_lock_lost = True
            return None
        if self._is_busy:
            self._lock.release()
            return None
        self._is_busy = True
        try:
            self._is_lock_lost = False
            return None if self._is_closed else work(*args)
        finally:
            self._is_busy = False
            self._unlock()

    def _unlock(self) -> None:
        """Release the lock as often as this thread has taken it, now or in calls that a raising handler cut short."""
        try:  # noqa: SIM105  suppress() costs as much as the rest
            while True:
                self._lock.release()
        except RuntimeError:  # it is another's now, or nobody's
            pass

    # -- families and series

    def family(
        self,
        name: str,
        kind: str,
        help: str,  # noqa: A002  as in prometheus_client
        labels: Sequence[str] = (),
        buckets: Sequence[float] = (),
        *,
        bound: Bound | None = None,
    ) -> int:
        """Declare a family and return its id; the same declaration again returns the same id.

        Args:
            name: without `_total`.
            kind: one of KINDS.
            help: a sentence.
            labels: names of the labels, without run and rank.
            buckets: upper bounds of a histogram, ascending, without +Inf.
            bound: of the plugin whose it is.

        Raises:
            ValueError: Prometheus would refuse it, or the name is declared with another kind, labels or buckets.
        """
        declaration = Declaration(name, kind, clean(help), tuple(labels), tuple(map(float, buckets))).check()
        family = self._by_name.get(name) or self._exclusive(self._add_family, declaration, bound)
        if family is None:
            self._drop()
            return 0  # whose series are scratch
        if family.declaration._replace(help=declaration.help) != declaration:
            raise ValueError(f"{name} is declared already, and otherwise: {family.declaration}")
        family.take(bound)
        return family.id

    def _add_family(self, declaration: Declaration, bound: Bound | None) -> _Family | None:
        family = self._by_name.get(declaration.name)
        if family is None:
            family = _Family(next(self._family_ids), declaration, bound)
            if len(self._families) >= MAX_FAMILIES or not self._append(family.record()):
                return None
            self._families[family.id] = self._by_name[declaration.name] = family
        return family

    def series(self, family: int, values: Values = ()) -> int:
        """Return the index of a series' first cell, which is 0.0 when the series is new.

        A counter and a gauge have one cell (so has an info, and it is 1.0). A histogram has a cell for each bucket, *not*
        cumulative, then one for +Inf, then one for the sum.

        Raises:
            ValueError: another number of values than the family has labels, or one that is no str.
        """
        known = self._families.get(family)
        if known is None:
            return self._scratch
        index = known.cells.get(values)
        if index is None:
            if len(values) != len(known.declaration.labels) or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{values!r} are no label values for {known.declaration}")
            if not known.has_room(values):
                return self._scratch
            index = self._exclusive(self._add_series, known, self._shared(values))
        return self._drop() if index is None else index

    def known(self, family: int) -> list[Values]:
        """Return the label values of a family's series."""
        known = self._families.get(family)
        return [] if known is None else list(known.cells)

    def _shared(self, values: Values) -> Values:
        """Clean label values; those of a module are one object in all of its families."""
        cleaned = tuple(map(clean, values))
        return self._texts.setdefault(cleaned, cleaned)

    def _add_series(self, family: _Family, values: Values) -> int:
        index = family.cells.get(values)
        if index is not None:
            return index
        index = self._reserve(family.width) if self._series_count < MAX_SERIES else None
        if index is None or not self._append(family.series_record(values, index)):
            if index is not None:
                self._free.setdefault(family.width, []).append(index)
            index = self._drop()
        else:
            self._series_count += 1
            family.count(values, 1)
            if family.declaration.kind == "info":
                self.cells[index] = 1.0
        family.cells[values] = index
        return index

    def _reserve(self, width: int) -> int | None:
        """Take `width` adjacent cells of 0.0."""
        if self._free.get(width):
            index = self._free[width].pop()
            for cell in range(index, index + width):
                self.cells[cell] = 0.0
            return index
        index = self._next
        if index + width > self._end:
            return None
        self._next = index + width
        return index

    def _drop(self) -> int:
        self.dropped = next(self._drops)
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._words[DROPPED_WORD] = self.dropped
        return self._scratch

    def retire(self, family: int, values: Values) -> None:
        """Take a series away. After the next `compact` its cells belong to others: nobody may store to them by then."""
        self._exclusive(self._retire, family, tuple(map(clean, values)))

    def _retire(self, family: int, values: Values) -> None:
        known = self._families.get(family)
        index = known.cells.pop(values, None) if known else None
        if known and index is not None:
            if index != self._scratch:
                known.count(values, -1)
            self._forget([index], known.width)
            self._append(array_of("-s", family, values))

    def retire_family(self, family: int) -> None:
        """Take a family and all its series away, as `retire` does."""
        self._exclusive(self._retire_family, family)

    def _retire_family(self, family: int) -> None:
        known = self._families.pop(family, None)
        if known:
            del self._by_name[known.declaration.name]
            self.sharers.pop(family, None)
            known.leave()
            self._forget(list(known.cells.values()), known.width)
            self._append(array_of("-f", family))

    def _forget(self, indexes: list[int], width: int) -> None:
        retired = [(index, width) for index in indexes if index != self._scratch]
        self._retired += retired
        self._series_count -= len(retired)
        self._stale += len(retired) + 1

    def compact(self) -> None:
        """Write the schema anew without what was retired, and free the retired cells: some 5 us for each live series."""
        self._exclusive(self._compact)

    def _compact(self) -> None:
        if self._stale:
            self._rewrite_schema()
            self._texts.clear()
        while self._retired:
            index, width = self._retired.pop()
            self._free.setdefault(width, []).append(index)
        for family in self._families.values():  # whoever was refused may ask again
            for values in [values for values, index in family.cells.items() if index == self._scratch]:
                del family.cells[values]

    def _append(self, payload: bytes) -> bool:
        """Append to the schema, rewriting it if it is full and an eighth of it or more is stale."""
        if self._schema.append(payload):
            return True
        if self._stale * 8 <= self._series_count + len(self._modules):
            return False  # not for every single one: a rewrite takes up to a second
        self._rewrite_schema()
        return self._schema.append(payload)

    def _rewrite_schema(self) -> None:
        self._schema.replace(self._live_records())
        self._stale = 0

    def _live_records(self) -> Iterator[bytes]:
        for family in self._families.values():
            yield family.record()
            for values, index in family.cells.items():
                if index != self._scratch:
                    yield family.series_record(values, index)
        for module, entry in self._modules.items():
            yield array_of("m", module, *entry)

    # -- modules

    def module(self, name: str, type: str, root: int) -> int:  # noqa: A002
        """Name a module for the heartbeat and the recorder; return its id, from 1 up and never used again.

        Args:
            name: as in its root's `named_modules()`.
            type: of which class it is.
            root: ordinal of its root.
        """
        module = next(self._module_ids)
        self._exclusive(self._add_module, module, (clean(name), clean(type), root))
        return module

    def _add_module(self, module: int, entry: tuple[str, str, int]) -> None:
        if len(self._modules) < MAX_MODULES and self._append(array_of("m", module, *entry)):
            self._modules[module] = entry

    def retire_module(self, module: int) -> None:
        """Take a module's name away."""
        self._exclusive(self._retire_module, module)

    def _retire_module(self, module: int) -> None:
        if self._modules.pop(module, None):
            self._stale += 1
            self._append(array_of("-m", module))


class _Family:
    """A declaration and its live series: label values to index of the first cell."""

    def __init__(self, number: int, declaration: Declaration, bound: Bound | None = None) -> None:
        self.id, self.declaration, self.width = number, declaration, declaration.width
        self.cells: dict[Values, int] = {}
        self._bound = bound
        self._module = declaration.labels.index("module") if "module" in declaration.labels else -1
        self._live: dict[str, int] = {}  # by module

    def has_room(self, values: Values) -> bool:
        module = values[self._module] if self._module >= 0 else ""
        return self._bound is None or self._bound.has_room(self.declaration.name, self._live.get(module, 0))

    def count(self, values: Values, change: int) -> None:
        """Note that a series has come or gone."""
        if self._bound is not None:
            module = values[self._module] if self._module >= 0 else ""
            self._bound.live += change
            self._live[module] = self._live.get(module, 0) + change
            if not self._live[module]:
                del self._live[module]

    def take(self, bound: Bound | None) -> None:
        """Belong to another object of the same plugin, which has declared the family anew."""
        if bound is not None and bound is not self._bound:
            self.leave()
            self._bound = bound
            bound.live += sum(self._live.values())

    def leave(self) -> None:
        """Note that all series have gone."""
        if self._bound is not None:
            self._bound.live -= sum(self._live.values())

    def record(self) -> bytes:
        return array_of("f", self.id, *self.declaration)

    def series_record(self, values: Values, index: int) -> bytes:
        """Return what `array_of("s", id, index, values)` would, in a third of the time."""
        return f'["s",{self.id},{index},[{",".join(map(encode_basestring, values))}]]'.encode()
