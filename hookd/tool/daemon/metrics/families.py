"""Families of pages on their way to text, without prometheus_client's cost of 5 us a series.

What stands before a value (name and labels) never changes while a series lives, so it is made once and kept. The text
is byte for byte what prometheus_client makes of the same samples, which `metric` gives and a test compares.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hookd.wire.page import Family

    Encoder = Callable[["One | Nothing"], bytes]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",), "gauge": ("",)}
"""By kind of a family, what its samples are called beyond its name."""

_LARGEST = sys.float_info.max
_GO_EXPONENT = 1e6
"""From here on Go writes another exponent than Python: prometheus_client/utils.py `floatToGoString`, 0.26."""

Heads = tuple[str, ...]
"""What stands before the values of one series: one text for each of its lines."""


@dataclass(frozen=True)
class Part:
    """What one target adds to a family.

    Attributes:
        family: of its page.
        indexes: of the series that are served.
        standard: the labels that all series of this target have.
        heads: by index, made here where they are missing.
    """

    family: Family
    indexes: Sequence[int]
    standard: Mapping[str, str]
    heads: dict[int, Heads]

    def text(self) -> str:
        """Give the text of all samples."""
        family, heads = self.family, self.heads
        for k in self.indexes:
            if k not in heads:
                heads[k] = tuple(_head(name, labels) for name, labels in self._names(k))
        if family.kind == "histogram":
            found = [(heads[k], _histogram(family, family.first[k])) for k in self.indexes]
            return "".join(_lines(head, values) for head, values in found)
        firsts = [heads[k][0] for k in self.indexes]
        values = list(map(family.cells.__getitem__, map(family.first.__getitem__, self.indexes)))
        if family.kind == "counter" and not _are_between(0, values, math.inf):
            served = [at for at, value in enumerate(values) if 0 <= value < math.inf]
            values, firsts = [values[at] for at in served], [firsts[at] for at in served]
        return _lines(firsts, values)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Give the name, labels and value of each sample."""
        family = self.family
        for k in self.indexes:
            value = family.cells[family.first[k]]
            if family.kind == "histogram":
                values = _histogram(family, family.first[k])
            else:
                values = [value] if family.kind != "counter" or 0 <= value < math.inf else []
            for (name, labels), one in zip(self._names(k), values, strict=False):
                yield name, labels, one

    def _names(self, k: int) -> list[tuple[str, dict[str, str]]]:
        """Give name and labels of each line of a series; of a histogram the buckets, the count, the sum."""
        family = self.family
        labels = {**self.standard, **dict(zip(family.labels, family.values[k], strict=True))}
        bucket, *rest = (family.name + suffix for suffix in SUFFIXES[family.kind])
        if not rest:
            return [(bucket, labels)]
        bounds = (*family.buckets, math.inf)
        return [*((bucket, {**labels, "le": number(bound)}) for bound in bounds), *((name, labels) for name in rest)]


@dataclass(frozen=True)
class Told:
    """What the daemon itself adds to a family that pages have, too: samples of one name, by their labels."""

    name: str
    values: Sequence[tuple[Mapping[str, str], float]]

    def text(self) -> str:
        """Give the text of all samples."""
        return _lines((_head(self.name, labels) for labels, _ in self.values), [value for _, value in self.values])

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Give the name, labels and value of each sample."""
        for labels, value in self.values:
            yield self.name, dict(labels), value


class PageFamily:
    """A family of one or more pages in one scrape.

    Args:
        name: of the family, without `_total`.
        text: its help.
        kind: counter, gauge, histogram or info.
    """

    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.parts: list[Part | Told] = []

    def sample_names(self) -> set[str]:
        """Return its own name and those that its samples may have."""
        return {self.name, *(self.name + suffix for suffixes in SUFFIXES.values() for suffix in suffixes)}

    def metric(self) -> Metric:
        """Give it as prometheus_client has it."""
        metric = Metric(self.name, self.text, self.kind)
        for part in self.parts:
            for name, labels, value in part.samples():
                metric.add_sample(name, labels, value)
        return metric

    def encode(self, encoder: Encoder) -> bytes:
        """Make its text; `encoder` makes HELP and TYPE, in its own format."""
        head = encoder(One(Metric(self.name, self.text, self.kind)))
        return head + "".join(part.text() for part in self.parts).encode()


class One:
    """A registry of one family, for prometheus_client's encoders."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """Give the family."""
        yield self._metric


class Nothing:
    """A registry without a family: what an encoder makes of it is how its format ends."""

    def collect(self) -> Iterator[Metric]:
        """Give nothing."""
        yield from ()


def encode(families: Iterable[Metric | PageFamily], encoder: Encoder) -> bytes:
    """Make the text of a scrape, as `encoder` would of the same samples."""
    end = encoder(Nothing())

    def open_ended(registry: One | Nothing) -> bytes:
        return encoder(registry).removesuffix(end)

    parts = (one.encode(open_ended) if isinstance(one, PageFamily) else open_ended(One(one)) for one in families)
    return b"".join(parts) + end


def number(value: float) -> str:
    """Write a number as Prometheus does."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _lines(heads: Iterable[str], values: list[float]) -> str:
    """Give a line for each value; where there are fewer values, the last heads have none."""
    if not values:
        return ""
    texts = repr(values)[1:-1].split(", ")  # as `number` for all but the few below, in a quarter of its time
    if not _are_between(-_LARGEST, values, _GO_EXPONENT):
        for at in [at for at, value in enumerate(values) if not -_LARGEST <= value < _GO_EXPONENT]:
            texts[at] = number(values[at])
    return "\n".join(map(operator.add, heads, texts)) + "\n"


def _are_between(low: float, values: list[float], top: float) -> bool:
    """Whether all are at least `low` and below `top`; a NaN is not, and shows in the sum."""
    return not values or (min(values) >= low and max(values) < top and not math.isnan(sum(values)))


def cumulative(bounds: Sequence[float], counts: Iterable[float]) -> list[tuple[str, float]]:
    """Give prometheus_client's buckets; the counts are each bucket's own, the last is that of +Inf."""
    total, buckets = 0.0, []
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        total += count
        buckets.append((number(bound), total))
    return buckets


def _histogram(family: Family, first: int) -> list[float]:
    """Give a histogram's cumulative buckets, its count and its sum; nothing if its counts are none.

    A sum that is no counter (NaN, or below 0) is left out, and with it the count, which the last bucket holds anyway:
    OpenMetrics allows neither such a sum, nor any where a bound is negative, nor one of the two alone.
    """
    total, values = 0.0, []
    end = first + len(family.buckets) + 1
    for count in family.cells[first:end]:
        if not (0 <= count < math.inf and count.is_integer()):
            return []
        total += count
        if total == math.inf:  # counts that are none, though each is finite
            return []
        values.append(total)
    spent = family.cells[end]
    is_counter = spent >= 0 and not (family.buckets and family.buckets[0] < 0)
    return [*values, total, spent] if is_counter else values


def _head(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escape(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{pairs}}} "


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
