"""No optimizer: the script writes to `p.data`, which changes no version, and accumulates a batch over three backwards.

Follows pytorch.org/tutorials/beginner/blitz/neural_networks_tutorial.html.
"""

import torch
from _report import finish, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for step in steps():
    model.zero_grad()
    for _ in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
    for p in model.parameters():
        p.data.sub_(p.grad.data * 1e-2)
    tell(step, loss)
finish(model, steps=step, samples=24 * step)
