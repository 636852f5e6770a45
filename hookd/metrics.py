"""Counter, Gauge and Histogram whose values are cells of the page. Runs in the target.

The names are prometheus_client's. A plugin gets its metrics from its `Context`; it does not make them itself.

Every change is one expression on a float64 cell (`cells[i] += a`, no call inside), which threads of one process
cannot lose under the GIL; no lock is taken and nobody is woken.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookd.page import PageWriter


class _Child:
    """One series: the place of its first cell in the page.

    Attributes:
        cells: the page's float64 cells.
        at: which of them is this series'. In the hottest hooks `cells[at] += amount` saves the call of `inc`.
    """

    __slots__ = ("at", "cells")

    def __init__(self, cells: memoryview[float], at: int, _buckets: tuple[float, ...]) -> None:
        self.cells = cells
        self.at = at


class CounterChild(_Child):
    """A value that only grows."""

    __slots__ = ()

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which must not be negative (unchecked: this is the hot path)."""
        self.cells[self.at] += amount


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

    def __init__(self, cells: memoryview[float], at: int, buckets: tuple[float, ...]) -> None:
        super().__init__(cells, at, buckets)
        self.bounds = buckets

    def observe(self, value: float) -> None:
        """Count `value` in its bucket."""
        self.cells[self.at + bisect_left(self.bounds, value)] += 1.0
        self.cells[self.at + len(self.bounds) + 1] += value


class _Metric:
    """A family of series, one for each combination of label values.

    Not `Generic` at run time: typing's caches would keep this module alive in the target after a detach.
    """

    kind = ""
    child: type[Any]

    def __init__(
        self, page: PageWriter, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
    ) -> None:
        self.name = name
        self.label_names = tuple(labels)
        self.buckets = tuple(buckets)
        self._page = page
        self._family = page.family(name, self.kind, help, self.label_names, self.buckets)
        self._children: dict[tuple[str, ...], Any] = {}

    def labels(self, *values: str) -> Any:
        """Give the series of these label values, made at the first call; about 0.3 us, so keep what you get.

        Raises:
            ValueError: the number of values is not that of the labels.
        """
        child = self._children.get(values)
        return self._make(values) if child is None else child

    def _make(self, values: tuple[str, ...]) -> Any:
        if len(values) != len(self.label_names):
            msg = f"{self.name} has the labels {self.label_names}, got {values}"
            raise ValueError(msg)
        texts = tuple(str(v) for v in values)
        at = self._page.series(self._family, texts)
        child = self.child(self._page.cells, at, self.buckets)
        self._children[values] = child
        return child

    def known(self) -> list[tuple[str, ...]]:
        """Give the label values of all series that there are."""
        return list(self._children)

    def remove(self, *values: str) -> None:
        """Let the series of these label values end."""
        if self._children.pop(values, None) is not None:
            self._page.retire(self._family, tuple(str(v) for v in values))

    def remove_module(self, name: str) -> None:
        """Let all series end whose label `module` is `name`."""
        if "module" in self.label_names:
            at = self.label_names.index("module")
            for values in [v for v in self._children if v[at] == name]:
                self.remove(*values)

    def retire(self, heir: _Metric | None = None) -> None:
        """Let the whole family end, or of one with an heir, the same family declared anew, what that does not go on with."""
        if heir is not None:
            for values in set(self._children).difference(heir.known()):
                self.remove(*values)
            return
        self._children.clear()
        self._page.retire_family(self._family)


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
