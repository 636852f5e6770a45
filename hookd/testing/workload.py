"""A training script that knows nothing of hookd: what a `SubprocessTarget` runs. Not to be imported.

It trains the five layers of `hookd.testing.small` until its stdin ends, and prints `ready` once and then each step's
number. Runs in a process of its own, as a file.
"""

from __future__ import annotations

import select
import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(4, 8)
step = 0
while True:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print("ready" if step == 1 else step, flush=True)
    if select.select([sys.stdin], [], [], 0.02)[0]:  # 50 steps a second at most, and the end of stdin ends it
        break
print(f"done {step}", flush=True)
