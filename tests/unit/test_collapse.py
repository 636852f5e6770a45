"""Which incidents are equal."""

from __future__ import annotations

import pytest

from hookd.tool.reports.collapse import collapse, same


def reported(message, kind="nan", module="fc1", **more):
    return {"seq": 1, "time": 1.0, "kind": kind, "module": module, "message": message, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reported("loss 3.1 at step 70"), reported("loss 22,000.25 at step 8")),
        (reported("loss 1e-07"), reported("loss 3.5E+20")),
        (reported("x", step=1), reported("x", step=2)),
        (reported("x", module=None), reported("x", module="")),
    ],
)
def test_numbers_and_steps_do_not_count(one, other):
    assert same(one) == same(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reported("x", module="layers.3"), reported("x", module="layers.4")),
        (reported("x", kind="nan"), reported("x", kind="inf")),
        (reported("loss is NaN"), reported("loss is inf")),
        (reported("x", seq=-2), reported("x", seq=-3)),
        (reported("b", kind="a", module=""), reported("", kind="a", module="b")),
        (reported("max_norm=1.0", kind="training_changed"), reported("max_norm=0.25", kind="training_changed", seq=2)),
    ],
)
def test_kind_module_and_words_count_and_what_the_daemon_has_seen_is_never_equal(one, other):
    assert same(one) != same(other)


def test_the_first_stands_for_all_with_their_count_and_the_last_time():
    first, other, again = reported("loss 1"), reported("loss is gone"), reported("loss 2", time=5.0)
    assert collapse([first, other, again]) == [{**first, "count": 2, "last": 5.0}, {**other, "count": 1, "last": 1.0}]
    assert "count" not in first


@pytest.mark.parametrize("odd", [{}, {"message": None, "kind": 3, "module": ["x"], "seq": "y"}, {"message": "\ud800"}])
def test_what_a_page_may_hold_has_a_key(odd):
    assert len(same(odd)) == 24
