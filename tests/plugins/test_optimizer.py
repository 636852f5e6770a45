"""hookd_optimizer shows the state of the optimizers, the norms of their weights, and the actions of a GradScaler."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hookd_optimizer.scale import Seen, skipped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, optimizer, steps=1, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def norm(parameters):
    return float(torch.cat([p.detach().double().view(-1) for p in parameters]).norm())


# -- groups


def test_groups_are_shown_under_their_number(hook):
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "weight_decay": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.75, 0.875), weight_decay=0.0)
    hook.start("optimizer", every=1)
    train(model, optimizer)
    assert hook.metric("optimizer_lr") == {("AdamW", "0"): 0.5, ("AdamW", "1"): 0.125}
    assert hook.metric("optimizer_momentum") == {("AdamW", "0"): 0.75, ("AdamW", "1"): 0.75}
    assert hook.metric("optimizer_beta2") == {("AdamW", "0"): 0.875, ("AdamW", "1"): 0.875}
    assert hook.metric("optimizer_weight_decay") == {("AdamW", "0"): 0.0, ("AdamW", "1"): 0.25}


def test_the_learning_rate_is_the_one_that_the_step_used(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    hook.start("optimizer", every=1)
    train(model, optimizer, 3, scheduler)
    assert hook.value("optimizer_lr", "SGD", "0") == 0.25
    assert hook.value("optimizer_momentum", "SGD", "0") == 0.5
    assert hook.value("optimizer_steps", "SGD") == 3


def test_a_learning_rate_that_is_a_tensor_is_read(hook):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    hook.start("optimizer", every=1)
    train(model, optimizer)
    assert hook.value("optimizer_lr", "Adam", "0") == 0.25


def test_no_more_groups_are_shown_than_asked_for(hook):
    model = net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    hook.start("optimizer", every=1, groups=3)
    train(model, optimizer, 2)
    assert set(hook.metric("optimizer_lr")) == {("SGD", "0"), ("SGD", "1"), ("SGD", "2")}
    assert any("3 of 4 groups" in line for line in hook.logs)


# -- several optimizers


def test_two_optimizers_are_told_apart(hook):
    one, two = net(), net()
    first, second = torch.optim.SGD(one.parameters(), lr=0.5), torch.optim.Adam(two.parameters(), lr=0.25)
    hook.start("optimizer", every=1)
    for _ in range(3):
        train(one, first)
        train(two, second)
    assert hook.metric("optimizer_lr") == {("SGD", "0"): 0.5, ("#2.Adam", "0"): 0.25}
    assert hook.metric("optimizer_steps") == {("SGD",): 3, ("#2.Adam",): 3}


def test_an_optimizer_that_is_made_anew_takes_the_place_of_the_old_one(hook):
    hook.start("optimizer", every=1)
    for kind in (torch.optim.SGD, torch.optim.SGD, torch.optim.Adagrad):
        model = net()
        train(model, kind(model.parameters(), lr=0.5))
        gc.collect()
    assert set(hook.metric("optimizer_lr")) == {("Adagrad", "0")}
    assert hook.value("optimizer_steps", "SGD") == 2


def test_optimizers_beyond_the_limit_have_no_series(hook):
    models = [net() for _ in range(10)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    hook.start("optimizer", every=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)
    assert len(hook.metric("optimizer_steps")) == 8
    assert any("only 8 optimizers" in line for line in hook.logs)


def test_an_optimizer_is_not_kept_alive(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook.start("optimizer", every=1)
    train(model, optimizer, 3)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None


# -- norms


def test_weight_norms_are_those_of_the_groups(hook):
    model = net()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    hook.start("optimizer", every=1)
    train(model, optimizer, 2)
    for at, group in enumerate(groups):
        assert hook.value("optimizer_weight_norm", "SGD", str(at)) == pytest.approx(norm(group), rel=1e-6)


def test_weight_norms_are_summed_up_over_several_steps(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook.start("optimizer", every=1, elements=1)
    train(model, optimizer, 3)
    with pytest.raises(KeyError):
        hook.value("optimizer_weight_norm", "SGD", "0")
    train(model, optimizer, 1)
    assert hook.value("optimizer_weight_norm", "SGD", "0") == pytest.approx(norm(model.parameters()), rel=1e-6)


# -- GradScaler


@given(
    st.lists(st.booleans(), min_size=3, max_size=60),
    st.integers(1, 4),
    st.sampled_from([2.0, 3.0]),
    st.sampled_from([0.5, 0.25, 0.75]),
)
@settings(max_examples=100, deadline=None)
def test_skipped_steps_follow_from_the_scale(overflows, interval, growth, backoff):
    scale, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    seen, between, expected, counted = None, 0, 0, 0
    for is_overflow in overflows:
        if is_overflow:
            between += 1
        else:
            now = Seen(float(scale), float(tracker), 0.0)
            if seen is not None:
                counted += skipped(seen, now, (interval, growth, backoff))
                expected += between
            seen, between = now, 0
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(is_overflow)), growth, backoff, interval)
    assert counted == expected


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_skips_is_counted(hook, fused):
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    hook.start("optimizer", every=1)
    overflows = (1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0)
    moved = 0
    for is_overflow in overflows:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean() * (float("inf") if is_overflow else 1.0)
        scaler.scale(loss).backward()
        used = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        moved += not torch.equal(before[0], model[0].weight.detach())
        before = [p.detach().clone() for p in model.parameters()]
    assert len(overflows) - moved == sum(overflows)
    assert hook.value("optimizer_skipped_steps") == sum(overflows) - (0 if fused else 1), "unseen before the first step"
    assert hook.value("optimizer_loss_scale") == used


def test_without_a_scaler_there_is_no_scale(hook):
    model = net()
    hook.start("optimizer", every=1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert hook.metric("optimizer_loss_scale") == {}
    assert hook.metric("optimizer_skipped_steps") == {}


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = net()
        train(model, torch.optim.AdamW(model.parameters()), 5)
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("optimizer", every=1)
    assert torch.equal(weights(), plain)


def test_series_of_a_group_that_was_removed_end(hook):
    model = net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.125)
    hook.start("optimizer", every=1)
    train(model, optimizer, 2)
    assert set(hook.metric("optimizer_weight_norm")) == {("AdamW", "0"), ("AdamW", "1")}
    del optimizer.param_groups[1]
    train(model, optimizer, 3)
    for name in ("lr", "momentum", "beta2", "weight_decay", "weight_norm"):
        assert set(hook.metric(f"optimizer_{name}")) == {("AdamW", "0")}, name
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    train(model, optimizer, 2)
    assert hook.metric("optimizer_lr") == {("AdamW", "0"): 0.125, ("AdamW", "1"): 0.5}
