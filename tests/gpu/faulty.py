"""A small training on a device, with a fault after a while: faulty.py cuda|cpu nan|hang|memory."""

import sys
import time

import torch
from torch import nn

HEALTHY = 60
"""Steps before the fault, of at least a twentieth of a second each: time to attach."""
device, fault = sys.argv[1:]


class Faulty(nn.Linear):
    """Has the fault, from one step on."""

    def forward(self, x):
        out = super().forward(x)
        if step <= HEALTHY:
            return out
        if fault == "nan":
            return out * float("nan")
        if fault == "memory":
            return out + torch.empty(1 << 46, device=device)[: out.numel()].view_as(out)
        if device == "cuda":
            torch.cuda._sleep(1 << 62)  # cycles: two minutes and more
            torch.cuda.synchronize()
        time.sleep(600)
        return out


step = 0
model = nn.Sequential(nn.Linear(64, 64), Faulty(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    step += 1
    optimizer.zero_grad()
    model(torch.randn(32, 64, device=device)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05 if step <= HEALTHY else 0.0)
    if step > HEALTHY + 2000:
        break
