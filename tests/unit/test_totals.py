"""Calls that are added up where no entry in C does it: for one plugin, and for several."""

from types import SimpleNamespace

import pytest

from hookd.api.totals import NOWHERE, BackwardTotals, Totals


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 1, 2)], [2e-6, 1e-6, 1.0, 0.0, 0.0, 0.0]),
        ([(0, NOWHERE, NOWHERE)], [2e-6, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ([(0, 1, 2), (3, NOWHERE, 5)], [2e-6, 1e-6, 1.0, 2e-6, 0.0, 1.0]),
        ([], [0.0] * 6),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_call_is_added_for_each_plugin_where_it_is_wanted(places, expected, inference):
    cells = memoryview(bytearray(8 * 6)).cast("d")
    totals = Totals(cells, ({}, {}, {7: places}) if inference else ({7: places}, {}, {}))
    totals.add(SimpleNamespace(id=7), 2000, 1000, False, False, inference)
    assert list(cells) == pytest.approx(expected)


def test_a_backward_counts_for_as_many_steps_as_its_call_though_the_interval_has_changed_since():
    cells = memoryview(bytearray(8 * 3)).cast("d")
    totals = BackwardTotals(cells, {7: [(0, 1, 2)]})
    totals.sample(is_on=True, done=0, interval=4)
    totals.sample(is_on=False, done=1, interval=8)
    totals.add(SimpleNamespace(id=7), 2000, 1000)
    assert list(cells) == pytest.approx([8e-6, 4e-6, 4.0])


@pytest.mark.parametrize(
    "samples",
    [
        [(0, 10), (10, 10), (20, 10)],
        [(3, 10), (10, 320), (330, 320)],
        [(0, 10), (9, 10), (17, 4)],
        [(0, 320), (10, 10), (20, 10), (310, 10), (320, 10)],
        [(5, 1), (6, 1)],
    ],
)
def test_every_step_is_represented_once_whatever_the_intervals_were(samples):
    totals = BackwardTotals(memoryview(bytearray(24)).cast("d"), {7: [(0, 1, 2)]})
    interval, due = samples[0][1], dict(samples)
    for done in range(samples[-1][0] + 1):
        interval = due.get(done, interval)
        for _ in range(2):  # the switches may be set several times in a step
            totals.sample(is_on=done in due, done=done, interval=interval)
        if done in due:
            totals.add(SimpleNamespace(id=7), 1, 1)
    assert totals._cells[2] == samples[-1][0] + samples[-1][1]


def test_a_plugin_that_was_not_active_represents_nothing():
    totals = BackwardTotals(memoryview(bytearray(24)).cast("d"), {7: [(0, 1, 2)]})
    for done in (0, 100):
        totals.sample(is_on=True, done=done, interval=10)
        totals.add(SimpleNamespace(id=7), 1, 1)
        totals.switch(is_on=False, is_active=False)
    assert totals._cells[2] == 20
