"""The bounds on memory, scrapes and large models."""

from __future__ import annotations

import pytest

from tests.bench import agent_memory, scale, scrape

pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(1800)]


def test_the_agent_takes_little_memory_of_a_large_model() -> None:
    found = agent_memory.apart("modules", 10_000)
    assert found["agent"] - abs(found["control"]) <= 15, found


def test_the_agent_does_not_grow_with_the_steps() -> None:
    found = agent_memory.apart("steps", 100_000)
    assert found["grown"] <= 1, found
    assert found["objects"] <= 500, found


@pytest.mark.parametrize(("size", "most_ms"), [((1, 50_000), 100), ((64, 2_000), 250)])
def test_a_scrape_is_fast(size: tuple[int, int], most_ms: float) -> None:
    for row in scrape.measure(*size, rounds=10):
        assert row["best"] <= most_ms, row
        assert row["ratio"] <= 0.35, row


def test_learning_a_large_model_makes_no_pause() -> None:
    assert max(scale.learning_s(10_000, 30)) <= 0.05
