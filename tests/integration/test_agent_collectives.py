"""The phase in which a backward waits for other ranks, and the phases in which collectives are issued."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Variable

from hookd import Plugin, hookimpl
from hookd.target.events.collectives import OPTIMIZER, STEPS, PhaseCollectives
from hookd.wire.page import PHASES, PageReader, PageWriter
from tests.support.agent import running

MS = 1_000_000


class Phases(Plugin):
    """Adds up the phases."""

    name = "phases"

    @hookimpl
    def configure(self, context):
        context.add_up_phases(context.counter("seconds", "By phase.", ["phase"]))


class Reducing(nn.Module):
    """Computes gradients for 3 ms, and waits for other ranks for 50 ms at the end of each backward, as DDP's reducer does.

    With `is_early` it prepares for the wait in a hook of its own output, as FSDP does.
    """

    def __init__(self, clock, *, is_early):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.clock, self.is_early = clock, is_early
        if not is_early:
            self.weight.register_post_accumulate_grad_hook(lambda _: self.queue())

    def queue(self):
        Variable._execution_engine.queue_callback(lambda: self.pass_ms(50))

    def pass_ms(self, ms):
        self.clock.now += ms * MS

    def forward(self, x):
        y = (x * self.weight).sum()
        if y.requires_grad:
            y.grad_fn.register_hook(lambda *_: self.pass_ms(3))
        if self.is_early:
            y.register_hook(lambda _: self.queue())
        return y


class Clock:
    """Stands still but for what the training moves it by."""

    now = 1000 * MS

    def __call__(self):
        return self.now


def of_three_steps(world_size, *, is_early, retain=False):
    clock = Clock()
    model = Reducing(clock, is_early=is_early)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Phases, clock=clock) as agent:
        agent.parts.process.world_size = world_size
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(3))
            if retain:
                loss.backward(retain_graph=True)
                assert not loss._backward_hooks
            loss.backward()
            optimizer.step()
        return agent.values("hookd_phases_seconds")


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("world_size", "backward", "waiting"), [(2, 0.009, 0.15), (1, 0.159, 0.0)])
def test_the_end_of_a_backward_that_waits_for_other_ranks_is_a_phase_of_its_own(
    world_size, backward, waiting, is_early
):
    seconds = of_three_steps(world_size, is_early=is_early)
    assert seconds["backward",] == pytest.approx(backward)
    assert seconds["collectives",] == pytest.approx(waiting)


def test_a_graph_that_is_kept_is_marked_once_in_each_backward():
    seconds = of_three_steps(2, is_early=False, retain=True)
    assert (seconds["backward",], seconds["collectives",]) == (pytest.approx(0.018), pytest.approx(0.3))


def test_phases_that_issue_collectives_are_known_by_their_share_of_metered_steps():
    page = PageWriter.create({"pid": 1})
    number = 0

    def count():
        return number

    collectives = PhaseCollectives(page, count)

    def step(*, metered, sends_in=()):
        nonlocal number
        for phase in ("other", "forward", "backward", "optimizer"):
            number += phase in sends_in
            collectives.phase_over(PHASES.index(phase), is_metered=metered)

    def ratios():
        (family,) = PageReader(page.duplicate()).read().families
        return {values[0]: cells[0] for values, cells in family.series}

    assert PHASES.index("optimizer") == OPTIMIZER
    step(metered=True, sends_in=["forward", "backward"])
    first = ratios()
    assert (first["forward"], first["backward"], first["other"]) == (1.0, 1.0, 0.0)
    step(metered=False, sends_in=["other", "forward"])  # unknown
    for _ in range(3 * STEPS):
        step(metered=True, sends_in=["backward"])
    later = ratios()
    assert (later["backward"], later["other"], later["optimizer"]) == (1.0, 0.0, 0.0)
    assert 0 < later["forward"] < 0.1
