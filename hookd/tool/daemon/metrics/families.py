"""Encode the metric families of pages as text, without prometheus_client's cost of 5 us per series.

The head of a line (name and labels) never changes during the life of a series, so it is made once and cached. The text equals
byte for byte the one that prometheus_client makes from the same samples, which `metric` returns; a test compares the two.
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

    Encoder = Callable[["Registry"], bytes]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",), "gauge": ("",)}
"""Suffixes of the sample names, by kind of family."""

UNITS = ("seconds", "bytes", "ratio")
"""Units that a name may end with; OpenMetrics has them in a line of their own as well."""

_LARGEST = sys.float_info.max
_GO_EXPONENT = 1e6
"""From this value on, Go formats the exponent differently from Python: prometheus_client/utils.py `floatToGoString`, 0.26."""

Heads = tuple[str, ...]
"""The text before the value, for each line of one series."""


@dataclass(frozen=True)
class Part:
    """The part of a family that comes from one target.

    Attributes:
        family: of the target's page.
        indexes: of the series that are served.
        standard: the labels that all series of this target have.
        heads: by index of the series; `text` adds the missing ones.
    """

    family: Family
    indexes: Sequence[int]
    standard: Mapping[str, str]
    heads: dict[int, Heads]

    def text(self) -> str:
        """Return the text of all samples."""
        family, heads = self.family, self.heads
        for k in self.indexes:
            if k not in heads:
                heads[k] = tuple(_head(name, labels) for name, labels in self._names(k))
        if family.kind == "histogram":
            series = [(heads[k], _histogram(family, family.first[k])) for k in self.indexes]
            return "".join(_lines(head, values) for head, values in series)
        firsts = [heads[k][0] for k in self.indexes]
        values = list(map(family.cells.__getitem__, map(family.first.__getitem__, self.indexes)))
        if family.kind == "counter" and not _are_between(0, values, math.inf):
            served = [at for at, value in enumerate(values) if 0 <= value < math.inf]
            values, firsts = [values[at] for at in served], [firsts[at] for at in served]
        return _lines(firsts, values)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield the name, labels and value of each sample."""
        family = self.family
        for k in self.indexes:
            value = family.cells[family.first[k]]
            if family.kind == "histogram":
                values = _histogram(family, family.first[k])
            else:
                values = [value] if family.kind != "counter" or 0 <= value < math.inf else []
            for (name, labels), number in zip(self._names(k), values, strict=False):
                yield name, labels, number

    def _names(self, k: int) -> list[tuple[str, dict[str, str]]]:
        """Return name and labels of each line of a series; a histogram's lines are its buckets, count and sum."""
        family = self.family
        labels = {**self.standard, **dict(zip(family.labels, family.values[k], strict=True))}
        bucket, *rest = (family.name + suffix for suffix in SUFFIXES[family.kind])
        if not rest:
            return [(bucket, labels)]
        bounds = (*family.buckets, math.inf)
        return [*((bucket, {**labels, "le": number(bound)}) for bound in bounds), *((name, labels) for name in rest)]


@dataclass(frozen=True)
class OwnPart:
    """The part of a page's family that comes from the daemon itself: samples of one name, by their labels."""

    name: str
    values: Sequence[tuple[Mapping[str, str], float]]

    def text(self) -> str:
        """Return the text of all samples."""
        return _lines((_head(self.name, labels) for labels, _ in self.values), [value for _, value in self.values])

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield the name, labels and value of each sample."""
        for labels, value in self.values:
            yield self.name, dict(labels), value


class PageFamily:
    """A family of one or more pages in one scrape.

    Args:
        name: of the family, without `_total`.
        kind: counter, gauge, histogram or info.
    """

    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.parts: list[Part | OwnPart] = []

    def sample_names(self) -> set[str]:
        """Return the name of the family, and the names that its samples may have."""
        return {self.name, *(self.name + suffix for suffixes in SUFFIXES.values() for suffix in suffixes)}

    def metric(self) -> Metric:
        """Return the family as a `Metric` of prometheus_client."""
        metric = empty(self.name, self.text, self.kind)
        for part in self.parts:
            for name, labels, value in part.samples():
                metric.add_sample(name, labels, value)
        return metric

    def encode(self, encoder: Encoder) -> bytes:
        """Return the text of the family; `encoder` writes HELP and TYPE in its own format."""
        head = encoder(Registry(empty(self.name, self.text, self.kind)))
        return head + "".join(part.text() for part in self.parts).encode()


def empty(name: str, text: str, kind: str) -> Metric:
    """Return a family of prometheus_client without samples, with the unit that its name ends with."""
    unit = name.rpartition("_")[2]
    return Metric(name, text, kind, unit if unit in UNITS else "")


class Registry:
    """A registry of these families, for prometheus_client's encoders; without any, they write their format's trailer."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._metrics


def encode(families: Iterable[Metric | PageFamily], encoder: Encoder) -> bytes:
    """Return the text of a scrape, equal to the one that `encoder` makes from the same samples."""
    end = encoder(Registry())

    def open_ended(registry: Registry) -> bytes:
        return encoder(registry).removesuffix(end)

    parts = (
        family.encode(open_ended) if isinstance(family, PageFamily) else open_ended(Registry(family))
        for family in families
    )
    return b"".join(parts) + end


def number(value: float) -> str:
    """Write a number as Prometheus does."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _lines(heads: Iterable[str], values: list[float]) -> str:
    """Return a line for each value; surplus heads are ignored."""
    if not values:
        return ""
    # `repr` takes a quarter of the time of `number`. Their results differ only for the few values that are replaced below.
    texts = repr(values)[1:-1].split(", ")
    if not _are_between(-_LARGEST, values, _GO_EXPONENT):
        for at in [at for at, value in enumerate(values) if not -_LARGEST <= value < _GO_EXPONENT]:
            texts[at] = number(values[at])
    return "\n".join(map(operator.add, heads, texts)) + "\n"


def _are_between(low: float, values: list[float], top: float) -> bool:
    """Whether all values are at least `low` and below `top`, and none is NaN, which the sum shows."""
    return not values or (min(values) >= low and max(values) < top and not math.isnan(sum(values)))


def cumulative(bounds: Sequence[float], counts: Iterable[float]) -> list[tuple[str, float]]:
    """Return cumulative buckets for prometheus_client; `counts` are not cumulative, and end with the one of +Inf."""
    total, buckets = 0.0, []
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        total += count
        buckets.append((number(bound), total))
    return buckets


def _histogram(family: Family, first: int) -> list[float]:
    """Return a histogram's cumulative buckets, its count and its sum; nothing if the counts are invalid.

    A sum that is not a valid counter (NaN, or below 0) is left out together with the count, which the last bucket repeats.
    OpenMetrics allows neither such a sum, nor any sum if a bound is negative, nor a sum or a count alone.
    """
    total, values = 0.0, []
    end = first + len(family.buckets) + 1
    for count in family.cells[first:end]:
        if not (0 <= count < math.inf and count.is_integer()):
            return []
        total += count
        if total == math.inf:  # invalid counts, although each of them is finite
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
