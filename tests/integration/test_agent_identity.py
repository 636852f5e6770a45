"""Observers change nothing: weights, random state and losses are the same bits with all of them on at every event."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.agent import running


def policy(_context, operation, *_args, **_kwargs):
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.b(self.drop(self.relu(self.norm(self.a(x)))))
        y += x
        return y


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            if self.kind == "selective":
                contexts = partial(create_selective_checkpoint_contexts, policy)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            elif self.kind in ("reentrant", "nonreentrant"):
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.kind == "reentrant")
            elif self.kind == "amp":
                with torch.autocast("cpu", torch.bfloat16):
                    x = block(x)
            else:
                x = block(x)
        return {"out": self.head(x.float())}


def fingerprint(kind: str) -> str:
    torch.manual_seed(0)
    net = Net(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for _ in range(25):
        loss = net(torch.randn(4, 8))["out"].pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", ["plain", "reentrant", "nonreentrant", "selective", "amp"])
def test_all_observers_at_every_step_leave_the_same_bits(kind: str) -> None:
    plain = fingerprint(kind)
    with running("nan", "timing", "activations", options={"every": "1"}) as agent:
        assert fingerprint(kind) == plain
        states = {e.name: (e.state, e.last_error.get("text", "")) for e in agent.parts.registry.loaded.values()}
        assert states == dict.fromkeys(("nan", "timing", "activations"), ("active", ""))
        assert agent.values("hookd_activations_mean")[("blocks.0.norm",)] != 0.0
