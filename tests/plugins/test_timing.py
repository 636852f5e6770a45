"""hookd_timing counts calls and wall time per module, and splits a step's time into phases that add up."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FORWARD_S, BACKWARD_S = 0.02, 0.03


class Busy(torch.autograd.Function):
    """Takes a known time in each direction."""

    @staticmethod
    def forward(_ctx, x):
        spin(FORWARD_S)
        return x * 1.0

    @staticmethod
    def backward(_ctx, grad):
        spin(BACKWARD_S)
        return grad


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Busy.apply(x) * self.weight


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def net():
    return nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 1))


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()


def test_calls_are_counted_by_module(hook):
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    hook.start("timing")
    train(model, 3)
    assert hook.metric("timing_forward_calls") == {("0",): 3, ("1",): 6, ("2",): 3, ("(root)",): 3}


def test_forward_seconds_are_wall_time_with_children(hook):
    model = net()
    hook.start("timing")
    train(model, 3)
    seconds = hook.metric("timing_forward_seconds")
    assert seconds["1",] == pytest.approx(3 * FORWARD_S, rel=0.5)
    assert seconds["(root)",] >= sum(v for k, v in seconds.items() if k != ("(root)",))


def test_backward_seconds_stand_for_the_steps_that_were_not_sampled(hook):
    model = net()
    hook.start("timing")
    train(model, 20)  # steps 1 and 11 are sampled
    seconds = hook.metric("timing_backward_seconds")
    assert seconds["1",] == pytest.approx(20 * BACKWARD_S, rel=0.5)
    assert seconds["1",] <= seconds["(root)",] * 1.01


def test_every_step_is_sampled_on_demand(hook):
    model = net()
    hook.start("timing", every=1)
    train(model, 3)
    assert hook.value("timing_backward_seconds", "1") == pytest.approx(3 * BACKWARD_S, rel=0.5)


def test_phases_add_up_to_the_wall_time_of_the_steps(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook.start("timing")
    train(model, 1, optimizer)  # the first step begins before anybody looks at the clock
    before = hook.metric("timing_phase_seconds")
    start = time.perf_counter()
    for _ in range(4):
        spin(0.01)
        train(model, 1, optimizer)
    wall_s = time.perf_counter() - start
    phases = {k[0]: v - before[k] for k, v in hook.metric("timing_phase_seconds").items()}
    assert sum(phases.values()) == pytest.approx(wall_s, rel=0.02)
    assert phases["other"] >= 4 * 0.01
    assert phases["forward"] >= 4 * FORWARD_S
    assert phases["backward"] >= 4 * BACKWARD_S


def test_model_called_inside_an_optimizer_step_is_not_counted_twice(hook):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x = torch.randn(3, 4)

    def closure():
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    hook.start("timing")
    optimizer.step(closure)
    before = hook.metric("timing_phase_seconds")
    start = time.perf_counter()
    optimizer.step(closure)
    wall_s = time.perf_counter() - start
    phases = {k[0]: v - before[k] for k, v in hook.metric("timing_phase_seconds").items()}
    assert sum(phases.values()) == pytest.approx(wall_s, rel=0.05)
    assert phases["optimizer"] < FORWARD_S
    assert phases["forward"] >= 2 * FORWARD_S


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_belongs_to_the_backward(hook, use_reentrant):
    slow = Slow()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow = slow

        def forward(self, x):
            return checkpoint(self.slow, x, use_reentrant=use_reentrant)

    hook.start("timing")
    model = Checkpointed()
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert hook.value("timing_forward_calls", "slow") == 1
    phases = hook.metric("timing_phase_seconds")
    assert phases["backward",] >= FORWARD_S + BACKWARD_S
    assert phases["forward",] < FORWARD_S + BACKWARD_S


def test_evaluation_in_another_thread_is_no_phase_of_the_training(hook):
    model, other = nn.Linear(4, 1), Slow()
    hook.start("timing")
    train(model, 1)
    before = hook.value("timing_phase_seconds", "forward")
    thread = threading.Thread(target=other, args=(torch.ones(4),))
    thread.start()
    thread.join()
    assert hook.value("timing_phase_seconds", "forward") == before
    assert hook.value("timing_forward_calls", "#2.(root)") == 1


def test_in_place_modules_are_timed(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Slow(), nn.Linear(4, 1))
    hook.start("timing", every=1)
    train(model, 2)
    assert set(hook.metric("timing_backward_seconds")) == {("0",), ("1",), ("2",), ("3",), ("(root)",)}


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        train(model, 5, torch.optim.AdamW(model.parameters()))
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("timing", every=1)
    assert torch.equal(weights(), plain)
