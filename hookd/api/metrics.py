"""Counter, Gauge and Histogram, with values in cells of the page.

The names are those of prometheus_client. A plugin gets its metrics from its `Context` and does not create them itself.

Every update is one expression on a float64 cell (`cells[i] += a`, no call inside), which threads of one process
cannot lose under the GIL. It takes no lock and wakes no thread.

A NaN would stay in a sum forever, and a counter with such a value is not served. So invalid amounts are not stored, but counted
(`hookd_plugin_bad_values_total`). A gauge may be any number, including NaN.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, Any

from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Container

    from hookd.wire.page import PageWriter
    from hookd.wire.page.series import Bound


class _Child:
    """One series: the index of its first cell in the page.

    Attributes:
        cells: the page's float64 cells.
        at: index of this series' first cell. In the hottest hooks `cells[at] += amount` saves the call of `inc`.
    """

    __slots__ = ("_family", "at", "cells")

    def __init__(self, cells: memoryview[float], at: int, family: _Metric) -> None:
        self.cells = cells
        self.at = at
        self._family = family


class CounterChild(_Child):
    """A value that only grows."""

    __slots__ = ()

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`; an amount that is negative, infinite or NaN is only counted as a bad value."""
        if 0 <= amount < inf:
            self.cells[self.at] += amount
        else:
            self._family.refuse()


class GaugeChild(_Child):
    """A value that goes up and down."""

    __slots__ = ()

    def set(self, value: float) -> None:
        """Store `value`."""
        self.cells[self.at] = value

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.cells[self.at] += amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self.cells[self.at] -= amount


class HistogramChild(_Child):
    """Observations counted in buckets; the reader derives the total count."""

    __slots__ = ("bounds",)

    def __init__(self, cells: memoryview[float], at: int, family: _Metric) -> None:
        super().__init__(cells, at, family)
        self.bounds = family.buckets

    def observe(self, value: float) -> None:
        """Count `value` in its bucket, and add it to the sum.

        A NaN is only counted as a bad value. An infinity is counted, but not added to the sum, which would stay infinite.
        """
        if value != value:  # noqa: PLR0124  takes a third of the time of `math.isnan`
            self._family.refuse()
            return
        self.cells[self.at + bisect_left(self.bounds, value)] += 1.0
        if -inf < value < inf:
            self.cells[self.at + len(self.bounds) + 1] += value


class _Metric:
    """A family of series, one for each combination of label values."""

    # Not `Generic` at run time: typing's caches would keep this module alive in the target after a detach.

    kind = ""
    child: type[Any]

    def __init__(
        self,
        page: PageWriter,
        name: str,
        help: str,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = (),
        *,
        bound: Bound | None = None,
    ) -> None:
        self.name = name
        self.label_names = tuple(labels)
        self.buckets = tuple(buckets)
        self._page = page
        self._bound = bound
        self._family = page.family(name, self.kind, help, self.label_names, self.buckets, bound=bound)
        self.asked: set[tuple[str, ...]] | None = None
        self._join()

    def _join(self) -> None:
        """Join the objects that declare this family; there are two while a plugin's options are changed.

        Only then does each object record which series it has created; a single object owns all series on the page.
        """
        self._sharers: list[_Metric] = self._page.sharers.setdefault(self._family, [])
        for other in self._sharers:
            if other.asked is None:
                other.asked = set(other.known())
            self.asked = set()
        self._sharers.append(self)

    def _leave(self) -> None:
        self._sharers.remove(self)
        if len(self._sharers) == 1:
            self._sharers[0].asked = None

    def labels(self, *values: str) -> Any:
        """Return the series with these label values; it is created at the first call.

        A call takes about 0.5 us, so keep the result.

        Raises:
            ValueError: the number of values differs from the number of labels.
        """
        if len(values) != len(self.label_names):
            msg = f"{self.name} has the labels {self.label_names}, got {values}"
            raise ValueError(msg)
        texts = tuple([v if type(v) is str else str(v) for v in values])
        if self.asked is not None:
            self.asked.add(tuple(map(clean, texts)))
        at = self._page.series(self._family, texts)
        return self.child(self._page.cells, at, self)

    def refuse(self) -> None:
        """Count an invalid value."""
        if self._bound is not None:  # None for hookd's own metrics
            self._bound.refuse(self.name)

    def known(self) -> list[tuple[str, ...]]:
        """Return the label values of all existing series."""
        return self._page.known(self._family) if self.asked is None else list(self.asked)

    def adopt(self, predecessor: _Metric) -> None:
        """Continue all series of the predecessor's metric; see the hook `succeed`."""
        for values in predecessor.known():
            self.labels(*values)

    def remove(self, *values: str) -> None:
        """Remove the series with these label values."""
        texts = tuple(str(v) for v in values)
        if self.asked is not None:
            self.asked.discard(tuple(map(clean, texts)))
        self._page.retire(self._family, texts)

    def remove_modules(self, names: Container[str]) -> None:
        """Remove all series whose label `module` is one of `names`."""
        if "module" in self.label_names:
            at = self.label_names.index("module")
            for values in [v for v in self.known() if v[at] in names]:
                self.remove(*values)

    def retire(self, successor: _Metric | None = None) -> None:
        """Remove the family; with a successor, which declares the same family, only the series that it does not have."""
        if successor is not None:
            for values in set(self.known()).difference(successor.known()):
                self.remove(*values)
        else:
            self._page.retire_family(self._family)
        self._leave()


class Counter(_Metric):
    """A family of counters; its name is exposed with `_total`."""

    kind = "counter"
    child = CounterChild

    if TYPE_CHECKING:

        def labels(self, *values: str) -> CounterChild: ...  # noqa: D102

    def inc(self, amount: float = 1.0) -> None:
        """Add to the series of a family without labels."""
        self.labels().inc(amount)


class Gauge(_Metric):
    """A family of gauges."""

    kind = "gauge"
    child = GaugeChild

    if TYPE_CHECKING:

        def labels(self, *values: str) -> GaugeChild: ...  # noqa: D102

    def set(self, value: float) -> None:
        """Set the series of a family without labels."""
        self.labels().set(value)


class Histogram(_Metric):
    """A family of histograms with fixed buckets."""

    kind = "histogram"
    child = HistogramChild

    if TYPE_CHECKING:

        def labels(self, *values: str) -> HistogramChild: ...  # noqa: D102

    def observe(self, value: float) -> None:
        """Count in the series of a family without labels."""
        self.labels().observe(value)
