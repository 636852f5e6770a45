"""The comparisons and the output of the benches: the order of the blocks, the bounds, a section rewritten alone."""

from __future__ import annotations

import contextlib
import random
import statistics

import pytest

from hookd.testing.pairs import Estimate, Pairs, alternate
from tests.bench.document import Document
from tests.bench.tables import Bound, Report, Table


def test_blocks_alternate_in_pairs_and_settle_after_each_switch() -> None:
    seen: list[str] = []
    state = "A"

    @contextlib.contextmanager
    def switched():
        nonlocal state
        state = "B"
        yield
        state = "A"

    def block() -> float:
        seen.append(state)
        return float(len(seen))

    pairs = alternate(block, switched, 4, lambda: seen.append("-"))
    assert "".join(seen) == "--A-BB-AA-BB-AA"
    at = [index + 1 for index, one in enumerate(seen) if one == "A"]
    assert pairs.plain == at[:-1]
    assert pairs.observed == [index + 1 for index, one in enumerate(seen) if one == "B"]


def test_a_steady_drift_cancels() -> None:
    times = iter([1 + n / 100 for n in range(1000)])
    pairs = alternate(lambda: next(times), contextlib.nullcontext, 100)
    assert pairs.added.value == pytest.approx(0, abs=1e-9)
    assert pairs.mean.value == pytest.approx(1, abs=1e-9)


def test_the_control_compares_plain_blocks_with_nothing_between_them() -> None:
    plain = [1.0, *(n for turn in range(1, 7) for n in (10.0**turn, 2 * 10.0**turn))]
    assert Pairs(plain).control.quarters == (2.0, 2.0)


def test_the_bounds_of_a_median_hold_as_often_as_they_say() -> None:
    draw = random.Random(1)
    samples = [[draw.expovariate(1) for _ in range(100)] for _ in range(2000)]
    true = 0.6931471805599453
    share = statistics.fmean(Estimate.of(sample).high >= true for sample in samples)
    assert 0.94 <= share <= 0.98  # it is 0.955 for 100 figures: between two of them nothing can be chosen
    assert 0.94 <= statistics.fmean(Estimate.of(sample).low <= true for sample in samples) <= 0.98


def test_the_bounds_of_a_mean_hold_as_often_as_they_say() -> None:
    draw, covered = random.Random(2), []
    for _ in range(40):
        observed = [10.0 if draw.random() < 0.2 else 1.0 for _ in range(100)]  # what is sampled in one block of five
        covered.append(Pairs([1.0] * 100, observed).mean.high >= 2.8)
    assert statistics.fmean(covered) >= 0.85


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="4 figures are too few"):
        Estimate.of([1.0, 1.0, 1.0, 1.0])


def test_a_section_is_rewritten_alone(tmp_path) -> None:
    path = tmp_path / "benchmarks.md"
    first = Document.read(path, ["one", "two"])
    for name in ("two", "one"):
        table = Table(f"{name}'s", ["what", "ns"], [["a | b", "7"]])
        first.put(
            name, name.title(), "How.\n\n    a command\n\nMore. Prints one JSON object: ns.", "- when", Report([table])
        )
    first.write(path)
    again = Document.read(path, ["one", "two"])
    again.put("one", "One", "How.", "- later", Report([], [Bound("x", 1.0, 2.0)]))
    again.write(path)
    text = path.read_text()
    assert text.index("## One") < text.index("## Two")
    assert text.count("## One\n") == text.count("## Two\n") == 1
    assert "- later" in text
    assert "a \\| b" in text
    assert "| x | 1.000 | 2.000 | **no** |" in text
    assert "How.\n\nMore.\n\n- when" in text
    assert Document.read(path, ["one", "two"]).markdown() == text
