"""The bounds on memory, scrapes and large models."""

from __future__ import annotations

import pytest

from tests.bench import agent_memory, scale, scrape

pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(1800)]


def test_the_agent_takes_little_memory_of_a_large_model_and_does_not_grow_with_the_steps() -> None:
    found = agent_memory.apart("modules", 10_000), agent_memory.apart("steps", 100_000)
    assert all(bound.holds for bound in agent_memory.bounds(*found)), found


@pytest.mark.parametrize("size", scrape.SIZES)
def test_a_scrape_is_fast(size: tuple[int, int]) -> None:
    for row in scrape.measure(*size, rounds=scrape.ROUNDS):
        assert all(bound.holds for bound in scrape.bounds(row)), row


@pytest.mark.parametrize("modules", scale.LEARNING)
def test_learning_a_large_model_makes_no_pause(modules: int) -> None:
    assert 1e3 * max(scale.learning_s(modules, scale.LEARNING[modules])) <= scale.PAUSE_MS
