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
    totals.switch(is_on=True, is_active=True, steps=4)
    totals.switch(is_on=False, is_active=True, steps=8)
    totals.add(SimpleNamespace(id=7), 2000, 1000)
    assert list(cells) == pytest.approx([8e-6, 4e-6, 4.0])
