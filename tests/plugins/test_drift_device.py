"""On a GPU hookd_drift computes the same sums as on the host, and nothing waits for them; needs a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hookd_drift.bits import joined, pieces, sum_of
from torch import nn

from tests.support.cuda import nothing_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 100_003])
def test_the_sums_are_those_of_the_host(dtype, size):
    tensor = torch.randn(size).to(dtype)
    there, here = (
        joined(torch.cat([piece.double().cpu() for piece in pieces(sum_of(one).reshape(1))]).tolist(), 1)
        for one in (tensor.cuda(), tensor)
    )
    assert there == here


def test_no_step_waits_and_the_checksums_arrive(hook, group):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 64).cuda()
    hook.start("drift", every=2, replicated="all")

    def train(steps):
        for _ in range(steps):
            model(batch).square().mean().backward()
            dist.all_reduce(torch.ones(1))
            optimizer.step()

    train(3)
    torch.cuda.synchronize()
    with nothing_waits():
        train(6)
    torch.cuda.synchronize()
    train(1)
    assert {module for (module,) in hook.metric("drift_checksum")} == {"0", "2"}
    assert all(value > 0 for value in hook.metric("drift_checksum").values())
