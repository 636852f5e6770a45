"""Calls of listeners: the state after a signal handler raises in between, and listeners that are no longer called."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from torch import nn

from hookd import Plugin, TrainingError, hookimpl
from hookd.target.tensors import torch_state
from tests.support.agent import running
from tests.support.clock import Clock


class Preempted(BaseException):
    """Raised by a signal handler."""


@pytest.fixture
def raises():
    def handler(*_):
        raise Preempted

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


class Steps(Plugin):
    name = "recorder"

    def __init__(self) -> None:
        self.reported: list[str] = []

    @hookimpl
    def loss(self, tensors):
        self.reported.append("loss")

    @hookimpl
    def step_pre(self, optimizer):
        self.reported.append("step_pre")


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("raises", "either_way")
@pytest.mark.parametrize("place", ["quiet", "set_grad_enabled", "leave"])
def test_a_signal_handler_that_raises_in_the_bracket_of_a_hook_leaves_all_as_it_was(place, monkeypatch) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with running(Steps) as agent:
        trained(net, optimizer)
        done, armed = getattr(torch_state, place), [False]

        def interrupted(*given):
            found = done(*given)
            if armed.pop():
                signal.raise_signal(signal.SIGUSR1)
            armed.append(False)
            return found

        monkeypatch.setattr(torch_state, place, interrupted)
        armed[:] = [False, True]
        with pytest.raises(Preempted):
            optimizer.step()
        monkeypatch.undo()
        assert torch.is_grad_enabled()
        assert torch._C._is_torch_function_enabled()
        reported = agent.plugin("recorder").reported
        reported.clear()
        trained(net, optimizer)
        assert reported == ["loss", "step_pre"]


@pytest.mark.usefixtures("raises")
def test_a_signal_handler_that_raises_at_the_clock_of_a_metered_step_leaves_all_as_it_was() -> None:
    is_armed, standing = False, Clock()

    def clock() -> int:
        nonlocal is_armed
        if is_armed and sys._getframe(1).f_code.co_name == "notify":
            is_armed = False
            signal.raise_signal(signal.SIGUSR1)
        return standing()

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with running(Steps, clock=clock) as agent:
        trained(net, optimizer)
        agent.parts.dispatch.accounts.is_metered = is_armed = True
        with pytest.raises(Preempted):
            optimizer.step()
        reported = agent.plugin("recorder").reported
        reported.clear()
        trained(net, optimizer)
        assert reported == ["loss", "step_pre"]


class Slow(Plugin):
    """Is put off while a call is under way."""

    name = "slow"
    sampled = ("forward",)

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.put_off = lambda: None

    @hookimpl
    def forward(self, module):
        self.reported.append(module.name)
        self.put_off()


@pytest.mark.usefixtures("either_way")
def test_a_deferred_hook_does_not_get_the_calls_that_are_under_way() -> None:
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    with running(Slow, budget=0.02) as agent, torch.no_grad():
        net(torch.ones(1, 2))
        entry, plugin = agent.parts.registry.named("slow"), agent.plugin("slow")
        agent.parts.governor.stretch_to(entry, 1)
        agent.parts.governor.listen(0)
        plugin.put_off = lambda: agent.parts.slow_hooks._put_off(entry, 0.5)
        plugin.reported.clear()
        net(torch.ones(1, 2))
        assert plugin.reported == ["0.0.0"]
        assert agent.state("slow") == "active"


class Ends(Plugin):
    """Ends the training after half a second."""

    name = "ends"
    mutates = True

    clock = Clock()

    @hookimpl
    def loss(self, tensors):
        self.clock.advance(0.5)
        raise TrainingError


def test_a_hook_that_ends_the_training_is_charged_with_its_time() -> None:
    net = nn.Linear(2, 2)
    with running(Ends, clock=Ends.clock) as agent:
        accounts = agent.parts.dispatch.accounts
        accounts.is_metered = True
        with pytest.raises(TrainingError):
            net(torch.ones(3, 2)).sum().backward()
        assert accounts.spent[agent.parts.registry.named("ends").number] == 500_000_000
