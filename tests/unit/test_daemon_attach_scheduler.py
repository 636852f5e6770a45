"""The order of attaches by rule: users take turns, and so do one user's job and that user's own fakes."""

from __future__ import annotations

import heapq
import itertools

import pytest

from hookd.tool.config.rules import ASKED_FOR
from hookd.tool.daemon.attach_scheduler import MOST, WIDTH, AttachScheduler, PendingAttach

PYTHON = ("08:01", 7)
TIMEOUT_S, QUICK_S = 10.0, 0.5
ALICE, BOB, MALLORY = 1000, 1001, 1002


class Daemon:
    """Makes the attempts that are due, in a simulated time: those on fakes end with the timeout, without an answer."""

    def __init__(self):
        self.now = 100.0
        self.scheduler = AttachScheduler()
        self.pending = []
        self.attached = {}
        self.begun = []
        self.jobs = set()
        self._ends = []
        self._pids = itertools.count(1)

    def add(self, uid, *, job=False, program=PYTHON):
        pid = next(self._pids)
        self.pending.append(PendingAttach(pid, pid, uid, program, ASKED_FOR, self.now))
        if job:
            self.jobs.add(pid)
        return pid

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            while self._ends and self._ends[0][0] <= self.now:
                self._end(heapq.heappop(self._ends)[2])
            while (attach := self.scheduler.take(self.pending, self.now)) is not None:
                self.begun.append((self.now, attach.uid))
                lasts_s = QUICK_S if attach.pid in self.jobs else TIMEOUT_S
                heapq.heappush(self._ends, (self.now + lasts_s, attach.pid, attach))
            self.now += 0.25

    def _end(self, attach):
        is_attached = attach.pid in self.jobs
        self.scheduler.end(attach, self.now, is_attached=is_attached)
        if is_attached:
            self.attached[attach.pid] = self.now
            self.pending.remove(attach)
        else:
            attach.at = self.now + 10.0 * 2**attach.failures
            attach.failures += 1

    def running(self, uid):
        return sum(1 for _, _, attach in self._ends if attach.uid == uid)


def test_a_users_fakes_do_not_delay_another_users_job():
    daemon = Daemon()
    for _ in range(1000):
        daemon.add(MALLORY)
    daemon.run(5)
    begun = daemon.now
    job = daemon.add(ALICE, job=True)
    daemon.run(5)
    assert daemon.attached[job] - begun <= 1.0


def test_of_two_users_with_fakes_neither_keeps_a_third_waiting_for_longer_than_an_attempt():
    daemon = Daemon()
    for _ in range(1000):
        daemon.add(MALLORY)
        daemon.add(BOB)
    daemon.run(1)
    assert daemon.running(MALLORY) == daemon.running(BOB) == WIDTH == MOST / 2
    begun = daemon.now
    job = daemon.add(ALICE, job=True)
    daemon.run(2 * TIMEOUT_S)
    assert daemon.attached[job] - begun <= TIMEOUT_S + 1.0
    begun = daemon.now
    job = daemon.add(ALICE, job=True)
    daemon.run(5)
    assert daemon.attached[job] - begun <= 1.0, "both have failed, and have one attempt at a time"


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_users_own_job_is_reached_beside_fakes_of_the_same_program(place):
    daemon = Daemon()
    job = daemon.add(ALICE, job=True) if place == "first" else None
    for _ in range(200):
        daemon.add(ALICE)
    daemon.run(300)
    if job is None:
        begun, job = daemon.now, daemon.add(ALICE, job=True)
        daemon.run(60)
        assert daemon.attached[job] - begun <= 60
    assert job in daemon.attached


def test_a_users_own_job_is_reached_though_new_fakes_come_all_the_time():
    daemon = Daemon()
    job = daemon.add(ALICE, job=True)
    daemon.add(ALICE)
    for _ in range(60):
        daemon.add(ALICE)
        daemon.run(2)
    assert job in daemon.attached


def test_a_users_job_of_another_program_is_next():
    daemon = Daemon()
    for _ in range(200):
        daemon.add(ALICE)
    daemon.run(100)
    begun, job = daemon.now, daemon.add(ALICE, job=True, program=("08:01", 8))
    daemon.run(30)
    assert daemon.attached[job] - begun <= TIMEOUT_S + 2


def test_new_fakes_do_not_reset_the_pause_of_their_program_nor_copies_that_of_their_user():
    daemon = Daemon()
    global_number = itertools.count()
    for _ in range(100):
        daemon.add(MALLORY)
        daemon.run(1)
    same = len(daemon.begun)
    assert same <= WIDTH + 100 / TIMEOUT_S
    for _ in range(100):
        daemon.add(MALLORY, program=("08:01", 100 + next(global_number)))
        daemon.run(1)
    assert len(daemon.begun) - same <= 100 / TIMEOUT_S + 1


def test_a_success_ends_the_pause():
    daemon = Daemon()
    for _ in range(20):
        daemon.add(ALICE)
    daemon.run(60)
    daemon.add(ALICE, job=True)
    daemon.run(40)
    jobs = [daemon.add(ALICE, job=True) for _ in range(3)]
    daemon.run(60)
    assert all(job in daemon.attached for job in jobs)


def test_what_has_not_failed_for_long_is_forgotten():
    daemon = Daemon()
    daemon.add(MALLORY)
    daemon.run(15)
    daemon.scheduler.forget(daemon.now)
    assert daemon.scheduler._users
    daemon.scheduler.forget(daemon.now + 3600)
    assert not daemon.scheduler._users
    assert not daemon.scheduler._programs
