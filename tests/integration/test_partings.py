"""Twenty trainings of which a changed twin parts at a known place: `hookd diff` names it, and finds nothing in equal twins."""

from __future__ import annotations

import functools

import pytest

from hookd.tool.fingerprints import comparison
from tests.faults.partings import PARTINGS, compared, recorded


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
