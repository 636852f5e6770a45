"""What a fleet makes of targets that lie, fail, or come under a name that is taken."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from hookd.daemon.identity import Identity
from hookd.daemon.room import Room
from tests.support.pages import Ranks, new_fleet
from tests.support.processes import Process


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


def started_by_hand(stack, rank, port):
    """Start a rank below a shell of its own, and give what the daemon sees of it from outside."""
    where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shell = stack.enter_context(Process(["sh", "-c", "sleep 60 & echo $!; wait; :"], env={**os.environ, **where}))
    pid = int(shell.expect(r"^(\d+)$").group(1))
    stack.callback(os.kill, pid, signal.SIGKILL)
    return pid, replace(Identity.of_process(pid), run="train.py", script="train.py")


def test_ranks_started_by_hand_are_one_run_where_they_meet_at_one_place(stack, fleet):
    (served,) = Ranks(stack, 1).targets
    first, identity = started_by_hand(stack, 0, 29511)
    served.pid, served.claim = first, fleet.claim(identity, first)
    fleet._held[first] = served
    second, identity = started_by_hand(stack, 1, 29511)
    other, stranger = started_by_hand(stack, 1, 29512)
    assert fleet.claim(identity, second).run == served.claim.run
    assert fleet.claim(stranger, other).run == f"{served.claim.run}~{stranger.ppid}"


def test_a_shortage_of_descriptors_is_logged_once_however_often_some_become_free(caplog):
    room, (one, other) = Room(), (os.getpid(), os.getppid())
    room.refuse(one)
    room.refuse(other)
    assert room.reopened() == sorted([one, other])
    room.forget(one)
    assert room.reopened() == [], "it is being looked at"
    room.refuse(other)
    assert len(caplog.records) == 1
    assert room.reopened() == [other]
    room.forget(other)
    room.refuse(one)
    assert [one.message.split()[1] for one in caplog.records] == [str(one)] * 2, "a new one is logged again"
