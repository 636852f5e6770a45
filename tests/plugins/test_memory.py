"""hookd_memory measures the process and each module, names memory that the training code keeps, and detects growth."""

from __future__ import annotations

import math
import mmap
import os
import random
from collections import deque

import psutil
import pytest
import torch
from hookd_memory.trend import LEAST, MOST, SPAN, Trend
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.simulated_device import simulated_device

MIB = 1 << 20
FLOAT = 4


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, steps, after=lambda _output, _loss: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(3, 4))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        after(output, loss)


# -- what is measured


def test_output_bytes_are_those_of_the_tensors(hook):
    hook.start("memory", every=1)
    train(net(), 1)
    assert hook.metric("memory_output_bytes") == {
        ("0",): 3 * 8 * FLOAT, ("1",): 3 * 8 * FLOAT, ("2",): 3 * 2 * FLOAT, ("(root)",): 3 * 2 * FLOAT
    }  # fmt: skip


def test_resident_bytes_are_the_kernels(hook):
    hook.start("memory")
    hook.plugin("memory").tick(0.0)
    seen = hook.metric("memory_resident_bytes")
    info = psutil.Process().memory_info()
    assert seen["anonymous",] + seen["shared",] == pytest.approx(info.rss, rel=0.05)
    assert seen["shared",] == pytest.approx(info.shared, rel=0.05)


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = net()
        train(model, 5)
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("memory", every=1)
    assert torch.equal(weights(), plain)


def test_nothing_stays_open_after_a_detach(hook):
    before = set(os.listdir("/proc/self/fd"))
    hook.start("memory")
    train(net(), 1)
    hook.close()
    assert set(os.listdir("/proc/self/fd")) <= before


# -- what is kept


def test_kept_outputs_are_named_with_their_step(hook):
    kept = []
    hook.start("memory", every=2, kept=4)
    train(net(), 3)
    train(net(), 20, lambda output, _: kept.append(output))
    assert hook.incident.kind == "leak"
    assert hook.incident.fields["modules"] == ["(root)"], "a backward frees what the layers below have saved"
    assert "the output of (root)" in hook.incident.message
    assert hook.incident.fields["since_step"] == 5, "steps 1, 3, 5... are looked at, and all are kept from step 4 on"
    assert hook.incident.fields["bytes_per_step"] == 3 * 2 * FLOAT


def test_kept_losses_are_named(hook):
    kept = []
    hook.start("memory", every=2, kept=4)
    train(net(), 20, lambda _, loss: kept.append(loss))
    assert hook.incident.fields["modules"] == ["(loss)"]
    assert "the loss" in hook.incident.message


def test_graphs_that_no_backward_frees_name_the_layers_too(hook):
    model, kept = net(), []
    hook.start("memory", every=1, kept=4)
    train(model, 10, lambda _output, _loss: kept.append(model(torch.randn(3, 4)).sum()))
    assert hook.incident.fields["modules"] == ["1"], "the rest was not saved for a backward"
    assert hook.incident.fields["since_step"] == 2


def test_what_is_kept_for_less_than_it_takes_is_no_leak(hook):
    window = deque(maxlen=5)
    hook.start("memory", every=2, kept=4)
    train(net(), 40, lambda output, loss: window.append((output, loss)))
    assert hook.incidents == []


def test_kept_copies_without_a_graph_are_no_finding(hook):
    kept = []
    hook.start("memory", every=1, kept=4)
    train(net(), 20, lambda output, loss: kept.append((output.detach(), loss.item())))
    assert hook.incidents == []


def test_one_tensor_given_out_again_and_again_is_not_watched_twice(hook):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))
            self.made = self.weight * 1.0

        def forward(self, x):
            return self.made.detach() + x if self.training else self.made

    model = nn.Sequential(Constant(), nn.Linear(4, 1))
    constant = Constant().eval()
    hook.start("memory", every=1, kept=3)
    train(model, 10, lambda _output, _loss: constant(None))
    assert hook.incidents == []


# -- what grows


def fresh(size: int) -> mmap.mmap:
    """Take memory that the process did not have yet; malloc may give what an earlier test has given back."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes([1]) * size)
    return memory


def test_memory_that_is_taken_and_never_given_back_is_a_leak(hook):
    hook.start("memory", growth=32 * MIB)
    taken = []
    for _ in range(2 * LEAST * SPAN):
        taken.append(fresh(MIB // 4))
        train(net(), 1)
        hook.plugin("memory").tick(0.0)
        if hook.incidents:
            break
    assert hook.incident.fields["place"] == "anonymous"
    assert hook.incident.fields["bytes_per_step"] == pytest.approx(MIB // 4, rel=0.3)
    assert hook.value("memory_growth_bytes", "anonymous") == pytest.approx(MIB // 4, rel=0.3)


def followed(values):
    """Return the trend of some values, and whether it was a leak at any time."""
    trend, is_leak = Trend(64 * MIB), False
    for step, value in enumerate(values):
        is_leak |= trend.add(step, round(value)) and trend.is_leak
    return trend, is_leak


def test_buckets_that_were_joined_in_pairs_cover_as_much_time_as_later_ones():
    count = MOST * SPAN * 3 // 2
    trend, _ = followed([100 * MIB] * count)
    assert trend.since == pytest.approx(count / 3, abs=2 * SPAN), "a third of the time is left out as the warm-up"


base = st.integers(100, 20_000).map(lambda mib: mib * MIB)
noise = st.integers(0, 1 << 32).map(random.Random)
some = settings(max_examples=40, deadline=None)


@given(base, st.floats(1, 50), noise)
@some
def test_steady_growth_is_a_leak_however_noisy(start, mib_per_value, noise):
    values = [start + MIB * mib_per_value * (k + 20 * noise.random()) for k in range(2000)]
    trend, is_leak = followed(values)
    assert is_leak
    assert trend.per_step == pytest.approx(mib_per_value * MIB, rel=0.1)


@given(base, st.floats(1, 3000), st.floats(2, LEAST * SPAN / 3), st.floats(0, 30), noise)
@some
def test_a_warm_up_that_levels_off_is_no_leak(start, mib, time_constant, noise_mib, noise):
    values = [start + MIB * (mib * -math.expm1(-k / time_constant) + noise_mib * noise.random()) for k in range(1500)]
    assert not followed(values)[1]


@given(base, st.floats(1, 500))
@some
def test_growth_with_the_logarithm_of_time_is_no_leak(start, mib):
    assert not followed([start + mib * MIB * math.log(2 + k) for k in range(1500)])[1]


@given(base, st.integers(2, LEAST * SPAN // 3), st.floats(1, 2000), noise)
@example(100 * MIB, 43, 126.0, random.Random(3867))
@some
def test_a_saw_of_garbage_collections_is_no_leak(start, period, mib, noise):
    values = [start + MIB * (mib * (k % period) / period + noise.random()) for k in range(2000)]
    assert not followed(values)[1]


@given(base, st.integers(0, 1000))
@some
def test_a_step_up_is_no_leak(start, at):
    assert not followed([start + 500 * MIB * (k > at) for k in range(1500)])[1]


# -- devices


def test_modules_of_a_model_that_comes_to_the_device_after_the_attach_are_measured(hook, monkeypatch):
    device = simulated_device(monkeypatch, is_in_use=False)
    hook.start("memory", every=1)
    model = net()
    train(model, 2)
    assert hook.metric("memory_forward_bytes") == {}
    device.is_in_use = True
    train(model, 2)
    assert len(hook.metric("memory_forward_bytes")) == 4


def test_any_device_with_torchs_interface_is_measured(hook, monkeypatch):
    device = simulated_device(monkeypatch, is_in_use=True)
    hook.start("memory", every=1)
    device.allocated = 3 * MIB
    train(net(), 2)
    assert hook.value("memory_device_allocated_bytes", "fake:0") == 3 * MIB
    assert hook.value("memory_device_reserved_bytes", "fake:0") == 4 * MIB
    assert hook.value("memory_device_ooms_total", "fake:0") == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cudas_books_are_read_per_device_and_per_module(hook):
    model = nn.Linear(1024, 1024).cuda()
    hook.start("memory", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(256, 1024, device="cuda")).sum().backward()
        optimizer.step()
    assert hook.value("memory_device_allocated_bytes", "cuda:0") == torch.cuda.memory_allocated()
    assert hook.value("memory_device_reserved_bytes", "cuda:0") == torch.cuda.memory_reserved()
    assert hook.value("memory_device_peak_bytes", "cuda:0") == torch.cuda.max_memory_allocated()
    assert hook.value("memory_forward_bytes", "(root)") >= 256 * 1024 * FLOAT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_growth_of_cudas_memory_is_a_leak(hook):
    kept = []
    hook.start("memory", growth=32 * MIB)
    for _ in range(2 * LEAST * SPAN):
        train(net(), 10, lambda _output, _loss: kept.append(torch.empty(MIB // 4, device="cuda")))
        hook.plugin("memory").tick(0.0)
    assert any(incident.fields["place"] == "cuda:0" for incident in hook.incidents)
