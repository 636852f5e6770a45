"""A target in the test's own process: a test can change it, simulate conditions for it, and query it while it trains."""

from __future__ import annotations

import threading

import pytest
import torch

from hookd import Plugin, PluginError, hookimpl
from hookd.testing import FakeTarget, request


class Halving(Plugin):
    """Multiplies the output of a layer."""

    name = "halving"
    mutates = True

    @hookimpl
    def configure(self, context):
        self.by = context.option("by", 0.5)

    @hookimpl
    def forward(self, module, output):
        return output * self.by if module.name == "4" else None


class TestWhatIsChanged:
    def test_options_that_are_not_given_stay_and_an_empty_text_takes_one_back(self, fake_target):
        fake_target.start("timing", every=7, readmit="false")
        assert fake_target.configure("timing", every=5) == {"every": "5", "readmit": "false"}
        assert fake_target.configure("timing", every="") == {"readmit": "false"}

    def test_what_changes_the_training_is_changed_where_the_step_that_is_given_begins(self, fake_target):
        fake_target.start(Halving)
        fake_target.run_steps(1)
        taken = []
        now = fake_target.configure("halving", lambda: taken.extend(fake_target.run_steps(1)), by=0.0)
        assert now == {"by": "0.0"}
        (loss,) = taken  # the optimizer's step begins when the loss is there
        assert loss > 0
        assert fake_target.run_steps(1) == [0.0]
        assert "halving changes the training with by=0.0" in fake_target.incidents[-1].message

    def test_without_a_step_it_takes_place_in_a_training_that_runs_in_another_thread(self, fake_target):
        fake_target.start(Halving)
        fake_target.run_steps(1)
        done = threading.Event()

        def train():
            while not done.is_set():
                fake_target.run_steps(1)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            assert fake_target.configure("halving", by=2.0) == {"by": "2.0"}
        finally:
            done.set()
            thread.join()
        assert fake_target.plugin("halving").by == 2.0

    def test_what_is_reported_as_done_has_been_cleaned_up(self, fake_target, monkeypatch):
        fake_target.start(Halving)
        agent, changes, reported = fake_target._agent, fake_target._parts.changes, []
        settle = changes.settle

        def settle_and_step():
            settle()
            if not reported:
                fake_target.run_steps(1)  # the step at which it takes place, at the worst moment

        with request._asking(agent._control.path) as ask:
            ask("configure", name="halving", options={"by": "2.0"})
            ask("arm")
            monkeypatch.setattr(changes, "settle", settle_and_step)
            while not reported or reported[-1] != "done":
                reported.append(agent._status({})["change"]["state"])
            assert fake_target.plugin("halving").by == 2.0
        assert reported == ["armed", "done"]

    def test_a_function_that_takes_no_step_is_reported(self, fake_target):
        fake_target.start(Halving)
        with pytest.raises(AssertionError, match=r"halving changes the training.*pass configure"):
            fake_target.configure("halving", lambda: None, by=0.0)

    def test_what_is_refused_leaves_the_old_object(self, fake_target):
        fake_target.start(Halving)
        old = fake_target.plugin("halving")
        with pytest.raises(PluginError, match="by"):
            fake_target.configure("halving", by="half")
        assert fake_target.plugin("halving") is old

    def test_a_new_object_has_the_options_of_the_old_one(self, fake_target):
        fake_target.start(Halving, by=3.0)
        old = fake_target.plugin("halving")
        fake_target.renew("halving")
        assert fake_target.plugin("halving") is not old
        assert fake_target.plugin("halving").by == 3.0


class Reading(Plugin):
    """Reads numbers: now and then at backwards and at calls, and in each step those of earlier calls."""

    name = "reading"
    remembers = True
    sampled = ("backward", "forwards")

    @hookimpl
    def configure(self, context):
        self.context, self.norms, self.remembered, self.backwards = context, [], {}, 0

    @hookimpl
    def root_forward(self, output):
        self.context.summary(output, lambda summary: self.norms.append(summary.norm))
        self.remembered = {one.module.name: one.tensor() is not None for one in self.context.returned()}

    @hookimpl
    def forwards(self, calls):
        pass

    @hookimpl
    def backward(self):
        self.backwards += 1


class TestWhatIsPretended:
    @pytest.mark.parametrize("device", [False, True])
    def test_what_is_on_a_device_is_reported_after_the_step(self, fake_target, device):
        fake_target.pretend(device=device).start(Reading)
        fake_target.training.model(torch.ones(4, 8))
        assert len(fake_target.plugin("reading").norms) == (0 if device else 1)
        fake_target.run_steps(2)
        assert fake_target.plugin("reading").norms

    @pytest.mark.parametrize("large", [False, True])
    def test_large_outputs_are_gone_where_the_training_does_not_keep_them(self, fake_target, large):
        fake_target.pretend(large=large).start(Reading, every=4)
        fake_target.run_steps(3)
        assert not fake_target.listens("reading", "forwards")
        remembered = fake_target.plugin("reading").remembered
        assert remembered["0"] is not large  # no backward needs it
        assert remembered["1"] is True

    def test_ranks_are_those_that_are_said_until_it_is_closed(self):
        with FakeTarget() as target:
            target.pretend(ranks=(1, 4)).start(Reading)
            assert (target.context("reading").rank, target.context("reading").world_size) == (1, 4)
        with FakeTarget() as target:
            target.start(Reading)
            assert (target.context("reading").rank, target.context("reading").world_size) == (0, 1)

    def test_it_is_too_late_when_the_target_has_started(self, fake_target):
        fake_target.start(Reading)
        with pytest.raises(AssertionError, match="before start"):
            fake_target.pretend(device=True)


def test_listens_says_in_which_steps_a_sampled_hook_comes(fake_target):
    fake_target.start(Reading, every=3)
    reported, seen = [], []
    for _ in range(12):
        before = fake_target.plugin("reading").backwards
        reported.append(fake_target.listens("reading", "backward"))
        fake_target.run_steps(1)
        seen.append(fake_target.plugin("reading").backwards > before)
    assert reported == seen
    assert sum(reported) == 4
    with pytest.raises(LookupError, match="no hook 'bakward'"):
        fake_target.listens("reading", "bakward")
