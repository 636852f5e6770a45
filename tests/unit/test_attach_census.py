"""The search of all processes: in which order, and which are left alone."""

from __future__ import annotations

import pytest

from hookd.errors import NoSuchTarget
from hookd.tool.attach import census, discover
from hookd.tool.attach.census import Census
from hookd.tool.attach.discover import Candidate


class Machine:
    """Simulated processes: their users, how long it takes to look at one, and the results."""

    def __init__(self, monkeypatch):
        self.now, self.users, self.takes_s, self.why = 100.0, {}, {}, {}
        self.seen = []
        monkeypatch.setattr(census, "account_of", self.users.get)
        monkeypatch.setattr(census.proc, "size", lambda pid: b"%d" % self.now)
        self.errors = {}
        monkeypatch.setattr(discover, "examine", self.examine)
        self.census = Census(self.users, lambda: self.now)

    def examine(self, pid):
        self.seen.append(pid)
        if pid in self.errors:
            raise self.errors[pid]
        self.now += self.takes_s.get(pid, 0.0)
        return Candidate(pid, pid, (), self.users[pid], "skipped", self.why.get(pid, ""), has_torch=False)

    def scan(self, after_s=1.0):
        """Look once more, after all sizes have changed; return the processes that were inspected."""
        self.now += after_s
        self.seen.clear()
        self.census.scan()
        return list(self.seen)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_one_users_processes_do_not_keep_a_look_from_anothers(machine):
    machine.users.update(dict.fromkeys(range(10, 20), 20002) | {50: 20001})
    machine.takes_s.update(dict.fromkeys(range(10, 20), 0.3))
    first = machine.scan()
    assert first == [10, 11, 50], "two are more than half a second"
    assert machine.scan() == [12, 13, 50], "those that have waited longest come first"


def test_roots_processes_are_all_looked_at(machine):
    machine.users.update(dict.fromkeys(range(10, 15), 0))
    machine.takes_s.update(dict.fromkeys(range(10, 15), 0.3))
    assert machine.scan() == [10, 11, 12, 13, 14]


def test_of_older_processes_some_of_each_user_have_their_turn(machine):
    machine.users.update(dict.fromkeys(range(10, 20), 20002) | {50: 20001})
    machine.scan()
    assert machine.scan(census.YOUNG_S) == [10, 11, 12, 50]
    assert machine.scan() == [13, 14, 15, 50]


def test_a_process_that_cannot_be_read_is_asked_less_and_less_often(machine):
    machine.users.update({10: 20002, 50: 20001})
    machine.why[10] = discover.SILENT
    asked = [n for n in range(20) if 10 in machine.scan()]
    assert asked == [0, 1, 3, 7, 15]
    machine.why.clear()
    machine.scan(60)
    assert 10 in machine.scan(), "it answers again"


def test_after_an_error_a_process_is_looked_at_again_although_its_size_is_the_same(machine, monkeypatch):
    monkeypatch.setattr(census.proc, "size", lambda _: b"7")
    machine.users.update({10: 20002, 50: 20001})
    machine.errors[10] = NoSuchTarget("there is no process 10")
    assert machine.scan() == [10, 50]
    machine.errors.clear()
    assert machine.scan() == [10]
    assert machine.scan() == []
