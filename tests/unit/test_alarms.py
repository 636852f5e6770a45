"""`hookd.Alarm` and `hookd.RecentRate`."""

from __future__ import annotations

import math

import pytest

from hookd import Alarm, RecentRate


def test_an_alarm_turns_on_after_several_values_in_a_row_and_off_at_the_other_limit():
    alarm = Alarm(0.9, clear=0.5, for_steps=3)
    assert [alarm.update(value) for value in (1.0, 1.0, 0.9, 1.0, 1.0)] == [False] * 5, "0.9 is not above 0.9"
    assert alarm.update(1.0)
    assert [alarm.update(value) for value in (1.0, 0.6)] == [False, False]
    assert alarm.is_on, "between the limits nothing changes"
    alarm.update(0.5)
    assert not alarm.is_on
    assert [alarm.update(1.0) for _ in range(3)] == [False, False, True], "it counts anew"


def test_a_nan_turns_an_alarm_off_and_a_bool_is_a_value():
    alarm = Alarm(0, for_steps=2)
    assert [alarm.update(holds) for holds in (True, False, True, True)] == [False, False, False, True]
    alarm.update(math.nan)
    assert not alarm.is_on


def test_a_recent_rate_is_that_of_the_last_steps():
    rate = RecentRate(4)
    assert rate.per_step(7) == 0
    rate.add(1, 3.0)
    rate.add(1)
    assert rate.per_step(1) == 4.0
    assert rate.per_step(2) == 2.0
    rate.add(3)
    assert rate.per_step(4) == pytest.approx(5 / 4)
    assert rate.per_step(5) == pytest.approx(1 / 4), "step 1 is too old"
    assert rate.per_step(99) == 0
