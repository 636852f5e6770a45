"""The fleet's treatment of targets that lie, fail, or ask for a name that is taken."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hookd.errors import HookdError
from hookd.tool.daemon.actions import Actions
from hookd.tool.daemon.fleet.fd_budget import QUIET_S, TargetLimits
from hookd.tool.daemon.fleet.fleet import POLL_LIMIT_S
from hookd.tool.daemon.fleet.identity import Identity
from hookd.wire import labels
from tests.support.pages import Ranks, new_fleet
from tests.support.pids import reuse_pids

NOBODY = 1 << 30
"""No process has a pid as high as this (the kernel's PID_MAX_LIMIT is 1 << 22)."""


@pytest.fixture
def fleet(stack):
    return new_fleet(stack)


@pytest.fixture
def pair(stack, fleet):
    """Return two targets of the fleet."""
    targets = Ranks(stack, 2).targets
    fleet._living = dict(enumerate(targets, start=NOBODY))
    for pid, target in fleet._living.items():
        target.pid = pid
    return targets


def test_a_target_that_cannot_be_looked_at_is_reported_once_and_the_others_are_looked_at(
    fleet, pair, monkeypatch, caplog
):
    bad, good = pair
    good.pid = os.getpid()
    monkeypatch.setattr(bad, "poll", lambda: 1 // 0)
    looks = []
    monkeypatch.setattr(good, "poll", lambda: looks.append(1))
    for _ in range(3):
        fleet.poll()
    assert len(looks) == 3
    assert [one.message for one in caplog.records] == [f"target {NOBODY} cannot be looked at"]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_agent_that_cannot_be_reached_is_logged_unless_it_has_merely_gone(stack, monkeypatch, caplog, is_there):
    caplog.set_level("INFO")
    ranks = Ranks(stack, 1)
    target = ranks.targets[0]
    target.pid = os.getpid() if is_there else NOBODY
    if is_there:
        monkeypatch.setattr("hookd.tool.attach.discover.find_page", lambda _: os.dup(ranks.pages[0].fd))
    target.identity = replace(target.identity, method="attach", keep=False)
    Actions(None, None, None, 1.0).adopt_orphans([target])
    assert ["cannot be reached" in one.message for one in caplog.records] == [True] * is_there


def test_whose_a_target_is_stays_known_when_its_process_ends_in_the_middle_of_a_look(stack, monkeypatch):
    ranks = Ranks(stack, 1)
    target = ranks.targets[0]
    ranks.pages[0].update_identity(step_offset=7)
    target.read()
    monkeypatch.setattr("hookd.tool.daemon.fleet.identity.uid_of", lambda _: -1)
    assert target.reidentify().step_offset == 7
    assert target.identity.uid == os.getuid()


def test_whether_a_process_holds_its_page_is_known_without_opening_one_and_of_a_spoilt_one_by_its_memory_file(stack):
    ranks = Ranks(stack, 2)
    one, other = ranks.targets
    assert one.holds_page()
    assert one.has_page_open()
    one.close()
    ranks.pages[0].close()
    assert one.holds_page(), "another page of this process has the same name"
    assert not one.has_page_open()
    assert other.has_page_open()


def test_a_process_that_ends_has_not_spoilt_its_page_where_its_memory_is_gone_before_its_files(
    fleet, stack, monkeypatch
):
    target = Ranks(stack, 1).targets[0]
    fleet._living[os.getpid()] = target
    assert fleet._corrupted(os.getpid(), None) is target
    monkeypatch.setattr("hookd.tool.linux.proc.size", lambda _: b"0")  # no kernel object can be held there
    assert fleet._corrupted(os.getpid(), None) is None


@pytest.mark.parametrize("calls", [1, 2])
def test_a_page_is_not_taken_for_that_of_a_process_that_has_come_under_the_same_pid(fleet, stack, monkeypatch, calls):
    page = Ranks(stack, 1).pages[0]
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.find_page", lambda _: os.dup(page.fd))
    before = os.listdir("/proc/self/fd")
    reuse_pids(monkeypatch, calls)
    assert fleet.adopt(os.getpid()) is None
    assert fleet.targets() == []
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.undo()
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.find_page", lambda _: os.dup(page.fd))
    adopted = fleet.adopt(os.getpid())
    assert adopted is not None
    adopted.close()


def test_a_page_that_an_agent_lets_go_of_is_not_served_again_as_one_that_is_attached(fleet, stack, monkeypatch):
    page = Ranks(stack, 1).pages[0]
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.find_page", lambda _: os.dup(page.fd))
    target = fleet.adopt(os.getpid())
    page.set_state("detached")
    fleet.poll()
    assert target.state == "detached"
    before = os.listdir("/proc/self/fd")
    assert fleet.adopt(os.getpid()) is None
    assert fleet.targets() == [target]
    assert os.listdir("/proc/self/fd") == before


def test_an_agent_that_leaves_because_a_plugin_failed_was_no_target_that_was_detached(fleet, stack, monkeypatch):
    page = Ranks(stack, 1).pages[0]
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.find_page", lambda _: os.dup(page.fd))
    page.set_state("starting")
    assert fleet.adopt(os.getpid()) is None
    page.set_state("detached")
    fleet.poll()
    assert fleet.targets() == []


def test_the_agent_of_a_plugins_test_is_not_served(fleet, stack, monkeypatch):
    page = Ranks(stack, 1).pages[0]
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.find_page", lambda _: os.dup(page.fd))
    page.update_identity(method="test")
    before = os.listdir("/proc/self/fd")
    assert fleet.adopt(os.getpid()) is None
    assert fleet.targets() == []
    assert os.listdir("/proc/self/fd") == before


def test_a_target_is_not_given_to_the_user_whose_process_has_its_pid_by_now(stack, monkeypatch):
    ranks = Ranks(stack, 1)
    target = ranks.targets[0]
    ranks.pages[0].update_identity(step_offset=7)
    target.read()
    monkeypatch.setattr("hookd.tool.daemon.fleet.identity.uid_of", lambda _: os.getuid() + 7)
    reuse_pids(monkeypatch, 0)
    assert target.reidentify().step_offset == 7
    assert (target.identity.uid, target.identity.process_uid) == (os.getuid(), os.getuid())


def test_an_incident_that_claims_an_old_time_does_not_keep_those_of_others_for_ever(fleet):
    now = time.time()
    old = {"seq": 1, "time": now - 7200, "kind": "nan", "message": "of another user"}
    fleet.store.add((11, 1, 1), "llama", "0", [old], owner=1)
    repeated = [
        {"seq": seq, "time": when, "kind": "nan", "message": f"loss {seq}"} for seq, when in ((1, 0.0), (2, now))
    ]
    fleet.store.add((12, 1, 1), "liar", "0", repeated, owner=2)
    fleet.forget(3600)
    assert [row["run"] for row in fleet.incidents()] == ["liar"]


def test_a_user_whose_targets_take_long_to_look_at_does_not_delay_those_of_others(fleet, stack, monkeypatch):
    now = SimpleNamespace(s=100.0)
    fleet._clock = lambda: now.s
    targets = Ranks(stack, 9).targets
    fleet._living = dict(enumerate(targets, start=1))
    other = targets[-1]
    other.identity = replace(other.identity, uid=7)
    looked = []

    def see(target):
        looked.append(target)
        now.s += 0.01 if target is other else 0.2

    monkeypatch.setattr(fleet, "_see", see)
    for _ in range(3):
        begun = now.s
        fleet.poll()
        assert now.s - begun < POLL_LIMIT_S + 0.3
    assert looked.count(other) == 3
    assert set(looked) == set(targets), "those that had to wait were the first next time"


def test_the_name_of_a_target_whose_page_is_corrupt_is_not_given_to_another(fleet, pair):
    first, second = pair
    first.mark_corrupt()  # its process goes on, and its series say so
    second.claim = fleet.claim(first.identity, second.pid)
    assert second.claim.run != first.claim.run


def test_who_ends_under_a_name_that_another_has_by_now_does_not_linger(fleet, pair):
    first, second = pair
    first.detach()
    second.claim = fleet.claim(first.identity, second.pid)
    assert second.claim.run == first.claim.run, "an agent that has left needs its name no more"
    fleet._retire(first)
    assert fleet.targets() == [second]


def test_a_shortage_of_descriptors_is_logged_once_however_often_some_become_free(caplog):
    now = [0.0]
    room, (one, other) = TargetLimits(clock=lambda: now[0]), (os.getpid(), os.getppid())
    room.refuse(one)
    room.refuse(other)
    assert room.reopened({}) == sorted([one, other])
    room.forget(one)
    assert room.reopened({}) == [], "it is being looked at"
    room.refuse(other)
    assert len(caplog.records) == 1
    assert room.reopened({}) == [other]
    room.forget(other)
    now[0] += QUIET_S
    room.refuse(one)
    assert [one.message.split()[1] for one in caplog.records] == [str(one)] * 2, "a new one is logged again"


def of_user(target, uid):
    """Make a target belong to a user."""
    target.identity = replace(target.identity, uid=uid)
    target.claim.uid = uid
    return target


def test_a_name_is_not_given_to_another_user_while_its_last_counters_are_served(fleet, pair):
    first, second = (of_user(target, uid) for target, uid in zip(pair, (20001, 20002), strict=True))
    second.claim.run = "other"
    first.detach()
    fleet._retire(first)
    assert fleet.claim(replace(first.identity, uid=20002), 99).run != first.claim.run
    assert fleet.claim(first.identity, 99).run == first.claim.run, "its own user's next job takes its place"


def reserved(pid, run, *, uid, wanted="job", rank="0"):
    return labels.Claim(pid, pid, rank, wanted, run, uid=uid)


def test_names_of_an_earlier_daemon_are_kept_for_as_long_as_an_ended_target_is_served(fleet, monkeypatch):
    now, gone = [0.0], 1 << 30
    monkeypatch.setattr(fleet, "_clock", lambda: now[0])
    fleet.reserve([reserved(gone, "job", uid=20001)])
    identity = replace(Identity.of_process(os.getpid()), name="job", is_named=True)
    assert fleet.claim(replace(identity, uid=20002), 99).run != "job"
    assert fleet.claim(replace(identity, uid=20001), gone).run == "job"
    assert fleet.claim(replace(identity, uid=20001), 99).run == "job", (
        "it has ended: its own user's next job takes its place"
    )
    now[0] = fleet._linger_s
    assert fleet.claim(replace(identity, uid=20002), 99).run == "job"


def test_a_process_that_an_earlier_daemon_has_served_keeps_its_name_when_the_first_of_that_name_has_gone(fleet):
    """Otherwise its counters and incidents would continue under the name of another process, which may be another user's."""
    identity = replace(Identity.of_process(os.getpid()), name="job", is_named=True, rank="0")
    for uid in (20001, 20002):
        fleet.reserve([reserved(99, "job~99", uid=uid)])
        assert fleet.claim(replace(identity, uid=uid), 99).run == "job~99"
        assert fleet.claim(replace(identity, uid=uid, name="new"), 99).run == "new"
        assert fleet.claim(replace(identity, uid=20003), 99).run == "job"


def test_a_launcher_that_an_earlier_daemon_has_served_is_one_again(fleet):
    me = os.getpid()
    fleet.reserve([reserved(me, "job", uid=20001, rank="launcher"), reserved(99, "job", uid=20001)])
    identity = replace(Identity.of_process(me), name="job", is_named=True, rank="0", uid=20001)
    assert (fleet.claim(identity, me).run, fleet.claim(identity, me).rank) == ("job", "launcher")


def test_a_user_with_enough_targets_gets_no_more_until_one_has_gone(caplog):
    room = TargetLimits(2)
    for pid in (5, 6, 7):
        room.refuse_user(pid, 20002)
    assert room.reopened({20002: 2}) == []
    assert room.reopened({20002: 1}) == [5]
    assert room.reopened({}) == [6, 7]
    assert room.reopened({}) == []
    assert ["targets_per_user" in one.message for one in caplog.records] == [True]


def test_one_users_new_targets_do_not_keep_a_scan_from_anothers(fleet, monkeypatch):
    owners, now, taken, again = {5: 1, 6: 1, 7: 1, 8: 2}, [0.0], [], []
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.account_of", owners.get)
    monkeypatch.setattr(fleet, "_clock", lambda: now[0])
    monkeypatch.setattr(fleet._census, "recheck", again.append)

    def adopt(pid):
        taken.append(pid)
        now[0] += 0.4

    monkeypatch.setattr(fleet, "adopt", adopt)
    assert fleet._adopt_in_turn([5, 6, 7, 8]) == []
    assert (taken, again) == ([5, 6, 8], [7])


def test_the_uids_of_a_range_that_is_lent_to_a_user_share_that_users_part(fleet, pair, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.account_of", {os.getpid(): 20001}.get)
    fleet._limits.per_user = len(pair)
    for target in pair:
        of_user(target, 20001)
    with pytest.raises(HookdError, match="has 2 targets already"):
        fleet.require_room(os.getpid())
    monkeypatch.setattr("hookd.tool.daemon.fleet.identity.account", lambda uid: uid + 1)
    identity = Identity.of_process(os.getpid())
    assert (identity.uid, identity.process_uid) == (os.getuid() + 1, os.getuid())


def test_an_attach_to_a_process_of_a_user_with_enough_targets_is_refused_before_it_begins(fleet, pair):
    fleet._limits.per_user = len(pair)
    for target in pair:
        of_user(target, os.getuid())
    with pytest.raises(HookdError) as caught:
        fleet.require_room(os.getpid())
    assert caught.value.reason == "no-room"
    fleet._limits.per_user += 1
    fleet.require_room(os.getpid())
