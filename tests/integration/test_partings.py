"""Twenty trainings of which a changed twin parts at a known place: `hookd diff` names it, and finds nothing in equal twins."""

from __future__ import annotations

import functools

import pytest

from hookd.target.tensors import statistics
from hookd.tool.fingerprints import comparison
from tests.faults import partings
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


@pytest.fixture
def device(monkeypatch):
    """Return a function that makes all tensors seem to be on a device."""

    def pretend():
        monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
        monkeypatch.setattr(statistics, "LOOKS_IN_C", False)

    return pretend


@pytest.mark.parametrize("train", [partings.one_ulp, partings.dropout_state, partings.forgotten_optimizer])
def test_on_a_device_the_place_is_named_and_in_equal_trainings_nothing_is_found(device, tmp_path, train):
    device()
    parting = next(one for one in PARTINGS if one.train is train)
    plain, *changed = (
        recorded(functools.partial(train, is_changed=name != "a"), tmp_path / name) for name in ("a", "b", "c")
    )
    found = comparison.compare(plain, changed[0])
    assert (found.code, found.phase, found.name) == (comparison.DIFFERENT, parting.phase, parting.name), found.sentence
    assert parting.words in found.sentence
    same = comparison.compare(*changed)
    assert (same.code, same.notes, same.compared) == (comparison.EQUAL, [], 13)


@pytest.mark.parametrize("train", [partings.seed, partings.clipping, partings.layer_in_bfloat16])
def test_a_run_on_a_device_is_compared_with_one_in_host_memory_by_norms_and_ends(device, tmp_path, train):
    parting = next(one for one in PARTINGS if one.train is train)
    host = recorded(functools.partial(train, is_changed=False), tmp_path / "host")
    device()
    same, changed = (recorded(functools.partial(train, is_changed=x), tmp_path / str(x)) for x in (False, True))
    for found in comparison.compare(host, same), comparison.compare(same, host):
        assert (found.code, found.compared) == (comparison.EQUAL, len(same.steps)), found.sentence
        assert "digests are of two kinds" in found.notes[0]
    found = comparison.compare(host, changed)
    assert (found.code, found.phase, found.name) == (comparison.DIFFERENT, parting.phase, parting.name), found.sentence


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
