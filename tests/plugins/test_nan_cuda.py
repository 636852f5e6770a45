"""On a GPU hookd_nan names modules and parameters, and nothing waits for that; needs a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.cuda import nothing_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)).cuda()


def train(model, steps=12, bad=6, before=lambda: None, strike=lambda: None):
    """Train; in one step `before` is called before the forward, and `strike` before the optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 8, device="cuda")
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        if step == bad:
            before()
        model(batch).square().mean().backward()
        if step == bad:
            strike()
        optimizer.step()
        torch.cuda.synchronize()


def named(incident):
    return incident.module, incident.fields["where"], incident.fields.get("parameter"), incident.step


@pytest.mark.parametrize("options", [{}, {"every": 1}], ids=["default", "every=1"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_parameter_of_a_bad_gradient_is_named(hook, options, value):
    model = net()
    hook.start("nan", **options)
    train(model, strike=lambda: model[2][0].bias.grad[1:2].fill_(value))
    assert named(hook.incidents[0]) == ("2.0", "grad", "bias", 6)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_bad_parameter_is_named(hook, name):
    model = net()
    hook.start("nan", every=1)
    train(model, before=lambda: getattr(model[2][0], name).data.view(-1)[:1].fill_(math.nan))
    assert named(hook.incidents[0]) == ("2.0", "param", name, 6)


def test_nothing_waits_for_the_device(hook):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 8, device="cuda")
    hook.start("nan", every=1)
    for step in range(8):
        if step == 4:
            model[3].weight.data[0, :1].fill_(math.nan)
            torch.cuda.synchronize()
        with nothing_waits():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
