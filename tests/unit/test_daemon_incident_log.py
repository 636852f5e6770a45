"""The daemon's log lines about new incidents."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hookd.tool.daemon.incidents.incident_log import KINDS, LINES, WINDOW_S, IncidentLog
from hookd.wire import labels
from hookd.wire.text import MAX_LINE


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def incident_log(clock, caplog):
    caplog.set_level(logging.WARNING)
    return IncidentLog(lambda: clock.now)


TARGET = SimpleNamespace(pid=7, claim=labels.Claim(7, 7, "1", "train.py", "train.py"))


def dead(n):
    return {"kind": "dead", "step": n, "message": f"layer {n} is dead"}


def test_a_line_names_kind_target_step_and_message(incident_log, caplog):
    incident_log.add(TARGET, [{"kind": "nan", "step": 60, "is_step_absolute": True, "message": "first NaN: fc output"}])
    incident_log.add(TARGET, [{"kind": "lost", "message": "gone"}])
    incident_log.add(TARGET, [{"kind": "inf", "step": 3, "is_step_absolute": False, "message": "first Inf"}])
    assert caplog.messages == [
        "nan in process 7 (run train.py, rank 1) at step 60: first NaN: fc output",
        "lost in process 7 (run train.py, rank 1): gone",
        "inf in process 7 (run train.py, rank 1) at step 3 (counted from the attach): first Inf",
    ]


def test_a_step_that_the_message_names_is_not_named_twice(incident_log, caplog):
    for message in ("first NaN: fc output at step 6, exact", "found at step 61"):
        incident_log.add(TARGET, [{"kind": "nan", "step": 6, "message": message}])
    assert caplog.messages == [
        "nan in process 7 (run train.py, rank 1): first NaN: fc output at step 6, exact",
        "nan in process 7 (run train.py, rank 1) at step 6: found at step 61",
    ]


def test_a_line_says_whose_process_it_is(incident_log, caplog):
    for uid in (0, 4_000_000_001):
        target = SimpleNamespace(pid=7, claim=labels.Claim(7, 7, "1", "llama", "llama", uid=uid))
        incident_log.add(target, [{"kind": "nan", "message": "first NaN"}])
    assert caplog.messages == [
        "nan in process 7 of user root (run llama, rank 1): first NaN",
        "nan in process 7 of user 4000000001 (run llama, rank 1): first NaN",
    ]


def test_of_many_of_one_kind_the_first_are_reported_and_the_others_counted(incident_log, clock, caplog):
    incident_log.add(TARGET, [dead(n) for n in range(13)])
    incident_log.add(TARGET, [{"kind": "nan", "message": "a NaN"}])
    texts = [line for line in caplog.messages if "is dead" in line]
    assert len(texts) == LINES
    assert "a NaN" in caplog.messages[-1]
    clock.now += WINDOW_S
    incident_log.add(TARGET, [])
    assert caplog.messages[-1] == f"{13 - LINES} more of dead in process 7 (run train.py, rank 1): hookd report 7"
    incident_log.add(TARGET, [dead(13)])
    assert "layer 13 is dead" in caplog.messages[-1]


def test_at_the_end_of_a_target_the_count_comes_at_once(incident_log, caplog):
    incident_log.add(TARGET, [dead(n) for n in range(LINES + 1)])
    incident_log.end(TARGET)
    incident_log.end(TARGET)
    assert [line for line in caplog.messages if "more of" in line] == [
        "1 more of dead in process 7 (run train.py, rank 1): hookd report 7"
    ]


def test_a_hostile_target_writes_one_line_that_no_terminal_obeys(incident_log, caplog):
    incident_log.add(TARGET, [{"kind": "a\nb", "step": "x", "message": "\x1b[2J\n" + "y" * 10_000}])
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < MAX_LINE + 100


def test_a_hostile_target_that_invents_kinds_does_not_flood_the_log(incident_log, clock, caplog):
    incident_log.add(TARGET, [{"kind": f"kind {n}", "message": "x"} for n in range(1000)])
    assert len(caplog.messages) == KINDS + LINES
    clock.now += WINDOW_S
    incident_log.add(TARGET, [])
    assert f"{1000 - KINDS - LINES} more of other kinds" in caplog.messages[-1]
