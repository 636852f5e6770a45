"""If there are no descriptors left, the log says so once, until all targets that were turned away are served."""

import os
import resource
import subprocess

import pytest

from hookd.tool.daemon.fleet.fd_budget import MARGIN, QUIET_S, RESERVE, TargetLimits


@pytest.fixture
def limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    newest = os.open("/dev/null", os.O_RDONLY)
    os.close(newest)

    def set_free(free):
        """Leave this many descriptors free, besides the reserve."""
        wanted = newest + free
        soft = next(n for n in range(wanted, 2 * wanted + RESERVE) if n - min(RESERVE, n // 4) == wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    yield set_free
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def pids(stack):
    """Processes that live as long as the test."""
    started = [stack.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(3)]
    return sorted(process.pid for process in started)  # leaving them closes what they read


def test_it_is_reported_once_while_there_is_room_for_some_only_and_again_after_there_was_room_for_all(
    limit, pids, caplog
):
    one, other, late = pids
    limit(2 * MARGIN)
    now = [100.0]
    room = TargetLimits(clock=lambda: now[0])
    room.refuse(one)
    room.refuse(other)
    assert room.reopened({}) == [one, other]
    room.refuse(other)  # there was room for one of them only
    assert [record.args[0] for record in caplog.records] == [one]
    room.forget(one)
    assert room.reopened({}) == [other]
    room.forget(other)
    assert room.reopened({}) == []
    room.refuse(late)
    assert [record.args[0] for record in caplog.records] == [one], "descriptors were free for a moment only"
    now[0] += QUIET_S
    room.refuse(other)
    assert [record.args[0] for record in caplog.records] == [one, other]


def test_without_a_margin_nobody_is_looked_at_again(limit):
    limit(MARGIN)
    room = TargetLimits()
    room.refuse(71)
    assert room.reopened({}) == []
    limit(MARGIN + 1)
    assert room.reopened({}) == [71]
