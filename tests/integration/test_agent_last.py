"""Facts that an agent leaves for when its process dies: the recorder's last events, the last exception."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from hookd.target.boot.exit_exception import exit_exception, last_exception_id
from hookd.wire.page import CALL_RECORD, PHASE_RECORD, PHASES, STEP_RECORD, PageReader
from tests.support.agent import running


class Refusing(nn.Module):
    def forward(self, x):
        raise KeyError("no such \ud800 key")


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).mean().backward()
        optimizer.step()


def test_calls_and_phases_are_recorded_in_some_steps_and_each_step_in_all():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with running("timing") as agent:
        train(model, 40)
        names = {number: entry.name for number, entry in agent.read().modules.items()}
        reader = PageReader(os.dup(agent.agent._page.fd))
        records = reader.recent(1000)
        reader.close()
    assert [one.step for one in records if one.kind == STEP_RECORD] == list(range(1, 41))
    calls = [one for one in records if one.kind == CALL_RECORD]
    metered = {one.step for one in calls}
    assert 2 <= len(metered) <= 15
    assert [names[one.module] for one in calls[-3:]] == ["(root)", "0", "1"]
    phases = [PHASES[int(one.value)] for one in records if one.kind == PHASE_RECORD and one.step == max(metered)]
    assert phases == ["forward", "backward", "optimizer"]


@pytest.fixture
def last(monkeypatch):
    """Return a function that makes an exception the last one that Python has printed."""

    def put(error):
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
        monkeypatch.setattr(sys, "last_value", error, raising=False)

    return put


def nobody(_module) -> str:
    return ""


def test_the_last_exception_names_the_innermost_module_that_it_has_left(last, either_way):
    last(None)
    assert exit_exception(last_exception_id(), nobody) is None
    model = nn.Sequential(nn.Identity(), nn.Sequential(Refusing()))
    with running("timing") as agent:
        train(nn.Linear(4, 4), 1)
        for _ in range(2):  # at the first call hookd learns its modules
            with pytest.raises(KeyError) as caught:
                model(torch.zeros(1))
        before = last_exception_id()
        last(caught.value)
        reported = exit_exception(before, agent.parts.models.names.name_of)
        assert agent.read().incidents == []
    assert reported == {
        "type": "KeyError",
        "message": repr("no such \ud800 key"),
        "where": reported["where"],
        "module": "#Sequential.1.0",
    }
    assert reported["where"].startswith("test_agent_last.py:")
    assert reported["where"].endswith(" in forward")


def test_an_exception_from_before_the_attach_is_not_the_one_for_which_python_ends(last):
    last(ValueError("long ago"))
    assert exit_exception(last_exception_id(), nobody) is None
    assert exit_exception(0, nobody) == {"type": "ValueError", "message": "long ago", "where": "", "module": ""}
