"""The overhead that hookd reports equals the measured one, within a factor. On a quiet machine."""

from __future__ import annotations

import pytest

from hookd.testing.pairs import PAIRS
from tests.bench import fresh
from tests.bench.claimed import WITHIN, WORKLOADS, measure

pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(900)]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_claimed_overhead_is_the_real_one_within_a_factor(workload) -> None:
    found = fresh.run(measure, workload, PAIRS)
    assert found.factor <= WITHIN, found
