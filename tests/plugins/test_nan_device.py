"""The names that hookd_nan gives to bad tensors on a device; here the host's memory stands in for the device's."""

from __future__ import annotations

import math

import hookd_nan.forward
import hookd_nan.models
import hookd_nan.scan
import pytest
import torch
from torch import nn

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _nothing_is_on_the_host(hook, monkeypatch):
    hook.pretend(device=True)
    monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
    monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


def net():
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 1))


def train(model, steps=6, strike=None, loss=lambda out: out.square().mean()):
    """Train; call `strike` in the third step, between the backward and the optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model(torch.randn(3, 4))).backward()
        if step == 3 and strike is not None:
            strike()
        optimizer.step()


def named(incident):
    return incident.module, incident.fields["where"], incident.fields.get("parameter"), incident.kind, incident.step


@pytest.mark.parametrize("every", [{}, {"every": 1}], ids=["default", "every=1"])
@pytest.mark.parametrize("kind", [NAN, INF])
def test_the_parameter_of_a_bad_gradient_is_named(hook, every, kind):
    model = net()
    hook.start("nan", **every)
    train(model, strike=lambda: model[1].fc.bias.grad[1:2].fill_(kind))
    first = hook.incidents[0]
    assert named(first) == ("1.fc", "grad", "bias", str(kind), 3)
    assert "1.fc gradient bias at step 3" in first.message
    assert {labels[:2] for labels in hook.metric("nan_nonfinite")} >= {("1.fc", "grad")}


@pytest.mark.parametrize("is_parameter", [True, False])
def test_what_a_block_uses_without_a_call_makes_it_uncertain(hook, is_parameter):
    """The numbers arrive when the training has gone on: by then, nobody knows whether it was bad before."""

    class Borrower(Block):
        is_on = False

        def forward(self, x):
            made = torch.tanh(nn.functional.linear(x, self.fc.weight))
            return made * NAN if self.is_on else made

    model = nn.Sequential(nn.Linear(4, 4), Borrower(), nn.Linear(4, 1))
    hook.start("nan", every=1)
    model(torch.randn(3, 4))
    if is_parameter:
        model[1].fc.weight.data[0, 0] = NAN
    model[1].is_on = not is_parameter
    train(model, steps=4, loss=lambda out: out.detach().requires_grad_().sum())
    first = hook.incidents[0]
    assert named(first)[:2] == ("1", "output")
    assert ("parameters" in first.fields) is is_parameter
    assert ("a parameter or buffer inside of it is bad now" in first.message) is is_parameter


def test_of_several_the_last_in_the_models_order_is_the_first_in_the_backwards(hook):
    model = net()

    def strike():
        for parameter in (model[0].weight, model[1].fc.weight):
            parameter.grad.fill_(NAN)

    hook.start("nan")
    train(model, strike=strike)
    assert named(hook.incidents[0])[:3] == ("1.fc", "grad", "weight")


def test_a_parameter_of_the_roots_own_is_named(hook):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    model = Root()
    hook.start("nan")
    train(model, strike=lambda: model.scale.grad.fill_(NAN))
    assert named(hook.incidents[0])[:3] == ("(root)", "grad", "scale")


def test_tensors_of_several_types_are_told_apart(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).double())
    model[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0].double(),))
    hook.start("nan")
    train(model, strike=lambda: model[1].bias.grad.fill_(INF))
    assert named(hook.incidents[0])[:3] == ("1", "grad", "bias")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_bad_parameter_is_named(hook, name):
    model = net()
    hook.start("nan", every=1)
    calls = []

    def spoil(_module, _inputs):
        calls.append(None)
        if len(calls) == 4:
            getattr(model[1].fc, name).data.view(-1)[0] = NAN

    model.register_forward_pre_hook(spoil)
    train(model)
    assert named(hook.incidents[0]) == ("1.fc", "param", name, "nan", 4)
    assert f"1.fc parameter {name} at step 4" in hook.incidents[0].message


def test_a_bad_buffer_is_named(hook):
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("good", torch.zeros(1))
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return super().forward(x) + self.shift

    model = nn.Sequential(Shifted(), nn.Linear(4, 1)).eval()
    hook.start("nan", every=1)
    train(model, strike=lambda: model[0].shift.fill_(INF))
    assert named(hook.incidents[0])[:3] == ("0", "param", "shift")
    assert "0 (Shifted) buffer shift" in hook.incidents[0].message


def test_under_a_scaler_the_parameter_is_named_once_an_overflow_has_become_an_incident(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    bad = range(3, 9)
    model[1].fc.weight.register_hook(lambda grad: grad * (INF if step in bad else 1))
    hook.start("nan", amp_patience=4)
    for step in range(12):  # noqa: B007  the hook asks for it
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert hook.value("nan_amp_skipped_steps") == len(bad)
    assert named(hook.incidents[0])[:3] == ("1.fc", "grad", "weight")


def test_no_model_is_searched_for_gradients_in_a_step_in_which_nothing_was_bad(hook, monkeypatch):
    searched = []
    parameters = hookd_nan.models.named_parameters
    monkeypatch.setattr(hookd_nan.models, "named_parameters", lambda root: searched.append(root) or parameters(root))
    hook.start("nan")
    model = net()
    train(model, steps=2)
    searched.clear()
    train(model, steps=6)
    assert searched == []
