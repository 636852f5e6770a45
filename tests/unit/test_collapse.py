"""Which incidents are equal."""

from __future__ import annotations

import pytest

from hookd.tool.reports.collapse import collapse, same


def told(message, kind="nan", module="fc1", **more):
    return {"seq": 1, "time": 1.0, "kind": kind, "module": module, "message": message, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (told("loss 3.1 at step 70"), told("loss 22,000.25 at step 8")),
        (told("loss 1e-07"), told("loss 3.5E+20")),
        (told("x", step=1), told("x", step=2)),
        (told("x", module=None), told("x", module="")),
    ],
)
def test_numbers_and_steps_do_not_count(one, other):
    assert same(one) == same(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (told("x", module="layers.3"), told("x", module="layers.4")),
        (told("x", kind="nan"), told("x", kind="inf")),
        (told("loss is NaN"), told("loss is inf")),
        (told("x", seq=-2), told("x", seq=-3)),
        (told("b", kind="a", module=""), told("", kind="a", module="b")),
        (told("max_norm=1.0", kind="training_changed"), told("max_norm=0.25", kind="training_changed", seq=2)),
    ],
)
def test_kind_module_and_words_count_and_what_the_daemon_has_seen_is_never_equal(one, other):
    assert same(one) != same(other)


def test_the_first_stands_for_all_with_their_count_and_the_last_time():
    first, other, again = told("loss 1"), told("loss is gone"), told("loss 2", time=5.0)
    assert collapse([first, other, again]) == [{**first, "count": 2, "last": 5.0}, {**other, "count": 1, "last": 1.0}]
    assert "count" not in first


@pytest.mark.parametrize("odd", [{}, {"message": None, "kind": 3, "module": ["x"], "seq": "y"}, {"message": "\ud800"}])
def test_what_a_page_may_hold_has_a_key(odd):
    assert len(same(odd)) == 24
