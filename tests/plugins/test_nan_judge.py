"""The judge of hookd_nan by itself: which of the bad places is the origin."""

from __future__ import annotations

from dataclasses import replace

from hookd_nan.judge import Event, Judge


def call(module, kind, *stack, inputs="", where="output"):
    return Event(where, kind, module, 1, stack, inputs)


class TestJudge:
    def test_caller_decides_about_bad_inputs(self):
        judge = Judge(3)
        assert judge.call(call("a.b", "nan", "r", "a", "a.b", inputs="nan")) is None
        origin = judge.call(call("a", "", "r", "a", inputs="nan"))
        assert origin is None
        origin = judge.call(call("r", "nan", "r"))
        assert (origin.module, origin.where) == ("r", "output")

    def test_caller_whose_outputs_could_not_be_read_decides_all_the_same(self):
        judge = Judge(3)
        assert judge.call(replace(call("a", "", "r", "a"), unread=(0,))) is None
        assert judge.call(call("a.b", "nan", "r", "a", "a.b", inputs="nan")) is None
        origin = judge.call(replace(call("a", "", "r", "a"), unread=(0,)))
        assert (origin.module, origin.where, origin.kind) == ("a", "output", "nan")

    def test_sibling_does_not_decide(self):
        judge = Judge(3)
        assert judge.call(call("a", "nan", "r", "a", inputs="nan")) is None
        assert judge.call(call("b", "", "r", "b")) is None
        assert judge.pending

    def test_skipped_steps_in_a_row_become_an_incident(self):
        judge = Judge(2)
        for last in (False, True):
            judge.flow(call("a", "inf"))
            origin = judge.loss(call("", "", where="loss"), cleared={0}, is_clear=True)
            assert (origin is not None) == last

    def test_good_step_ends_the_row(self):
        judge = Judge(2)
        for _ in range(5):
            judge.flow(call("a", "inf"))
            assert judge.loss(call("", "", where="loss"), cleared={0}, is_clear=True) is None
            assert judge.step(call("", "", where="grad"), found_inf=False) is None
        assert judge.skipped == 5

    def test_a_bad_gradient_that_reached_no_optimizer_is_not_the_origin_of_a_later_one(self):
        judge = Judge(3)
        judge.flow(call("a", "nan", where="grad"))
        assert judge.step(call("", "", where="grad"), found_inf=False) is None
        assert judge.is_calm
        judge.flow(replace(call("b", "nan", where="grad"), order=7))
        assert judge.step(call("", "nan", where="grad"), found_inf=False).module == "b"
