"""Numbers of a device that come late, or never, and the verdicts of `nan` and `activations` that wait for them."""

from __future__ import annotations

import math

import hookd_nan.forward
import hookd_nan.pending
import hookd_nan.scan
import pytest
import torch
from torch import nn

from hookd.target.tensors import deferred
from hookd.testing import FakeTarget

NAN, INF = math.nan, math.inf


@pytest.fixture
def hook(monkeypatch):
    """hookd, not started yet, to which no tensor is on the host; after the test no plugin may have raised anything."""
    monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
    monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)
    torch.manual_seed(0)
    with FakeTarget(record=False) as target:
        yield target.pretend(device=True)
        target.stop_clean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


def net():
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 1))


def train(model, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


class Spoiled(nn.Module):
    """Multiplies by NaN while `is_on`."""

    is_on = False

    def forward(self, x):
        return x * NAN if self.is_on else x * 1.0


def free(hook, module):
    """Free the memory of the numbers that were computed on the device about a module's outputs."""
    for entry in hook.plugin("nan").queue.entries:
        if (entry.event.where, entry.event.module) == ("output", module):
            entry.results[0][0].values[0].untyped_storage().resize_(0)


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
    assert (first.module, first.fields["where"], first.step, first.fields["is_exact"]) == (
        named_as,
        "output",
        3,
        is_exact,
    )
    assert ("could not be read from the device" in first.message) is not is_exact
    assert len(hook.incidents) == 1
    assert sum("could not be read" in line for line in hook.logs) == (lost is not None)
    assert not hook.plugin("nan").queue.requested


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
                most.append(len(hook.plugin("nan").queue.requested))

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
    assert hook.incidents[0].module.endswith("model.1")


def test_after_a_quarantine_no_verdict_waits_for_numbers_that_arrived_in_it(hook, monkeypatch):
    monkeypatch.setattr("hookd.target.plugins.listeners.BACK_OFF_S", 1e-9)
    spoiled = Spoiled()
    model = nn.Sequential(nn.Linear(4, 4), spoiled, nn.Linear(4, 1))
    hook.start("nan", every=1)
    train(model)
    queue, parts = hook.plugin("nan").queue, hook._parts
    model(torch.randn(3, 4))
    queue.flush()
    parts.stopper.quarantine(parts.registry.named("nan"), "for the test")
    train(model, steps=1)
    assert queue.requested
    hook.tick()
    assert hook.state("nan") == "active"
    spoiled.is_on = True
    train(model, steps=2)
    assert not queue.requested
    assert [one.module for one in hook.incidents if one.kind == "nan"] == ["1"]


def test_an_error_in_one_verdict_costs_no_other():
    judged = []

    def judge(event):
        judged.append(event.module)
        if event.module == "a":
            raise ValueError(event.module)

    with FakeTarget(record=False) as target:
        target.start("nan")
        plugin = target.plugin("nan")
        for name in "abc":
            ends = hookd_nan.scan.Ends((torch.zeros(()), torch.ones(())), (0,))
            plugin.queue.submit(judge, plugin.checks.event("output", name), [ends])
        train(net(), steps=3)
        assert not plugin.queue.requested
    assert judged == ["a", "b", "c"]


def test_a_server_gets_its_verdict_after_some_calls(hook):
    spoiled = Spoiled()
    model = nn.Sequential(nn.Linear(4, 4), spoiled)
    hook.start("nan", every=1)
    with torch.no_grad():
        for at in range(1, 35):
            spoiled.is_on = at == 3
            model(torch.ones(1, 4))
    assert hook.incidents[0].module == "1"
    assert not hook.plugin("nan").queue.requested


def test_gradients_that_cannot_be_read_are_found_in_the_parameter_that_they_made_bad(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook.start("nan", every=1)

    def free_gradients(*_):
        for entry in hook.plugin("nan").queue.entries:
            if step == 3 and entry.event.where == "grad" and entry.event.optimizer:
                entry.pieces()[0].value.untyped_storage().resize_(0)

    optimizer.register_step_pre_hook(free_gradients)
    for step in range(1, 6):  # noqa: B007  the hook asks for it
        model(torch.randn(3, 4)).square().mean().backward()
        if step == 3:
            model[1].fc.weight.grad[0, 0] = NAN
        optimizer.step()
        optimizer.zero_grad()
    assert [(one.module, one.fields["where"], one.step) for one in hook.incidents] == [("1.fc", "param", 4)]
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
            entries[-1].results[1][0].values[0].untyped_storage().resize_(0)

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


def test_a_module_whose_change_cannot_be_read_is_not_reported_and_the_others_are(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=1)

    def ask_of_nothing(*_):
        (samples,) = hook.plugin("activations").parameters._rounds.values()
        row = samples.rows["0", "weight"]
        samples.requests.append(([torch.empty((), device="meta")] * 2, row.move, row))

    optimizer.register_step_pre_hook(ask_of_nothing)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert set(hook.metric("activations_update_ratio")) == {("1",)}
