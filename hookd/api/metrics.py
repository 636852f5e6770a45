"""Counter, Gauge and Histogram whose values are cells of the page. Runs in the target.

The names are prometheus_client's. A plugin gets its metrics from its `Context`; it does not make them itself.

Every change is one expression on a float64 cell (`cells[i] += a`, no call inside), which threads of one process
cannot lose under the GIL; no lock is taken and nobody is woken.

One NaN in a sum would stay there for ever, and a counter that is none is not served. So what is no amount is not stored, but counted
(`hookd_plugin_bad_values_total`). A gauge may be any number, also NaN.
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
    """One series: the place of its first cell in the page.

    Attributes:
        cells: the page's float64 cells.
        at: which of them is this series'. In the hottest hooks `cells[at] += amount` saves the call of `inc`.
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
        """Add `amount`. One that is negative, infinite or NaN is not added, but counted."""
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
    """Counts of observations by size; the reader derives the total count."""

    __slots__ = ("bounds",)

    def __init__(self, cells: memoryview[float], at: int, family: _Metric) -> None:
        super().__init__(cells, at, family)
        self.bounds = family.buckets

    def observe(self, value: float) -> None:
        """Count `value` in its bucket, and add it to the sum.

        A NaN is in no bucket: it is counted apart. An infinity is not added to the sum, which it would be for ever.
        """
        if value != value:  # noqa: PLR0124  in a third of the time that `math.isnan` takes
            self._family.refuse()
            return
        self.cells[self.at + bisect_left(self.bounds, value)] += 1.0
        if -inf < value < inf:
            self.cells[self.at + len(self.bounds) + 1] += value


class _Metric:
    """A family of series, one for each combination of label values.

    Not `Generic` at run time: typing's caches would keep this module alive in the target after a detach.
    """

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
        """Be one of the objects that declare this family: two while a plugin's options are changed.

        Only then each of them keeps which series it has asked for; else these are all that the page has.
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
        """Give the series of these label values, made at the first call; about 0.5 us, so keep what you get.

        Raises:
            ValueError: the number of values is not that of the labels.
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
        """Count a value that is none."""
        if self._bound is not None:  # hookd's own metrics have none
            self._bound.refuse(self.name)

    def known(self) -> list[tuple[str, ...]]:
        """Give the label values of all series that there are."""
        return self._page.known(self._family) if self.asked is None else list(self.asked)

    def adopt(self, predecessor: _Metric) -> None:
        """Go on with all series of the same metric of another object, see the hook `succeed`."""
        for values in predecessor.known():
            self.labels(*values)

    def remove(self, *values: str) -> None:
        """Let the series of these label values end."""
        texts = tuple(str(v) for v in values)
        if self.asked is not None:
            self.asked.discard(tuple(map(clean, texts)))
        self._page.retire(self._family, texts)

    def remove_modules(self, names: Container[str]) -> None:
        """Let all series end whose label `module` is one of `names`."""
        if "module" in self.label_names:
            at = self.label_names.index("module")
            for values in [v for v in self.known() if v[at] in names]:
                self.remove(*values)

    def retire(self, heir: _Metric | None = None) -> None:
        """Let the whole family end, or of one with an heir, the same family declared anew, what that does not go on with."""
        if heir is not None:
            for values in set(self.known()).difference(heir.known()):
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
        """Add to the series without labels."""
        self.labels().inc(amount)


class Gauge(_Metric):
    """A family of gauges."""

    kind = "gauge"
    child = GaugeChild

    if TYPE_CHECKING:

        def labels(self, *values: str) -> GaugeChild: ...  # noqa: D102

    def set(self, value: float) -> None:
        """Store into the series without labels."""
        self.labels().set(value)


class Histogram(_Metric):
    """A family of histograms with fixed buckets."""

    kind = "histogram"
    child = HistogramChild

    if TYPE_CHECKING:

        def labels(self, *values: str) -> HistogramChild: ...  # noqa: D102

    def observe(self, value: float) -> None:
        """Count in the series without labels."""
        self.labels().observe(value)
