"""The default training script of `SubprocessTarget`, without any use of hookd. Do not import it.

It trains the five layers of `hookd.testing.small` until end of file on stdin, and prints `ready` after the first step and
then the number of each step. It runs as a file in its own process.
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
    if select.select([sys.stdin], [], [], 0.02)[0]:  # at most 50 steps/s; end of file on stdin ends the training
        break
print(f"done {step}", flush=True)
