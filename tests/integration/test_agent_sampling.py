"""How often sampled hooks are called: by the budget, by the person, and by a plugin that has found something."""

from __future__ import annotations

import operator
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

from hookd import Plugin, Rate, hookimpl
from tests.support.agent import running
from tests.support.clock import Clock

STEP_S = 0.001


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the agent, and of this file's plugins."""
    made = Clock()
    monkeypatch.setattr(Looker, "clock", made)
    return made


def train(clock: Clock, steps: int, step_s: float = STEP_S) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(3, 4)).pow(2).sum().backward()
        optimizer.step()
        clock.advance(step_s)


class Looker(Plugin):
    """Notes the steps in which its sampled hooks are called."""

    clock = Clock()
    name = "looker"
    sampled = ("forward", "loss")
    longest = 8

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.losses: list[int] = []

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, module):
        self.forwards.append(self.context.step)

    @hookimpl
    def loss(self):
        self.losses.append(self.context.step)
        self.clock.advance(0.002)  # far more than one per cent of these steps


class Partly(Looker):
    """Leaves how often one hook is called to the budget, whatever the option `every` says."""

    sampled: ClassVar = {"forward": Rate(), "loss": Rate(longest=8)}


def blocks(steps: list[int], interval: int) -> list[int]:
    """Return in which block of `interval` steps each step is: sampled are one of each, at no fixed distance."""
    return [(step - 1) // interval for step in steps]


def test_the_budget_stretches_what_is_sampled_to_the_longest_interval_and_no_further(clock) -> None:
    with running(Looker, clock=clock) as agent:
        # A tenth of a step: far over the budget, and far from the third of one at which a plugin is quarantined.
        train(clock, 96, step_s=0.02)
        steps = agent.plugin("looker").forwards
        assert steps[:4] == list(range(1, 5)), "at first it is not known what they cost"
        assert blocks(steps, 8)[-9:] == list(range(3, 12)), "one of each eight"
        assert len(set(map(operator.sub, steps[-8:], steps[-9:-1]))) > 1, "at no fixed distance"
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 8}
        assert agent.plugin("looker").context.settings["every"] == "1..8", "also once the budget has stretched it"
        assert agent.state("looker") == "active"


def test_what_takes_a_hundred_times_the_budget_is_throttled_within_20_steps_and_recovers(clock) -> None:
    class Heavy(Looker):
        longest = 4096
        cost_s = 0.02

        @hookimpl
        def loss(self):
            self.losses.append(self.context.step)
            self.clock.advance(self.cost_s)

    with running(Heavy, clock=clock) as agent:
        train(clock, 20, step_s=0.02)
        looker = agent.plugin("looker")
        assert agent.values("hookd_sampling_interval_steps")[("looker",)] >= 64, "half of each step was its"
        train(clock, 100, step_s=0.02)
        assert len(looker.losses) < 20
        assert agent.state("looker") == "active"
        Heavy.cost_s = 0.0
        assert wait_for_a_sample(agent, looker, clock) <= 16


def wait_for_a_sample(agent, looker, clock) -> float:
    """Train until it is sampled again, in one of two blocks at the latest, and the governor has had its say."""
    known, trained, longest = len(looker.losses), 0, 1.0
    while len(looker.losses) == known:
        assert trained <= 2 * longest + 50
        train(clock, 50, step_s=0.01)
        trained += 50
        # It grows at first, as these steps are shorter.
        longest = max(longest, *agent.values("hookd_sampling_interval_steps").values())
    train(clock, 100, step_s=0.01)
    (interval,) = agent.values("hookd_sampling_interval_steps").values()
    return interval


class Steady(Looker):
    name = "steady"
    sampled = ()


def test_what_comes_at_every_step_takes_its_part_of_the_budget_from_what_is_sampled(clock) -> None:
    found = {}
    for plugins in ((Looker,), (Looker, Steady)):
        with running(*plugins, budget=0.25, clock=clock) as agent:
            train(clock, 96, step_s=0.01)
            found[plugins] = agent.values("hookd_sampling_interval_steps")[("looker",)]
    assert found[Looker,] == 1, "2 of 12 ms are less than a quarter"
    assert found[Looker, Steady] >= 2, "it and 2 ms of each step are more"


def test_what_cannot_be_sampled_and_takes_a_hundred_times_the_budget_is_quarantined_within_20_steps(clock) -> None:
    class Unsampled(Looker):
        sampled = ()

        @hookimpl
        def loss(self):
            self.clock.advance(0.02)

    with running(Unsampled, clock=clock) as agent:
        train(clock, 20, step_s=0.02)
        assert agent.state("looker") == "quarantined"


def test_without_a_budget_nothing_is_sampled_but_what_the_person_has_fixed(clock) -> None:
    with running(Looker, budget=0.0, clock=clock) as agent:
        train(clock, 40)
        assert agent.plugin("looker").forwards == agent.plugin("looker").losses == []
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 0}
        assert agent.values("hookd_overhead_budget_ratio") == {(): 0.0}
    with running(Partly, options={"every": "2"}, budget=0.0, clock=clock) as agent:
        train(clock, 6)
        assert agent.plugin("looker").forwards == [1, 3, 5]
        assert agent.plugin("looker").losses == []


def test_rare_hooks_are_stretched_further_and_called_in_steps_in_which_the_others_are(clock) -> None:
    class Rarer(Looker):
        longest = 4
        sampled: ClassVar = {"forward": Rate(), "loss": Rate(longest=30)}

    with running(Rarer, clock=clock) as agent:
        train(clock, 200, step_s=0.005)
        looker = agent.plugin("looker")
        assert blocks(looker.forwards, 4)[-10:] == list(range(40, 50))
        assert blocks(looker.losses, 28)[-3:] == [4, 5, 6]
        assert set(looker.losses) <= set(looker.forwards)
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 4}


class Last(Looker):
    """Has a hook that is to be called at every step as long as that is possible."""

    sampled: ClassVar = {"forward": Rate(), "loss": Rate(longest=12), "step_pre": Rate(stretched_last=True)}
    longest = 4
    cost_s = 0.0005

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @hookimpl
    def step_pre(self, step):
        self.steps.append(step)
        self.clock.advance(self.cost_s)


def test_what_is_stretched_last_becomes_rarer_only_where_all_else_is_as_rare_as_it_may_be(clock) -> None:
    with running(Last, budget=0.1, clock=clock) as agent:
        train(clock, 300, step_s=0.01)
        looker = agent.plugin("looker")
        assert looker.steps == list(range(1, 301)), "it takes a twentieth of a step"
        assert blocks(looker.losses, 4)[-5:] == list(range(70, 75)), "2 ms once in four steps are a twentieth"
    with running(Last, budget=0.01, clock=clock) as agent:
        train(clock, 300, step_s=0.01)
        looker = agent.plugin("looker")
        sampled = {step for step in looker.forwards if step > 200}
        assert {step for step in looker.steps if step > 200} >= sampled, "in every step in which another one is"
        assert blocks(looker.losses, 12)[-3:] == [22, 23, 24]
        alone = [step for step in looker.steps if step > 200 and step not in sampled]
        assert 10 < len(sampled) + len(alone) < 60
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 4}
        Last.cost_s = 0.0
        train(clock, 300, step_s=0.01)
        assert looker.steps[-20:] == list(range(581, 601)), "when it costs nothing any more"
    Last.cost_s = 0.0005


def test_a_plugin_can_hold_one_hook_and_the_others_stay_as_the_budget_has_them(clock) -> None:
    class Holder(Last):
        @hookimpl
        def phase(self, name):
            if name == "backward":
                self.context.hold(1 if 250 <= self.context.step < 260 else None, "step_pre")

    with running(Holder, budget=0.01, clock=clock) as agent:
        train(clock, 300, step_s=0.01)
        looker = agent.plugin("looker")
        assert [step for step in looker.steps if 250 <= step < 260] == list(range(250, 260))
        assert len([step for step in looker.forwards if 250 <= step < 260]) <= 3
        assert len([step for step in looker.steps if step >= 270]) < 20


def test_what_was_held_for_a_while_is_as_rare_again_as_the_budget_asks_for(clock) -> None:
    class Holder(Last):
        @hookimpl
        def phase(self, name):
            if name == "backward":
                self.context.hold(1 if 5 <= self.context.step < 60 else None, "step_pre")

    with running(Holder, budget=0.01, clock=clock) as agent:
        train(clock, 400, step_s=0.01)
        assert len([step for step in agent.plugin("looker").steps if step > 300]) <= 30
        context = agent.plugin("looker").context
        context.hold(3, "step_pre")
        train(clock, 60, step_s=0.01)
        alone = {step for step in agent.plugin("looker").steps if step > 400} - set(agent.plugin("looker").forwards)
        assert alone <= {step for step in range(400, 462) if (step - 1) % 3 == 0}
        context.hold(None)
        assert not context.requests.is_fixed


def test_every_fixes_the_hooks_without_a_rate_of_their_own_and_the_budget_stretches_the_others(clock) -> None:
    with running(Partly, options={"every": "1"}, clock=clock) as agent:
        train(clock, 80)
        looker = agent.plugin("looker")
        assert looker.forwards == list(range(1, 81))
        assert blocks(looker.losses, 8)[-6:] == list(range(4, 10))
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 1}, "what the person has fixed"


def test_steps_that_take_turns_are_all_sampled(clock) -> None:
    class Turns(Looker):
        every = 10

    with running(Turns, clock=clock) as agent:
        train(clock, 400)
        sampled = agent.plugin("looker").forwards
        for length in (2, 3, 5, 10):
            shares = [sum(step % length == turn for step in sampled) / len(sampled) for turn in range(length)]
            assert min(shares) > 0.5 / length, (length, shares)


def test_a_plugin_can_hold_its_interval_and_let_it_go(clock) -> None:
    class Holder(Looker):
        @hookimpl
        def step_pre(self, step):
            if step == 3:
                self.context.hold(1)
            elif step == 8:
                self.context.hold(None)

    with running(Holder, options={"every": "5"}, clock=clock) as agent:
        train(clock, 5)
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 1}
        train(clock, 11)
        assert agent.values("hookd_sampling_interval_steps") == {("looker",): 5}
        assert agent.plugin("looker").forwards == [1, 4, 5, 6, 7, 8, 11, 16]


def test_what_is_exported_as_overhead_is_what_a_sampled_plugin_really_took(clock) -> None:
    """Measured steps are one in five and sampled ones one in eight: each kind stands for its own."""

    class Spender(Looker):
        @hookimpl
        def loss(self):
            self.losses.append(self.context.step)
            self.clock.advance(0.003)

    with running(Spender, options={"every": "8"}, clock=clock) as agent:
        train(clock, 160)
        spent, said = 0.003 * len(agent.plugin("looker").losses), agent.values("hookd_overhead_seconds")[("looker",)]
        assert 0.9 < said / spent < 1.1, (said, spent)


def test_a_step_of_another_thread_in_the_middle_of_a_hook_does_not_charge_it_with_the_clock_itself(clock) -> None:
    class Stepping(Plugin):
        """Steps, in each call of its hook, in another thread: whether a step is measured changes meanwhile."""

        name = "stepping"

        @hookimpl
        def forward(self):
            other = threading.Thread(target=optimizer.step)
            other.start()
            other.join(60)
            clock.advance(STEP_S)

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with running(Stepping, clock=clock) as agent:
        for _ in range(12):
            net(torch.ones(1, 2))
        assert agent.parts.count.done >= 12
        assert agent.state("stepping") == "active"
        assert agent.values("hookd_overhead_seconds")[("stepping",)] <= 12 * STEP_S


class Waiter(Plugin):
    """Wants to know of the end of a backward only every third time."""

    name = "waiter"

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def loss(self):
        self.begun.append(self.context.step)
        self.context.listen("loss_done", wanted=self.context.step % 3 == 0)

    @hookimpl
    def loss_done(self):
        self.done.append(self.context.step)


def test_a_hook_that_a_plugin_does_not_want_is_not_called_from_its_next_event_on(clock) -> None:
    with running(Waiter, clock=clock) as agent:
        train(clock, 9)
        assert agent.plugin("waiter").begun == [*range(1, 10)]
        assert agent.plugin("waiter").done == [3, 6, 9]


class Apart(Looker):
    """Notes the steps in which it looks, and those of them in which it does so alone."""

    name = "apart"
    apart = True

    def __init__(self) -> None:
        super().__init__()
        self.alone: list[int] = []

    @hookimpl
    def forward(self, module):
        self.forwards.append(self.context.step)
        if self.context.is_alone:
            self.alone.append(self.context.step)


@pytest.mark.parametrize("every", [3, 10])
def test_what_is_to_be_apart_looks_as_often_as_others_and_never_when_they_do(every, clock) -> None:
    class Other(Looker):
        longest = 1

    Other.every = Apart.every = Other.longest = Apart.longest = every
    with running(Other, Apart, clock=clock) as agent:
        train(clock, 300, step_s=10.0)
        other, apart = agent.plugin("looker").forwards, agent.plugin("apart")
        assert not set(other) & set(apart.forwards)
        assert apart.alone == apart.forwards
        assert abs(len(apart.forwards) - 300 // every) <= 2


def test_where_others_look_at_every_step_it_does_so_with_them_and_knows(clock) -> None:
    class Always(Looker):
        longest = 1

    Apart.every = Apart.longest = 10
    with running(Always, Apart, clock=clock) as agent:
        train(clock, 100, step_s=10.0)
        apart = agent.plugin("apart")
        assert 7 <= len(apart.forwards) <= 8, "it has waited for two intervals"
        assert apart.alone == []


def test_a_switch_in_the_middle_of_a_step_takes_no_sample_twice(clock) -> None:
    Apart.every = Apart.longest = 10
    with running(Apart, clock=clock) as agent:
        for _ in range(10):
            train(clock, 10, step_s=10.0)
            agent.parts.host.resample()
        assert len(agent.plugin("apart").forwards) == 10


def test_a_step_is_charged_by_what_was_called_in_it_whatever_is_wanted_of_the_next(clock, monkeypatch) -> None:
    class Choosy(Looker):
        name = "choosy"
        every = 1
        longest = 1

        @hookimpl
        def step_done(self):
            self.context.listen("forward", wanted=self.context.step % 3 == 2)
            self.context.listen("loss", wanted=self.context.step % 3 == 2)

    with running(Choosy, clock=clock, budget=100.0) as agent:
        governor, charged = agent.parts.governor, []
        account = governor._account
        monkeypatch.setattr(
            governor, "_account", lambda *given, **named: (charged.append(governor._kind), account(*given, **named))
        )
        train(clock, 12)
        assert agent.plugin("choosy").forwards == [1, 3, 6, 9, 12]
        heard = [(kinds[0] > 0, listening) for _, kinds, (listening,) in charged]
        assert heard[1:] == [(step % 3 == 0, 2 * (step % 3 == 0)) for step in range(3, 3 + len(heard) - 1)]
