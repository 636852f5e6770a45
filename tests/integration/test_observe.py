"""`hookd.observe()` around a plain loop, and `hookd.read()`: a program's own view of its training."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import sys

import pytest
import torch
from torch import nn

import hookd
from hookd.target.boot import bootstrap, loader
from hookd.wire.page import PageWriter
from tests.support.agent import running
from tests.support.examples import examples
from tests.support.watched import is_watched

TORCHS_OWN = nn.Module.__call__


def train(steps: int = 12, bad: int | None = None) -> str:
    """Train, with a NaN in the input of one step; return a digest of losses, weights and random numbers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for step in range(steps):
        x = torch.randn(8, 4)
        if step == bad:
            x[0, 0] = float("nan")
        loss = net(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    for tensor in (*net.parameters(), torch.get_rng_state()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_loop_inside_observe_leaves_the_same_bits_and_is_reported():
    plain = train()
    with hookd.observe(["timing", ("nan", {"every": 1})], run="loop", rank=3) as seen:
        assert train() == plain
        now = hookd.read()
        assert (now["state"], now["step"]["counted"], seen.report) == ("running", 12, None)
    assert nn.Module.__call__ is TORCHS_OWN
    assert bootstrap.attached() is None
    report = seen.report
    assert (report["state"], report["step"]["counted"], report["incidents"]) == ("detached", 12, [])
    assert (report["identity"]["run"], report["identity"]["rank"]) == ("loop", 3)
    assert [row["name"] for row in report["modules"]] == ["(root)", "0", "1", "2"]
    assert report["modules"][0]["metrics"]["timing"]["forward_calls"] == 12
    assert json.loads(json.dumps(report)) == report


def test_what_went_wrong_is_in_the_report_also_when_the_loop_raises():
    def failing() -> None:
        train(bad=11)  # the last step: what the plugin finds at the detach counts as well
        raise RuntimeError("mine")

    observed = hookd.observe([("nan", {"every": 1})])
    with pytest.raises(RuntimeError, match="mine"), observed:
        failing()
    assert nn.Module.__call__ is TORCHS_OWN
    assert [one["kind"] for one in observed.report["incidents"]] == ["nan"]


def test_one_that_is_there_already_goes_on_and_is_not_stopped(caplog):
    with running("timing") as agent:
        with hookd.observe(["nan"]) as second:
            train(steps=2)
            assert not second.is_on
        assert [one["name"] for one in second.report["plugins"]] == ["timing"]
        assert agent.read().state == "running"
        assert is_watched()
    assert [record.message for record in caplog.records] == [
        "hookd did not start an agent here: an agent runs in this process already"
    ]


def test_one_that_somebody_has_detached_and_another_followed_stops_nothing():
    mine = hookd.observe(["timing"])
    mine.begin()
    mine.begin()  # it is on: nothing
    hookd.stop()
    with running("nan") as other:
        mine.end()
        assert other.read().state == "running"
    mine.end()
    assert bootstrap.attached() is None


def test_a_machine_that_gives_no_page_does_not_stop_the_training(monkeypatch, caplog):
    def refuse(*_args: object, **_more: object) -> None:
        raise hookd.errors.PageError("no memory for a page", reason="no-memory")

    monkeypatch.setattr(PageWriter, "create", refuse)
    with caplog.at_level(logging.WARNING, "hookd"), hookd.observe() as seen:
        train(steps=1)
    assert seen.report is None
    assert "no memory for a page" in caplog.text


def test_words_that_are_wrong_are_an_error_of_the_callers():
    with pytest.raises(hookd.PluginError, match="nothing_such"), hookd.observe(["nothing_such"]):
        raise AssertionError("it must not come here")
    with pytest.raises(hookd.HookdError, match="no agent runs in this process"):
        hookd.read()


def test_an_agent_that_came_from_outside_is_read_there(monkeypatch, caplog):
    # As the agent of another hookd says that it is there.
    monkeypatch.setattr(sys, loader.AGENT_LOCK, (os.getpid(), object()), raising=False)
    with hookd.observe() as seen:
        for ask in (hookd.read, hookd.stop):
            with pytest.raises(hookd.HookdError, match="from outside") as caught:
                ask()
            assert caught.value.reason == "already-attached"
            assert f"hookd report {os.getpid()}" in caught.value.hint
    assert seen.report is None
    assert "an agent runs in this process already" in caplog.text


def test_it_can_be_copied_to_another_process_before_and_while_it_observes():
    observed = hookd.observe(["timing"], run="copied")
    pickle.loads(pickle.dumps(observed))
    with observed:
        copied = pickle.loads(pickle.dumps(observed))
        copied.end()  # the same one, by another name
    assert bootstrap.attached() is None


def test_the_first_example_of_the_documents_prints_what_stands_below_it(capsys):
    examples("integrations.md", "hookd")[0].run(capsys)
