"""Families, series and modules of a page, as the agent writes them."""

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
    """Limits on the series of one plugin: of all its families together, and of each family for one value of `module`.

    A label with ever new values (text, a step, a fraction) reaches these limits before it takes the space of other plugins.

    Attributes:
        refused: number of refused series; `why` is the last reason, as text, and `published` the number published so far.
        bad: number of invalid values by metric, see `hookd.api.metrics`; `bad_published` is the number published so far.
    """

    def __init__(self, most: int = MAX_SERIES // 2, most_values: int = 500) -> None:
        self.most, self.most_values = most, most_values
        self.live = self.refused = self.published = 0
        self.why = ""
        self.bad: dict[str, int] = {}
        self.bad_published: dict[str, int] = {}

    def refuse(self, name: str) -> None:
        """Count an invalid value of a metric."""
        self.bad[name] = self.bad.get(name, 0) + 1

    def has_room(self, name: str, beside: int) -> bool:
        """Whether a family may get one more series, and count the refusal if not.

        Args:
            name: of the family.
            beside: number of its series with the same module.
        """
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
        schema: the log that assigns cells to series.
        values: the region of the series' cells.

    Attributes:
        dropped: number of series for which there was no space.
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
        self._series_count = self._stale = 0  # live series; outdated records in the schema
        self._retired: list[tuple[int, int]] = []  # index and width; free after the next compact()
        self._free: dict[int, list[int]] = {}  # by width
        self._scratch = values.offset // 8
        self._next = self._scratch + SCRATCH_CELLS
        self._end = self._scratch + values.length // 8

    def _exclusive(self, work: Callable[..., T], *args: Any) -> T | None:
        """Run `work` under the lock and return its result; None, without running it, if closed, re-entered or not locked in time.

        The training must never hang because of hookd. So the lock is re-entrant: a signal handler may interrupt `work` and
        call this again. And the wait is limited: a handler that raises at the wrong moment can leave the lock taken.
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
        """Release the lock as often as this thread has taken it, also in earlier calls that a raising signal handler interrupted."""
        try:  # noqa: SIM105  suppress() costs as much as the rest
            while True:
                self._lock.release()
        except RuntimeError:  # this thread no longer has it
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
            bound: of the plugin that declares it.

        Raises:
            ValueError: Prometheus would refuse it, or the name is already declared with another kind, labels or buckets.
        """
        declaration = Declaration(name, kind, clean(help), tuple(labels), tuple(map(float, buckets))).check()
        family = self._by_name.get(name) or self._exclusive(self._add_family, declaration, bound)
        if family is None:
            self._drop()
            return 0  # the series of this id are scratch
        if family.declaration._replace(help=declaration.help) != declaration:
            raise ValueError(f"{name} is already declared differently: {family.declaration}")
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
        """Return the index of a series' first cell; the cells of a new series are 0.0.

        A counter and a gauge have one cell; so has an info, and it is 1.0. A histogram has a cell for each bucket, *not*
        cumulative, then one for +Inf, then one for the sum.

        Raises:
            ValueError: the number of values differs from that of the labels, or a value is not a str.
        """
        known = self._families.get(family)
        if known is None:
            return self._scratch
        index = known.cells.get(values)
        if index is None:
            if len(values) != len(known.declaration.labels) or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{values!r} are not label values for {known.declaration}")
            if not known.has_room(values):
                return self._scratch
            index = self._exclusive(self._add_series, known, self._shared(values))
        return self._drop() if index is None else index

    def known(self, family: int) -> list[Values]:
        """Return the label values of a family's series."""
        known = self._families.get(family)
        return [] if known is None else list(known.cells)

    def _shared(self, values: Values) -> Values:
        """Clean label values; equal ones are a single object in all families."""
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
        """Return the first of `width` adjacent free cells, set to 0.0; None if there is no space."""
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
        """Remove a series. Nothing may store to its cells after the next `compact`, which frees them for other series."""
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
        """Remove a family and all its series, as `retire` does."""
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
        """Rewrite the schema without retired entries and free their cells, in about 5 us for each live series."""
        self._exclusive(self._compact)

    def _compact(self) -> None:
        if self._stale:
            self._rewrite_schema()
            self._texts.clear()
        while self._retired:
            index, width = self._retired.pop()
            self._free.setdefault(width, []).append(index)
        for family in self._families.values():  # a refused series may be requested again
            for values in [values for values, index in family.cells.items() if index == self._scratch]:
                del family.cells[values]

    def _append(self, payload: bytes) -> bool:
        """Append to the schema; if it is full and has more than one stale record for eight live ones, rewrite it first."""
        if self._schema.append(payload):
            return True
        if self._stale * 8 <= self._series_count + len(self._modules):
            return False  # a rewrite takes up to a second: too long for every single record
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
        """Register a module for the heartbeat and the recorder; return its id, which is 1 or more and never reused.

        Args:
            name: as in its root's `named_modules()`.
            type: name of its class.
            root: ordinal of its root.
        """
        module = next(self._module_ids)
        self._exclusive(self._add_module, module, (clean(name), clean(type), root))
        return module

    def _add_module(self, module: int, entry: tuple[str, str, int]) -> None:
        if len(self._modules) < MAX_MODULES and self._append(array_of("m", module, *entry)):
            self._modules[module] = entry

    def retire_module(self, module: int) -> None:
        """Remove a module."""
        self._exclusive(self._retire_module, module)

    def _retire_module(self, module: int) -> None:
        if self._modules.pop(module, None):
            self._stale += 1
            self._append(array_of("-m", module))


class _Family:
    """A declaration and its series; maps label values to the index of the first cell."""

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
        """Count a series that was added (1) or removed (-1)."""
        if self._bound is not None:
            module = values[self._module] if self._module >= 0 else ""
            self._bound.live += change
            self._live[module] = self._live.get(module, 0) + change
            if not self._live[module]:
                del self._live[module]

    def take(self, bound: Bound | None) -> None:
        """Count the series for a new object of the same plugin, which has declared the family again."""
        if bound is not None and bound is not self._bound:
            self.leave()
            self._bound = bound
            bound.live += sum(self._live.values())

    def leave(self) -> None:
        """Stop counting the series for the plugin."""
        if self._bound is not None:
            self._bound.live -= sum(self._live.values())

    def record(self) -> bytes:
        return array_of("f", self.id, *self.declaration)

    def series_record(self, values: Values, index: int) -> bytes:
        """Return the same as `array_of("s", id, index, values)`, in a third of the time."""
        return f'["s",{self.id},{index},[{",".join(map(encode_basestring, values))}]]'.encode()
