"""What hookd_nan names of tensors on a device: here with the host's memory in the part of the device's."""

from __future__ import annotations

import math

import hookd_nan.forward
import hookd_nan.models
import hookd_nan.pending
import hookd_nan.scan
import pytest
import torch
from torch import nn

from hookd.target.tensors import deferred

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
    """Train; `strike` is called in the third step, between the backward and the optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model(torch.randn(3, 4))).backward()
        if step == 3 and strike is not None:
            strike()
        optimizer.step()


def named(incident):
    return incident["module"], incident["where"], incident.get("parameter"), incident["kind"], incident["step"]


@pytest.mark.parametrize("every", [{}, {"every": 1}], ids=["default", "every=1"])
@pytest.mark.parametrize("kind", [NAN, INF])
def test_the_parameter_of_a_bad_gradient_is_named(hook, every, kind):
    model = net()
    hook.start("nan", **every)
    train(model, strike=lambda: model[1].fc.bias.grad[1:2].fill_(kind))
    first = hook.incidents[0]
    assert named(first) == ("1.fc", "grad", "bias", str(kind), 3)
    assert "1.fc gradient bias at step 3" in first["message"]
    assert {labels[:2] for labels in hook.metric("nan_nonfinite")} >= {("1.fc", "grad")}


@pytest.mark.parametrize("is_parameter", [True, False])
def test_what_a_block_uses_without_a_call_makes_it_uncertain(hook, is_parameter):
    """Its numbers come when the training has gone on: whether it was bad then cannot be told any more."""

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
    assert ("parameters" in first) is is_parameter
    assert ("a parameter or buffer inside of it is bad now" in first["message"]) is is_parameter


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
    assert f"1.fc parameter {name} at step 4" in hook.incidents[0]["message"]


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
    assert "0 buffer shift" in hook.incidents[0]["message"]


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


class Spoiled(nn.Module):
    """Multiplies by NaN while `is_on`."""

    is_on = False

    def forward(self, x):
        return x * NAN if self.is_on else x * 1.0


def free(hook, module):
    """Free the memory of what was computed on the device about the outputs of a module."""
    for entry in hook.plugin("nan").queue.entries:
        if (entry.event.where, entry.event.module) == ("output", module):
            entry.found[0][0].low.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("lost", "named_as", "is_exact"),
    [("0", "1.0", True), ("2", "1.0", True), ("1.0", "1", False), (None, "1.0", True)],
)
def test_what_cannot_be_read_from_the_device_costs_no_other_verdict(hook, lost, named_as, is_exact):
    spoiled = Spoiled()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(spoiled), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook.start("nan", every=1)
    for step in range(1, 8):  # each new request takes a step
        spoiled.is_on = step == 3
        loss = model(torch.randn(3, 4)).square().mean()
        if step == 3:
            free(hook, lost)
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    first = hook.incidents[0]
    assert (first["module"], first["where"], first["step"], first["is_exact"]) == (named_as, "output", 3, is_exact)
    assert ("could not be read from the device" in first["message"]) is not is_exact
    assert len(hook.incidents) == 1
    assert sum("could not be read" in line for line in hook.logs) == (lost is not None)
    assert not hook.plugin("nan").queue.batches


@pytest.mark.parametrize("is_inside", [False, True], ids=["calls", "one call"])
def test_a_long_validation_without_steps_gets_all_verdicts_in_little_memory(hook, monkeypatch, is_inside):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 4), spoiled)

        def forward(self, x, times):
            for at in range(times):
                spoiled.is_on = at == 3
                self.model(x)
                most.append(len(hook.plugin("nan").queue.batches))

    monkeypatch.setattr(hookd_nan.pending, "LARGEST", 4)
    monkeypatch.setattr(deferred, "MANY", 16)
    most, spoiled = [], Spoiled()
    outer = Outer()
    hook.start("nan", every=1)
    train(net(), steps=2)
    with torch.no_grad():
        if is_inside:
            outer(torch.ones(1, 4), 300)
        else:
            for at in range(300):
                outer(torch.ones(1, 4), 4 if at == 30 else 1)
    assert max(most) < 16
    train(net(), steps=2)
    assert hook.incidents[0]["module"].endswith("model.1")


def test_after_a_quarantine_no_verdict_waits_for_numbers_that_arrived_in_it(hook, monkeypatch):
    monkeypatch.setattr("hookd.target.plugins.listeners.BACK_OFF_S", 1e-9)
    spoiled = Spoiled()
    model = nn.Sequential(nn.Linear(4, 4), spoiled, nn.Linear(4, 1))
    hook.start("nan", every=1)
    train(model)
    queue, parts = hook.plugin("nan").queue, hook._parts
    model(torch.randn(3, 4))
    queue.flush()
    parts.stopping.quarantine(parts.registry.named("nan"), "for the test")
    train(model, steps=1)
    assert queue.batches
    hook.tick()
    assert hook.state("nan") == "active"
    spoiled.is_on = True
    train(model, steps=2)
    assert not queue.batches
    assert [one["module"] for one in hook.incidents if one["kind"] == "nan"] == ["1"]


def test_a_server_gets_its_verdict_after_some_calls(hook):
    spoiled = Spoiled()
    model = nn.Sequential(nn.Linear(4, 4), spoiled)
    hook.start("nan", every=1)
    with torch.no_grad():
        for at in range(1, 35):
            spoiled.is_on = at == 3
            model(torch.ones(1, 4))
    assert hook.incidents[0]["module"] == "1"
    assert not hook.plugin("nan").queue.batches


def test_gradients_that_cannot_be_read_are_found_in_the_parameter_that_they_made_bad(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook.start("nan", every=1)

    def free_gradients(*_):
        for entry in hook.plugin("nan").queue.entries:
            if step == 3 and entry.event.where == "grad" and entry.event.optimizer:
                entry.values[0].untyped_storage().resize_(0)

    optimizer.register_step_pre_hook(free_gradients)
    for step in range(1, 6):  # noqa: B007  the hook asks for it
        model(torch.randn(3, 4)).square().mean().backward()
        if step == 3:
            model[1].fc.weight.grad[0, 0] = NAN
        optimizer.step()
        optimizer.zero_grad()
    assert [(one["module"], one["where"], one["step"]) for one in hook.incidents] == [("1.fc", "param", 4)]
    (line,) = [line for line in hook.logs if "could not be read" in line]
    assert line.startswith("nan: 1 check not judged")
    assert line.endswith("the last: grad of the training at step 3")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_is_not_taken_for_one_that_used_its_gradients_if_the_scalers_flag_cannot_be_read(hook, is_lost):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    hook.start("nan", every=1)

    def free_flag(*_):
        entries = [entry for entry in hook.plugin("nan").queue.entries if entry.event.optimizer]
        if is_lost and entries and step == 3:
            entries[-1].found[1][0].low.untyped_storage().resize_(0)

    optimizer.register_step_pre_hook(free_flag)
    for step in range(1, 6):
        optimizer.found_inf = torch.tensor(float(step == 3))
        model(torch.randn(3, 4)).square().mean().backward()
        if step == 3:
            model[1].fc.weight.grad[0, 0] = INF
        optimizer.step()
        optimizer.zero_grad()
    assert not hook.incidents
    assert hook.value("nan_amp_skipped_steps") == (not is_lost)
