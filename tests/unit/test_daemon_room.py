"""Where there are no descriptors the log says so once, until all that were turned away are served."""

import os
import resource

import pytest

from hookd.daemon.room import MARGIN, RESERVE, Room


@pytest.fixture
def limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    newest = os.open("/dev/null", os.O_RDONLY)
    os.close(newest)

    def set_free(free):
        """Leave so many descriptors free, besides the reserve."""
        wanted = newest + free
        soft = next(n for n in range(wanted, 2 * wanted + RESERVE) if n - min(RESERVE, n // 4) == wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    yield set_free
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_is_told_once_while_there_is_room_for_some_only_and_again_after_there_was_room_for_all(limit, caplog):
    limit(2 * MARGIN)
    room = Room()
    room.refuse(71)
    room.refuse(72)
    assert room.reopened({}) == [71, 72]
    room.refuse(72)  # there was room for one of them only
    assert [one.args[0] for one in caplog.records] == [71]
    assert room.reopened({}) == [72]
    assert room.reopened({}) == []
    room.refuse(73)
    assert [one.args[0] for one in caplog.records] == [71, 73]


def test_without_a_margin_nobody_is_looked_at_again(limit):
    limit(MARGIN)
    room = Room()
    room.refuse(71)
    assert room.reopened({}) == []
    limit(MARGIN + 1)
    assert room.reopened({}) == [71]
