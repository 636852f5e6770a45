"""Twenty trainings of which a changed twin parts at a known place: `hookd diff` names it, and finds nothing in equal twins."""

from __future__ import annotations

import functools

import pytest

from hookd.tool.fingerprints import comparison
from tests.faults.partings import PARTINGS, Data, Net, adam, compared, learn, recorded


@pytest.mark.parametrize("parting", PARTINGS, ids=lambda parting: parting.train.__name__)
def test_the_place_where_two_trainings_part_is_named(parting):
    found = compared(parting)
    assert (found.code, found.phase, found.name) == (comparison.DIFFERENT, parting.phase, parting.name), found.sentence
    assert parting.words in found.sentence


@pytest.mark.parametrize("parting", PARTINGS, ids=lambda parting: parting.train.__name__)
def test_in_equal_trainings_nothing_is_found(parting, tmp_path):
    runs = [recorded(functools.partial(parting.train, is_changed=True), tmp_path / name) for name in "ab"]
    found = comparison.compare(*runs)
    assert (found.code, found.notes) == (comparison.EQUAL, [])
    assert found.compared >= 13


def training(steps, data_at=0, state=None):
    """Train from the beginning, or from the state of an earlier one; return the state."""
    model, data = Net(), Data()
    optimizer = adam(model)
    if state is not None:
        model.load_state_dict(state)
    data.at = data_at
    for _ in range(steps):
        learn(model, optimizer, data.batch())
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_resumed_run_is_compared_from_the_step_at_which_it_goes_on(tmp_path):
    state = {}
    whole = recorded(lambda: training(20), tmp_path / "whole")
    recorded(lambda: state.update(training(12)), tmp_path / "first")
    resumed = recorded(lambda: training(8, data_at=12 * 16, state=state), tmp_path / "resumed")
    found = comparison.compare(whole, resumed)
    assert (found.code, found.compared) == (comparison.DIFFERENT, 8)
    assert found.notes[0] == "B begins with the weights that A has after step 12."
    assert "another random state" in found.sentence
    assert found.step == 13
    forgotten = recorded(lambda: training(8, state=state), tmp_path / "forgotten")
    assert (
        comparison.compare(whole, forgotten).sentence
        == "Step 13: the batches differ; the model had no part in it. So does the random state of torch."
    )
