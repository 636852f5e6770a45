"""What a fleet makes of targets that lie, fail, or come under a name that is taken."""

from __future__ import annotations

import os

import pytest

from tests.support.pages import Ranks, new_fleet


@pytest.fixture
def fleet(stack):
    return new_fleet(stack)


@pytest.fixture
def pair(stack, fleet):
    """Give two targets that the fleet holds."""
    targets = Ranks(stack, 2).targets
    fleet._held = dict(enumerate(targets, start=1))
    for pid, target in fleet._held.items():
        target.pid = pid
    return targets


def test_a_target_that_cannot_be_looked_at_is_told_once_and_the_others_are_looked_at(fleet, pair, monkeypatch, caplog):
    bad, good = pair
    good.pid = os.getpid()
    monkeypatch.setattr(bad, "poll", lambda: 1 // 0)
    looks = []
    monkeypatch.setattr(good, "poll", lambda: looks.append(1))
    for _ in range(3):
        fleet.poll()
    assert len(looks) == 3
    assert [one.message for one in caplog.records] == ["target 1 cannot be looked at"]


def test_the_name_of_a_target_whose_page_is_corrupt_is_not_given_to_another(fleet, pair):
    first, second = pair
    first.spoil()  # its process goes on, and its series say so
    second.claim = fleet.claim(first.identity, second.pid)
    assert second.claim.run != first.claim.run


def test_who_ends_under_a_name_that_another_has_by_now_does_not_linger(fleet, pair):
    first, second = pair
    first.detach()
    second.claim = fleet.claim(first.identity, second.pid)
    assert second.claim.run == first.claim.run, "an agent that has left needs its name no more"
    fleet._retire(first)
    assert fleet.targets() == [second]
