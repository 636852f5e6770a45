"""Faults by which a model does not learn are found in time and named, and the same training without them is silent."""

from __future__ import annotations

import pytest

from tests.faults.learning import FAULTS, HEALTHY_STEPS, Fault, play

NAMES = [fault.name for fault in FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_it_is_found_in_time(fault: Fault) -> None:
    incidents = play(fault, is_wrong=True, steps=fault.since + fault.within)
    assert [incident["kind"] for incident in incidents][:1] == [fault.kind]
    assert incidents[0]["step"] <= fault.since + fault.within
    assert incidents[0].get("module", "") == fault.module or not fault.module


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
@pytest.mark.parametrize("steps", [120, pytest.param(HEALTHY_STEPS, marks=pytest.mark.load)])
def test_the_same_without_the_mistake_is_silent(fault: Fault, steps: int) -> None:
    assert play(fault, is_wrong=False, steps=steps) == []
