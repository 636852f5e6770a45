"""Which steps the time is taken in, and that they stand for the others."""

from __future__ import annotations

from time import monotonic_ns as now_ns

import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl
from tests.support.agent import running
from tests.support.clock import Clock

STEP_S = 0.008


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the agent, and of this file's plugins."""
    made = Clock()
    monkeypatch.setattr(Spender, "clock", made)
    return made


def metered(agent, steps: int, clock: Clock) -> float:
    """Train; return the share of the steps that were metered."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    taken = 0
    for _ in range(steps):
        taken += agent.parts.dispatch.accounts.is_metered
        net(torch.ones(3, 4)).pow(2).sum().backward()
        optimizer.step()
        clock.advance(STEP_S)
    return taken / steps


class Spender(Plugin):
    name = "spender"
    clock = Clock()

    def __init__(self) -> None:
        self.spent_s = 0.0

    @hookimpl
    def configure(self, context):
        self.context = context

    def spend(self, cost_s: float) -> None:
        self.clock.advance(cost_s)
        self.spent_s += cost_s


@pytest.mark.parametrize("turn", [0, 1])
def test_a_plugin_that_is_dear_at_every_other_step_is_charged_with_what_it_took(turn, clock) -> None:
    """As in a training whose steps alternate between a generator and a discriminator."""

    class Alternating(Spender):
        @hookimpl
        def loss(self):
            if self.context.step % 2 == turn:
                self.spend(0.004)

    with running(Alternating, clock=clock) as agent:
        metered(agent, 160, clock)
        spent, said = agent.plugin("spender").spent_s, agent.values("hookd_overhead_seconds")[("spender",)]
        assert agent.state("spender") == "active"
        assert 0.67 < said / spent < 1.5, (said, spent)


def sampled_every(interval: int) -> type[Plugin]:
    class Fixed(Plugin):
        name = f"fixed{interval}"
        sampled = ("loss",)
        longest = 64

        @hookimpl
        def configure(self, context):
            context.hold(interval)

        @hookimpl
        def loss(self):
            pass

    Fixed.__name__ = f"Fixed{interval}"
    return Fixed


def test_however_many_kinds_of_steps_there_are_few_are_metered(clock) -> None:
    with running(*map(sampled_every, (2, 3, 5, 7, 11, 13, 17)), clock=clock) as agent:
        metered(agent, 200, clock)
        assert 0.05 < metered(agent, 600, clock) <= 0.35


def test_a_plugin_that_was_dear_as_it_was_unloaded_does_not_keep_steps_metered(clock) -> None:
    class Dear(Spender):
        @hookimpl
        def loss(self):
            self.spend(0.05)

    with running(Dear, clock=clock) as agent:
        while not any(agent.parts.governor._runaway.values()):
            metered(agent, 1, clock)
        agent.parts.loading.unload("spender")
        metered(agent, 4 * 16, clock)  # windows without a surprise
        assert metered(agent, 170, clock) <= 0.1


def test_as_long_as_nothing_is_metered_no_cost_is_reported(clock, monkeypatch) -> None:
    """While a model is being learnt, no step is like those that follow."""

    class Idle(Spender):
        @hookimpl
        def forward(self, module):
            self.spend(0.001)

    with running(Idle, method="attach", clock=clock) as agent:
        with monkeypatch.context() as patched:
            patched.setattr(type(agent.parts.models), "is_learning", True)
            assert metered(agent, 40, clock) == 0
            assert agent.values("hookd_overhead_ratio") == {}
        metered(agent, 40, clock)
        assert agent.values("hookd_overhead_ratio")[()] > 0


def test_what_a_plugin_takes_in_a_call_that_c_counts_is_not_charged_to_hookd_as_well() -> None:
    class Looking(Plugin):
        name = "looking"
        sampled = ("forward",)

        def __init__(self) -> None:
            self.spent_ns = 0

        @hookimpl
        def forward(self, module):
            begun = now_ns()
            while now_ns() < begun + 2_000_000:
                pass
            self.spent_ns += now_ns() - begun

    net = nn.Sequential(nn.Identity())
    with running(Looking, options={"every": "1"}) as agent:
        counting, looking = agent.parts.models.counting, agent.plugin("looking")
        for _ in range(3):
            net(torch.ones(1))
        counting.meter(is_metered=True)
        counting.metered_ns()
        looking.spent_ns, begun = 0, now_ns()
        net(torch.ones(1))
        others_ns = now_ns() - begun - looking.spent_ns
        assert 0 < counting.metered_ns()[0] <= others_ns
