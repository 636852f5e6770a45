"""Plugins that change the training are loaded, changed and unloaded where a step begins; others at once."""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookd import Plugin, hookimpl
from hookd.errors import ControlError, PluginError
from hookd.tool.attach import discover
from hookd.tool.attach.change import _others as ranks_beside
from hookd.tool.attach.change import change
from hookd.tool.attach.control import Control
from hookd.tool.config import PluginSpec
from tests.support import emulated
from tests.support.agent import running
from tests.support.processes import wait_until


class Adds(Plugin):
    """Adds a number to each gradient, which shows whose options are in effect."""

    name = "adds"
    mutates = True

    @hookimpl
    def configure(self, context):
        self.number = context.option("number", 1.0)
        self.mutates = not context.option("dry_run", default=False)
        self.calls = context.counter("calls", "Steps.").labels()
        self.shown = context.gauge("number", "The number.", ["sign"]).labels("+" if self.number > 0 else "-")
        context.option("last", 0)
        if self.number == 13.0:
            raise ValueError("not that one")

    @hookimpl
    def step_pre(self, optimizer):
        self.calls.inc()
        self.shown.set(self.number)
        if self.mutates:
            optimizer.param_groups[0]["params"][0].grad.add_(self.number)


class Training:
    """One parameter; its change in a step is the number that was added to its gradient."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)

    def step(self):
        before = self.weight.item()
        self.weight.grad = torch.zeros(1)
        self.optimizer.step()
        return before - self.weight.item()


@pytest.fixture
def tool():
    """Return a function that changes plugins of this process from another thread, as a tool does from another process."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda op, spec, timeout_s=30.0: pool.submit(
            change, os.getpid(), op, PluginSpec.parse(spec), (), timeout_s
        )


def is_armed(agent):
    current = agent.parts.changes.current
    return current is not None and current.state == "armed"


def reported(agent):
    return [one for one in agent.read().incidents if one["kind"] == "training_changed"]


def test_options_hold_from_the_next_step_on_and_counters_go_on(tool):
    training = Training()
    with running(Adds) as agent:
        assert [training.step(), training.step()] == [1.0, 1.0]
        done = tool("configure", "adds:number=-2")
        wait_until(lambda: is_armed(agent))
        assert not done.done()
        assert agent.plugin("adds").number == 1.0
        assert training.step() == -2.0
        assert done.result()["options"] == {"number": "-2"}
        assert agent.plugin("adds").number == -2.0
        assert agent.values("hookd_adds_calls") == {(): 3.0}
        assert agent.values("hookd_adds_number") == {("-",): -2.0}


class Remembers(Adds):
    """Counts on from its predecessors, and continues a series that it would not make itself."""

    @hookimpl
    def configure(self, context):
        self.seen = context.counter("seen", "Steps by number.", ["number"])
        self.count = 0
        self.number = context.option("number", 1.0)

    @hookimpl
    def succeed(self, predecessor):
        if self.number == 13.0:
            raise ValueError("planned")
        self.seen.adopt(predecessor.seen)
        self.count = predecessor.count

    @hookimpl
    def step_pre(self, optimizer):
        self.count += 1
        self.seen.labels(str(self.number)).inc()


def test_what_must_not_be_forgotten_is_taken_over_at_the_very_step(tool):
    training = Training()
    with running(Remembers) as agent:
        training.step()
        done = tool("configure", "adds:number=2")
        wait_until(lambda: is_armed(agent))
        training.step(), done.result()
        assert agent.plugin("adds").count == 2
        assert agent.values("hookd_adds_seen") == {("1.0",): 1.0, ("2.0",): 1.0}


def test_what_fails_to_take_over_is_quarantined_as_for_any_error(tool):
    training = Training()
    with running(Remembers) as agent:
        training.step()
        done = tool("configure", "adds:number=13")
        wait_until(lambda: is_armed(agent))
        training.step(), done.result()
        assert agent.values("hookd_plugin_errors") == {("adds",): 1.0}
        assert agent.state("adds") == "quarantined"


@pytest.mark.parametrize("spec", ["adds:number=13", "adds:number=many", "adds:nummer=2"])
def test_refused_options_change_nothing(tool, spec):
    training = Training()
    with running(Adds, options=None) as agent:
        training.step()
        with pytest.raises(PluginError):
            tool("configure", spec).result()
        assert training.step() == 1.0
        assert agent.values("hookd_adds_calls") == {(): 2.0}
        assert agent.values("hookd_adds_number") == {("+",): 1.0}


def test_what_changes_the_training_and_who_wanted_it_is_reported(tool):
    training = Training()
    with running(Adds) as agent:
        training.step()
        for op, spec in (("configure", "adds:number=2"), ("configure", "adds:dry_run=true"), ("unload", "adds")):
            done = tool(op, spec)
            wait_until(lambda done=done: is_armed(agent) or done.done())
            assert training.step() == (2.0 if spec == "adds:number=2" else 0.0)
            done.result()
        first, second, third = reported(agent)
        assert (first["change"], first["step"], first["options"]) == ("load", 1, {})
        assert (second["step"], second["options"]) == (2, {"number": "2"})
        assert second["by"] == {"uid": os.getuid(), "pid": os.getpid()}
        assert third["step"] == 3
        assert "no longer changes the training" in third["message"]
        assert agent.values("hookd_incidents")[("training_changed",)] == 3, (
            "it did nothing any more when it was unloaded"
        )


def test_whether_it_changes_the_training_is_a_metric(tool):
    training = Training()
    with running(Adds) as agent:
        assert agent.values("hookd_plugin_changes_training") == {("adds",): 1.0}
        done = tool("configure", "adds:dry_run=true")
        wait_until(lambda: is_armed(agent))
        training.step()
        done.result()
        assert agent.values("hookd_plugin_changes_training") == {("adds",): 0.0}
        tool("unload", "adds").result()
        assert agent.values("hookd_plugin_changes_training") == {}


def test_without_a_step_it_stays_pending_and_holds_at_the_next(tool):
    training = Training()
    with running(Adds):
        training.step()
        assert tool("configure", "adds:number=5", 0.1).result()["state"] == "pending"
        assert training.step() == 5.0


def test_what_a_tool_has_prepared_is_forgotten_when_it_goes(tool):
    training = Training()
    with running(Adds) as agent:
        training.step()
        with Control.connect(os.getpid()) as control:
            assert control.request("configure", name="adds", options={"number": "7"})["state"] == "prepared"
            with pytest.raises(ControlError, match="being changed right now"):
                tool("configure", "adds:number=8").result()
        wait_until(lambda: agent.parts.changes.current.state == "aborted")
        assert training.step() == 1.0
        assert len(agent.parts.registry.loaded) == 1
        done = tool("configure", "adds:number=8")
        wait_until(lambda: is_armed(agent))
        assert training.step() == 8.0
        done.result()


def test_a_plugin_that_only_looks_is_changed_at_once(tool):
    with running("timing") as agent:
        assert tool("configure", "timing:every=3").result()["state"] == "done"
        assert agent.parts.registry.named("timing").interval == 3
        assert not reported(agent)


@pytest.fixture
def two_ranks():
    """A process group of two ranks in this one process: torch's own stand-in, whose collectives do nothing."""
    yield lambda: distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_one_of_several_ranks_is_not_changed_alone(two_ranks):
    two_ranks()
    with pytest.raises(PluginError, match="this job has 2 ranks") as caught, running(Adds):
        pass
    assert caught.value.reason == "several-ranks"


def test_a_job_that_becomes_one_of_several_ranks_is_left_alone_from_then_on(two_ranks):
    training = Training()
    with running(Adds) as agent:
        assert training.step() == 1.0
        two_ranks()
        assert training.step() == 0.0
        assert agent.state("adds") == "disabled"
        assert "has become a job of 2 ranks" in reported(agent)[-1]["message"]


def test_what_only_measures_is_welcome_on_one_of_several_ranks(two_ranks):
    two_ranks()
    training = Training()
    with running(Adds, options={"dry_run": "true"}) as agent:
        assert training.step() == 0.0
        assert agent.values("hookd_adds_calls") == {(): 1.0}


def test_what_was_quarantined_can_be_loaded_again():
    training = Training()
    with running(Adds) as agent:
        training.step()
        agent.parts.stopper.quarantine(agent.parts.registry.named("adds"), "for the test")
        assert training.step() == 0.0
        assert agent.values("hookd_plugin_changes_training") == {("adds",): 0.0}
        with Control.connect(os.getpid()) as control:
            spec = {"name": "adds", "entry": "hookd_of_the_test:Adds", "by_name": True, "options": {"number": "4"}}
            assert control.request("load", plugin=spec)["state"] == "prepared"
            control.request("arm")
            assert training.step() == 4.0


def test_descriptors_that_nobody_asked_for_are_closed():
    inner, outer = os.pipe()
    with running(Adds), Control.connect(os.getpid()) as control:
        control.request("status", fds=[outer] * 3)
        os.close(outer)
    assert wait_until(lambda: select.select([inner], [], [], 0)[0], what="the end of the pipe, which all have closed")
    os.close(inner)


def test_two_threads_that_train_carry_a_change_out_once(tool):
    trainings = [Training(), Training()]
    over = threading.Event()

    def train(training):
        while not over.is_set():
            training.step()

    with running(Adds) as agent:
        threads = [threading.Thread(target=train, args=[one]) for one in trainings]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, 8):
                tool("configure", f"adds:number={number}").result()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert [one["options"].get("number") for one in reported(agent)] == [None, "2", "3", "4", "5", "6", "7"]


def test_what_the_program_imports_itself_is_not_reloaded():
    with running(Adds), pytest.raises(PluginError, match="imported by the program itself") as caught:
        change(os.getpid(), "reload", PluginSpec("adds"))
    assert caught.value.reason == "in-process"


@emulated.lacks("proc")
def test_two_processes_that_say_they_are_one_rank_are_refused(hold, monkeypatch):
    """A change on one of them would leave the other, which may be the true one, without it."""
    first, *others = (hold(world_size=2, rank=rank) for rank in (0, 1, 1))
    found = [
        SimpleNamespace(pid=one.pid, state="attached") for one in (first, *others)
    ]  # they have pages alone, and no torch: discovery does not find them
    monkeypatch.setattr(discover, "candidates", lambda: found)
    with pytest.raises(PluginError) as caught:
        ranks_beside(first.pid, 2, "adds")
    assert caught.value.reason == "several-ranks"
    assert "both say that they are rank 1 of it" in caught.value.hint
