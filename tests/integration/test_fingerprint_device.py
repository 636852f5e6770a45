"""Fingerprints of a training whose tensors seem to be on a device: records wait for their numbers, and the training for nothing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from hookd.target.tensors import deferred
from hookd.testing import FakeTarget
from hookd.tool.fingerprints.steps import Decoder
from tests.support.simulated_device import simulated_device


class Net(nn.Module):
    """Has dropout, a norm with buffers, a validation, and a second call of one layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.b(self.drop(self.norm(self.a(x)))))


def train(steps, model=None):
    torch.manual_seed(0)
    random.seed(0)
    model = model or Net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(16, 4))
    return [value.clone() for value in model.state_dict().values()], torch.rand(1), random.random()


@pytest.fixture
def hook():
    torch.manual_seed(0)
    with FakeTarget(record=False) as target:
        yield target
        target.stop_clean()


@pytest.fixture
def device(hook, monkeypatch):
    """A device on which all tensors seem to be; its numbers arrive while `is_done`."""

    class Device:
        is_done = True

    monkeypatch.setattr(deferred._Copy, "is_over", lambda _copy: Device.is_done)
    hook.pretend(device=True)
    return Device


def recorded(hook):
    """Return the steps that the plugin keeps."""
    hook._parts.numeric.later.finish(0.0)
    decoder = Decoder()
    return [decoder.step(record) for record in hook.plugin("fingerprint").kept]


def test_a_training_on_a_device_ends_with_the_same_bits_and_random_numbers(hook, device):
    plain = train(8)
    hook.start("fingerprint", every=1, buffer=64)
    watched = train(8)
    assert len(recorded(hook)) == 8
    assert all(map(torch.equal, plain[0], watched[0]))
    assert plain[1:] == watched[1:]


def test_records_wait_for_their_device_in_order_and_the_training_does_not(hook, device):
    hook.start("fingerprint", every=1, buffer=64)
    device.is_done = False
    train(4)
    assert not recorded(hook)
    device.is_done = True
    train(1)
    steps = recorded(hook)
    assert [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert not any(step.unread for step in steps)
    assert {key.algorithm for step in steps for key in step.entries} == {"mix64"}


def test_a_device_that_does_not_answer_costs_digests_and_no_step(hook, device, monkeypatch):
    monkeypatch.setattr("hookd_fingerprint.MOST_WAITING", 2)
    hook.start("fingerprint", every=1, buffer=64)
    device.is_done = False
    train(5)
    device.is_done = True
    train(3)
    steps = recorded(hook)
    assert [step.number for step in steps] == list(range(1, 9))
    assert [step.unread > 0 for step in steps] == [True] * 3 + [False] * 5
    assert not any(step.entries for step in steps[:3])


@pytest.mark.parametrize("where", ["target.tensors.deferred._joined", "target.tensors.statistics.digest_parts"])
def test_a_tensor_whose_digest_the_device_cannot_compute_or_send_is_unread(hook, device, monkeypatch, where):
    def refuse(*_):
        raise RuntimeError("out of memory")

    hook.start("fingerprint", every=1, buffer=64)
    train(2, nn.Linear(4, 4))
    monkeypatch.setattr(f"hookd.{where}", refuse)
    train(1, nn.Linear(4, 4))
    first, second, lost = recorded(hook)
    assert [one.unread for one in (first, second)] == [0, 0]
    assert (lost.unread, lost.entries) == (len(first.entries), {})


def test_the_states_of_a_devices_generators_are_recorded_only_once_it_is_initialized(hook, monkeypatch):
    def phases():
        return [[key.slot for key in step.entries if key.phase == "random"] for step in recorded(hook)]

    device = simulated_device(monkeypatch, is_in_use=False)
    hook.start("fingerprint", every=1, buffer=64)
    train(1, nn.Linear(4, 4))
    device.is_in_use = True
    train(1, nn.Linear(4, 4))
    assert ["fake:0" in slots for slots in phases()] == [False, True]
