"""Samples and operations are counted at every step, however rarely hookd_timing looks at one."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 2), nn.ReLU())


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()


def test_samples_are_counted_at_every_step_however_rarely_one_is_sampled(hook):
    per_step = 2 * (2 * 6 * 4 * 2)  # forward, and backward for the weight: the input needs no gradient
    hook.start("timing", every=7)
    model = net()
    counted = []
    for _ in range(20):
        train(model, 1)
        counted.append((hook.value("timing_samples"), hook.value("timing_flops")))
    assert counted == [(6 * at, per_step * at) for at in range(1, 21)]


def test_a_longer_interval_loses_no_samples(hook):
    hook.start("timing", every=3)
    model = net()
    train(model, 7)
    hook.sample_every("timing", 64)
    train(model, 30)
    assert hook.value("timing_samples") == 37 * 6


@pytest.mark.parametrize(("dim", "is_odd"), [(7, True), (2, True), (1, False), (-1, False)])
def test_a_batch_dimension_that_the_input_has_not_is_reported_once(hook, dim, is_odd):
    hook.start("timing", every=1, batch_dim=dim)
    train(net(), 3)
    messages = [one.message for one in hook.incidents]
    assert len(messages) == is_odd
    assert all(f"batch_dim={dim}, but the input of (root) has 2 dimensions" in text for text in messages)


def test_a_step_of_two_optimizers_counts_its_samples_once(hook):
    model = net()
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    hook.start("timing", every=64)
    for _ in range(20):
        model(torch.randn(6, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert hook.value("timing_samples") == pytest.approx(20 * 6, abs=6), "give or take the step in progress"


def test_steps_that_were_uncertain_until_now_count_one_by_one(hook):
    model = net()
    hook.start("timing", every=64)
    for _ in range(40):
        model(torch.randn(6, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
    assert hook.value("timing_samples") == pytest.approx(40 * 6, abs=6), "give or take the step in progress"
