"""The injector's priority, for a stop alone and never for long; and few injectors at a time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hookd.errors import AttachError
from hookd.tool.inject import helper, injector
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until

KEEPS_BUSY = """
import os, time
from hookd.tool.inject import injector
injector.harden()
with injector.ahead_of_others():
    print(os.sched_getscheduler(0) == os.SCHED_FIFO, flush=True)
    begun = time.process_time()
    while os.sched_getscheduler(0) == os.SCHED_FIFO and time.process_time() < begun + 5:
        pass
    print(f"{time.process_time() - begun:.3f}", flush=True)
    while time.process_time() < begun + 0.3:
        pass
print(os.sched_getscheduler(0) == os.SCHED_OTHER, flush=True)
"""
ENDS = """
import contextlib
import os
from hookd.tool.inject import injector
injector.harden()
with injector.ahead_of_others():
    pass
print(os.sched_getscheduler(0) == os.SCHED_OTHER, flush=True)
"""


def may_be_ahead():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def said_by(program):
    with Process([sys.executable, "-c", program], env=tool_environment(), cwd=REPOSITORY) as process:
        return process.finish()


def test_after_a_tenth_of_a_second_it_is_a_process_like_others_and_goes_on():
    if not may_be_ahead():
        pytest.skip("real-time priority is not allowed here")
    was_ahead, seconds, is_like_others = said_by(KEEPS_BUSY)
    assert (was_ahead, is_like_others) == ("True", "True")
    assert 0.05 < float(seconds) < 0.3


def test_after_a_stop_it_is_a_process_like_others():
    assert said_by(ENDS) == ["True"]


WAITS_FOR_A_FIFTH = """
import json, os, sys, time
sys.stdin.readline()
place = {place!r}
mine = os.path.join(place, str(os.getpid()))
open(mine, "w").close()
end = time.monotonic() + 1
while len(os.listdir(place)) < 5 and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps(dict(beside=len(os.listdir(place)))))
os.unlink(mine)
"""


def test_there_are_three_at_a_time_for_one_user_however_many_attaches(tmp_path, monkeypatch):
    place = tmp_path / "running"
    place.mkdir()
    monkeypatch.setattr(helper, "_START", WAITS_FOR_A_FIFTH.format(place=str(place)))
    with open(os.devnull) as nothing, ThreadPoolExecutor(8) as pool:  # noqa: PTH123
        job = injector.Job(os.getpid(), 0, "", nothing.fileno(), {}, (0, 0), "", 0, 0, timeout_s=120)
        answers = list(pool.map(helper.run, [job] * 8))
    assert max(answer["beside"] for answer in answers) <= helper.WIDTH


def test_a_slot_that_the_first_who_waits_may_not_have_is_the_next_ones():
    slots, came = helper.Slots(), []

    def attach(user):
        with slots.of(user):
            came.append(user)

    with contextlib.ExitStack() as others, contextlib.ExitStack() as last:
        for number in range(helper.MOST - 1):
            others.enter_context(slots.of(20001 if number < helper.WIDTH else 20002))
        last.enter_context(slots.of(20002))
        waiting = [threading.Thread(target=attach, args=(user,)) for user in (20001, 20003)]
        for number, thread in enumerate(waiting, 1):
            thread.start()
            wait_until(lambda number=number: len(slots._changed._waiters) == number, what="one who waits")
        last.close()
        wait_until(lambda: came == [20003], what="the turn of another user")
    for thread in waiting:
        thread.join()
    assert came == [20003, 20001]


def test_an_attach_whose_turn_does_not_come_says_so(monkeypatch):
    monkeypatch.setattr(helper, "WAIT_S", 0.05)
    slots = helper.Slots()
    with contextlib.ExitStack() as stack:
        for _ in range(helper.WIDTH):
            stack.enter_context(slots.of(20001))
        with (
            pytest.raises(AttachError, match="timed out waiting for 3 other attaches, 3 of them") as caught,
            slots.of(20001),
        ):
            pass
        assert caught.value.reason == "busy"
        with slots.of(20002):
            pass
