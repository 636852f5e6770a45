"""On a GPU the numbers are the same, and nothing ever waits for it; needs a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl
from hookd.api.summary import Summary
from hookd.target.tensors import device_digest, statistics
from hookd.tool.fingerprints.steps import Decoder
from tests.support.agent import running
from tests.support.cuda import nothing_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

BAD_INDEX = """
import sys, torch, hookd
from torch import nn
model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for step in range(20):
        model(torch.full((4,), 99 if step == 15 else 1, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
try:
    if sys.argv[1] == "observe":
        with hookd.observe():
            train()
    else:
        hookd.start()
        try:
            train()
        except RuntimeError:
            print("caught", flush=True)
        hookd.stop()
        print("stopped", flush=True)
finally:
    print("finally", flush=True)
"""
SEEN: list[Summary] = []


class Sums(Plugin):
    name = "sums"

    @hookimpl
    def configure(self, context):
        SEEN.clear()
        self.context = context

    @hookimpl
    def forward(self, output):
        assert self.context.summary(output, SEEN.append) is None
        self.context.later([self.context.is_finite(output)], lambda numbers: SEEN.append(numbers == [1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_sums_are_those_of_the_host(dtype):
    tensor = (torch.randn(100_000) * 3 + 100).to(dtype)
    tensor[::1000] = float("nan")
    tensor[1::1000] = -float("inf")
    there = Summary.of_sums(statistics.device_sums(tensor.cuda()).tolist())
    assert list(there) == pytest.approx(list(Summary.of_sums(statistics.host_sums(tensor))), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1, 100_001, 9_000_000])
def test_the_digest_is_that_of_the_same_operations_on_the_host_and_of_the_kernel(dtype, size):
    tensor = (torch.randn(size) * 3).to(dtype)
    there = tensor.cuda()
    with nothing_waits():
        parts = device_digest.digest_parts(there)
    assert torch.equal(parts.cpu(), device_digest.digest_parts(tensor))
    if importlib.util.find_spec("triton") is not None:
        from hookd.target.tensors.device_kernel import WIDTHS, launch

        launch(there, has_sums=dtype in WIDTHS)  # compiles it
        with nothing_waits():
            parts, rows = launch(there, has_sums=dtype in WIDTHS)
        assert torch.equal(parts.cpu(), device_digest.digest_parts(tensor))
        if rows is not None:
            expected = statistics.device_sums(there)
            torch.testing.assert_close(statistics._combined(rows), expected, rtol=1e-5, atol=1e-6)


def test_no_step_waits_for_a_fingerprint_and_all_steps_are_recorded():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    batches = [torch.randn(32, 64).cuda() for _ in range(6)]
    with running("fingerprint", options={"every": "1", "buffer": "64"}) as agent:
        for batch in batches:
            with nothing_waits():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        agent.parts.numeric.later.finish(0.0)
        steps, decoder = agent.plugin("fingerprint").kept, Decoder()
        found = [decoder.step(record) for record in steps]
    assert [step.number for step in found] == [1, 2, 3, 4, 5]
    assert not any(step.unread for step in found)
    assert {key.slot for key in found[0].entries if key.phase == "random"} >= {"torch", "cuda:0"}


@pytest.mark.parametrize("plugins", [(Sums,), ("activations",)], ids=["sums", "activations"])
def test_no_step_waits_and_the_numbers_arrive(plugins):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(32, 64).cuda() for _ in range(4)]
    options = {"every": "1", "histogram": "true"} if "activations" in plugins else {}
    with running(*plugins, options=options) as agent:
        for batch in batches[:3]:
            with nothing_waits():
                model(batch).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize()
        out = model(batches[3])
        out.square().mean().backward()
        optimizer.step()
        assert agent.values("hookd_plugin_errors") == {(plugins[0] if "activations" in plugins else "sums",): 0.0}
        if "activations" in plugins:
            assert agent.values("hookd_activations_grad_norm")
            assert agent.values("hookd_activations_std")
    if "activations" not in plugins:
        assert len(SEEN) >= 2 * 5 * 3
        assert all(isinstance(one, Summary) or one is True for one in SEEN)


@pytest.mark.parametrize("how", ["observe", "stop"])
def test_after_an_error_of_the_device_the_process_ends_as_without_hookd(how):
    done = subprocess.run(
        [sys.executable, "-c", BAD_INDEX, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert "finally" in done.stdout
    if how == "observe":
        assert done.returncode == 1, done.stderr[-2000:]
        assert "Traceback" in done.stderr
    else:
        assert (done.returncode, done.stdout.split()) == (0, ["caught", "stopped", "finally"]), done.stderr[-2000:]
