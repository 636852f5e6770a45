"""The times of a CUDA device, compared with its own clock; nothing may wait for it. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.cuda import nothing_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Busy(nn.Module):
    """Keeps the device busy for a while that it measures itself; the CPU goes on at once."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2048, 2048)
        self.events = []

    def forward(self, x):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            x = self.fc(x)
        end.record()
        self.events.append((begin, end))
        return x


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2048, 2048, device="cuda")).square().mean().backward()
        optimizer.step()


def test_the_gpu_has_its_uuid(hook):
    hook.start("timing", every=1)
    train(nn.Sequential(Busy()).cuda(), 2)
    ((device, uuid, name),) = hook.metric("timing_device_info")
    assert (device, name) == ("cuda:0", torch.cuda.get_device_name(0))
    assert uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")


def by_hand(model, steps):
    """Return the seconds of one forward call of the busy module, by its own events."""
    model[0].events.clear()
    train(model, steps)
    torch.cuda.synchronize()
    return sum(begin.elapsed_time(end) for begin, end in model[0].events) / 1e3 / steps


def a_call(hook):
    """Return the same of all modules, as hookd says."""
    calls = hook.metric("timing_forward_calls")
    return {name: seconds / calls[name] for name, seconds in hook.metric("timing_forward_device_seconds").items()}


@pytest.mark.parametrize("plugins", [("timing",), ("nan", "timing")], ids=["alone", "with another"])
def test_seconds_are_those_of_the_device(hook, plugins):
    model = nn.Sequential(Busy(), nn.ReLU()).cuda()
    train(model, 3)
    expected_s = by_hand(model, 20)
    hook.begin(plugins, {"every": 10}, budget=1.0)  # so that the other one does not look at every step
    train(model, 400)
    torch.cuda.synchronize()
    train(model, 1)  # at its end all steps before it are read
    torch.cuda.synchronize()
    found = a_call(hook)
    assert found["0",] == pytest.approx(expected_s, rel=0.3)
    assert found["(root)",] == pytest.approx(expected_s, rel=0.4)
    assert hook.value("timing_backward_device_seconds", "0") > 0


def test_a_model_that_comes_to_the_device_after_the_attach_is_measured(hook):
    torch.cuda.init()
    hook.start("timing", every=1)
    model = nn.Sequential(Busy(), nn.ReLU())
    model[0].fc = nn.Linear(4, 4)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(8):
        model(torch.randn(4, 4, device="cuda")).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
    assert {name for (name,) in hook.metric("timing_forward_device_seconds")} >= {"(root)", "0", "1"}


def test_nothing_waits_for_the_device(hook):
    model = nn.Sequential(Busy(), nn.ReLU()).cuda()
    train(model, 2)
    hook.start("timing", every=1)
    train(model, 1)
    with nothing_waits():
        train(model, 3)


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("timing", every=1)
    assert torch.equal(weights(), plain)
