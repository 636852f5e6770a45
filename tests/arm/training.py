"""A training of a few steps, which prints its last loss to the bit: plain, under `hookd run`, or with `hookd.start()`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

WAY = sys.argv[1]
if WAY == "start":
    import hookd

    hookd.start()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = (model(torch.randn(8, 16)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
maps = Path("/proc/self/maps").read_text()
for name in ("hookd-entry", "hookd-kernel"):
    assert (f"/memfd:{name}" in maps) is (WAY != "plain"), f"{name} is there, or is not, and should not be so: {WAY}"
if WAY == "start":
    hookd.stop()
print(loss.item().hex())
