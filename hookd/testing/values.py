"""Read and check values of metrics by the names and labels that Prometheus shows."""

from __future__ import annotations

import difflib
import re
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.wire.page import Snapshot
    from hookd.wire.page.snapshot import Family

    Sample = tuple[str, dict[str, str], float]

_SERIES = re.compile(r"\s*(\w+)\s*(?:\{(.*)\})?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(snapshot: Snapshot) -> list[Sample]:
    """Return name, labels and value of every series of a page, with histograms as buckets, count and sum."""
    return [sample for family in snapshot.families for sample in _of_family(family)]


def _of_family(family: Family) -> Iterator[Sample]:
    for series in family.series:
        labels = dict(zip(family.labels, series.values, strict=True))
        if family.kind != "histogram":
            yield family.name + ("_total" if family.kind == "counter" else ""), labels, series.cells[0]
            continue
        bounds = [*(f"{bound:g}" for bound in family.buckets), "+Inf"]
        counts = list(accumulate(series.cells[: len(bounds)]))
        for bound, count in zip(bounds, counts, strict=True):
            yield f"{family.name}_bucket", {**labels, "le": bound}, count
        yield f"{family.name}_count", labels, counts[-1]
        yield f"{family.name}_sum", labels, series.cells[len(bounds)]


def assert_metrics(found: list[Sample], expected: Mapping[str, object]) -> None:
    """Check values of series, which are named as Prometheus shows them: `hookd_widths_calls_total{module="0"}`.

    Args:
        found: the actual series, see `samples`.
        expected: values by series. They are compared with `==`, so `pytest.approx(...)` works; None means that there must be
            no such series. Labels that are not named may have any value, but only one series may match.

    Raises:
        AssertionError: a value differs; the message has the existing series.
    """
    wrong = [text for text in (_compare(found, key, value) for key, value in expected.items()) if text]
    assert not wrong, "\n".join(wrong)


def _compare(found: list[Sample], key: str, expected: object) -> str:
    match = _SERIES.match(key)
    assert match, f'{key!r} is not a series: write it as hookd_widths_calls_total{{module="0"}}'
    name, labels = match[1], dict(_LABEL.findall(match[2] or ""))
    fitting = [sample for sample in found if sample[0] == name and labels.items() <= sample[1].items()]
    if expected is None:
        return f"{key}: there should be none, there is {written(fitting)}" if fitting else ""
    if not fitting:
        same = [sample for sample in found if sample[0] == name]
        near = difflib.get_close_matches(name, {sample[0] for sample in found}, 3)
        there = f"there are {written(same)}" if same else f"the nearest names are {', '.join(near) or 'none'}"
        return f"{key}: there is no such series; {there}"
    if len(fitting) > 1:
        return f"{key}: several series fit: {written(fitting)}"
    return "" if fitting[0][2] == expected else f"{key}: it is {fitting[0][2]!r}, not {expected!r}"


def written(some: list[Sample]) -> str:
    """Write series as Prometheus shows them."""
    return ", ".join(f"{name}{{{_pairs(labels)}}} {value:g}" for name, labels, value in some)


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in labels.items())
