"""Whole runs: one NaN after the other, how certain each origin is, and what a change of options must preserve."""

from __future__ import annotations

import math
import threading

import hookd_nan.forward
import hookd_nan.scan
import pytest
import torch
from hookd_nan.recorder import number
from torch import nn

from tests.support.processes import wait_until

NAN, INF = math.nan, math.inf


class Residual(nn.Module):
    """The backward does not need the output of the linear layer, so it is gone when the model has returned."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc(x).relu()


class Run:
    """A training that takes steps on request; the request also says which of them get a bad value, and where."""

    def __init__(self, lr=0.01):
        self.bad = None
        self.model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 1))
        for name, module in self.model.named_modules():
            module.register_forward_hook(lambda _m, _i, o, name=name: o * NAN if self.bad == name else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def steps(self, number, bad=None):
        for _ in range(number):
            self.bad = bad
            self.optimizer.zero_grad()
            x = torch.full((3, 4), NAN) if bad == "input" else torch.randn(3, 4)
            self.model(x).square().mean().backward()
            self.optimizer.step()


def findings(hook):
    return [(one.module, one.fields["where"], one.step) for one in hook.incidents if one.kind in ("nan", "inf")]


class TestOneAfterTheOther:
    def test_another_one_is_reported_after_a_hundred_good_steps(self, hook):
        run = Run()
        hook.start("nan", policy="skip", every=1)
        run.steps(2)
        run.steps(1, bad="input")
        run.steps(50)
        run.steps(1, bad="0")  # too soon: it may follow from the first
        run.steps(101)
        run.steps(1, bad="1")
        assert findings(hook) == [("(root)", "input", 3), ("1", "output", 156)]
        assert hook.incidents[-1].message.startswith("another NaN: 1 (Residual) output at step 156")
        assert hook.value("nan_first_step") == 3
        assert hook.metric("nan_origin") == {("(root)", "input", "nan"): 1, ("1", "output", "nan"): 1}

    def test_no_more_than_eight_are_reported(self, hook):
        run = Run()
        hook.start("nan", policy="skip", every=1)
        for _ in range(10):
            run.steps(1, bad="1")
            run.steps(101)
        assert len(findings(hook)) == 8

    def test_all_modules_are_no_longer_looked_at_when_it_does_not_come_again(self, hook):
        hook.pretend(large=True)
        run = Run()
        hook.start("nan", policy="skip", every=50)
        run.steps(2)
        run.steps(1, bad="1.fc")
        assert hook.incidents[-1].fields["is_exact"] is False
        assert all(self.looked_at(hook, run, 10))
        run.steps(92)
        assert sum(self.looked_at(hook, run, 100)) == 2

    @staticmethod
    def looked_at(hook, run, steps):
        """Take steps; yield for each whether all modules are looked at in it."""
        for _ in range(steps):
            yield hook.listens("nan", "forwards")
            run.steps(1)


class TestOriginMetric:
    def test_each_place_where_it_may_have_been_born_has_its_share(self, hook):
        hook.pretend(large=True)
        run = Run()
        hook.start("nan", every=50)
        run.steps(2)
        run.steps(1, bad="1.fc")
        incident = hook.incident
        places = [incident.module, *incident.fields["or_in"]]
        assert "1.fc" in places
        assert hook.metric("nan_origin") == {
            (place, "output", "nan"): pytest.approx(1 / len(places)) for place in places
        }

    def test_place_where_it_was_only_seen_has_none(self, hook):
        run = Run()
        hook.start("nan", every=50)
        run.steps(2)
        run.model[1].fc.bias.register_hook(lambda gradient: gradient * NAN)
        run.steps(1)
        assert hook.metric("nan_origin") == {("1.fc", "grad", "nan"): 0}


class TestNewOptions:
    @pytest.mark.parametrize("options", [{}, {"policy": "skip"}])
    def test_what_was_found_is_remembered(self, hook, options):
        run = Run()
        hook.start("nan", every=1, **options)
        run.steps(2)
        run.steps(1, bad="1")
        self.configure(hook, run)
        run.steps(3, bad="1")
        assert findings(hook) == [("1", "output", 3)]
        assert hook.metric("nan_origin") == {("1", "output", "nan"): 1}
        assert hook.value("nan_first_step") == 3
        assert hook.value("nan_nonfinite", "1", "output", "nan") >= 4
        if options:
            assert hook.value("nan_policy", "skip") >= 4

    @staticmethod
    def configure(hook, run):
        """Change an option from another thread while the training goes on."""
        thread = threading.Thread(target=hook.configure, args=("nan",), kwargs={"recorder": 5})
        thread.start()
        while thread.is_alive():
            run.steps(1)
        thread.join()
        run.steps(1)  # a whole one: the step in which the change took place may have been seen only in part

    def test_what_is_searched_for_is_found(self, hook):
        hook.pretend(large=True)
        run = Run()
        hook.start("nan", every=50, policy="skip")
        run.steps(2)
        run.steps(1, bad="1.fc")
        self.configure(hook, run)
        run.steps(1, bad="1.fc")
        (first, second) = findings(hook)
        assert first[2] == 3
        assert second[:2] == ("1.fc", "output")

    def test_steps_since_when_are_known(self, hook):
        run = Run()
        hook.start("nan", every=1)
        run.steps(4)
        self.configure(hook, run)
        run.steps(1, bad="1")
        assert hook.incident.fields["is_exact"] is True
        assert len(hook.incident.fields["steps_before"]) >= 4

    def test_row_of_skipped_steps_goes_on(self, hook):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)

        def overflow(steps):
            for _ in range(steps):
                out = model(torch.randn(3, 4))
                out.register_hook(lambda gradient: gradient * INF)
                scaler.scale(out.square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        hook.start("nan", amp_patience=6)
        overflow(4)
        hook.configure("nan", recorder=5)
        overflow(4)
        assert hook.value("nan_amp_skipped_steps") == 7
        assert len(findings(hook)) == 1

    def test_what_is_on_a_device_is_judged_all_the_same(self, hook, monkeypatch):
        monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
        monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)
        run = Run()
        hook.start("nan")
        run.steps(2)
        run.steps(1, bad="1")
        hook.configure("nan", recorder=5)
        run.steps(3)
        assert findings(hook) == [("1", "output", 3)]

    def test_pause_is_ended_without_forgetting_why(self, hook):
        run, done = Run(), threading.Event()

        def training():
            run.steps(2)
            run.steps(1, bad="input")
            run.steps(2, bad="input")
            done.set()

        hook.start("nan", policy="pause")
        thread = threading.Thread(target=training)
        thread.start()
        wait_until(lambda: [one for one in hook.incidents if one.kind == "paused"], what="the pause")
        hook.configure("nan", policy="report")
        thread.join(60)
        assert done.is_set()
        assert findings(hook) == [("(root)", "input", 3)]
        assert hook.value("nan_policy", "pause") == 1


def test_a_step_of_seven_digits_is_not_rounded():
    assert [number(value) for value in (1234567, 0.12345678, math.inf)] == [1234567, 0.123457, "inf"]
